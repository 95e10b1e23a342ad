"""The history of a run: when its ranks began, and which of them failed, where and why.

It lies beside the snapshots, in the memory of each host, and has what the ranks of that host have heard.
"""

import json
import time
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
    """The step from which they went on, or at which the rank failed."""
    ranks: int
    rank: int = 0
    """The rank that failed first."""
    why: str = ""
    in_batches: bool = True
    """True if the step at which the rank failed is the number of its batch, in a loop over ``batches()``; False if it
    is the number of steps that the optimizer had made."""

    def describe(self) -> str:
        """Return the event in one line."""
        if self.what == BEGAN:
            return f"{self.time}  {self.ranks} ranks began after step {self.step or 0}"
        where = f" {'at' if self.in_batches else 'after'} step {self.step}" if self.step else ""
        return f"{self.time}  rank {self.rank} failed{where}: {self.why}"


def note(folder: Path, event: Event) -> None:
    """Append an event to the history in a folder."""
    with open(folder / HISTORY, "a") as file:
        file.write(json.dumps(asdict(event)) + "\n")  # in one piece, whoever else does the same


def now() -> str:
    """Return the time of an event."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


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
