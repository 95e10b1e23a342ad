"""Backward passes, followed from where a program enters the autograd engine to where it leaves it.

A pass that ends well calls what was queued for its end. A pass that fails does not: the engine drops its callbacks, and
with an accelerator that happens in a thread of the engine's, some time after the exception has reached the program,
which may have sent other things by then. What a failed pass owes to the other ranks has to be on its way before that.
So the engine's entry is watched: ``Variable._execution_engine``, through which every pass goes that Python begins
(``backward()``, ``torch.autograd.grad``, checkpointing), is an object of a subclass from the first replicated module
on. It adds nothing to a pass but its beginning and its end. That is the only part of PyTorch that is replaced.

A pass that C++ begins does not come here: it is known by its callback alone, which the engine drops unrun when the pass
fails, and which knows that it is dropped.
"""

import inspect
import logging
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from lockstep.compiler import outside_compiler
from lockstep.distributed.reduction import handed_on
from lockstep.distributed.reduction.graph import (
    Arguments,
    Reach,
    devices_of_leaves,
    joined_behind,
    named,
    reach_of,
    take_part,
    unfinished_collectives,
)

_KEY = "lockstep.backward"
_lock = threading.Lock()


class BackwardPass:
    """One call of the engine."""

    __slots__ = ("_arguments", "_failed", "followers", "is_step", "means", "outer", "over", "told")

    def __init__(self, outer: "BackwardPass | None", is_step: bool, arguments: "Arguments") -> None:
        self.outer = outer
        """The pass in which this one was begun."""
        self.is_step = is_step
        """Whether a function's backward has begun it, as reentrant checkpointing does: a step of the pass around it."""
        self.over = False
        """Whether it has left the engine. With several devices, threads of the engine may not know of a failure yet."""
        self.followers: list[PassFollower] = []
        """Those that wait for its end."""
        self.told: set[PassFollower] = set()
        """Those that know already that it has ended."""
        self.means: dict[object, torch.Tensor] = {}
        """With ``create_graph``: by group, an output of the last mean over its ranks that has been made in it."""
        self._arguments: Arguments | None = arguments
        self._failed: set[int] = outer._failed if outer is not None else set()  # common to passes inside of one another

    @property
    def accumulates(self) -> bool:
        """Whether it adds gradients to whatever leaves it reaches: ``backward()``, but not with ``inputs``."""
        if self._arguments is None:
            return False
        given = named(*self._arguments)
        return bool(given.get("accumulate_grad")) and not given.get("inputs")

    @property
    def creates_graph(self) -> bool:
        """Whether it was asked for gradients that have a graph themselves."""
        return self._arguments is not None and bool(named(*self._arguments).get("create_graph"))

    @property
    def whole(self) -> "BackwardPass":
        """The pass that this one is a step of; itself if it is none."""
        return self.outer.whole if self.is_step and self.outer is not None else self

    def note_failure(self, thing: object) -> None:
        """Remember that every rank knows ``thing`` to have failed in this pass."""
        self._failed.add(id(thing))

    def is_known_to_fail(self, thing: object) -> bool:
        """Whether :meth:`note_failure` has been told of ``thing``, in this pass or in one around it."""
        return id(thing) in self._failed

    def end(self) -> None:
        """It has ended well: tell those whose callback has not run."""
        self.over = True
        told = list(self.followers)
        if _is_compiled():
            told += [follower for follower in _alive() if follower not in told]
        self.followers.clear()
        for follower in sorted(told, key=lambda each: each.order):
            follower.compiled_pass_ended(self)

    def fail(self, reach: Reach) -> None:
        """It has failed: tell everybody, whatever happens to one of them."""
        self.over = True
        self.followers.clear()
        for follower in sorted(_alive(), key=lambda each: each.order):
            try:
                follower.pass_failed(self, reach)
            except Exception:
                logging.getLogger("lockstep").exception("what a failed backward pass owes could not be sent")

    def close(self) -> None:
        """It has left the engine. Whoever holds it from now on, holds no follower, and no group.

        A collective keeps the thread-local state in which it was begun, and this with it, until a thread of the group
        lets go of it: a group whose last reference that was would wait for its own thread
        (``test_a_pass_that_is_over_keeps_no_group``).
        """
        self.over, self._arguments = True, None
        self.followers.clear()
        self.told.clear()
        self.means.clear()


def current_pass() -> BackwardPass | None:
    """The pass that the calling thread runs for: the innermost; None outside, and in one that C++ has begun."""
    found: BackwardPass | None = handed_on.get(_KEY)
    return found


