"""Observes backward passes from the moment they enter the autograd engine until they leave it.

Every pass that Python begins (``backward()``, ``torch.autograd.grad``, checkpointing) goes through
``Variable._execution_engine``. The first replicated module replaces it by an instance of a subclass, which tells the
schedulers of all groups when a pass begins, ends or fails; it is the only part of PyTorch that is replaced. Gradients
are noted when the outermost pass begins, and compared when it has ended (``gradients.py``).

A pass that C++ begins does not come here. One that goes through outputs of a replicated module is noticed by a callback
queued in it, which the engine drops without calling if the pass fails; the callback's finalizer then reports the
failure.

Observers are told of a failed pass before its exception reaches the program, which may start other collectives then:
the messages that other ranks wait for must be on their way by that time.

Passes may be nested. A pass begun by a function's backward, as in reentrant checkpointing, is a step of the pass around
it and ends with it. A pass begun by a hook is a pass of its own for all modules that the outer pass has not reached.
"""

import ctypes
import functools
import inspect
import logging
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from lockstep._base.compiler import outside_compiler
from lockstep.distributed.reduction.autograd.graph import (
    ENGINE_ARGUMENTS,
    ReachableLeaves,
    devices_of_leaves,
    finish_means,
    joined_behind,
    reach_of,
)

_KEY = "lockstep.backward"
_lock = threading.Lock()


class BackwardPass:
    """One call of the autograd engine."""

    __slots__ = (
        "_failed",
        "_given",
        "_is_known",
        "_reach",
        "adds",
        "creates_graph",
        "in_callback",
        "is_step",
        "later",
        "outer",
        "over",
        "thread",
        "told",
    )

    def __init__(self, outer: "BackwardPass | None", is_step: bool, given: dict[str, Any] | None) -> None:
        """``given``: the engine's arguments by name; None if C++ has begun the pass."""
        self.outer = outer
        """The pass in which this one was begun, or None."""
        self.is_step = is_step
        """True if a function's backward has begun it, as in reentrant checkpointing: a step of the outer pass."""
        self.over = False
        """True once it has left the engine. After a failure, engine threads of other devices may still run it."""
        self.thread = threading.get_ident()
        """The thread that began it."""
        self.told: set[PassObserver] = set()
        """The observers that have been told of its end."""
        self.adds = given is None or bool(given.get("accumulate_grad"))
        """True if it accumulates into ``.grad``: ``backward()``, not ``torch.autograd.grad``."""
        self.creates_graph = given is not None and bool(given.get("create_graph"))
        """True if it was begun with ``create_graph=True``."""
        self.in_callback = False
        """True while a callback runs that the program has queued in it."""
        self.later: list[Callable[[], None]] = []
        """The callbacks that such callbacks have queued, to be called when the gradients have been reduced."""
        self._is_known = given is not None
        self._given = given or {}
        self._failed: set[int] = outer._failed if outer is not None else set()  # shared by nested passes
        self._reach: ReachableLeaves | None = None

    @property
    def accumulates(self) -> bool:
        """True if it accumulates into every leaf that it reaches: ``backward()`` without ``inputs``."""
        return self._is_known and self.adds and not self._given.get("inputs")

    @property
    def reach(self) -> ReachableLeaves:
        """The leaves that it may accumulate into; the graph is searched on the first access."""
        if self._reach is None:
            self._reach = reach_of(self._given)
        return self._reach

    @property
    def whole(self) -> "BackwardPass":
        """The pass that this one is a step of; itself if it is not a step."""
        return self.outer.whole if self.is_step and self.outer is not None else self

    @property
    def outermost(self) -> "BackwardPass":
        """The pass around all others that it was begun in; itself if there is none."""
        return self if self.outer is None else self.outer.outermost

    def is_inside(self, other: "BackwardPass") -> bool:
        """Return True if it was begun in ``other``, or in a pass nested in that."""
        outer = self.outer
        while outer is not None and outer is not other:
            outer = outer.outer
        return outer is not None

    def note_failure(self, thing: object) -> None:
        """Remember that every rank knows ``thing`` to have failed in this pass."""
        self._failed.add(id(thing))

    def has_failed(self, thing: object) -> bool:
        """Return True if :meth:`note_failure` was called for ``thing`` in this pass or one that it is nested with."""
        return id(thing) in self._failed

    def run_callback(self, callback: Callable[[], None]) -> None:
        """Call a callback that the program has queued in it, or in a step of it."""
        self.in_callback = True
        try:
            callback()
        finally:
            self.in_callback = False

    def fail(self, reach: ReachableLeaves) -> None:
        """Tell all observers that the pass has failed, even if one of them raises."""
        self.over = True
        for link in _in_order():
            observer = link()
            try:
                if observer is not None:
                    observer.pass_failed(self, reach)
            except Exception:
                logging.getLogger("lockstep").exception("what a failed backward pass owes could not be sent")

    def close(self) -> None:
        """Mark the pass as over, and drop its references to groups.

        A collective keeps the thread-local state in which it was begun, and with it this object, until a thread of the
        process group releases it. If that were the last reference to the group, the group would wait for its own thread
        (``test_a_pass_that_is_over_keeps_no_group``).
        """
        self.over = True
        self._given = {}
        self._reach = None
        self.told.clear()
        self.later.clear()


