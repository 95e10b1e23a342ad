"""What this rank contributes to the next round: which parameters have had gradients, what those count, and whether
parameters were changed on them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress

from torch.nn import Parameter

from lockstep.distributed.reduction.drift import DriftWatch
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.passes import Code
from lockstep.distributed.reduction.report import RankStatus, round_code
from lockstep.distributed.reduction.window import Window, are_zero
from lockstep.errors import OptionError


class Contribution:
    """Grows with each backward pass, and is gone when a round has been reduced, or has failed."""

    def __init__(
        self, parameters: Sequence[ManagedParameter], global_rank: int, joined: bool = False, idle: bool = False
    ) -> None:
        """``joined``: the rank has run out of batches, and contributes nothing, inside of ``Join``; ``idle``: the same
        in ``batches()``."""
        self._parameters, self._global_rank, self._joined, self._idle = parameters, global_rank, joined, idle
        self.used = bytearray(len(parameters))
        """A one for each parameter that has had a gradient since the last round."""
        self.window = Window()
        self.drift = DriftWatch(parameters, global_rank)

    def describe(
        self, number: int, failed: bool, differs: bool, backward: Code | None, loop: int, waits: bool
    ) -> tuple[RankStatus, float]:
        """What this rank says of round ``number``; ``differs``: it has other parameters, buffers or hooks than were
        agreed on; ``loop``: what it says of its loop; ``waits``: it waits for the report."""
        window, code = self.window, round_code(number)
        drifts = self.drift.suspects
        status = RankStatus(code, failed, window.is_open, self._joined, differs, drifts, backward, loop, waits)
        return status, window.total

    def check(self) -> None:
        """Raise :class:`OptionError` if this rank's part in the round has to fail."""
        if self.window.problem:
            raise OptionError(self.window.problem)

    def is_something(self, newcomers: Sequence[ManagedParameter]) -> bool:
        """Whether there is anything to contribute: a weight, a failure, or a gradient that is not zero, also of
        ``newcomers``, which the ranks have not agreed on yet. May wait for the device."""
        if self.window.is_open or self.window.problem:
            return True
        piled = [*compress(self._parameters, self.used), *newcomers]
        return not all(are_zero([member.parameter.grad for member in piled]))

    @property
    def is_idle(self) -> bool:
        """Whether the rank has run out of batches, and contributes nothing."""
        return self._idle

    @property
    def is_usual(self) -> bool:
        """Whether it has a gradient of every parameter, and nothing else to tell."""
        return 0 not in self.used and not (self.window.is_open or self._joined or self._idle or self.drift.suspects)

    def accumulate(self, arrived: Iterable[Parameter]) -> None:
        """A pass has ended that did not synchronise, and has given these parameters gradients."""
        came = set(map(id, arrived))
        if len(came) == len(self.used):
            self.used[:] = bytes((1,)) * len(self.used)
        else:
            for member in self._parameters:
                if id(member.parameter) in came:
                    self.used[member.index] = 1
        self.window.pass_ended()

    def forget(self) -> None:
        """What has been contributed is not this rank's alone any more; after a failure, or where the batch is left out,
        it is gone."""
        self.used[:] = bytes(len(self.used))
        self.drift.forget()
        self.window.close()

    def renumber(self, before: Sequence[ManagedParameter], parameters: Sequence[ManagedParameter]) -> None:
        """Go on with other parameters: what has had a gradient under its old number has it under the new one."""
        used = {id(each.parameter) for each, is_used in zip(before, self.used, strict=True) if is_used}
        self.used = bytearray(id(each.parameter) in used for each in parameters)
        self._parameters = parameters
        self.drift = DriftWatch(parameters, self._global_rank)


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