class PassFollower(ABC):
    """Somebody who has to do something when a backward pass is over, however it ends.

    At any time it follows one pass, at most. Passes that it does not follow tell it, too, when they fail.
    """

    def __init__(self) -> None:
        self.followed: BackwardPass | None = None
        """The pass that it follows; None also for one that C++ has begun."""
        self.is_following = False
        """Whether it follows a pass."""
        self._starting = threading.Lock()
        with _lock:
            _followers[:] = [each for each in _followers if each() is not None]
            _followers.append(weakref.ref(self))
            if type(Variable._execution_engine) is torch._C._ImperativeEngine:
                Variable._execution_engine = _Engine()

    @property
    @abstractmethod
    def order(self) -> int:
        """Its place among those that are told, the same on every rank."""

    @abstractmethod
    def pass_ended(self) -> None:
        """The pass that it follows has ended well."""

    @abstractmethod
    def compiled_pass_ended(self, this: BackwardPass) -> None:
        """A pass has ended well, perhaps without callbacks and hooks: compiled autograd may have run it."""

    @abstractmethod
    def pass_failed(self, this: BackwardPass, reach: Reach) -> None:
        """A pass has failed; its exception is on its way to the program, and waits for this."""

    @abstractmethod
    def pass_dropped(self) -> None:
        """The pass that it follows has failed. C++ has begun it, so nothing is known of its graph."""

    def follow(self) -> bool:
        """Follow the pass under way, of which this is called, to its end; False if it has failed already."""
        return self.is_following or self._follow()

    def _follow(self) -> bool:
        with self._starting:
            current = current_pass()
            this = current if current is None or not current.is_step else current.whole
            if this is not None and this.over:
                return False
            if not self.is_following:
                if this is current:  # else a callback would run at the end of the step
                    at_end = _AtEndOfLonePass(self) if this is None else _AtEnd(self, this)
                    Variable._execution_engine.queue_callback(at_end)
                self.followed, self.is_following = this, True
                if this is not None:
                    this.followers.append(self)
            return True

    def unfollow(self) -> None:
        """Follow no pass any more."""
        followed, self.followed = self.followed, None
        self.is_following = False
        if followed is not None and self in followed.followers:
            followed.followers.remove(self)


_followers: list[weakref.ref[PassFollower]] = []


def _alive() -> list[PassFollower]:
    found = (each() for each in list(_followers))
    return [follower for follower in found if follower is not None]


class _AtEnd:
    """The engine's callback. The first one that is called tells all that follow the pass."""

    __slots__ = ("_follower", "_pass")

    def __init__(self, follower: PassFollower, this: BackwardPass | None = None) -> None:
        self._follower: PassFollower | None = follower
        self._pass = this

    @outside_compiler
    def __call__(self) -> None:
        follower, self._follower = self._follower, None
        this, self._pass = self._pass, None
        if this is not None:
            followers = list(this.followers)  # which stop following now
            if len(followers) > 1:
                followers.sort(key=lambda each: each.order)
            for each in followers:
                each.pass_ended()
        elif follower is not None:
            follower.pass_ended()


class _AtEndOfLonePass(_AtEnd):
    """The callback of a pass that nothing else tells of. It is the engine's alone, so that dropping it unrun shows."""

    __slots__ = ()

    @outside_compiler
    def __del__(self) -> None:
        if self._follower is not None:
            self._follower.pass_dropped()


class _Engine(torch._C._ImperativeEngine):
    """PyTorch's engine, entered here."""

    @outside_compiler
    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass."""
        outer = current_pass()
        this = BackwardPass(outer, outer is not None and _is_in_function(), (args, kwargs))
        handed_on.put(_KEY, this)
        try:
            given = named(args, kwargs)
            if joined := joined_behind(given):
                args, kwargs = (), {**given, "inputs": (*given["inputs"], *joined)}
            result = super().run_backward(*args, **kwargs)
            if joined and not given["accumulate_grad"]:
                result = result[: len(given["inputs"])]
            if this.followers or _is_compiled():
                this.end()
        except BaseException:
            given = named(args, kwargs)
            if outer is None:
                self._wait_for_threads(devices_of_leaves(given))
            take_part(unfinished_collectives(given, this))
            this.fail(reach_of(given) if outer is None else Reach())
            raise
        else:
            return result
        finally:
            this.close()
            if outer is not None:
                handed_on.put(_KEY, outer)
            else:
                handed_on.remove(_KEY)

    def _wait_for_threads(self, devices: set[torch.device]) -> None:
        """A pass has failed in one thread: return when no other is at work on a node of it, which may be the one that
        sets a gradient. None begins another one; so each has ended its own when it comes to a pass of ours."""
        for device in devices:
            try:
                with torch.enable_grad():
                    leaf = torch.zeros((), device=device, requires_grad=True)
                    super().run_backward((leaf * 1,), (torch.ones_like(leaf),), False, False, (leaf,), True, False)
            except RuntimeError as error:  # of a device that does not work any more
                logging.getLogger("lockstep").debug("a thread of the autograd engine cannot be waited for: %s", error)


def _is_in_function() -> bool:
    """Whether the pass that begins is begun in the backward of a function, and not in a hook."""
    frame = sys._getframe(2)
    engine = inspect.unwrap(_Engine.run_backward).__code__
    while frame is not None and frame.f_code is not engine:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_compiled() -> bool:
    """Whether compiled autograd may run backward passes now."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and getattr(compiled_autograd, "compiled_autograd_enabled", True)