def current_pass() -> BackwardPass | None:
    """Return the innermost pass that this thread runs; None outside of passes, and in one that C++ has begun."""
    found: BackwardPass | None = get_from_tls(_KEY)
    return found


def note_failure(thing: object) -> None:
    """Note that all ranks know that ``thing`` has failed in the pass under way: none has to be told."""
    this = current_pass()
    if this is not None:
        this.note_failure(thing)


class PassObserver(ABC):
    """Base class of objects that are told of every backward pass."""

    def __init__(self) -> None:
        with _lock:
            _observers[:] = [each for each in _observers if each() is not None]
            _observers.append(weakref.ref(self))
        watch_engine()

    @property
    @abstractmethod
    def order(self) -> int:
        """The place in the order in which observers are told, the same on every rank."""

    @abstractmethod
    def pass_begins(self, this: BackwardPass) -> None:
        """Called when a pass begins, before it adds to any gradient; not for steps of other passes."""

    @abstractmethod
    def pass_ended(self, this: BackwardPass) -> None:
        """Called when such a pass has ended without an error."""

    @abstractmethod
    def pass_failed(self, this: BackwardPass, reach: ReachableLeaves) -> None:
        """Called when a pass has failed, before its exception reaches the program."""


_observers: list[weakref.ref[PassObserver]] = []


def _in_order() -> Sequence["weakref.ref[PassObserver]"]:
    """Return references to all observers, in the order that is the same on every rank.

    Only the observer that is being told is kept alive. A pass of one thread must not hold the group of another thread
    until it ends: then it would destroy that group, and wait for its ranks.
    """
    return sorted(_observers, key=_order_of)


def _order_of(link: "weakref.ref[PassObserver]") -> int:
    observer = link()
    return 0 if observer is None else observer.order


def _tell_of_begin(this: BackwardPass) -> None:
    # Sorting takes longer than a pass that concerns nobody, and nearly every program has one group.
    for link in _observers if len(_observers) == 1 else _in_order():
        observer = link()
        if observer is not None:
            observer.pass_begins(this)


def _tell_of_end(this: BackwardPass) -> None:
    for link in _observers if len(_observers) == 1 else _in_order():
        observer = link()
        if observer is not None:
            observer.pass_ended(this)


def watch_engine() -> None:
    """Install the library's entry to the engine, around another library's if that has been installed since."""
    engine = Variable._execution_engine
    if not isinstance(engine, _Engine):
        Variable._execution_engine = _Engine(engine)


class _EndOfForeignPass:
    """Callback of a pass that C++ has begun; only the engine refers to it, and drops it uncalled if the pass fails."""

    __slots__ = ("_pass",)

    def __init__(self, this: BackwardPass) -> None:
        self._pass: BackwardPass | None = this

    @outside_compiler
    def __call__(self) -> None:
        this, self._pass = self._pass, None
        if this is not None:
            _tell_of_end(this)

    @outside_compiler
    def __del__(self) -> None:
        if self._pass is not None:
            self._pass.fail(ReachableLeaves())


def foreign_pass() -> BackwardPass:
    """Return an object for the pass under way, which C++ has begun; call this once for each such pass."""
    this = BackwardPass(None, False, None)
    Variable._execution_engine.queue_callback(_EndOfForeignPass(this))
    return this


