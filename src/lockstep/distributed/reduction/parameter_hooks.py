"""Hooks on parameters: ours, and those of users that are to see reduced gradients.

Autograd runs a parameter's post-accumulate hooks when its gradient is there, which is before it is reduced. An
optimizer step in such a hook would step on this rank's gradient alone; so hooks that users put there, before or after
replicating, are held back. At the end of a backward that synchronises, each runs once for every parameter that any rank
has used since the last one - on all ranks, also where the parameter was not used, so that what it does stays in step.
Copies of a parameter, and pickles, have no hooks.

The garbage collector does not see through hooks, so they refer to their reducer weakly; the modules hold it
(``keeping.py``). A parameter that has outlived them all raises.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

from lockstep.compiler import is_in_compiled_backward, outside_compiler
from lockstep.errors import NotReplicableError


class GradientListener(Protocol):
    """What synchronises the gradients of parameters, as their hooks know it."""

    def mark_gradient_ready(self, index: int) -> None:
        """Autograd has accumulated the gradient of the parameter with that number."""

    def newcomer_arrived(self, parameter: Parameter, name: str) -> None:
        """Autograd has accumulated the gradient of a parameter that the ranks have not agreed on yet."""

    def hold_hooks(self) -> None:
        """Some parameter has users' hooks, to be run when its gradient is reduced."""


OUR_KEY = -1
"""Under which our hook stands among those of a parameter; PyTorch's own numbers begin with 0."""


class ParameterHook:
    """Tells the reducer of a gradient that has come, unless something cheaper stands in its place
    (``arrivals.py``)."""

    __slots__ = ("_index", "_name", "_reducer", "marked")

    def __init__(self, index: int, name: str, reducer: GradientListener) -> None:
        self._index, self._name, self._reducer = index, name, weakref.ref(reducer)
        self.marked = False
        """Whether a gradient has arrived in a function that compiled autograd has made of a backward pass."""

    def __call__(self, parameter: Parameter) -> None:
        """The gradient of ``parameter`` is there."""
        if is_dynamo_compiling():  # a third of is_compiling's time; only the compiler's tracing gets here
            self._compiled(parameter)
        else:
            self._tell(parameter)

    def _tell(self, parameter: Parameter) -> None:
        self._listener().mark_gradient_ready(self._index)

    def _compiled(self, parameter: Parameter) -> None:
        if is_in_compiled_backward():
            self.marked = True  # such a function can do this, and no more
        else:
            _run_outside(self, parameter)

    def _listener(self) -> GradientListener:
        reducer = self._reducer()
        if reducer is None:
            raise NotReplicableError(
                f"parameter {self._name} got a gradient, but no module is left of those that it was replicated with, "
                "so nothing synchronises it any more; keep the module, or replicate the one that holds the parameter "
                "now, or train a copy: torch.nn.Parameter(parameter.detach())"
            )
        return reducer

    @property
    def reducer(self) -> GradientListener | None:
        """Who is told, if they are still there."""
        return self._reducer()


class NewcomerHook(ParameterHook):
    """The hook of a parameter that the ranks have not agreed on yet: its gradient opens a round, in which they do."""

    __slots__ = ()

    def __init__(self, name: str, reducer: GradientListener) -> None:
        super().__init__(-1, name, reducer)

    def _tell(self, parameter: Parameter) -> None:
        self._listener().newcomer_arrived(parameter, self._name)


class HeldHook:
    """A user's hook, held back until the gradient is reduced."""

    __slots__ = ("_earlier", "_key", "_reducer", "hook")

    def __init__(
        self,
        hook: Callable[[Parameter], None],
        reducer: Callable[[], GradientListener | None],
        key: int = -1,
        earlier: Mapping[int, Any] | None = None,
    ) -> None:
        self.hook, self._reducer, self._key = hook, reducer, key
        self._earlier = earlier

    def __call__(self, parameter: Parameter) -> None:
        """The gradient of ``parameter`` is there, but perhaps only this rank's: :func:`run_held_hooks` has its turn."""
        if is_compiling() and not is_in_compiled_backward():
            _run_outside(self, parameter)
        elif self._reducer() is None:
            self.run(parameter)

    def run(self, parameter: Parameter) -> None:
        """Call the user's hook, unless its handle has removed it."""
        if self._earlier is None or self._key in self._earlier:
            self.hook(parameter)

    def moved_to(
        self, reducer: Callable[[], GradientListener | None], key: int, earlier: Mapping[int, Any]
    ) -> "HeldHook":
        """The same for another reducer; the user's handle still removes it from the dictionary that it was put into."""
        return HeldHook(self.hook, reducer, key, earlier if self._earlier is None else self._earlier)


