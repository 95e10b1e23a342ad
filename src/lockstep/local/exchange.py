"""How replicas take turns on a device, and exchange values.

A device computes in one order, and has one random generator. Code that reads the generator's state in forward and
restores it in backward, such as activation checkpointing, gets the same numbers again only if no other replica draws
between the reading and the drawing. So on each device one replica runs at a time, in the order of the list
(:class:`Turns`). It lets the next one run when it ends, or when it waits for the others at a meeting, which must not be
inside a checkpointed segment.

:func:`current_replica` tells code inside ``forward`` in which replica it runs. A replica's :class:`ReplicaExchange` is
the meeting place of all replicas of one call: each gives a value and gets all values, in replica order. A replica that
ends or fails before a meeting makes the others fail there, instead of waiting for ever.
"""

import contextvars
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import FrameType
from typing import Any, TypeVar

import torch

from lockstep.errors import ReplicaError

T = TypeVar("T")


class Turns:
    """The replicas on one device. One of them runs at a time; at first all want to run, and the first one begins."""

    def __init__(self, replicas: Collection[int]) -> None:
        self._changed = threading.Condition()
        self._wanting = set(replicas)
        self._running: int | None = None

    @contextmanager
    def taken(self, replica: int) -> Iterator[None]:
        """Wait until ``replica`` may run, and keep the others from running inside the block."""
        try:
            self._take(replica)
            yield
        finally:
            self._end(replica)

    @contextmanager
    def given_up(self, replica: int) -> Iterator[None]:
        """Let other replicas run inside the block, which is inside a :meth:`taken` block."""
        self._end(replica)
        try:
            yield
        except Exception:
            self._take(replica)
            raise
        else:
            self._take(replica)
        # what else is raised, such as a Ctrl-C, does not wait for the others

    def want(self, replica: int) -> None:
        """Let no later replica run before ``replica``, which is about to take its turn."""
        with self._changed:
            self._wanting.add(replica)

    def _take(self, replica: int) -> None:
        self.want(replica)
        with self._changed:
            self._changed.wait_for(lambda: self._running is None and min(self._wanting) == replica)
            self._running = replica
            self._wanting.discard(replica)

    def _end(self, replica: int) -> None:
        with self._changed:
            self._wanting.discard(replica)  # if a Ctrl-C has kept it from taking its turn
            if self._running == replica:
                self._running = None
            self._changed.notify_all()


def turns_on(devices: Sequence[torch.device]) -> list[Turns]:
    """Return the turns that each replica takes, given their devices."""
    sharing: dict[torch.device, list[int]] = defaultdict(list)
    for index, device in enumerate(devices):
        sharing[device].append(index)
    turns = {device: Turns(replicas) for device, replicas in sharing.items()}
    return [turns[device] for device in devices]


class ReplicaMissingError(ReplicaError):
    """A replica waits for one that has ended; the error of the replica that ended is the cause."""