class _Engine(torch._C._ImperativeEngine):
    """PyTorch's engine, or the entry that another library has installed, with observers."""

    def __new__(cls, _entry: Any) -> "_Engine":
        return super().__new__(cls)

    def __init__(self, entry: Any) -> None:
        super().__init__()
        self._run = super().run_backward if type(entry) is torch._C._ImperativeEngine else entry.run_backward

    @outside_compiler
    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, and tell the observers of its begin and its end."""
        outer = get_from_tls(_KEY)
        given = dict(zip(ENGINE_ARGUMENTS, args, strict=False)) | kwargs
        this = BackwardPass(outer, outer is not None and _is_in_function(), given)
        put_in_tls(_KEY, this)
        try:
            # A reentrant checkpoint runs its part of the graph as a pass of its own, which is a part of the outer one.
            if not this.is_step:
                _tell_of_begin(this)
            # With ``inputs=`` the engine leaves out nodes that do not lead to them, also a mean over the ranks in which
            # other ranks wait for this one. What the added inputs get is nobody's.
            joined = joined_behind(given) if given.get("inputs") else ()
            if joined:
                given["inputs"] = (*given["inputs"], *joined)
                args, kwargs = (), given
            result = self._run(*args, **kwargs)
            if joined and not given["accumulate_grad"]:
                result = result[: -len(joined)]
            if not this.is_step:
                _tell_of_end(this)
                for callback in this.later:  # each may add others
                    this.run_callback(callback)
        except BaseException:
            if outer is None:
                # Gradients are dropped next, and a thread of another device may still be about to set one.
                self._wait_for_threads(devices_of_leaves(given))
            finish_means(given, this)
            this.fail(ReachableLeaves() if this.is_step else this.reach)
            raise
        else:
            return result
        finally:
            this.close()
            if outer is not None:
                put_in_tls(_KEY, outer)
            else:
                remove_from_tls(_KEY)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Queue a callback, to be called when the pass leaves the engine.

        What such a callback queues itself is called when the gradients have been reduced: code that has to run after
        DDP does so (``fairscale.optim.AdaScale``).
        """
        this = current_pass()
        if this is None:
            super().queue_callback(callback)
        elif this.whole.in_callback:
            this.whole.later.append(callback)
        else:
            super().queue_callback(functools.partial(this.whole.run_callback, callback))

    def _wait_for_threads(self, devices: set[torch.device]) -> None:
        """Wait until no engine thread runs a node of a failed pass, such as one that sets a gradient.

        No thread starts another node of it, so each has finished its last one when it runs this small pass.
        """
        for device in devices:
            try:
                with torch.enable_grad():
                    leaf = torch.zeros((), device=device, requires_grad=True)
                    super().run_backward((leaf * 1,), (torch.ones_like(leaf),), False, False, (leaf,), True, False)
            except RuntimeError as error:  # the device does not work any more
                logging.getLogger("lockstep").debug("a thread of the autograd engine cannot be waited for: %s", error)


def is_autograd_compiled() -> bool:
    """Return True if compiled autograd may run backward passes at present."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and getattr(compiled_autograd, "compiled_autograd_enabled", True)


def _is_in_function() -> bool:
    """Return True if the new pass is begun in the backward of a function, not in a hook."""
    frame = sys._getframe(2)
    engine = inspect.unwrap(_Engine.run_backward).__code__
    while frame is not None and frame.f_code is not engine:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# ------------------------------------------------------- thread-local objects of the engine's threads
#
# The engine runs the backward of accelerators in threads of its own, and gives them the thread-local state of the
# thread that began the pass. A `threading.local` is not part of that state.


def get_from_tls(key: str) -> Any:
    """Return the value stored under ``key`` by this thread or by the one that began the pass; None if there is none."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def _put_with_reference(key: str, value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


def _put_none(key: str) -> None:
    put_in_tls(key, None)


def _is_reference_taken() -> bool:
    """Return True if PyTorch takes a reference to a stored object.

    Some versions (such as 2.11) only release one when the object is replaced, so a stored object is freed while in use,
    and the process crashes: ``test_what_is_put_lives_until_it_is_removed``.
    """
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_KEY, probe)
    taken = sys.getrefcount(probe) > before
    if not taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))  # PyTorch releases a reference that it has not taken
    return taken


# In each pass: they are PyTorch's own functions where these do what is wanted.
put_in_tls: Callable[[str, object], None] = torch._C._stash_obj_in_tls if _is_reference_taken() else _put_with_reference
"""Stores a value under a key, replacing an earlier value."""
remove_from_tls: Callable[[str], None] = getattr(torch._C, "_remove_obj_from_tls", _put_none)
"""Removes the value stored under a key.

A thread that ends with an object stored, even None, may deadlock: PyTorch takes the interpreter's lock to release the
object. PyTorch versions that cannot remove an entry keep None.
"""
remove_from_tls(_KEY)  # the object that _is_reference_taken() has stored
