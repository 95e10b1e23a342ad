"""What this rank contributes to the next round: which parameters have had gradients, what those count, and whether
parameters were changed on them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lockstep.distributed.reduction.drift import DriftWatch
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.status import Part
from lockstep.distributed.reduction.weights import Weights


class Contribution:
    """Grows with each backward pass, and is gone when a round has been reduced, or has failed."""

    def __init__(self, parameters: Sequence[ManagedParameter], global_rank: int, part: Part = Part.FULL) -> None:
        self._parameters, self._global_rank = parameters, global_rank
        self.part = part
        """How the rank takes part with it, if nothing fails."""
        self.used = bytearray(len(parameters))
        """A one for each parameter that has had a gradient since the last round."""
        self.weights = Weights()
        self.drift = DriftWatch(parameters, global_rank)
        self.weights.watch(parameters)

    @property
    def is_something(self) -> bool:
        """Whether there is anything to contribute: a gradient, or a weight, that has not been given up."""
        return self.weights.counted

    @property
    def is_usual(self) -> bool:
        """Whether it has a gradient of every parameter, and nothing else to tell."""
        return 0 not in self.used and self.part is Part.FULL and not (self.weights.given or self.drift.suspects)

    def accumulate(self) -> None:
        """A pass has ended that did not synchronise."""
        self.weights.pass_ended(self.used)

    def end_round(self) -> None:
        """All of it has been reduced; :meth:`forget` follows."""
        self.weights.reduced()

    def forget(self) -> None:
        """What has been contributed is not this rank's alone any more; after a failure it is gone."""
        self.used[:] = bytes(len(self.used))
        self.drift.forget()
        self.weights.give_up()

    def leave_out(self) -> None:
        """The batch is left out."""
        self.forget()
        self.weights.leave_out()

    def renumber(self, before: Sequence[ManagedParameter], parameters: Sequence[ManagedParameter]) -> None:
        """Go on with other parameters: what has had a gradient under its old number has it under the new one."""
        used = {id(each.parameter) for each, is_used in zip(before, self.used, strict=True) if is_used}
        self.used = bytearray(id(each.parameter) in used for each in parameters)
        self._parameters = parameters
        self.drift = DriftWatch(parameters, self._global_rank)
        self.weights.watch(parameters)


@contextmanager
def gradients_set_aside(parameters: Sequence[ManagedParameter]) -> Iterator[None]:
    """Let the parameters have no gradient inside; afterwards they have what they had."""
    had = [member.parameter.grad for member in parameters]
    for member in parameters:
        member.parameter.grad = None
    try:
        yield
    finally:
        for member, grad in zip(parameters, had, strict=True):
            member.parameter.grad = grad
