"""The collectives of this library in which threads of this process wait for other ranks, as far as a watcher asks.

Who watches the ranks (``session/waits_of_rank.py``) reads them here, to find ranks that wait for each other for ever.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple

_numbers = count()
_waits: dict[int, "Waiting"] = {}


class BegunCollectives:
    """Counts the collectives that this library has begun on a group: the same number on all ranks, as all begin the
    same ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        """The number of the last one, from 1."""
        self.threads: set[int] = set()
        """``threading.get_ident()`` of the threads that have begun them."""
        self.on_device = 0
        """How many of them were begun on the group itself, for tensors on an accelerator, while it has a companion."""
        self.last_on_device: tuple[Call, int | None] | None = None
        """The last of these, and the number of the group's collectives up to it."""

    def add(self) -> int:
        """Count a collective that the calling thread has begun, and return its number."""
        with self._lock:
            self.threads.add(threading.get_ident())
            self.count += 1
            return self.count

    def note_on_device(self, call: "Call", number: int | None) -> None:
        """Record a collective for a tensor on an accelerator: nobody waits for it in Python."""
        self.on_device += 1
        self.last_on_device = call, number


_CALLS = {
    "backward()": (
        "bucket ",
        "means, bucket ",
        "numbers of rows, bucket ",
        "report, round",
        "small buffers",
        "buffers",
        "late gradients",
        "order of gradients",
        "which modules",
        "whether each rank",
        "partial sums",
        "sums",
        "modules of a step",
        "the end of a step with shares",
    ),
    "optimizer.step()": (
        "step of a sharded optimizer",
        "weights, ",
        "weights from before ",
        "marks of weights",
        "error of a sharded step",
        "digests of gradients",
        "what ranks step with",
    ),
    "mean_over_ranks()": ("mean of tensors",),
    "gather_rows()": ("rows of all ranks, ", "gradients of rows of all ranks, "),
}
"""The calls of programs whose collectives are not called as they are, and how the names of these begin."""


def name_of_call(what: str) -> str:
    """Return the call of the program that begins a collective, as messages name it."""
    return next((call for call, names in _CALLS.items() if what.startswith(names)), what)


class Call(NamedTuple):
    """One collective of this library on one group: made in each step, where a frozen dataclass takes longer."""

    group: Any
    number: int
    """See :class:`BegunCollectives`."""
    kind: str
    """The name of the function that was called for it; the same on all ranks."""
    what: str
    needed: Sequence[int] | None = None
    """The ranks of the group without which it cannot end; None: all."""

    @property
    def in_words(self) -> str:
        """The call of the program that has begun it."""
        return name_of_call(self.what)


@dataclass(slots=True)
class Waiting:
    """Marks the calling thread, inside the block, as waiting for the other ranks in a collective."""

    call: Call
    since: float = field(default_factory=time.monotonic)
    id: int = field(default_factory=lambda: next(_numbers))
    """Unique in this process, so that two waits are never taken for one."""
    _outer: "Waiting | None" = None

    def __enter__(self) -> None:
        ident = threading.get_ident()
        self._outer = _waits.get(ident)
        _waits[ident] = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._outer is None:
            del _waits[threading.get_ident()]
        else:
            _waits[threading.get_ident()] = self._outer


def waits() -> dict[int, Waiting]:
    """Return what the threads of this process wait in, by ``threading.get_ident()``."""
    return dict(_waits)


def forget() -> None:
    """Forget all waits, in a forked process: they are its parent's."""
    _waits.clear()