class ReplicaExchange:
    """The meetings of the replicas of one call. ``begin`` begins the others, if only the first one has begun so far."""

    def __init__(self, turns: Sequence[Turns], begin: Callable[[], None] | None = None) -> None:
        self._turns = turns
        self._begin = begin
        self._changed = threading.Condition()
        self._count = len(turns)
        self._left: set[int] = set()
        self._meetings: dict[tuple[Any, int], list[Any]] = {}
        self._visits: dict[tuple[Any, int], int] = {}
        self._waiting: dict[int, Any] = {}

    def all_gather(self, key: Any, index: int, value: Any) -> list[Any]:
        """Give ``value`` for the meeting ``key``; wait for all replicas, and return their values in replica order.

        The n-th visit of each replica to a key is the same meeting. Raises a :class:`~lockstep.errors.ReplicaError`
        that names the replicas that ended without coming.
        """
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()
        with self._turns[index].given_up(index), self._changed:  # the others may be on the same device
            visit = self._visits[key, index] = self._visits.get((key, index), 0) + 1
            meeting = self._meetings.setdefault((key, visit), [])
            meeting.append((index, value))
            if len(meeting) == self._count:
                self._go_on(index, (key, visit))
            try:
                while len(meeting) < self._count:
                    self._waiting[index] = (key, visit)
                    self._check_waiting(key, index, meeting)
                    self._changed.wait()
            finally:
                self._waiting.pop(index, None)
            return [given for _, given in sorted(meeting, key=lambda pair: pair[0])]

    def _go_on(self, last: int, place: Any) -> None:
        """Wake the replicas at a meeting; on each device they go on in the order of the list, whoever came last."""
        for index in (last, *(i for i, its_place in self._waiting.items() if its_place == place)):
            self._turns[index].want(index)
        self._changed.notify_all()

    def _check_waiting(self, key: Any, index: int, meeting: list[Any]) -> None:
        """Raise if a missing replica has ended, or if all that have not ended wait and some of them wait elsewhere."""
        came = {i for i, _ in meeting}
        missing = self._left - came
        if missing:
            raise ReplicaMissingError(
                f"replica {index} waits at {key} for replicas {sorted(missing)}, which ended without coming "
                "there: every replica must call the same synchronised modules, in the same order"
            )
        if len(self._waiting) + len(self._left) == self._count and self._unmet():
            elsewhere = {i: self._waiting[i][0] for i in sorted(self._waiting) if i not in came}
            places = ", ".join(f"replica {i} at {place}" for i, place in elsewhere.items())
            raise ReplicaMissingError(
                f"replica {index} waits at {key} for replicas that wait elsewhere ({places}): every replica must call "
                "the same synchronised modules, in the same order"
            )

    def _unmet(self) -> bool:
        """Return True if no waiting replica has all others at its meeting, so that none can go on."""
        return all(len(self._meetings[place]) < self._count for place in self._waiting.values())

    def leave(self, index: int) -> None:
        """Record that a replica has ended and comes to no more meetings."""
        with self._changed:
            self._begin = None  # nobody can meet a replica that has ended; and no circle leads to the tensors of a call
            self._left.add(index)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Replica:
    """The replica that the running code belongs to, and the number of replicas."""

    index: int
    count: int
    exchange: ReplicaExchange
    outer: "Replica | None" = None

    @property
    def is_first(self) -> bool:
        """True for the first replica of the outermost call."""
        return self.index == 0 and (self.outer is None or self.outer.is_first)

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, for whose code this is the current replica."""
        token = _current.set(self)
        try:
            return call()
        finally:
            _current.reset(token)

    def frames(self) -> Iterator[FrameType]:
        """Yield the frames of this thread, from the innermost to that in which the outermost replica began."""
        frame: FrameType | None = sys._getframe(1)
        replica: Replica | None = self
        while frame is not None and replica is not None:
            yield frame
            if frame.f_code is Replica.run.__code__:
                replica = replica.outer
            frame = frame.f_back

    def all_gather(self, key: Any, value: Any) -> list[Any]:
        """Return the values that all replicas of the outermost call give for the meeting ``key``, in their order.

        A replica inside another one first meets the replicas of its own call; the first of them then meets the outer
        ones.
        """
        return self._gather(key, [value])

    def _gather(self, key: Any, values: list[Any]) -> list[Any]:
        together = list(chain.from_iterable(self.exchange.all_gather(key, self.index, values)))
        if self.outer is None:
            return together
        everybody = self.outer._gather(key, together) if self.index == 0 else None
        found: list[Any] = self.exchange.all_gather(("from the outer replicas", key), self.index, everybody)[0]
        return found


_current: contextvars.ContextVar[Replica | None] = contextvars.ContextVar("lockstep_replica", default=None)


def current_replica() -> Replica | None:
    """Return the innermost replica in whose forward this code runs; None outside any, or if there is only one."""
    return _current.get()
