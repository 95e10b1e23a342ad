"""Counts the steps of a program's optimizers, in this rank's page of progress."""

from collections.abc import Callable

from torch.optim import Optimizer

from lockstep._base.identity_map import IdentityMap
from lockstep._base.optimizer_steps import has_replicated_parameters, observe_steps, stop_observing
from lockstep.failures.progress import Phase, Progress


class StepCounter:
    """Counts steps until :meth:`close`, as long as no batches are counted, and calls ``enter`` with the rank's phase.

    The step of the run is the highest number that any optimizer has reached. One that is new begins with the step at
    which the run is: the discriminator and the generator of a GAN count as one. Steps inside of another step of the
    same optimizer count once.
    """

    def __init__(self, progress: Progress, enter: Callable[[str], object]) -> None:
        self._progress = progress
        self._enter = enter
        self._start = progress.step
        self._made: IdentityMap[int] = IdentityMap()
        self._next: IdentityMap[int] = IdentityMap()
        observe_steps(self)

    def step_begins(self, optimizer: Optimizer, closure: bool) -> None:
        """Note that an optimizer begins a step."""
        self._enter(Phase.OPTIMIZER)
        if not self._progress.in_batches:
            made = self._made.get(optimizer)
            if made is not None or has_replicated_parameters(optimizer):
                self._next[optimizer] = 1 + (self._before_new() if made is None else made)

    def _before_new(self) -> int:
        """Return the number of the step before the one with which a new optimizer begins."""
        return max(self._start, self._progress.step - 1)

    def step_ended(self, optimizer: Optimizer, closure: bool) -> None:
        """Count the step of an optimizer."""
        self._enter(Phase.TRAINING)
        made = self._next.get(optimizer)
        if made is not None and not self._progress.in_batches:
            self._made[optimizer] = made
            if made > self._progress.step:
                self._progress.step = made

    def has_parameter_of(self, optimizer: Optimizer) -> None:
        """Return None: it replicates no module."""

    def go_on_from(self, step: int) -> None:
        """Count on from the step of a checkpoint."""
        self._progress.resume_at(step)
        self._start = step
        self._made.clear()
        self._next.clear()

    def close(self) -> None:
        """Count no further steps."""
        stop_observing(self)
