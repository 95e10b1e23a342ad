"""Distinguishes a crash loop from bad luck: the same step has failed at each of the last starts. Names its batch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoints import history
from lockstep.checkpoints.history import Event
from lockstep.checkpoints.ranks import Ranks
from lockstep.errors import CrashLoopError


class Batch(NamedTuple):
    """A batch whose step has failed each time."""

    epoch: int
    number: int
    samples: list[Any]

    def describe(self) -> str:
        """Return the batch and its samples in words."""
        shown = ", ".join(map(str, self.samples[:_SHOWN]))
        more = f" and {len(self.samples) - _SHOWN} more" if len(self.samples) > _SHOWN else ""
        return f"batch {self.number} of epoch {self.epoch}, with the samples {shown}{more}"


_SHOWN = 32
"""Number of samples that a message names; the error has all."""
TO_LEAVE_OUT = (
    "To go on without the samples of the step, let the data set leave out error.samples of this CrashLoopError: "
    "docs/reliability.md has a program that does"
)


class CrashLoops:
    """What the histories of all hosts say about the last starts of a run; every rank has the same.

    ``folder`` has the history of this host; ``state`` is what is resumed. After ``give_up_after`` failures in a row the
    run ends.
    """

    def __init__(self, folder: Path, ranks: Ranks, state: Mapping[str, Any], give_up_after: int | None) -> None:
        self._ranks = ranks
        self._give_up_after = give_up_after
        self._state = state
        failures = failures_in_a_row(history.read(folder))
        told = ranks.tell(
            {
                "same": {"give_up_after": give_up_after},
                "failures": [[each.step, each.rank, each.in_batches, each.describe()] for each in failures],
            },
            "how often a step has failed",
        )
        ranks.check_equal("resume()", [each["same"] for each in told])
        self._failures: list[list[Any]] = max((each["failures"] for each in told), key=len)

    def check(self, step: int) -> None:
        """Raise :class:`CrashLoopError` in a crash loop; call it after the state of ``step`` is restored."""
        if self._give_up_after is None or len(self._failures) < self._give_up_after:
            return
        failed_at, rank, in_batches, _ = self._failures[0]
        # An optimizer may make a step in every N-th batch only.
        batch = self._find(failed_at - step - 1, rank) if in_batches else None
        with self._ranks.in_unison():
            raise self._error(failed_at, batch)

    def _find(self, ahead: int, rank: int) -> Batch | None:
        """Return the batch ``ahead`` of the next one, with the samples that a rank has of it."""
        known = [each for each in self._state.values() if hasattr(each, "samples_ahead")]
        found = known[0].samples_ahead(ahead) if len(known) == 1 and ahead >= 0 else None
        if found is not None:
            found = [*found[:2], [each if isinstance(each, int) else str(each) for each in found[2]]]
        told = self._ranks.tell(found, "the samples of a step")
        of_rank = told[rank if rank < len(told) else 0]
        return None if of_rank is None else Batch(*of_rank)

    def _error(self, step: int, batch: Batch | None) -> CrashLoopError:
        if batch is None:
            places = [
                f"{name} is at {each.state_dict()}" for name, each in self._state.items() if hasattr(each, "epoch")
            ]
            what = (
                f"where {', '.join(places) or 'no sampler says which batch it is'}: look at the batches from there on"
            )
        else:
            what = f"and its batch is {batch.describe()}: look at these"
        failures = "; ".join(text for *_, text in self._failures)
        return CrashLoopError(
            f"the last {len(self._failures)} starts have failed at the same step: {failures}. The run goes on before "
            f"it, {what}. When the cause is gone, `lockstep runs --forget` lets it start again, and so does "
            f"resume(give_up_after=None). {TO_LEAVE_OUT}",
            step=step,
            samples=() if batch is None else tuple(batch.samples),
        )


def failures_in_a_row(events: Iterable[Event]) -> list[Event]:
    """PURE: return the failures of the last starts, newest first, as long as all were at the same step.

    A start without a recorded failure ends the row: all of its ranks were killed at once, so its step is not the cause.
    """
    starts: dict[str, Event | None] = {}
    for event in events:
        if event.what == history.FAILED:
            starts[event.start] = event
        else:
            starts.setdefault(event.start, None)
    found: list[Event] = []
    for failure in reversed(starts.values()):
        if failure is None or not failure.step or (found and failure.step != found[0].step):
            break
        found.append(failure)
    return found
