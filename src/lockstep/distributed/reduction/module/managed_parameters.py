"""A parameter whose gradient is synchronised, the reducer that synchronises it, and the hooks on it.

The reducer that claimed a parameter last synchronises it, even after a wrapper has been dropped. So the replicated
module holds the reducer, which does not refer back to it. An attribute of the module would be visible and copied.
Instead, one of the dictionaries that every module has, an empty one if there is any, is replaced by a subclass that
carries the reducer; it is copied and pickled as the plain dictionary. When the module is gone, the next gradient of a
parameter that is left raises an error.

Autograd runs a parameter's post-accumulate hooks before its gradient is reduced. An optimizer step in such a hook would
use the local gradient, so hooks that users register, before or after replicating, are held back. At the end of a
backward that synchronises, each runs once for every parameter that any rank has used since the last one, on all ranks
(even where the parameter was not used), so that replicas stay equal. Copies and pickles of a parameter have no hooks.

The reducer finds gradients without hooks when a pass is over (``engine.py``). A *trigger* lets it look earlier: in each
bucket, the parameter whose gradient came last in an earlier backward has one.

On an accelerator autograd accumulates each gradient on the stream on which a forward has made the parameter's
``AccumulateGrad`` node, and lets other streams wait for it only at the end of the pass. So a bucket may be copied
earlier only on that stream, if all of its gradients have the same. The first trigger of a parameter notes the stream,
and the node is kept from then on, since the next forward could make another one on another stream.

Hooks refer to their reducer weakly, since the garbage collector does not see references held by hooks.
"""

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import compress
from operator import attrgetter
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Module, Parameter

from lockstep._base.buckets import TensorSpec, contiguous_stride, dense_stride
from lockstep._base.compiler import call_outside, is_in_compiled_backward
from lockstep._base.devices import is_accelerator
from lockstep._base.dtensors import local_part, matching_gradient
from lockstep._base.inner_tensors import check_trained, is_plain
from lockstep.errors import LayoutError, NotReplicableError


class ManagedParameter:
    """A parameter whose gradient is synchronised, with its name and its index among those of the module."""

    __slots__ = ("__weakref__", "_accumulator", "_kind", "index", "name", "parameter", "sparse", "spec", "stream")

    def __init__(self, index: int, name: str, parameter: Parameter, sparse: bool) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.sparse = sparse
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        local = local_part(parameter)
        shape, device = tuple(local.shape), local.device
        stride = dense_stride(shape, local.stride()) if is_plain(local) else contiguous_stride(shape)
        self.spec = TensorSpec(name, shape, stride, dtype, device)
        self._kind = _kind_of(parameter)
        self.stream: torch.Stream | None = None
        """The stream on which autograd accumulates the gradient; None until that is known, and on the CPU."""
        self._accumulator: object = None  # the node that does so, kept

    @property
    def needs_stream(self) -> bool:
        """True if the stream on which autograd accumulates the gradient is still to be noted."""
        return self.stream is None and is_accelerator(self.spec.device)

    def note_stream(self) -> None:
        """Note the current stream, which is the one on which autograd has just accumulated the gradient, unless the
        parameter has been frozen since forward: autograd calls its hooks all the same."""
        if self.parameter.requires_grad:
            self._accumulator = get_gradient_edge(self.parameter).node
            self.stream = torch.accelerator.current_stream(self.spec.device)

    def take(self, grad: Tensor) -> Tensor:
        """Return this rank's part of a gradient as a plain tensor; raise if its dtype or shape is not as planned."""
        check_trained(self.name, self.parameter)  # it may have been frozen when the module was replicated
        local = matching_gradient(grad.detach(), self.parameter)
        self.check(local)
        return local

    def check(self, local: Tensor) -> None:
        """Raise :class:`LayoutError` if a parameter or gradient is not of the planned dtype, shape and device."""
        spec = self.spec
        if local.shape != spec.shape or local.dtype != spec.dtype or local.device != spec.device:
            raise LayoutError(
                f"parameter {self.name} is to have a gradient of {spec.dtype}, shape {spec.shape}, on {spec.device}, "
                f"and has one of {local.dtype}, shape {tuple(local.shape)}, on {local.device}; set such gradients to "
                "None (zero_grad) when a parameter has got another shape, dtype or device"
            )

    @property
    def is_retyped(self) -> bool:
        """True if the dtype, shape or device of the parameter has changed."""
        return _kind_of(self.parameter) != self._kind

    def vacated(self) -> "ManagedParameter":
        """Return the same place with a parameter that nothing uses, since the module's has become another one."""
        place, spec = copy.copy(self), self.spec
        values = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
        place.parameter = Parameter(values, requires_grad=self.parameter.requires_grad)
        place.stream = place._accumulator = None
        return place

    def check_parameter(self) -> None:
        """Raise :class:`LayoutError` if the dtype, shape or device of the parameter has changed during backward."""
        kind = _kind_of(self.parameter)
        if kind != self._kind:
            raise LayoutError(
                f"parameter {self.name} was {_describe(*self._kind)} when backward began, and is {_describe(*kind)} "
                "now; change shape, dtype and device of a module between two backward passes, on every rank alike"
            )

    def zeros(self) -> Tensor:
        """Return zeros of the planned dtype and shape; if gradients are sparse, a tensor without entries."""
        spec = self.spec
        if self.sparse:
            size = (1, 0), (0, *spec.shape[1:])
            indices = torch.empty(size[0], dtype=torch.int64, device=spec.device)
            values = torch.empty(size[1], dtype=spec.dtype, device=spec.device)
            return torch.sparse_coo_tensor(indices, values, spec.shape, check_invariants=True).coalesce()
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).zero_()