@outside_compiler
def _run_outside(hook: ParameterHook | HeldHook, parameter: Parameter) -> None:
    hook(parameter)


def is_marked(parameter: Parameter) -> bool:
    """Whether a compiled backward pass has run the parameter's hook."""
    ours = _ours(parameter)
    return ours is not None and ours.marked


def take_mark(parameter: Parameter) -> bool:
    """Whether a compiled backward pass has run the parameter's hook since this was last asked."""
    ours = _ours(parameter)
    if ours is None or not ours.marked:
        return False
    ours.marked = False
    return True


def _ours(parameter: Parameter) -> ParameterHook | None:
    hooks = parameter._post_accumulate_grad_hooks
    return hooks.ours if isinstance(hooks, HookDictionary) else None


class HookDictionary(OrderedDict[int, Any]):
    """A parameter's post-accumulate hooks: ours first, all others held."""

    def __init__(self, ours: ParameterHook, reducer: GradientListener) -> None:
        super().__init__()
        self.ours = ours
        self._reducer = weakref.ref(reducer)
        super().__setitem__(OUR_KEY, ours)

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, HeldHook(hook, self._reducer))
        self._tell()

    def take_over(self, earlier: Mapping[int, Any]) -> None:
        """Hold the users' hooks of a dictionary that autograd has used so far; their handles go on working."""
        for key, hook in earlier.items():
            if key != OUR_KEY:
                held = hook if isinstance(hook, HeldHook) else HeldHook(hook, self._reducer)
                super().__setitem__(key, held.moved_to(self._reducer, key, earlier))
                self._tell()

    def held(self, reducer: GradientListener) -> list[HeldHook]:
        """The users' hooks that wait for a reducer."""
        if self._reducer() is not reducer:
            return []
        return [hook for hook in self.values() if isinstance(hook, HeldHook)]

    def _tell(self) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.hold_hooks()


def attach(tensor: Parameter, ours: ParameterHook, reducer: GradientListener) -> HookDictionary:
    """Hook a parameter, also a frozen one, for it may be unfrozen; an earlier reducer's hook gives way."""
    earlier = tensor._post_accumulate_grad_hooks
    hooks = HookDictionary(ours, reducer)
    tensor._post_accumulate_grad_hooks = hooks
    if earlier:
        hooks.take_over(earlier)
    return hooks


def detach(tensor: Parameter, reducer: GradientListener) -> None:
    """Take the hook of ``reducer`` off a parameter that it does not synchronise any more; users' hooks stay."""
    hooks = tensor._post_accumulate_grad_hooks
    if listener_of(tensor) is reducer:
        held = [(key, hook) for key, hook in hooks.items() if key != OUR_KEY]
        tensor._post_accumulate_grad_hooks = OrderedDict((k, h.moved_to(_nobody, k, hooks)) for k, h in held)


def _nobody() -> None:
    """Stands where a reducer would be referred to."""


def run_held_hooks(parameters: Iterable[Parameter], reducer: GradientListener) -> None:
    """Run users' hooks of parameters whose gradients ``reducer`` has reduced."""
    for parameter in parameters:
        hooks = parameter._post_accumulate_grad_hooks
        for hook in hooks.held(reducer) if isinstance(hooks, HookDictionary) else ():
            hook.run(parameter)


def can_have_gradient(tensor: Parameter) -> bool:
    """Whether autograd could ever give it a gradient: integers have none."""
    return tensor.is_floating_point() or tensor.is_complex()


def listener_of(tensor: Parameter) -> GradientListener | None:
    """What synchronises the parameter's gradient, if anything does."""
    ours = _ours(tensor)
    return None if ours is None else ours.reducer


def is_newcomer(tensor: Parameter) -> bool:
    """Whether the parameter has the hook of one that ranks have not agreed on yet."""
    return isinstance(_ours(tensor), NewcomerHook)
