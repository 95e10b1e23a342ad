"""Labels for the profiler, and statistics and timelines of phases.

Every phase is a ``torch.profiler`` label ``lockstep::phase (detail)`` while a profiler runs, is counted and timed in
public statistics, and is listed, with its replica, in timelines.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import NamedTuple

from torch.autograd import profiler
from torch.profiler import record_function

printed_rooms: set[str] = set()
"""The rooms whose phases are printed: see ``_base/debug.py``."""


class Event(NamedTuple):
    """One phase of one replica (None: the calling thread), in seconds of ``time.perf_counter()``."""

    phase: str
    replica: int | None
    start: float
    end: float


@dataclass(slots=True)
class Statistics:
    """For each phase, how often it has run so far and for how many seconds (of the host's time)."""

    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Phases:
    """The phases of one owner (a ``DataParallel``, a replica set): entered with :meth:`phase`, from any thread."""

    def __init__(self, room: str = "rounds") -> None:
        """``LOCKSTEP_DEBUG`` prints the phases with those of ``room``."""
        self.room = room
        self.lock = threading.Lock()
        self.tallies: dict[str, _Tally] = defaultdict(_Tally)
        self.timelines: list[list[Event]] = []

    def phase(self, name: str, detail: str = "", replica: int | None = None) -> "_TimedPhase":
        """Return a context manager around one phase."""
        # A label costs 5 us even if no profiler records it; the flag belongs to the whole process.
        label = record_function(_text(name, detail, replica)) if profiler._is_profiler_enabled else None
        timed = _PrintedPhase() if self.room in printed_rooms else _TimedPhase()
        timed.owner, timed.name, timed.detail, timed.replica, timed.label = self, name, detail, replica, label
        return timed

    def statistics(self) -> Statistics:
        """Return a copy of the counts and times so far."""
        with self.lock:
            calls = {name: tally.calls for name, tally in self.tallies.items()}
            return Statistics(calls, {name: tally.seconds for name, tally in self.tallies.items()})

    @contextmanager
    def timeline(self) -> Iterator[list[Event]]:
        """List every phase that ends inside the ``with`` block."""
        events: list[Event] = []
        with self.lock:
            self.timelines.append(events)
        try:
            yield events
        finally:
            with self.lock:
                self.timelines = [other for other in self.timelines if other is not events]


class _Tally:
    """The number of times that a phase has run, and its seconds in total."""

    __slots__ = ("calls", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0


class _TimedPhase:
    """One phase: a context manager."""

    __slots__ = ("detail", "label", "name", "owner", "replica", "start")

    owner: Phases  # set by Phases.phase(), without one more call for each phase
    name: str
    detail: str
    replica: int | None
    label: record_function | None
    start: float

    def __enter__(self) -> None:
        if self.label is not None:
            self.label.__enter__()
        self.start = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = perf_counter()
        if self.label is not None:
            self.label.__exit__(kind, error, trace)
        owner = self.owner
        with owner.lock:
            tally = owner.tallies[self.name]
            tally.calls += 1
            tally.seconds += end - self.start
            for events in owner.timelines:
                events.append(Event(self.name, self.replica, self.start, end))


class _PrintedPhase(_TimedPhase):
    """A phase that is printed when it ends."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        ended = "" if kind is None else f", ended by {kind.__name__}"
        text = _text(self.name, self.detail, self.replica)
        logging.getLogger(f"lockstep.{self.owner.room}").debug(
            "%s: %.3f ms%s", text, 1e3 * (perf_counter() - self.start), ended
        )


def _text(name: str, detail: str, replica: int | None) -> str:
    if replica is not None:
        detail = f"replica {replica}" + (f", {detail}" if detail else "")
    return f"lockstep::{name} ({detail})" if detail else f"lockstep::{name}"
