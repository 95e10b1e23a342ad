"""A parameter whose gradient is synchronised, the reducer that synchronises it, and the hooks on it.

The reducer that claimed a parameter last synchronises it, even after a wrapper has been dropped. So the replicated
module holds the reducer, which does not refer back to it. An attribute of the module would be visible and copied.
Instead, one of the dictionaries that every module has, an empty one if there is any, is replaced by a subclass that
carries the reducer; it is copied and pickled as the plain dictionary. (A map from modules to reducers would never let
go of a module to which its reducer leads back, as through the state of a communication hook:
test_nothing_is_left_of_a_module.) When the module is gone, the next gradient of a parameter that is left raises an
error.

Between passes nothing of the library is on a parameter. Autograd runs a parameter's post-accumulate hooks before its
gradient is reduced, and an optimizer step in such a hook would use the local gradient. So users' hooks are taken off
when a pass begins, and put back when it is over (:class:`PassHooks`). At the end of a backward that synchronises, each
runs once for every parameter that any rank has used since the last one, on all ranks (even where the parameter was not
used), so that replicas stay equal.

The reducer finds gradients without hooks when a pass is over (``engine.py``). A *trigger* lets it look earlier: in each
bucket, the parameter whose gradient came last in an earlier backward has one while a pass runs.

On an accelerator autograd accumulates each gradient on the stream on which a forward has made the parameter's
``AccumulateGrad`` node, and lets other streams wait for it only at the end of the pass. So a bucket may be copied
earlier only on that stream, if all of its gradients have the same. The first trigger of a parameter notes the stream,
and the node is kept from then on, since the next forward could make another one on another stream.

Triggers refer to their reducer weakly, since the garbage collector does not see references held by hooks.
"""

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling
from torch.nn import Module, Parameter

from lockstep._base.buckets import TensorSpec, contiguous_stride, dense_stride
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
        """Raise :class:`LayoutError` if a gradient is not of the planned dtype, shape and device."""
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
    has_lost_parameters: bool
    """True if another reducer has claimed some of its parameters, and may still have them."""

    def manages(self, parameter: Parameter) -> bool:
        """Return True if it synchronises the parameter, or will once the ranks have agreed on it."""

    def has_in_module(self, parameter: Parameter) -> bool:
        """Return True if its module has the parameter on this rank."""

    def is_added(self, parameter: Parameter) -> bool:
        """Return True if the parameter is new on this rank, and not agreed on yet."""

    def present(self) -> list[Parameter]:
        """Return the parameters that its module still has."""

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


def claim(parameters: Iterable[Parameter], owner: Owner) -> None:
    """Let ``owner``, and no other reducer, synchronise the gradients of these parameters from now on."""
    parameters = list(parameters)
    for hooks in filter(None, map(hooks_of, parameters)):
        hooks.pop(_OUTLIVED, None)
    with _lock:
        for number in [number for number, known in _owners.items() if known() is None]:
            del _owners[number]
        earlier = [_owners.get(id(parameter)) for parameter in parameters]  # a set would ask a dead one for its hash
        _owners.update(dict.fromkeys(map(id, parameters), ref(owner)))
    for loser in [link() for link in earlier if link is not None]:
        if loser is not None and loser is not owner:
            loser.has_lost_parameters = True


def owner_of(parameter: Parameter) -> Owner | None:
    """Return the reducer that synchronises the gradient of a parameter, or None."""
    link = _owners.get(id(parameter))
    owner = None if link is None else link()
    return owner if owner is not None and owner.manages(parameter) else None


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
    with _lock:
        for number, link in earlier.items():
            if link is None:
                _owners.pop(number, None)
            else:
                _owners[number] = link


_OUTLIVED = -1
"""The key of an :class:`OutlivedHook` among a parameter's hooks; keys of PyTorch begin at 0."""
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
    hooks: dict[int, Any] | None = hooks_of(parameter)
    if hooks is None:
        hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
    hooks[_OUTLIVED] = OutlivedHook(name)


class _HooksInPass(dict[Any, Any]):
    """The hooks that a parameter has while a pass runs: triggers. Users' hooks are aside, also those that a program
    registers or removes meanwhile."""

    __slots__ = ("__weakref__", "aside")

    def __init__(self, aside: "OrderedDict[int, Any] | None") -> None:
        super().__init__()
        self.aside = aside

    def __bool__(self) -> bool:
        return True

    def __setitem__(self, key: int, hook: Any) -> None:
        if self.aside is None:
            self.aside = OrderedDict()
        self.aside[key] = hook

    def __contains__(self, key: object) -> bool:
        return self.aside is not None and key in self.aside

    def __delitem__(self, key: int) -> None:
        if self.aside is not None:
            del self.aside[key]

    def put(self, trigger: Trigger) -> None:
        """Call ``trigger`` when autograd has accumulated a gradient; modules that share a parameter have one each."""
        super().__setitem__(trigger, trigger)


class PassHooks:
    """What a pass has put onto parameters in place of their hooks, until :meth:`put_back`."""

    def __init__(self, parameters: Sequence[Parameter], triggers: Iterable[tuple[Parameter, Trigger]]) -> None:
        self._changed: list[Parameter] = []
        self.has_users = False
        """True if any of the parameters has users' hooks."""
        for parameter, hooks in zip(parameters, map(hooks_of, parameters), strict=True):
            if hooks is not None:
                self.has_users = self.has_users or bool(hooks.aside if isinstance(hooks, _HooksInPass) else hooks)
                if hooks:
                    self._replace(parameter)
        for parameter, trigger in triggers:
            self._replace(parameter).put(trigger)

    def _replace(self, parameter: Parameter) -> _HooksInPass:
        hooks = hooks_of(parameter)
        if isinstance(hooks, _HooksInPass):  # of another module, or of a pass around this one, which puts back
            return hooks
        ours = parameter._post_accumulate_grad_hooks = _HooksInPass(hooks)
        self._changed.append(parameter)
        return ours

    def put_back(self) -> None:
        """Put back the hooks of before."""
        for parameter in self._changed:
            ours = hooks_of(parameter)
            if isinstance(ours, _HooksInPass):
                # Autograd keeps the dictionary if None takes its place, and would go on to call what is in it.
                ours.clear()
                parameter._post_accumulate_grad_hooks = ours.aside  # type: ignore[assignment]  # None: no hooks
        self._changed.clear()


def users_hooks_of(parameter: Parameter) -> Sequence[Callable[[Parameter], None]]:
    """Return the hooks that users have registered on a parameter, also while a pass has put them aside."""
    hooks = hooks_of(parameter)
    if isinstance(hooks, _HooksInPass):
        hooks = hooks.aside
    return [hook for key, hook in hooks.items() if key != _OUTLIVED] if hooks else ()


def can_have_gradient(tensor: Parameter) -> bool:
    """Return True if a parameter's dtype can have gradients; integers cannot."""
    return tensor.is_floating_point() or tensor.is_complex()
