"""Batches of a session: those of :func:`lockstep.batches`, counted, so that messages can name the step."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from lockstep.distributed.uneven import Batches
from lockstep.failures.progress import Phase, Progress
from lockstep.failures.where import OF_A_STEP, TRAINING

B = TypeVar("B")


class CountedBatches(Generic[B]):
    """What ``run.batches()`` returns. Its length, if it has one, is the same on all ranks."""

    def __init__(self, batches: Batches[B], progress: Progress, check: Callable[[], object]) -> None:
        self._batches, self._progress, self._check = batches, progress, check

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def is_padding(self) -> bool:
        """Whether the batch that the loop is at counts nothing: this rank has run out."""
        return self._batches.is_padding

    @property
    def weight(self) -> float:
        """What the batch counts: 1, or 0 if the rank has run out."""
        return self._batches.weight

    def __iter__(self) -> Iterator[B]:
        progress, trains = self._progress, torch.is_grad_enabled()
        before, batches = progress.current_phase, iter(self._batches)
        if before in OF_A_STEP:  # of an evaluation, which ends with a forward
            before = TRAINING
        while True:
            self._check()
            if before == TRAINING:
                progress.current_phase = Phase.DATA
            try:
                batch = next(batches)
            except StopIteration:
                progress.current_phase = before
                return
            progress.step += trains
            progress.current_phase = before
            yield batch
