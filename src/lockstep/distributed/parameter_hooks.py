"""Hooks on parameters: ours, and those of users that are to see reduced gradients.

Autograd runs a parameter's post-accumulate hooks when its gradient is there, which is before it is reduced. An
optimizer step in such a hook would step on this rank's gradient alone; so hooks that users put there, before or after
replicating, are held back until the gradient is the mean of all ranks'. Copies of a parameter, and pickles, have no
hooks.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lockstep.compiler import outside_compiler
from lockstep.distributed.gradients import ManagedParameter

if TYPE_CHECKING:
    from lockstep.distributed.conductor import Conductor
    from lockstep.distributed.reducer import Reducer


class ParameterHook:
    """Tells the reducer that a gradient has arrived."""

    __slots__ = ("_index", "_reducer")

    def __init__(self, index: int, reducer: "Reducer") -> None:
        self._index, self._reducer = index, weakref.ref(reducer)

    def __call__(self, parameter: Parameter) -> None:
        """The gradient of ``parameter`` is there."""
        if is_compiling():
            _tell_outside(self)
            return
        reducer = self._reducer()  # as in _tell, without a call more: this runs for every parameter
        if reducer is not None:
            reducer.arrived(self._index)
            if reducer.conductor.hooks_left:
                reducer.conductor.hook_has_run()

    def _tell(self) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.arrived(self._index)
            if reducer.conductor.hooks_left:
                reducer.conductor.hook_has_run()

    @property
    def conductor(self) -> "Conductor | None":
        """Who conducts the reducer, if there is still one."""
        reducer = self._reducer()
        return None if reducer is None else reducer.conductor

    @property
    def alive(self) -> bool:
        """Whether there is still a reducer to tell."""
        return self._reducer() is not None


class HeldHook:
    """A user's hook, held back until the gradient is reduced."""

    __slots__ = ("_hook", "_reducer")

    def __init__(self, hook: Callable[[Parameter], None], reducer: "weakref.ref[Reducer]") -> None:
        self._hook, self._reducer = hook, reducer

    def __call__(self, parameter: Parameter) -> None:
        """The gradient of ``parameter`` is there, but perhaps only this rank's."""
        (_hold_outside if is_compiling() else HeldHook._hold)(self, parameter)

    def _hold(self, parameter: Parameter) -> None:
        reducer = self._reducer()
        if reducer is None:
            self._hook(parameter)
        else:
            reducer.after_reduction(self._hook, parameter)


# Compiled autograd traces hooks; ours are about the order of things, which a trace does not keep.
_tell_outside = outside_compiler(ParameterHook._tell)
_hold_outside = outside_compiler(HeldHook._hold)


class _Hooks(OrderedDict[int, Any]):
    """A parameter's post-accumulate hooks: ours first, all others held."""

    def __init__(self, reducer: "Reducer") -> None:
        super().__init__()
        self._reducer = weakref.ref(reducer)

    def __setitem__(self, key: int, hook: Any) -> None:
        ours = isinstance(hook, ParameterHook)
        super().__setitem__(key, hook if ours else HeldHook(hook, self._reducer))


def attach(parameter: ManagedParameter, reducer: "Reducer") -> None:
    """Hook a parameter, also a frozen one, for it may be unfrozen; an earlier reducer's hook gives way."""
    tensor = parameter.parameter
    users = [
        (key, hook._hook if isinstance(hook, HeldHook) else hook)
        for key, hook in (tensor._post_accumulate_grad_hooks or {}).items()
        if not isinstance(hook, ParameterHook)
    ]
    frozen = not tensor.requires_grad
    if frozen:
        tensor.requires_grad_(True)
    hooks = _Hooks(reducer)
    tensor._post_accumulate_grad_hooks = hooks
    tensor.register_post_accumulate_grad_hook(ParameterHook(parameter.index, reducer))
    for key, hook in users:
        hooks[key] = hook
    _take_over_optimizers(tensor, hooks)
    if frozen:
        tensor.requires_grad_(False)


def _take_over_optimizers(tensor: Any, hooks: _Hooks) -> None:
    """Let optimizers that run in backward (``_apply_optimizer_in_backward``) run when the gradient is reduced."""
    optimizers = getattr(tensor, "_in_backward_optimizers", None)
    if not optimizers:
        return
    for handle in tensor._optimizer_hook_handles:
        handle.remove()

    def step(parameter: Parameter) -> None:
        for optimizer in optimizers:
            optimizer.step()
        parameter.grad = None

    handle = RemovableHandle(hooks)
    hooks[handle.id] = step


def is_attached(tensor: Parameter) -> bool:
    """Whether some reducer that is alive already synchronises the parameter's gradient."""
    hooks = tensor._post_accumulate_grad_hooks or {}
    return any(isinstance(hook, ParameterHook) and hook.alive for hook in hooks.values())
