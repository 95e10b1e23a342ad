"""Backward passes, from where a program enters the autograd engine to where it leaves it.

Every pass that Python begins (``backward()``, ``torch.autograd.grad``, checkpointing) goes through
``Variable._execution_engine``. From the first replicated module on that is an object of a subclass, which tells the
schedulers of all groups when a pass begins, has ended or has failed; it is the only part of PyTorch that is replaced.
Gradients are noted when the outermost pass begins, and looked at when it has ended (``gradient_snapshot.py``).

A pass that C++ begins does not come here. One that goes through the outputs of a replicated module is known by a
callback, which the engine drops unrun when the pass fails, and which knows that it is dropped.

A pass that fails is told of before its exception reaches the program, which may send other things then: what it owes to
the other ranks has to be on its way by that time.

Passes may be inside of one another. One that a function's backward begins, as reentrant checkpointing does, is a step
of the pass around it, and ends with that. One that a hook begins is a pass of its own, for all modules that the pass
around it has not come to.
"""

import inspect
import logging
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from lockstep.compiler import outside_compiler
from lockstep.distributed.reduction import autograd_tls
from lockstep.distributed.reduction.graph import (
    ReachableLeaves,
    devices_of_leaves,
    finish_means,
    joined_behind,
    named,
    reach_of,
)
from lockstep.errors import NotReplicableError

_KEY = "lockstep.backward"
_lock = threading.Lock()


class BackwardPass:
    """One call of the engine."""

    __slots__ = (
        "_failed",
        "_given",
        "_is_known",
        "_reach",
        "adds",
        "creates_graph",
        "is_step",
        "means",
        "outer",
        "over",
        "thread",
        "told",
    )

    def __init__(self, outer: "BackwardPass | None", is_step: bool, given: dict[str, Any] | None) -> None:
        """``given``: the arguments of the engine's entry, by name; None if C++ has begun the pass."""
        self.outer = outer
        """The pass in which this one was begun."""
        self.is_step = is_step
        """True if a function's backward has begun it, as reentrant checkpointing does: a step of the pass around it."""
        self.over = False
        """True when it has left the engine. With several devices, threads of the engine may not know of a failure
        yet."""
        self.thread = threading.get_ident()
        """The thread that has begun it."""
        self.told: set[PassObserver] = set()
        """Those that know already that it has ended."""
        self.means: dict[object, torch.Tensor] = {}
        """With ``create_graph``: by group, an output of the last mean over its ranks that has been taken in it."""
        self.adds = given is None or bool(given.get("accumulate_grad"))
        """True if it adds to gradients: ``backward()``, and not ``torch.autograd.grad``."""
        self.creates_graph = given is not None and bool(given.get("create_graph"))
        """True if it was asked for gradients that have a graph themselves."""
        self._is_known = given is not None
        self._given = given or {}
        self._failed: set[int] = outer._failed if outer is not None else set()  # common to passes inside of one another
        self._reach: ReachableLeaves | None = None

    @property
    def accumulates(self) -> bool:
        """Return True if it adds gradients to whatever leaves it reaches: ``backward()``, but not with ``inputs``."""
        return self._is_known and self.adds and not self._given.get("inputs")

    @property
    def reach(self) -> ReachableLeaves:
        """What it was to accumulate into, by its graph, which is searched when this is first asked."""
        if self._reach is None:
            self._reach = reach_of(self._given)
        return self._reach

    @property
    def whole(self) -> "BackwardPass":
        """The pass that this one is a step of; itself if it is none."""
        return self.outer.whole if self.is_step and self.outer is not None else self

    def is_inside(self, other: "BackwardPass") -> bool:
        """Return True if it was begun in ``other``, or in a pass inside of that."""
        outer = self.outer
        while outer is not None and outer is not other:
            outer = outer.outer
        return outer is not None

    def note_failure(self, thing: object) -> None:
        """Remember that every rank knows ``thing`` to have failed in this pass."""
        self._failed.add(id(thing))

    def is_known_to_fail(self, thing: object) -> bool:
        """Return True if :meth:`note_failure` has been told of ``thing``, in this pass or in one around it."""
        return id(thing) in self._failed

    def fail(self, reach: ReachableLeaves) -> None:
        """Tell all observers that it has failed, whatever happens to one of them."""
        self.over = True
        for observer in observers():
            try:
                observer.pass_failed(self, reach)
            except Exception:
                logging.getLogger("lockstep").exception("what a failed backward pass owes could not be sent")

    def close(self) -> None:
        """Let go of the group and the graph: the pass has left the engine.

        A collective keeps the thread-local state in which it was begun, and this with it, until a thread of the group
        lets go of it: a group whose last reference that was would wait for its own thread
        (``test_a_pass_that_is_over_keeps_no_group``).
        """
        self.over = True
        self._given = {}
        self._reach = None
        self.told.clear()
        self.means.clear()


def current_pass() -> BackwardPass | None:
    """Return the pass that the calling thread runs for: the innermost; None outside, and in one that C++ has begun."""
    found: BackwardPass | None = autograd_tls.get(_KEY)
    return found


