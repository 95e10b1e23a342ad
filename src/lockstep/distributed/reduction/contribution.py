"""What this rank contributes to the next round: which parameters have had gradients, what those count, and whether
parameters were changed on them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from lockstep.distributed.reduction.drift import DriftWatch
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.passes import Code
from lockstep.distributed.reduction.report import RankStatus, Weight, round_code
from lockstep.distributed.reduction.weights import Weights


class Contribution:
    """Grows with each backward pass, and is gone when a round has been reduced, or has failed."""

    def __init__(
        self, parameters: Sequence[ManagedParameter], global_rank: int, joined: bool = False, idle: bool = False
    ) -> None:
        """``joined``: the rank has run out of batches, and contributes nothing, inside of ``Join``; ``idle``: the same
        in ``batches()``."""
        self._global_rank, self._joined, self._idle = global_rank, joined, idle
        self.used = bytearray(len(parameters))
        """A one for each parameter that has had a gradient since the last round."""
        self.weights = Weights()
        self.drift = DriftWatch(parameters, global_rank)
        self.weights.watch(parameters)

    def describe(
        self, number: int, failed: bool, differs: bool, backward: Code | None, loop: int
    ) -> tuple[RankStatus, Weight]:
        """What this rank says of round ``number``; ``differs``: it has other parameters, buffers or hooks than were
        agreed on; ``loop``: what it says of its loop."""
        flags = failed, self.weights.given, self._joined, differs, self.drift.suspects
        weight = Weight(self.weights.total, bool(self.weights.earlier.copies))
        return RankStatus(round_code(number), *flags, backward, loop), weight

    @property
    def is_something(self) -> bool:
        """Whether there is anything to contribute: a gradient, or a weight."""
        return 1 in self.used or self.weights.counted

    @property
    def is_idle(self) -> bool:
        """Whether the rank has run out of batches, and contributes nothing."""
        return self._idle

    @property
    def is_usual(self) -> bool:
        """Whether it has a gradient of every parameter, and nothing else to tell."""
        return 0 not in self.used and not (self.weights.given or self._joined or self._idle or self.drift.suspects)

    def accumulate(self, used: bytes) -> None:
        """A pass has ended that did not synchronise; ``used`` has a one for each parameter that it gave a gradient."""
        both = int.from_bytes(self.used, "little") | int.from_bytes(used, "little")
        self.used[:] = both.to_bytes(len(used), "little")
        self.weights.pass_ended(self.used)

    def end_round(self) -> None:
        """All of it has been reduced."""
        self.weights.reduced()
        self.forget()

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
        self.drift = DriftWatch(parameters, self._global_rank)
        self.weights.watch(parameters)

    def watch(
        self,
        parameters: Sequence[ManagedParameter],
        newcomers: Sequence[ManagedParameter] = (),
        departed: Collection[int] = (),
    ) -> None:
        """See :meth:`Weights.watch`."""
        self.weights.watch(parameters, newcomers, departed)


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
