"""The history of a run: when its ranks began, and which of them failed, where and why; finds a crash loop.

It lies beside the snapshots, in the memory of each host, and has what the ranks of that host have heard.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

HISTORY = "history.jsonl"
BEGAN, FAILED = "began", "failed"


@dataclass(frozen=True)
class Event:
    """A line of the history."""

    what: str
    """``BEGAN`` or ``FAILED``."""
    start: str
    """The id of the start of the ranks."""
    time: str
    step: int | None
    """The step from which they went on; or that at which the rank failed."""
    ranks: int
    rank: int = 0
    """The rank that failed first."""
    why: str = ""

    def describe(self) -> str:
        """Return the event in one line."""
        if self.what == BEGAN:
            return f"{self.time}  {self.ranks} ranks began after step {self.step or 0}"
        where = f" at step {self.step}" if self.step else ""
        return f"{self.time}  rank {self.rank} failed{where}: {self.why}"


def note(folder: Path, what: str, start: str, step: int | None, ranks: int, *, rank: int = 0, why: str = "") -> None:
    """Append an event to the history in a folder."""
    event = Event(what, start, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), step, ranks, rank, why)
    with open(folder / HISTORY, "a") as file:
        file.write(json.dumps(asdict(event)) + "\n")  # in one piece, whoever else does the same


def read(folder: Path) -> list[Event]:
    """Return the history in a folder: each start once, and the first failure of each that this host has heard of."""
    try:
        lines = (folder / HISTORY).read_text().splitlines()
    except OSError:
        return []
    events: dict[tuple[str, str], Event] = {}
    for line in lines:
        try:
            event = Event(**json.loads(line))
        except (ValueError, TypeError):  # its process was killed
            continue
        events.setdefault((event.start, event.what), event)
    return list(events.values())


def forget(folder: Path) -> None:
    """Remove the history in a folder."""
    (folder / HISTORY).unlink(missing_ok=True)


def failures_in_a_row(events: Iterable[Event]) -> list[Event]:
    """PURE: return the failures of the last starts, newest first, as long as all were at the same step.

    A start without a recorded failure ends the row: all of its ranks were killed at once, so its step is not the cause.
    """
    starts: dict[str, Event | None] = {}
    for event in events:
        if event.what == FAILED:
            starts[event.start] = event
        else:
            starts.setdefault(event.start, None)
    found: list[Event] = []
    for failure in reversed(starts.values()):
        if failure is None or not failure.step or (found and failure.step != found[0].step):
            break
        found.append(failure)
    return found
