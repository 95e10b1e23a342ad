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
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.distributed.reduction.bucket import BucketPart, GradientBucket
from lockstep.distributed.reduction.in_flight import InFlight
from lockstep.distributed.reduction.late import graphs_of, reduce_late
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.report import RankStatus, Report
from lockstep.distributed.reduction.second_order import has_graphs, with_graphs
from lockstep.distributed.reduction.setup import Setup


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
        describe: Callable[[int, bool, bool], tuple[RankStatus, float]],
        create_graph: bool,
        gradients_reached: WeakMethod[Callable[[], None]],
    ) -> None:
        """``used`` has a one for each parameter that has had a gradient on this rank since the last round; ``describe``
        says what this rank has to report of a round of that number, failed or not, with a late gradient or without;
        ``gradients_reached`` is called by backward passes that go through the gradients, where those have a graph."""
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
        self._setup, self._used, self._describe, self._create_graph = setup, used, describe, create_graph
        self._gradients_reached = gradients_reached
        self._divide_factor = setup.gradient_divide_factor
        # Ranks that use different things come to a mean inside of the pass at different times.
        self._launches_early = setup.is_ready and not has_graphs(setup.collectives.group)
        self._graphs: list[tuple[ManagedParameter, Tensor]] = []
        self._undefined: list[int] = []
        self._in_flight = InFlight(number, setup)
        scale = 1.0 if setup.hooks.hooks else 1.0 / self._divide_factor
        for bucket in self.buckets.in_order:
            bucket.open(scale, copies_early=not create_graph)
        self._expect_gradients()

    @property
    def has_begun(self) -> bool:
        """Whether the other ranks may have had anything of this round."""
        return self.next_bucket > 0 or self.phase is not RoundPhase.FILLING

    def _become(self, phase: RoundPhase) -> None:
        if not self.phase.may_become(phase):
            raise RuntimeError(f"round {self.number} is {self.phase.name} and becomes {phase.name}; a bug in lockstep")
        self.phase = phase

    # ------------------------------------------------------------------------ filling: gradients come

    def _expect_gradients(self) -> None:
        plan, arrivals = self._setup.plan, self._setup.members.arrivals
        if plan.observes:
            plan.begin_round()  # each gradient is looked at, to note the order
        else:
            for part in self.buckets.parts:
                arrivals.note_in(part.arrived, part.noted)
        # What has piled up without a place in the plan may not come again before the end of this backward.
        for index in self.buckets.unbucketed:
            if self._setup.parameters[index].parameter.grad is None:
                self._used[index] = 0  # given up
            elif self._used[index]:
                self.late[index] = None

    def mark_gradient_ready(self, index: int) -> None:
        """A gradient has come that is looked at: the first of a pass, the last of a part, or one that may be late."""
        self._used[index] = 1
        if self._setup.plan.observes:
            self._setup.plan.observe(index)
        part = self.buckets.part_of[index]
        if part is None or part.bucket.index < self.next_bucket:
            self.late[index] = None
        elif not part.is_complete:
            part.arrived.append(self._setup.parameters[index].parameter)
            if part.is_looked_at and part.look():
                self._part_is_complete(part)
            elif index == part.awaited:
                # Another one is the last: test_gradients_in_another_order_than_was_planned_are_copied_early_too.
                self._setup.members.arrivals.ask_for(part.noted)

    def _part_is_complete(self, part: BucketPart) -> None:
        bucket = part.bucket
        if not bucket.waits_for_end:  # what comes from now on comes again, and late: test_checkpointing.py
            self._setup.members.arrivals.ask_for(part.noted)
        if bucket.part_is_complete(part):
            self.launch_ready_buckets()

    def mark_unhooked(self, indices: Sequence[int]) -> None:
        """Count the gradients of parameters that had lost their hooks."""
        for index in indices:
            self._used[index] = 1
            if self.buckets.of[index] is None:
                self.late[index] = None

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
            copied = bucket.copy_in(self._used if bucket.missing else None)
            self._graphs += copied.graphs
            self._undefined += copied.undefined
            if bucket is self.buckets.report_bucket:
                self._write_report(bucket.row)
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

    def end_filling(self) -> None:
        """Backward has ended: what has not come counts as zero."""
        self._become(RoundPhase.FINALIZING)
        incomplete: list[BucketPart] = []
        for part in self.buckets.parts:
            if not part.is_complete:
                if part.look():
                    part.bucket.missing -= 1
                else:
                    incomplete.append(part)
        if incomplete or self.buckets.unbucketed:
            for part in self.buckets.parts:
                for index in part.indices if part.is_complete else part.came():
                    self._used[index] = 1
        else:
            self._used[:] = self.buckets.all_used

    def launch_rest(self) -> None:
        """Launch all that is left: buckets, buffers that do not ride in the report, and the report."""
        setup = self._setup
        setup.buffers.prepare_large()
        for bucket in self.buckets.in_order[self.next_bucket :]:
            is_last = bucket is self.buckets.report_bucket and not setup.buffers.has_large
            self._launch_bucket(bucket, wait_follows=is_last)
        if setup.hooks.hooks:
            self._in_flight.order_hooks(setup.collectives.device)
        setup.buffers.send_large()
        row = setup.transport.own_row
        if row is not None:
            self._write_report(row)
            self._all_reduce(row, "report", wait_follows=True)

    def _write_report(self, row: Tensor, failed: bool = False) -> None:
        for index in self._undefined:  # hooks have run, but there was no gradient
            self._used[index] = 0
        status, weight = self._describe(self.number, failed, bool(self.late))
        digest = None if failed or status.backward is None else self._setup.look(self.number)
        self._setup.transport.write(row, self._used, list(self.late), status, weight, digest)

    def wait(self) -> None:
        """Return when all has arrived."""
        self._in_flight.wait()
        self._become(RoundPhase.REDUCED)

    @property
    def report_row(self) -> Tensor:
        """The report's place."""
        bucket, row = self.buckets.report_bucket, self._setup.transport.own_row
        if bucket is not None:
            return bucket.row
        assert row is not None
        return row

    def copy_out(self, report: Report, factor: float, newcomers: Sequence[ManagedParameter]) -> None:
        """Give the parameters their reduced gradients, times ``factor``: what is in the buckets, and what was late.

        The ranks have just agreed on ``newcomers``, which have no bucket yet.
        """
        if report.is_usual and not (self._graphs or self._create_graph):
            for bucket in self.buckets.in_order:
                bucket.copy_out(report)
            self.is_copied_out = True
            return
        overdue = [*(self._setup.parameters[index] for index in report.late), *newcomers]
        graphs = [*self._graphs, *graphs_of(overdue)]
        late = reduce_late(overdue, self._setup.collectives, self._divide_factor) if overdue else []
        for bucket in self.buckets.in_order:
            if factor != 1:
                bucket.multiply(factor)
            bucket.copy_out(report)
        for each in late:
            each.copy_out(factor)
        if graphs or self._create_graph:
            collectives = self._setup.collectives
            is_idle = any(report.idle) and (len(report.idle) == 1 or report.idle[collectives.rank])
            reduced = [*(member for member in self._setup.parameters if report.uses(member.index)), *newcomers]
            with_graphs(graphs, reduced, factor, is_idle, self._gradients_reached, collectives)
        self.is_copied_out = True

    def parameters_in_order(self, report: Report, newcomers: Sequence[ManagedParameter]) -> list[Parameter]:
        """The parameters that any rank has used, in an order that is the same on all ranks: the plan's."""
        placed = [index for bucket in self.buckets.in_order for index in bucket.planned.indices]
        used = [self._setup.parameters[i] for i in (*placed, *self.buckets.unbucketed) if report.uses(i)]
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
                self.abandoned_row = zeros[bucket.planned.layout.numel :]
                self._write_report(self.abandoned_row, failed=True)
            self._all_reduce(zeros, "abandoned bucket")
        if setup.hooks.hooks and not setup.collectives.follows_stream(setup.collectives.device):
            sent.wait_abandoned()
        setup.buffers.send_large(failed=True)
        if setup.transport.own_row is not None:
            self.abandoned_row = setup.transport.own_row
            self._write_report(self.abandoned_row, failed=True)
            self._all_reduce(self.abandoned_row, "abandoned report")

    def wait_abandoned(self) -> None:
        """Return when all that an abandoned round has sent has arrived."""
        self._in_flight.wait_abandoned()
