"""Replicas that run side by side know of each other, and can exchange values while they run.

:func:`current_replica` tells code inside ``forward`` which replica it runs in. Its :class:`Exchange` is a meeting of
all replicas of one call: each gives a value and gets everybody's, in replica order. A replica that ends or fails
before a meeting makes the others fail there, instead of waiting for ever.
"""

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.errors import ReplicaError


class _Abandoned(ReplicaError):
    """A replica waits for one that has ended; the error of that one is the cause."""


class Exchange:
    """The meetings of the replicas of one call; :attr:`used` tells whether there has been any."""

    Abandoned: ClassVar = _Abandoned

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._count = count
        self._left: set[int] = set()
        self._meetings: dict[tuple[Any, int], list[Any]] = {}
        self._visits: dict[tuple[Any, int], int] = {}
        self.used = False

    def share(self, key: Any, index: int, value: Any) -> list[Any]:
        """Give ``value`` for the meeting ``key``; wait for all replicas, and return their values in replica order.

        The n-th visit of each replica to a key is the same meeting. Raises a :class:`~lockstep.errors.ReplicaError`
        that names the replicas that ended without coming.
        """
        with self._changed:
            self.used = True
            visit = self._visits[key, index] = self._visits.get((key, index), 0) + 1
            meeting = self._meetings.setdefault((key, visit), [])
            meeting.append((index, value))
            self._changed.notify_all()
            while len(meeting) < self._count:
                missing = self._left.difference(i for i, _ in meeting)
                if missing:
                    raise self.Abandoned(
                        f"replica {index} waits at {key} for replicas {sorted(missing)}, which ended without coming "
                        "there: every replica must call the same synchronised modules, in the same order"
                    )
                self._changed.wait()
            return [given for _, given in sorted(meeting, key=lambda pair: pair[0])]

    def leave(self, index: int) -> None:
        """Note that a replica has ended and comes to no more meetings."""
        with self._changed:
            self._left.add(index)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Replica:
    """Which of how many replicas the running code belongs to."""

    index: int
    count: int
    exchange: Exchange


_current: contextvars.ContextVar[Replica | None] = contextvars.ContextVar("lockstep_replica", default=None)


def current_replica() -> Replica | None:
    """The replica whose forward this code runs in, or None outside any, or where there is only one."""
    return _current.get()


def enter_replica(replica: Replica) -> None:
    """Let :func:`current_replica` answer ``replica`` from now on, in a context that ends with the replica's run."""
    _current.set(replica)


@contextmanager
def entered_replica(replica: Replica | None) -> Iterator[None]:
    """Let :func:`current_replica` answer ``replica`` inside the block."""
    token = _current.set(replica)
    try:
        yield
    finally:
        _current.reset(token)