def _kind_of(parameter: Parameter) -> tuple[torch.dtype, torch.Size, torch.device]:
    return parameter.dtype, parameter.shape, parameter.device


def _describe(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    return f"{dtype}, shape {tuple(shape)}, on {device}"


class Owner(Protocol):
    """The part of a reducer that code which selects parameters depends on."""

    retired: bool
    """True if another replication has taken over all of its parameters."""

    def manages(self, parameter: Parameter) -> bool:
        """Return True if it synchronises the parameter, or will once the ranks have agreed on it."""

    def has_in_module(self, parameter: Parameter) -> bool:
        """Return True if its module has the parameter on this rank."""

    def is_added(self, parameter: Parameter) -> bool:
        """Return True if the parameter is new on this rank, and not agreed on yet."""

    def present(self) -> list[Parameter]:
        """Return the parameters that its module still has."""

    def hold_hooks(self) -> None:
        """Note that a parameter has hooks of the user, to be run after its gradient has been reduced."""

    def gradient_triggered(self, index: int) -> None:
        """Note that autograd has accumulated the gradient of parameter ``index``, which has a trigger."""

    def note_stream(self, index: int) -> None:
        """Note the stream on which autograd has just accumulated the gradient of parameter ``index``."""

    def retire(self) -> None:
        """Stop synchronising: another replication has taken over all parameters."""


_owners: dict[int, "ref[Owner]"] = {}
"""By ``id(parameter)``: the id stays valid because the reducer holds the parameter. A weak reference to the parameter
would make ``torch.utils.swap_tensors`` refuse it."""
_lock = threading.Lock()
_generation = 0


def claim(parameters: Iterable[Parameter], owner: Owner) -> None:
    """Let ``owner``, and no other reducer, synchronise the gradients of these parameters from now on."""
    global _generation
    with _lock:
        for number in [number for number, known in _owners.items() if known() is None]:
            del _owners[number]
        link = ref(owner)
        for parameter in parameters:
            _owners[id(parameter)] = link
        _generation += 1


def owner_of(parameter: Parameter) -> Owner | None:
    """Return the reducer that synchronises the gradient of a parameter, or None."""
    link = _owners.get(id(parameter))
    owner = None if link is None else link()
    return owner if owner is not None and owner.manages(parameter) else None


def generation() -> int:
    """Return a number that changes with each :func:`claim`."""
    return _generation


_ATTRIBUTES = (
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class _KeepingDict(OrderedDict[int, Any]):
    """The module's hooks, and the reducers that it keeps alive."""

    def __init__(self, entries: Any = ()) -> None:
        super().__init__(entries)
        self.kept: list[Owner] = []

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


def attach_to_module(module: Module, owner: Owner) -> None:
    """Keep ``owner`` alive as long as ``module``, and let go of reducers that have retired."""
    name, hooks = _kept_by(module)
    if not isinstance(hooks, _KeepingDict):
        hooks = _KeepingDict(hooks)
        vars(module)[name] = hooks
    hooks.kept = [each for each in hooks.kept if each is not owner and not each.retired]
    hooks.kept.append(owner)


def _kept_by(module: Module) -> tuple[str, dict[int, Any]]:
    """Return the dictionary that keeps things for a module, or is to be replaced by one that does, with its name.

    Handles of hooks refer to the dictionary in which they were registered, so an empty one is replaced:
    test_handles_of_hooks_still_remove_them.
    """
    found = [(name, vars(module)[name]) for name in _ATTRIBUTES if name in vars(module)]
    keeping = (pair for pair in found if isinstance(pair[1], _KeepingDict))
    return next(keeping, None) or next((pair for pair in found if not pair[1]), found[0])


def restore_later(module: Module, parameters: Sequence[Parameter], undo: ExitStack) -> None:
    """Let ``undo`` restore what a module keeps alive, and which reducers have claimed parameters, as they are now."""
    name, hooks = _kept_by(module)
    undo.callback(vars(module).__setitem__, name, hooks)
    if isinstance(hooks, _KeepingDict):
        undo.callback(setattr, hooks, "kept", hooks.kept)
    undo.callback(_restore_owners, {id(parameter): _owners.get(id(parameter)) for parameter in parameters})


def _restore_owners(earlier: Mapping[int, "ref[Owner] | None"]) -> None:
    global _generation
    with _lock:
        for number, link in earlier.items():
            if link is None:
                _owners.pop(number, None)
            else:
                _owners[number] = link
        _generation += 1


TRIGGER_KEY = -1
"""The key of a trigger among a parameter's hooks; keys of PyTorch begin at 0."""
hooks_of = attrgetter("_post_accumulate_grad_hooks")


class Trigger:
    """Lets the reducer look at gradients while backward runs."""

    __slots__ = ("_index", "_reducer")

    def __init__(self, index: int, reducer: Owner) -> None:
        self._index = index
        self._reducer = weakref.ref(reducer)

    def __call__(self, parameter: Parameter) -> None:
        """Tell the reducer that autograd has accumulated the gradient of ``parameter``."""
        if is_dynamo_compiling():  # compiled autograd traces the whole pass; the end of the pass is enough
            return
        reducer = self._reducer()
        if reducer is not None:
            reducer.gradient_triggered(self._index)


class StreamTrigger(Trigger):
    """A trigger that first lets the reducer note the stream on which autograd accumulates the gradient."""

    __slots__ = ()

    def __call__(self, parameter: Parameter) -> None:
        """See :meth:`Trigger.__call__`."""
        reducer = None if is_dynamo_compiling() else self._reducer()
        if reducer is not None:
            reducer.note_stream(self._index)
        super().__call__(parameter)


class OutlivedHook:
    """Hook on a parameter that has outlived the module that it was replicated with."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, parameter: Parameter) -> None:
        """Raise :class:`NotReplicableError`."""
        raise NotReplicableError(
            f"parameter {self._name} got a gradient, but the module that was replicated does not exist any more, so "
            "nothing synchronises it; keep a reference to that module, or replicate the part of it that is trained "
            "now, or train a copy.deepcopy() of the part without the other ranks"
        )


def note_outlived(parameter: Parameter, name: str) -> None:
    """Let the next gradient of a parameter whose reducer is gone raise an error."""
    earlier: Mapping[int, Any] | None = hooks_of(parameter)
    hooks: OrderedDict[int, Any] = OrderedDict(earlier or {})
    hooks[TRIGGER_KEY] = OutlivedHook(name)
    parameter._post_accumulate_grad_hooks = hooks


class HeldHook:
    """A user's hook, held back until the gradient is reduced."""

    __slots__ = ("_earlier", "_key", "_reducer", "hook")

    def __init__(
        self,
        hook: Callable[[Parameter], None],
        reducer: Callable[[], Owner | None],
        key: int = -1,
        earlier: Mapping[int, Any] | None = None,
    ) -> None:
        self.hook = hook
        self._reducer = reducer
        self._key = key
        self._earlier = earlier

    def __call__(self, parameter: Parameter) -> None:
        """Do nothing, since the gradient may not be reduced yet; without a reducer, call the user's hook at once."""
        if is_compiling() and not is_in_compiled_backward():
            call_outside(self, parameter)
        elif self._reducer() is None:
            self.run(parameter)

    def run(self, parameter: Parameter) -> None:
        """Call the user's hook, unless its handle has removed it."""
        if self._earlier is None or self._key in self._earlier:
            self.hook(parameter)

    def moved_to(self, reducer: Callable[[], Owner | None], key: int, earlier: Mapping[int, Any]) -> "HeldHook":
        """Return the same hook for another reducer; the user's handle still removes it from the dictionary in which it
        was registered."""
        return HeldHook(self.hook, reducer, key, earlier if self._earlier is None else self._earlier)


class HookDictionary(OrderedDict[int, Any]):
    """A parameter's post-accumulate hooks: a trigger, if it has one, and held users' hooks."""

    def __init__(self, reducer: Owner) -> None:
        super().__init__()
        self._reducer = weakref.ref(reducer)

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, HeldHook(hook, self._reducer))
        self._tell()

    def set_trigger(self, trigger: Callable[[Parameter], object]) -> None:
        """Call ``trigger`` when autograd has accumulated a gradient."""
        super().__setitem__(TRIGGER_KEY, trigger)

    def take_over(self, earlier: Mapping[int, Any]) -> None:
        """Hold the users' hooks of an earlier dictionary; their handles still work."""
        for key, hook in earlier.items():
            if key != TRIGGER_KEY:
                held = hook if isinstance(hook, HeldHook) else HeldHook(hook, self._reducer)
                super().__setitem__(key, held.moved_to(self._reducer, key, earlier))
                self._tell()

    def held(self, reducer: Owner) -> list[HeldHook]:
        """Return the users' hooks that are held for a reducer."""
        return [hook for hook in self.values() if isinstance(hook, HeldHook)] if self.belongs_to(reducer) else []

    def belongs_to(self, reducer: Owner) -> bool:
        """Return True if the hooks are held for this reducer."""
        return self._reducer() is reducer

    def _tell(self) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.hold_hooks()


def hold(parameter: Parameter, reducer: Owner) -> HookDictionary:
    """Hold the hooks of a parameter, also ones registered later; take over those held for an earlier reducer."""
    earlier = parameter._post_accumulate_grad_hooks
    if isinstance(earlier, HookDictionary) and earlier.belongs_to(reducer):
        return earlier
    hooks = HookDictionary(reducer)
    parameter._post_accumulate_grad_hooks = hooks
    if earlier:
        hooks.take_over(earlier)
    return hooks


def hold_all(parameters: Sequence[Parameter], reducer: Owner) -> None:
    """Hold the hooks of those parameters that have any."""
    for parameter in compress(parameters, map(hooks_of, parameters)):
        hold(parameter, reducer)


def remove_trigger(parameter: Parameter) -> None:
    """Remove the trigger of a parameter; autograd calls nothing for a parameter without hooks."""
    hooks = hooks_of(parameter)
    if isinstance(hooks, HookDictionary):
        hooks.pop(TRIGGER_KEY, None)
        if not hooks:
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # None: no hooks


def release(parameter: Parameter, reducer: Owner) -> None:
    """Stop holding the hooks of a parameter that ``reducer`` no longer synchronises; users' hooks stay on it."""
    hooks = parameter._post_accumulate_grad_hooks
    if isinstance(hooks, HookDictionary) and hooks.belongs_to(reducer):
        held = [(key, hook) for key, hook in hooks.items() if key != TRIGGER_KEY]
        of_nobody = ((key, hook.moved_to(lambda: None, key, hooks)) for key, hook in held)
        parameter._post_accumulate_grad_hooks = OrderedDict(of_nobody)


def run_held_hooks(parameters: Iterable[Parameter], reducer: Owner) -> None:
    """Run users' hooks of parameters whose gradients ``reducer`` has reduced."""
    for parameter in parameters:
        hooks = parameter._post_accumulate_grad_hooks
        for hook in hooks.held(reducer) if isinstance(hooks, HookDictionary) else ():
            hook.run(parameter)


def can_have_gradient(tensor: Parameter) -> bool:
    """Return True if a parameter's dtype can have gradients; integers cannot."""
    return tensor.is_floating_point() or tensor.is_complex()
