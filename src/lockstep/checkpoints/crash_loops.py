"""Distinguishes a crash loop from bad luck: the same step has failed at each of the last starts. Names its batch."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoints import history
from lockstep.checkpoints.history import Event
from lockstep.checkpoints.ranks import Ranks
from lockstep.errors import CrashLoopError, OptionError


class Batch(NamedTuple):
    """A batch whose step has failed each time."""

    step: int
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


class CrashLoops:
    """What the histories of all hosts say about the last starts of a run; every rank has the same.

    ``folder`` has the history of this host; ``state`` is what is resumed. After ``give_up_after`` failures in a row the
    run ends, or, with ``leaves_out``, goes on without the batch.

    Raises :class:`OptionError` if no batch could be left out.
    """

    def __init__(
        self, folder: Path, ranks: Ranks, state: Mapping[str, Any], give_up_after: int | None, *, leaves_out: bool
    ) -> None:
        self._ranks = ranks
        self._give_up_after = give_up_after
        self._leaves_out = leaves_out
        self._state = state
        self._batches = [each for each in state.values() if hasattr(each, "leave_out")]
        if leaves_out and (len(self._batches) != 1 or give_up_after is None):
            raise OptionError(
                f"resume(give_up_after={give_up_after}, skip_poison=True) with {len(self._batches)} GlobalBatches in "
                "the state: the batch of the step that has failed give_up_after times can be left out if there is one "
                "lockstep.shares.GlobalBatches, from which all ranks get their samples"
            )
        events = history.read(folder)
        failures = failures_in_a_row(events)
        told = ranks.tell(
            {
                "same": {"give_up_after": give_up_after, "skip_poison": leaves_out},
                "failures": [[each.step, each.rank, each.in_batches, each.describe()] for each in failures],
                "left out": [[each.step, each.batch] for each in events if each.what == history.LEFT_OUT],
            },
            "how often a step has failed",
        )
        ranks.check_equal("resume()", [each["same"] for each in told])
        self._failures: list[list[Any]] = max((each["failures"] for each in told), key=len)
        left_out = {(step, *batch) for each in told for step, batch in each["left out"]}
        self._left_out: list[tuple[int, int, int]] = sorted(left_out)

    def check(self, step: int) -> Batch | None:
        """Raise :class:`CrashLoopError` in a crash loop, or leave out the batch, and return it.

        Call it after the state of ``step`` is restored. Batches that earlier starts have left out stay so.
        """
        for each in self._batches if len(self._batches) == 1 else ():
            for _, epoch, number in self._left_out:
                each.leave_out(epoch, number)
        if self._give_up_after is None or len(self._failures) < self._give_up_after:
            return None
        failed_at, rank, in_batches, _ = self._failures[0]
        # An optimizer may make a step in every N-th batch only.
        batch = self._find(failed_at, failed_at - step - 1, rank) if in_batches else None
        before = [batch[1:] for batch in self._left_out if batch[0] == failed_at]
        if not self._leaves_out or before or batch is None:
            raise self._error(failed_at, batch, before)
        self._batches[0].leave_out(batch.epoch, batch.number)
        if not self._ranks.rank:
            times = len(self._failures)
            what = f"step {batch.step} has failed {times} times in a row, and the run goes on without its batch"
            warnings.warn(f"{what}: {batch.describe()}", stacklevel=5)
        return batch

    def _find(self, step: int, ahead: int, rank: int) -> Batch | None:
        """Return the batch ``ahead`` of the next one, with the samples that a rank has of it."""
        known = [each for each in self._state.values() if hasattr(each, "samples_ahead")]
        found = known[0].samples_ahead(ahead) if len(known) == 1 and ahead >= 0 else None
        if found is not None:
            found = [*found[:2], [each if isinstance(each, int) else str(each) for each in found[2]]]
        told = self._ranks.tell(found, "the samples of a step")
        of_rank = told[rank if rank < len(told) else 0]
        return None if of_rank is None else Batch(step, *of_rank)

    def _error(self, step: int, batch: Batch | None, before: list[tuple[int, int]]) -> CrashLoopError:
        if batch is None:
            places = [
                f"{name} is at {each.state_dict()}" for name, each in self._state.items() if hasattr(each, "epoch")
            ]
            what = (
                f"where {', '.join(places) or 'no sampler says which batch it is'}: look at the batches from there on"
            )
        else:
            what = f"and its batch is {batch.describe()}: look at these"
        if before:
            left = " and ".join(f"batch {number} of epoch {epoch}" for epoch, number in before)
            what += f". It has failed without {left}, too, so that the batch may not be the cause"
        failures = "; ".join(text for *_, text in self._failures)
        return CrashLoopError(
            f"the last {len(self._failures)} starts have failed at the same step: {failures}. The run goes on before "
            f"it, {what}. When the cause is gone, `lockstep runs --forget` lets it start again, and so does "
            "resume(give_up_after=None). resume(skip_poison=True) leaves out the batch, if there is one "
            "lockstep.shares.GlobalBatches",
            step=step,
            samples=() if batch is None else tuple(batch.samples),
        )


def failures_in_a_row(events: Iterable[Event]) -> list[Event]:
    """PURE: return the failures of the last starts, newest first, as long as all were at the same step.

    A start without a recorded failure ends the row: all of its ranks were killed at once, so its step is not the cause.
    A start that has left out a batch begins another row.
    """
    starts: dict[str, Event | None] = {}
    without = set[str]()
    for event in events:
        if event.what == history.FAILED:
            starts[event.start] = event
        else:
            starts.setdefault(event.start, None)
        if event.what == history.LEFT_OUT:
            without.add(event.start)
    found: list[Event] = []
    for start, failure in reversed(starts.items()):
        if failure is None or not failure.step or (found and failure.step != found[0].step):
            break
        found.append(failure)
        if start in without:
            break
    return found
