"""A round: one backward pass of one replicated module, as it is reduced.

It is made when a backward pass that synchronises reaches the module, and dropped when the pass is over. Meanwhile it
knows what has come, what has left, and what is on its way; :class:`RoundPhase` says what may follow. When backward
fails, the round is abandoned: this rank sends all that the others wait for, without a gradient, and a report that says
so. An abandoned round is kept until what it has sent has arrived; nobody waits for that, unless communication hooks
have to be ordered by waiting.
"""

import time
from collections.abc import Callable, Sequence
from enum import IntEnum, auto

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.distributed.reduction.bucket import GradientBucket
from lockstep.distributed.reduction.gradient_look import GradientLook
from lockstep.distributed.reduction.graph import has_means
from lockstep.distributed.reduction.in_flight import InFlight
from lockstep.distributed.reduction.late import reduce_late
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.setup import Setup
from lockstep.distributed.reduction.status import Status
from lockstep.distributed.reduction.verdict import Verdict


class RoundPhase(IntEnum):
    """Where a round is."""

    FILLING = auto()
    """Backward runs: gradients come, full buckets leave. FINALIZING or ABANDONED follows."""
    FINALIZING = auto()
    """Backward has ended: all that is left leaves, and is waited for. REDUCED or ABANDONED follows."""
    REDUCED = auto()
    """All ranks' parts have been summed; nothing follows."""
    ABANDONED = auto()
    """This rank's part has failed, which the others are told; nothing follows."""

    def may_become(self, other: "RoundPhase") -> bool:
        """Whether ``other`` may follow."""
        return other in _FOLLOWING[self]


_FOLLOWING = {
    RoundPhase.FILLING: (RoundPhase.FINALIZING, RoundPhase.ABANDONED),
    RoundPhase.FINALIZING: (RoundPhase.REDUCED, RoundPhase.ABANDONED),
    RoundPhase.REDUCED: (),
    RoundPhase.ABANDONED: (),
}


