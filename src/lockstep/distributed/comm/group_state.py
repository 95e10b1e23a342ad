"""What this process keeps of each process group: its companion, its watcher, its counts; and which groups it knows."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lockstep._base.abilities import abilities_of
from lockstep._base.forked_groups import keep_in_forks
from lockstep.distributed.comm import waits
from lockstep.distributed.comm.groups import Group, is_registered, registered_ranks
from lockstep.errors import PeerFailure

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

    def compare_calls(self, key: str, what: str, ranks: Collection[int]) -> str:
        """Return in words which collectives ``ranks`` were in that have noticed that they differ; all call it with the
        same ``key``."""

    def explain(self, error: BaseException) -> PeerFailure | None:
        """Return the failure of another rank that has caused an error, if there is one or soon will be."""


BATCHES_OF_A_LOOP = 1 << 32
"""The number of a batch is that of its loop, times this, and its own in the loop."""


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
        self.makes_companion = threading.Lock()
        """Held by the thread that makes :attr:`companion`."""
        self.session_ended = False
        """True once the session that made the group has ended, and destroyed it."""
        self.companion: Group | None = None
        """The group that sends tensors on the CPU instead of the group, from its first use on: see ``companion.py``."""
        self.begun = waits.BegunCollectives()
        """The collectives that this library has begun on the group and its companion."""
        self.batch = 0
        """The number of the last batch, and, in units of :data:`BATCHES_OF_A_LOOP`, of its loop. Kept when the
        decisions are freed with the last module, which happens at a different time on each rank
        (test_uneven_data.py, test_batches_are_numbered_alike_whatever_has_been_freed)."""
        self.in_loop = ""
        """Where the rank is in its loop over ``batches()``, in words, or how it has left the last one."""
        self.has_no_rows = False
        """True if :func:`gather_rows` has given this rank none of the rows, as it is at a padding batch."""
        self.modules_with_shares = 0
        """The number of modules with shares replicated so far; kept when modules are freed
        (test_shares.py, test_modules_are_numbered_alike_whatever_has_been_freed)."""
        self.shared: weakref.WeakValueDictionary[object, Any] = weakref.WeakValueDictionary()
        """The objects of :func:`shared_object`, by their class, and of :func:`shared_by_ranks`."""

    def lose(self, reason: str) -> None:
        """Note that this rank cannot communicate over the group any more; the first reason counts."""
        self.lost = self.lost or reason

    def begin_loop(self) -> None:
        """Count a loop over batches: ranks that have left one at different batches are at the same number again."""
        self.batch = (self.batch // BATCHES_OF_A_LOOP + 1) * BATCHES_OF_A_LOOP

    def next_batch(self) -> None:
        """Count a batch."""
        self.batch += 1
        self.has_no_rows = False


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
    """Return the objects of a class for all groups that the default group knows."""
    states = [_states.get(group) for group in list(dist.distributed_c10d._world.pg_map)]
    return [each for state in states if state is not None and (each := state.shared.get(kind)) is not None]


def shared_by_ranks(kind: Callable[[], T], group: Group) -> T:
    """Return the object of a class for all groups of the same ranks, as :func:`shared_object`: those that the default
    group knows; another group has one of its own."""
    ranks = registered_ranks(group)
    shared = state_of(group if ranks is None else dist.group.WORLD).shared
    with _lock:
        key = kind, *sorted(ranks or ())
        found: T | None = shared.get(key)
        if found is None:
            found = shared[key] = kind()
        return found


def watch_group(group: Group, watcher: Watcher) -> None:
    """Let waits for this group's collectives ask ``watcher`` for failures from now on."""
    state_of(group).watcher = watcher
    watchers.append(watcher)


def end_groups(watcher: Watcher, reason: str) -> None:
    """End, on this rank and the others, the ``shm`` groups of watched ranks and the companions, so that waits raise."""
    for _, group, _ in watched_groups(watcher):
        for each in _with_companion(group):
            abilities = abilities_of(each)
            if abilities is not None:
                with contextlib.suppress(RuntimeError):
                    abilities._abort(reason)


def _with_companion(group: Group) -> set[Group]:
    state = _states.get(group)
    return {group} if state is None or state.companion is None else {group, state.companion}


def leave_companions() -> None:
    """Leave the companions of groups that have been destroyed; modules that still exist keep them otherwise."""
    for group, state in list(_states.items()):
        if state.companion is not None and not is_registered(group):
            with contextlib.suppress(RuntimeError):
                state.companion.shutdown()


def forget_watcher(watcher: Watcher) -> None:
    """Remove a watcher from its groups."""
    watchers[:] = [each for each in watchers if each is not watcher]
    for state in list(_states.values()):
        if state.watcher is watcher:
            state.watcher = None


def begun_on(group: Group) -> waits.BegunCollectives:
    """Return the collectives that this library has begun on a group."""
    state = _states.get(group)
    return state.begun if state is not None else waits.BegunCollectives()


def watched_groups(watcher: Watcher) -> Iterator[tuple[str, Group, Sequence[int]]]:
    """Yield the groups whose ranks all belong to a watcher: names that are the same on all ranks, and the ranks.

    Bare backends have no such name, except for the one that is watched itself.
    """
    watched = set(watcher.global_ranks)
    world = dist.distributed_c10d._world
    for group in list(world.pg_map) if dist.is_initialized() else []:
        ranks = registered_ranks(group)
        if ranks and len(ranks) > 1 and watched.issuperset(ranks):
            yield str(world.pg_names.get(group)), group, ranks
    for group, state in list(_states.items()):
        if state.watcher is watcher and not is_registered(group):
            yield "that is watched", group, watcher.global_ranks


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held the old one
    watchers.clear()
    waits.forget()
    if dist.is_available():
        for group in dist.distributed_c10d._world.pg_map:
            _states.setdefault(group, GroupState(os.getppid()))
    for state in _states.values():
        state.is_inherited = True
        state.watcher = None


os.register_at_fork(after_in_child=_forked)


def sequence_number_on(group: Group) -> int | None:
    """Return the number of collectives that this process has begun on a group and its companion; None if the group
    does not count them."""
    numbers = [number_on(each) for each in _with_companion(group)]
    return None if None in numbers else sum(filter(None, numbers))


def begun_in_process(group: Group) -> int | None:
    """Return the number of collectives that this process has begun, on all groups that count them and on companions;
    None if ``group`` does not count them."""
    companions = {state.companion for state in list(_states.values()) if state.companion is not None}
    total = number_on(group)
    if total is not None:
        for other in {*dist.distributed_c10d._world.pg_map, *companions} - {group}:
            total += number_on(other) or 0
    return total


def number_on(group: Group) -> int | None:
    """Return the number of the last collective on a group, whoever has begun it; None if it does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None
