"""The contribution of this rank to the next round: parameters with gradients, weights, drift."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress

from lockstep.distributed.reduction.drift import DriftWatch
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.status import Part
from lockstep.distributed.reduction.window import Window, are_zero
from lockstep.errors import OptionError


class Contribution:
    """Grows with each backward pass, and is gone when a round has been reduced, or has failed."""

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        global_rank: int,
        part: Part = Part.FULL,
        window: Window | None = None,
        used: bytearray | None = None,
    ) -> None:
        self._parameters = parameters
        self._global_rank = global_rank
        self.part = part
        """How the rank takes part with it, if nothing fails."""
        self.used = used or bytearray(len(parameters))
        """A one for each parameter that has had a gradient since the last round."""
        self.window = window or Window()
        self.drift = DriftWatch(parameters, global_rank)

    def check(self) -> None:
        """Raise :class:`OptionError` if this rank's part in the round has to fail."""
        if self.window.problem:
            raise OptionError(self.window.problem)

    def is_something(self, newcomers: Sequence[ManagedParameter]) -> bool:
        """Return True if there is anything to contribute: a weight, a failure, or a gradient that is not zero, also of
        ``newcomers``, which the ranks have not agreed on yet. May wait for the device."""
        if self.window.is_open or self.window.problem:
            return True
        piled = [*compress(self._parameters, self.used), *newcomers]
        return not all(are_zero([member.parameter.grad for member in piled]))

    def forget(self) -> None:
        """What has been contributed is not this rank's alone any more; after a failure, or where the batch is left out,
        it is gone."""
        self.used[:] = bytes(len(self.used))
        self.drift.forget()
        self.window.close()

    def renumbered(self, parameters: Sequence[ManagedParameter]) -> "Contribution":
        """Return the same with other parameters: those that have had a gradient under their old numbers have it under
        the new ones."""
        used = {id(each.parameter) for each in compress(self._parameters, self.used)}
        found = bytearray(id(each.parameter) in used for each in parameters)
        return Contribution(parameters, self._global_rank, self.part, self.window, found)


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
