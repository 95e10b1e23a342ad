"""What the threads of this rank wait for, and what it has launched: on these facts ``failures/deadlock.py`` decides.

Waits of this library are exact (``distributed/comm/waits.py``). Those of the program are seen in its threads' stacks: a
thread waits if it is at a line of ``torch.distributed`` that waits for a blocking collective, such as
``dist.all_reduce``. Nothing of PyTorch is replaced for that. What cannot be seen - ``work.wait()`` of an asynchronous
collective - is no wait here.

With NCCL no collective is waited for on the host: a rank waits later, where it needs a result. So if the thread that
trains stays at one instruction while the accelerator has work to do, it counts as waiting for the last collective that
was begun there. It may as well wait for a long kernel, or for something else. But ranks that make the same calls in the
same order are never found stuck for that: the one that is furthest behind lacks nobody that waits.
"""

import linecache
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from lockstep._base.devices import has_work
from lockstep.distributed.comm.group_state import begun_on, number_on, sequence_number_on, state_of, watched_groups
from lockstep.distributed.comm.groups import Group, backends_of
from lockstep.distributed.comm.waits import Waiting, waits
from lockstep.failures.channel import FailureChannel
from lockstep.failures.program_lines import is_of_program, place_of
from lockstep.failures.stacks import no_collection, own_stack
from lockstep.failures.whereabouts import Wait, Whereabouts

_FILE = os.path.join(os.path.dirname(dist.__file__), "distributed_c10d.py")
_NEED_ALL = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""How the names of functions begin for which each rank needs all others."""
DEVICE_SECONDS = 2.0
"""Seconds for which the thread that trains stays at one instruction before the accelerator is asked whether it has
work to do."""
_NEED_ROOT = frozenset(("broadcast", "scatter"))
"""Of these each rank needs the root alone; of all others it is not known whom a rank needs."""


class _Known(NamedTuple):
    """A group whose ranks all belong to the channel, and the names under which its collectives are counted.

    These contain the ranks, in case two groups have one name.
    """

    group: Group
    name: str
    """The same on all ranks."""
    ranks: tuple[int, ...]
    key: str
    """For the program's collectives."""
    library_key: str
    """For lockstep's, which are counted apart."""
    key_on_device: str
    """For lockstep's for tensors on an accelerator."""


class _Blocked(NamedTuple):
    """A thread in a blocking collective of the program, or, with an empty ``kind``, one that waits for the accelerator.
    Equal ones in two looks are the same wait: a later collective has another number."""

    thread: int
    group: int
    number: int
    kind: str
    root: int | None
    frame: int
    instruction: int
    begun: int = 0
    """How many collectives of this library were begun before, if it waits for the accelerator."""


class _Seen(NamedTuple):
    """What one look at the threads has shown."""

    ours: tuple[tuple[int, int], ...]
    """Threads that wait in a collective of this library, and the ids of their waits."""
    blocked: tuple[_Blocked, ...]
    is_free: bool
    """True if a thread that launches collectives does not wait."""
    has_others: bool
    """True if the program has a thread that does not wait, and is not known to launch collectives."""


_NOTHING = _Seen((), (), is_free=False, has_others=False)


class WaitsOfRank:
    """Looks at what this rank waits for, on the groups whose ranks a channel connects.

    ``group`` returns the group whose collectives are counted, None before it exists, and ``device`` the index of this
    rank's accelerator.
    """

    def __init__(
        self, channel: FailureChannel, group: Callable[[], Group | None], device: Callable[[], int | None]
    ) -> None:
        self._channel = channel
        self._group = group
        self._device = device
        self._since: dict[_Blocked, float] = {}
        self._state: object = None
        self._number = 0
        self._lock = threading.Lock()

    def __call__(self, ends: bool) -> Whereabouts:
        """Return what the threads wait for, and have launched; with ``ends`` what they have launched in the end.

        The threads are looked at before and after what they have launched: if both looks show the same waits, the
        threads were in them in between.
        """
        group = self._group()
        own = Whereabouts(self._channel.rank, number=0, begun=None if group is None else sequence_number_on(group))
        if ends:
            return replace(own, launched=_launched(_groups(self._channel), has_others=False), has_left=True)
        with self._lock:
            seen, waiting, groups = self._look()
            launched = _launched(groups, seen.has_others) if waiting else {}
            is_steady = bool(waiting) and not seen.is_free and seen == self._look()[0]
            state = (seen, launched) if is_steady else None
            if state is None or state != self._state:
                self._number += 1
                self._state = state
            own = replace(own, number=self._number)
            if state is None:
                return own
            return replace(own, waits=(*waiting,), launched=launched, seconds=time.monotonic() - max(waiting.values()))

    def _look(self) -> tuple[_Seen, dict[Wait, float], list[_Known]]:
        """Return what the threads are in, since when each of them waits, and the groups that are known."""
        with no_collection:
            frames = sys._current_frames()
            try:
                # A frame that refers to itself would keep all others, and their objects.
                del frames[threading.get_ident()]
                return self._look_at(frames)
            finally:
                frames.clear()  # so would two threads that look at each other

    def _look_at(self, frames: Mapping[int, FrameType]) -> tuple[_Seen, dict[Wait, float], list[_Known]]:
        ours = waits()
        blocked = [each for each in map(_blocked, frames.items()) if each and each.thread not in ours]
        if not ours and not blocked and self._device() is None:
            return _NOTHING, {}, []
        known = _groups(self._channel)
        if not ours and not blocked and not (blocked := self._on_device(frames, known)):
            return _NOTHING, {}, []
        groups = {id(each.group): each for each in known}
        ours = {ident: each for ident, each in ours.items() if id(each.call.group) in groups}
        blocked = [each for each in blocked if each.group in groups]
        launch = {ident for each in known for ident in begun_on(each.group).threads}
        waiting = {*ours, *(each.thread for each in blocked)}
        others = any(_runs_program(frame) for ident, frame in frames.items() if ident not in waiting | launch)
        if others:  # one of them may have launched what is waited for here, or launch it next
            blocked = []
        free = launch - ours.keys() - {each.thread for each in blocked}
        is_free = any(each in frames for each in free) or (others and bool(free))
        ids = tuple(sorted((ident, each.id) for ident, each in ours.items()))
        seen = _Seen(ids, tuple(sorted(blocked)), is_free, others)
        return seen, self._described(ours, blocked, groups), known

    def _on_device(self, frames: Mapping[int, FrameType], known: Iterable[_Known]) -> list[_Blocked]:
        """Return the thread that trains if it waits for the accelerator, for a group whose collectives run there."""
        thread = self._channel.progress.read().thread
        groups = [each.group for each in known if "nccl" in backends_of(each.group) and number_on(each.group)]
        frame = frames.get(thread)
        if frame is None or len(groups) != 1:
            return []
        number, begun = _of_program(groups[0]) or 0, begun_on(groups[0]).count
        found = _Blocked(thread, id(groups[0]), number, "", None, id(frame), frame.f_lasti, begun)
        since = self._since.get(found, time.monotonic())
        self._since = {found: since}
        # Not before: to ask a device is an error for a thread that captures a graph of it.
        return [found] if time.monotonic() - since >= DEVICE_SECONDS and has_work(self._device()) else []

    def _described(
        self, ours: Mapping[int, Waiting], blocked: Iterable[_Blocked], groups: Mapping[int, _Known]
    ) -> dict[Wait, float]:
        now = time.monotonic()
        self._since = {each: self._since.get(each, now) for each in blocked}
        found = {_our_wait(ident, each, groups): each.since for ident, each in ours.items()}
        return found | {_wait(each, groups[each.group]): since for each, since in self._since.items()}


