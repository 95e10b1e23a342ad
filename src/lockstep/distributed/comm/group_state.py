"""The state that this process keeps for each process group, as long as the group exists."""

import os
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lockstep.errors import PeerFailure
from lockstep.forked_groups import keep_in_forks

Group = Any
"""A ``dist.ProcessGroup`` or a bare backend: both have ``rank()`` and ``size()``."""

T = TypeVar("T")


class Watcher(Protocol):
    """Tells the ranks of a group of each other's failures; connected by :func:`watch_group`."""

    global_ranks: list[int]

    def enter(self, phase: str) -> None:
        """Record the training phase, for other ranks' error messages."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Note that, inside, this rank waits for the others in the collective ``what``."""

    def check(self) -> None:
        """Raise :class:`PeerFailure` if another rank has failed."""

    def check_waiting(self, ranks: Collection[int], since: float) -> None:
        """As :meth:`check`, for a rank that has waited since ``since``; raise as well if one of ``ranks`` has left."""

    def explain(self, error: BaseException) -> PeerFailure | None:
        """Return the failure of another rank that has caused an error, if there is one or soon will be."""


class GroupState:
    """State that outlives the objects that use a group; does not refer to the group."""

    def __init__(self, process: int) -> None:
        self.process = process
        """The id of the process that is a rank of the group."""
        self.is_inherited = False
        """True in a process forked from it, which must not communicate: its messages would be taken for the rank's."""
        self.watcher: Watcher | None = None
        """Tells of failures of the group's ranks, or None."""
        self.lost = ""
        """The reason why this rank cannot communicate over the group any more, or an empty text."""
        self.control_plane: Group | None = None
        """A group of the same ranks for tensors on the CPU, if the group itself cannot send them."""
        self.batch = 0
        """The number of the last batch. Kept when the decisions are freed with the last module, which happens at a
        different time on each rank
        (test_uneven_data.py, test_batches_are_numbered_alike_whatever_has_been_freed)."""
        self.modules_with_shares = 0
        """The number of modules with shares replicated so far; kept when modules are freed
        (test_shares.py, test_modules_are_numbered_alike_whatever_has_been_freed)."""
        self.shared: weakref.WeakValueDictionary[Callable[..., Any], Any] = weakref.WeakValueDictionary()
        """The objects of :func:`shared_object`, by their class."""

    def lose(self, reason: str) -> None:
        """Note that this rank cannot communicate over the group any more; the first reason counts."""
        self.lost = self.lost or reason


_states: "weakref.WeakKeyDictionary[Group, GroupState]" = weakref.WeakKeyDictionary()
_without_group = GroupState(os.getpid())
_lock = threading.RLock()
watchers: list[Watcher] = []
"""The watchers of all groups. Empty in most programs: then a step looks at nothing else."""


def state_of(group: Group | None) -> GroupState:
    """Return the state of a group, or of a process that trains alone if it is None."""
    if group is None:
        return _without_group
    with _lock:
        state = _states.get(group)
        if state is None:
            state = _states[group] = GroupState(os.getpid())
            keep_in_forks(group)
        return state


def shared_object(kind: Callable[[Any], T], group: Group | None) -> T:
    """Return the object of a class for a group: one in a process, as long as it is referred to."""
    shared = state_of(group).shared
    with _lock:
        found: T | None = shared.get(kind)
        if found is None:
            found = shared[kind] = kind(group)
        return found


def shared_objects(kind: Callable[[Any], T]) -> list[T]:
    """Return the objects of a class for all groups."""
    with _lock:
        found = [state.shared.get(kind) for state in (_without_group, *_states.values())]
    return [each for each in found if each is not None]


def watch_group(group: Group, watcher: Watcher) -> None:
    """Let waits for this group's collectives ask ``watcher`` for failures from now on."""
    state_of(group).watcher = watcher
    watchers.append(watcher)


def forget_watcher(watcher: Watcher) -> None:
    """Remove a watcher from its groups."""
    watchers[:] = [each for each in watchers if each is not watcher]
    for state in list(_states.values()):
        if state.watcher is watcher:
            state.watcher = None


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held the old one
    watchers.clear()
    if dist.is_available():
        for group in dist.distributed_c10d._world.pg_map:
            _states.setdefault(group, GroupState(os.getppid()))
    for state in _states.values():
        state.is_inherited = True
        state.watcher = None


os.register_at_fork(after_in_child=_forked)
