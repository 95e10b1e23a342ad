"""The state that this process keeps for each process group, for as long as the group is there."""

import os
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lockstep.errors import PeerFailure

Group = Any
"""A ``dist.ProcessGroup`` or a bare backend: both have ``rank()`` and ``size()``."""

T = TypeVar("T")


class Watcher(Protocol):
    """Tells the ranks of a group of each other's failures, once it is plugged in by :func:`watch_group`."""

    global_ranks: list[int]

    def enter(self, phase: str) -> None:
        """Note the phase of its step in which this rank is from now on."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Within: this rank waits for the others, in a collective of ours."""

    def check(self) -> None:
        """Raise :class:`PeerFailure` if another rank has failed."""

    def check_waiting(self, ranks: Collection[int], since: float) -> None:
        """As :meth:`check`, for a rank that has waited since then; raises, too, if one of ``ranks`` has left."""

    def explain(self, error: BaseException) -> PeerFailure | None:
        """Return the failure of another rank from which an error follows, if there is one, or soon will be."""


class GroupState:
    """What outlasts the objects that use a group; holds no reference to the group."""

    def __init__(self, process: int) -> None:
        self.process = process
        """The process that is a rank of the group."""
        self.is_inherited = False
        """True in a process that was forked from that one. It must not speak for the rank: what it sent would be taken
        for what the rank sends."""
        self.watcher: Watcher | None = None
        """Who tells of failures of the group's ranks."""
        self.control_plane: Group | None = None
        """A group of the same ranks for tensors on the CPU, where the group itself cannot send them."""
        self.batch = 0
        """The number of the last batch. It goes on where decisions have been dropped with the last module, which
        happens at another time on each rank
        (test_uneven_data.py, test_batches_are_numbered_alike_whatever_has_been_freed)."""
        self.modules_with_shares = 0
        """How many have been replicated. It goes on where they have been dropped
        (test_shares.py, test_modules_are_numbered_alike_whatever_has_been_freed)."""
        self.shared: weakref.WeakValueDictionary[Callable[..., Any], Any] = weakref.WeakValueDictionary()
        """Objects of :func:`shared_object`, by their class."""


_states: "weakref.WeakKeyDictionary[Group, GroupState]" = weakref.WeakKeyDictionary()
_without_group = GroupState(os.getpid())
_inherited: list[Group] = []  # kept: the end of a group would wait for threads that are the parent's
_lock = threading.RLock()
watchers: list[Watcher] = []
"""Those of all groups: empty where nobody watches, which is all that a step has to look at then."""


def state_of(group: Group | None) -> GroupState:
    """Return the state of a group, or of a process that trains alone."""
    if group is None:
        return _without_group
    with _lock:
        state = _states.get(group)
        if state is None:
            state = _states[group] = GroupState(os.getpid())
        return state


def shared_object(kind: Callable[[Any], T], group: Group | None) -> T:
    """Return the object of a class that belongs to a group: one in a process, for as long as somebody holds it."""
    shared = state_of(group).shared
    with _lock:
        found: T | None = shared.get(kind)
        if found is None:
            found = shared[kind] = kind(group)
        return found


def shared_objects(kind: Callable[[Any], T]) -> list[T]:
    """Return the objects of a class that belong to any group."""
    with _lock:
        found = [state.shared.get(kind) for state in (_without_group, *_states.values())]
    return [each for each in found if each is not None]


def watch_group(group: Group, watcher: Watcher) -> None:
    """From now on, waits for this group's collectives hear of failures from this watcher."""
    state_of(group).watcher = watcher
    watchers.append(watcher)


def forget_watcher(watcher: Watcher) -> None:
    """Its groups have no watcher any more."""
    watchers[:] = [each for each in watchers if each is not watcher]
    for state in list(_states.values()):
        if state.watcher is watcher:
            state.watcher = None


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    watchers.clear()
    if dist.is_available():
        for group in dist.distributed_c10d._world.pg_map:
            _states.setdefault(group, GroupState(os.getppid()))
    _inherited.extend(_states)
    for state in _states.values():
        state.is_inherited = True
        state.watcher = None


os.register_at_fork(after_in_child=_forked)