def _groups(channel: FailureChannel) -> list[_Known]:
    found = []
    for name, group, ranks in watched_groups(channel):
        key = f"{name} {zlib.crc32(repr(tuple(ranks)).encode()):x}"
        found.append(_Known(group, name, (*ranks,), key, f"lockstep on {key}", f"lockstep on the device, {key}"))
    return found


def _launched(groups: Iterable[_Known], has_others: bool) -> dict[str, int]:
    """Return the numbers of the last collectives, without the groups on which another thread may launch the next."""
    found = {}
    for each in groups:
        count = begun_on(each.group).count
        if count or not has_others:
            found[each.library_key] = count
        if not has_others and (number := _of_program(each.group)) is not None:
            found[each.key] = number
        if not has_others:
            found[each.key_on_device] = begun_on(each.group).on_device
    return found


def _of_program(group: Group) -> int | None:
    """Return the number of the program's last collective on a group; None if the group does not count them."""
    number = number_on(group)
    return None if number is None else number - begun_on(group).on_device


def _our_wait(ident: int, waiting: Waiting, groups: Mapping[int, _Known]) -> Wait:
    call = waiting.call
    known = groups[id(call.group)]
    needed = known.ranks if call.needed is None else tuple(known.ranks[rank] for rank in call.needed)
    in_words = call.in_words + state_of(call.group).in_loop
    what = f"{in_words} ({call.kind}, collective {call.number} of lockstep on process group {known.name})"
    return Wait(known.library_key, call.number, call.kind, needed, True, what, place_of(own_stack(ident)))


def _wait(blocked: _Blocked, known: _Known) -> Wait:
    if not blocked.kind:
        return _wait_on_device(blocked, known)
    needed: tuple[int, ...] = known.ranks if blocked.kind.startswith(_NEED_ALL) else ()
    if blocked.kind in _NEED_ROOT and blocked.root is not None and blocked.root != known.group.rank():
        needed = (known.ranks[blocked.root],)
    exact = "gloo" not in backends_of(known.group)
    what = f"{blocked.kind}() (collective {blocked.number} of the program on process group {known.name})"
    return Wait(known.key, blocked.number, blocked.kind, needed, exact, what, place_of(own_stack(blocked.thread)))


def _wait_on_device(blocked: _Blocked, known: _Known) -> Wait:
    begun, group = begun_on(known.group), f"on process group {known.name}), on the accelerator"
    place = place_of(own_stack(blocked.thread))
    if begun.last_on_device is not None and begun.last_on_device[1] == number_on(known.group):
        call = begun.last_on_device[0]
        kind = f"{call.kind}, after {blocked.number} of the program"  # others run in another order, or never end
        what = f"{call.in_words} ({kind}, collective {call.number} of lockstep {group}"
        return Wait(known.key_on_device, begun.on_device, kind, known.ranks, True, what, place)
    what = f"a collective of the program (number {blocked.number} of its own {group}"
    return Wait(known.key, blocked.number, "", known.ranks, True, what, place)


def _blocked(thread: tuple[int, FrameType]) -> _Blocked | None:
    """Return the blocking collective of the program in which a thread waits, if it is at the line that waits."""
    ident, frame = thread
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename != _FILE:
        found = found.f_back
    if found is None or ".wait(" not in linecache.getline(_FILE, found.f_lineno):
        return None
    names = found.f_locals
    group = names.get("group")
    if group is None:
        group = dist.group.WORLD
    number = _of_program(group)
    if number is None:
        return None
    root = names.get("group_src")
    return _Blocked(ident, id(group), number, found.f_code.co_name, root, id(found), found.f_lasti)


def _runs_program(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    while frame is not None:
        if is_of_program(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