class PassObserver(ABC):
    """Is told of every backward pass."""

    def __init__(self) -> None:
        with _lock:
            _observers[:] = [each for each in _observers if each() is not None]
            _observers.append(weakref.ref(self))
        watch_engine()

    @property
    @abstractmethod
    def order(self) -> int:
        """Its place among those that are told, the same on every rank."""

    @abstractmethod
    def pass_begins(self, this: BackwardPass) -> None:
        """Note that a pass begins that is no step of another one, and has added to no gradient yet."""

    @abstractmethod
    def pass_ended(self, this: BackwardPass) -> None:
        """Such a pass has ended well."""

    @abstractmethod
    def pass_failed(self, this: BackwardPass, reach: ReachableLeaves) -> None:
        """Note that a pass has failed; its exception is on its way to the program, and waits for this."""


_observers: list[weakref.ref[PassObserver]] = []


def observers() -> list[PassObserver]:
    """Return all that are told of passes, in the order that is the same on every rank."""
    found = [observer for each in _observers if (observer := each()) is not None]
    if len(found) > 1:
        found.sort(key=lambda each: each.order)
    return found


def watch_engine() -> None:
    """Let passes go through the library's entry, also if another library has put its own there since."""
    engine = Variable._execution_engine
    if not isinstance(engine, _Engine):
        Variable._execution_engine = _Engine(engine)


class _EndOfForeignPass:
    """The callback of a pass that C++ has begun. It is the engine's alone, which drops it unrun if the pass fails."""

    __slots__ = ("_pass",)

    def __init__(self, this: BackwardPass) -> None:
        self._pass: BackwardPass | None = this

    @outside_compiler
    def __call__(self) -> None:
        this, self._pass = self._pass, None
        for observer in observers():
            if this is not None:
                observer.pass_ended(this)

    @outside_compiler
    def __del__(self) -> None:
        if self._pass is not None:
            self._pass.fail(ReachableLeaves())


def foreign_pass() -> BackwardPass:
    """Return a pass for the one under way, that C++ has begun; call this once in it."""
    this = BackwardPass(None, False, None)
    Variable._execution_engine.queue_callback(_EndOfForeignPass(this))
    return this


class _Engine(torch._C._ImperativeEngine):
    """PyTorch's engine, or the one that another library has put in its place, entered here."""

    def __new__(cls, _entry: Any) -> "_Engine":
        return super().__new__(cls)

    def __init__(self, entry: Any) -> None:
        super().__init__()
        self._run = super().run_backward if type(entry) is torch._C._ImperativeEngine else entry.run_backward

    @outside_compiler
    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass."""
        outer = autograd_tls.get(_KEY)
        given = named(args, kwargs)
        this = BackwardPass(outer, outer is not None and _is_in_function(), given)
        autograd_tls.put(_KEY, this)
        try:
            observed = [] if this.is_step else observers()
            for observer in observed:
                observer.pass_begins(this)
            joined = joined_behind(given) if given.get("inputs") else ()
            if joined:
                given["inputs"] = (*given["inputs"], *joined)
                args, kwargs = (), given
            result = self._run(*args, **kwargs)
            if joined and not given["accumulate_grad"]:
                result = result[: -len(joined)]
            for observer in observed:
                observer.pass_ended(this)
        except BaseException:
            if outer is None:
                self._wait_for_threads(devices_of_leaves(given))
            finish_means(given, this)
            this.fail(this.reach if outer is None else ReachableLeaves())
            raise
        else:
            return result
        finally:
            this.close()
            if outer is not None:
                autograd_tls.put(_KEY, outer)
            else:
                autograd_tls.remove(_KEY)

    def _wait_for_threads(self, devices: set[torch.device]) -> None:
        """Return when no thread is at work any more on a node of a pass that has failed in another, which may be the
        one that sets a gradient. None begins another one; so each has ended its own when it comes to a pass of ours."""
        for device in devices:
            try:
                with torch.enable_grad():
                    leaf = torch.zeros((), device=device, requires_grad=True)
                    super().run_backward((leaf * 1,), (torch.ones_like(leaf),), False, False, (leaf,), True, False)
            except RuntimeError as error:  # of a device that does not work any more
                logging.getLogger("lockstep").debug("a thread of the autograd engine cannot be waited for: %s", error)


def is_autograd_compiled() -> bool:
    """Return True if compiled autograd may run backward passes now."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and getattr(compiled_autograd, "compiled_autograd_enabled", True)


def _is_in_function() -> bool:
    """Return True if the pass that begins is begun in the backward of a function, and not in a hook."""
    frame = sys._getframe(2)
    engine = inspect.unwrap(_Engine.run_backward).__code__
    while frame is not None and frame.f_code is not engine:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def check_optimizers(named: Callable[[], Iterable[tuple[str, Parameter]]]) -> None:
    """Raise :class:`NotReplicableError` for a parameter that has such an optimizer; ``named`` is asked for parameters
    and their names where any has one."""
    module = sys.modules.get(_MODULE)
    if module is not None and getattr(module, "param_to_acc_grad_map", True):  # else it has not been called
        for name, parameter in named():
            if hasattr(parameter, "_in_backward_optimizers"):
                raise NotReplicableError(
                    f"parameter {name} has an optimizer from _apply_optimizer_in_backward(), which steps before "
                    "gradients are reduced; step in a hook of your own (parameter.register_post_accumulate_grad_hook), "
                    "which waits for the reduced gradient, or after backward"
                )