class Round:
    """Reduces the gradients of one backward pass, together with the same round of the other ranks."""

    def __init__(
        self,
        number: int,
        setup: Setup,
        used: bytearray,
        describe: Callable[[int, bool], Status],
    ) -> None:
        """``used`` has a one for each parameter that has had a gradient on this rank since the last round; ``describe``
        says what this rank has to report of a round of that number, failed or not."""
        self.number, self.phase = number, RoundPhase.FILLING
        self.buckets = setup.buckets
        self.next_bucket = 0
        """The first bucket that has not left."""
        self.late: dict[int, None] = {}
        """Parameters whose gradient came after its bucket had left, or has no bucket."""
        self.is_copied_out = False
        """Whether the parameters have their gradients."""
        self.abandoned_row: Tensor | None = None
        """The report, if the round was abandoned before it had left."""
        self._setup, self._used, self._describe = setup, used, describe
        self._divide_factor = setup.gradient_divide_factor
        # Ranks that use different things come to a mean inside of the pass at different times.
        self._launches_early = setup.is_ready and not has_means()
        self._undefined: list[int] = []
        self._in_flight = InFlight(number, setup)
        scale = 1.0 if setup.hooks.hooks else 1.0 / self._divide_factor
        for bucket in self.buckets.in_order:
            bucket.open(scale)
        self._moved: dict[int, int] = {}  # triggers

    @property
    def has_begun(self) -> bool:
        """Whether the other ranks may have had anything of this round."""
        return self.next_bucket > 0 or self.phase is not RoundPhase.FILLING

    def _become(self, phase: RoundPhase) -> None:
        if not self.phase.may_become(phase):
            raise RuntimeError(f"round {self.number} is {self.phase.name} and becomes {phase.name}; a bug in lockstep")
        self.phase = phase

    # ------------------------------------------------------------------------ filling: gradients come

    def part_triggered(self, index: int, look: GradientLook) -> None:
        """The gradient of a parameter has come that is expected to be the last one of its part, in a pass before which
        there was a ``look``."""
        part = self.buckets.part_of[index]
        if part is None or part.is_complete or part.bucket.index < self.next_bucket:
            return  # it has come again
        missing = look.missing(part.indices)
        if missing:
            self._moved[index] = missing[-1]  # in the order of the plan
            return
        part.is_complete = True
        if part.bucket.part_is_complete(part):
            self.launch_ready_buckets()

    @property
    def taken(self) -> list[int]:
        """The parameters whose gradients have been taken from them, or may have been, before the pass has ended."""
        return [index for part in self.buckets.parts if part.is_complete for index in part.indices]

    def moved_triggers(self) -> list[tuple[int, int]]:
        """The triggers that came too early, by the number of their parameter, and those of the parameters to which
        they move."""
        return list(self._moved.items())

    def launch_ready_buckets(self) -> None:
        """Launch every bucket whose turn has come, without waiting for anything: another rank may be at another module.

        A bucket that is to wait for the end, as the one with the report is, does.
        """
        while self.next_bucket < len(self.buckets.in_order):
            bucket = self.buckets.in_order[self.next_bucket]
            if bucket.missing or bucket.waits_for_end or not self._may_launch(bucket):
                return
            with torch.no_grad():
                self._launch_bucket(bucket)

    def _may_launch(self, bucket: GradientBucket) -> bool:
        """Whether a bucket may leave while backward runs."""
        if not (self._launches_early and self._setup.scheduler.modules.exclusive):
            return False
        return not self._setup.hooks.hooks or self._in_flight.may_call_hooks(bucket.members[0].spec.device)

    def _launch_bucket(self, bucket: GradientBucket, wait_follows: bool = False) -> None:
        """``wait_follows``: nothing else is launched."""
        setup = self._setup
        with setup.collectives.phases.phase("collect"):
            copied = bucket.copy_in(self._used if 0 in self._used else None)
            self._undefined += copied.undefined
            if bucket is self.buckets.report_bucket:
                self._write_in_bucket(bucket.row)
        what = self.buckets.labels[bucket.index]
        if setup.hooks.hooks:
            self._in_flight.send_through_hooks(bucket, copied.flat, what)
        else:
            self._all_reduce(copied.flat, what, copied.factor, wait_follows)
        self.next_bucket += 1

    def _all_reduce(self, tensor: Tensor, what: str, factor: float = 1.0, wait_follows: bool = False) -> None:
        """Begin to sum a tensor, times ``factor``, over the ranks."""
        begun, collectives = time.perf_counter(), self._setup.collectives
        what = f"{what}, round {self.number}"
        self._in_flight.add(collectives.all_reduce(tensor, what, factor, wait_follows=wait_follows), begun)

    # ------------------------------------------------------------- finalizing: backward has ended

    def end_filling(self, came: Sequence[int]) -> None:
        """Backward has ended, and these gradients have come in it: what has not come counts as zero."""
        self._become(RoundPhase.FINALIZING)
        parameters = self._setup.parameters
        for bucket in self.buckets.in_order[: self.next_bucket]:
            for index in bucket.planned.indices:
                if parameters[index].parameter.grad is not None:
                    self.late[index] = None
        for index in self.buckets.unbucketed:
            if parameters[index].parameter.grad is None:
                self._used[index] = 0  # given up
            elif self._used[index]:
                self.late[index] = None

    def launch_rest(self) -> None:
        """Launch all that is left: buckets, buffers that do not ride in the report, and the report."""
        setup, row = self._setup, self._setup.transport.own_row
        setup.buffers.prepare_large()
        for bucket in self.buckets.in_order[self.next_bucket :]:
            is_last = bucket is self.buckets.report_bucket and not setup.buffers.has_large and row is None
            self._launch_bucket(bucket, wait_follows=is_last)
        if setup.hooks.hooks:
            self._in_flight.order_hooks(setup.collectives.device)
        setup.buffers.send_large()
        if row is not None:
            self._send_own(row, "report")

    def _send_own(self, row: Tensor, what: str, failed: bool = False) -> None:
        """Send what of the report travels on its own."""
        transport, what = self._setup.transport, f"{what}, round {self.number}"
        status = self._write_report(row, failed)
        if transport.own_buffers is not None:
            transport.write_buffers(transport.own_buffers, status)
            self._all_reduce(transport.own_buffers, "small buffers")
        begun = time.perf_counter()
        self._in_flight.add(transport.send(row, what), begun)

    def _write_in_bucket(self, row: Tensor, failed: bool = False) -> None:
        """Write what rides behind the last bucket: the report, or small buffers alone."""
        if self._setup.transport.own_row is None:
            self._write_report(row, failed)
        else:
            self._setup.transport.write_buffers(row, self._describe(self.number, failed))

    def _write_report(self, row: Tensor, failed: bool = False) -> Status:
        for index in self._undefined:  # hooks have run, but there was no gradient
            self._used[index] = 0
        status = self._describe(self.number, failed)
        digest = self._setup.look(self.number) if status.called and not failed else None
        self._setup.transport.write(row, self._used, list(self.late), status, digest)
        return status

    def wait(self) -> None:
        """Return when all has arrived."""
        self._in_flight.wait()
        self._become(RoundPhase.REDUCED)

    @property
    def report_row(self) -> Tensor:
        """The report's place."""
        row = self._setup.transport.own_row
        return self.bucket_row if row is None else row

    @property
    def bucket_row(self) -> Tensor:
        """What rides behind the last bucket; nothing if the report and small buffers travel on their own."""
        bucket = self.buckets.report_bucket
        return torch.empty(0) if bucket is None else bucket.row

    def copy_out(self, verdict: Verdict, newcomers: Sequence[ManagedParameter]) -> None:
        """Give the parameters their reduced gradients, times the verdict's factor: what is in the buckets, and what was
        late.

        The ranks have just agreed on ``newcomers``, which have no bucket yet.
        """
        if verdict.is_usual:
            for bucket in self.buckets.in_order:
                bucket.copy_out(verdict)
            self.is_copied_out = True
            return
        factor = verdict.factor
        overdue = [*(self._setup.parameters[index] for index in verdict.late), *newcomers]
        late = reduce_late(overdue, self._setup.collectives, self._divide_factor) if overdue else []
        for bucket in self.buckets.in_order:
            if factor != 1:
                bucket.multiply(factor)
            bucket.copy_out(verdict)
        for each in late:
            each.copy_out(factor)
        self.is_copied_out = True

    def parameters_in_order(self, verdict: Verdict, newcomers: Sequence[ManagedParameter]) -> list[Parameter]:
        """The parameters that any rank has used, in an order that is the same on all ranks: the plan's."""
        placed = [index for bucket in self.buckets.in_order for index in bucket.planned.indices]
        used = [self._setup.parameters[i] for i in (*placed, *self.buckets.unbucketed) if verdict.uses(i)]
        return [each.parameter for each in (*used, *newcomers)]

    # -------------------------------------------------------------------- abandoned: backward has failed

    def abandon(self) -> None:
        """Send what the other ranks wait for, in the order of :meth:`launch_rest`, without a gradient.

        Communication hooks run, too, on buckets of zeros: what they send is what the other ranks' hooks wait for.
        """
        self._become(RoundPhase.ABANDONED)
        setup, sent = self._setup, self._in_flight
        for bucket in self.buckets.in_order[self.next_bucket :]:
            zeros = sent.make(bucket.zeros)
            if setup.hooks.hooks:
                sent.send_zeros_through_hooks(bucket, zeros)
                continue
            if bucket is self.buckets.report_bucket:
                row = zeros[bucket.planned.layout.numel :]
                self._write_in_bucket(row, failed=True)
                if setup.transport.own_row is None:
                    self.abandoned_row = row
            self._all_reduce(zeros, "abandoned bucket")
        if setup.hooks.hooks and not setup.collectives.follows_stream(setup.collectives.device):
            sent.wait_abandoned()
        setup.buffers.send_large(failed=True)
        if setup.transport.own_row is not None:
            self.abandoned_row = setup.transport.own_row
            self._send_own(self.abandoned_row, "abandoned report", failed=True)

    def wait_abandoned(self) -> None:
        """Return when all that an abandoned round has sent has arrived."""
        self._in_flight.wait_abandoned()
