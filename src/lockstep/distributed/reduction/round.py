"""A round: one backward pass of one replicated module, as it is reduced.

It is made when a backward pass that synchronises reaches the module, and dropped when the pass is over. Meanwhile it
knows what has come, what has left, and what is on its way; :class:`RoundPhase` says what may follow. When backward
fails, the round is abandoned: this rank sends all that the others wait for, without a gradient, and a report that says
so. An abandoned round is kept until what it has sent has arrived; nobody waits for that, unless communication hooks
have to be ordered by waiting.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.distributed.reduction.buckets import BlankBucket, BucketPart, GradientBucket
from lockstep.distributed.reduction.comm_hooks import Waitable
from lockstep.distributed.reduction.late import graphs_of, reduce_again, reduce_late
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.report import RankStatus, Report, Weight
from lockstep.distributed.reduction.second_order import with_graphs
from lockstep.distributed.reduction.setup import Setup
from lockstep.errors import CommunicationError


class RoundPhase(Enum):
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
        describe: Callable[[int, bool], tuple[RankStatus, Weight]],
        creates_graph: bool,
    ) -> None:
        """``used`` has a one for each parameter that has had a gradient on this rank since the last round; ``describe``
        says what this rank has to report of a round of that number, failed or not."""
        self.number, self.phase = number, RoundPhase.FILLING
        self.buckets = setup.buckets
        self.next_bucket = 0
        """The first bucket that has not left."""
        self.late: dict[int, None] = {}
        """Parameters whose gradient came after its bucket had left, or has no bucket."""
        self.abandoned_row: Tensor | None = None
        """The report, if the round was abandoned before it had left."""
        self._setup, self._used, self._describe, self._creates_graph = setup, used, describe, creates_graph
        self._divide_factor, self._launches_early = setup.gradient_divide_factor, setup.is_ready
        self._graphs: list[tuple[ManagedParameter, Tensor]] = []
        self._undefined: list[int] = []
        self._pending: list[Waitable] = []
        self._expected = setup.buckets.expected
        self._awaited = bytearray(self._expected)  # what has not come of those
        scale = 1.0 if setup.hooks.hooks else 1.0 / self._divide_factor
        for bucket in self.buckets:
            bucket.open(scale, copies_early=not creates_graph)
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
            plan.begin_round()  # no gradient is expected by its hook: each is looked at, to note the order
        else:
            self._awaited = arrivals.expect(self.buckets.part_of, self._expected)
        # What has piled up without a place in the plan may not come again before the end of this backward.
        for index in self.buckets.unbucketed:
            if self._setup.parameters[index].parameter.grad is None:
                self._used[index] = 0  # given up
            elif self._used[index]:
                self.late[index] = None

    def mark_gradient_ready(self, index: int) -> None:
        """Count a gradient that the hooks have not counted: the first of a pass, or one that may be late."""
        self._used[index] = 1
        if self._setup.plan.observes:
            self._setup.plan.observe(index)
        part = self.buckets.part_of[index]
        if part is None or part.bucket.index < self.next_bucket:
            self.late[index] = None
        elif self._awaited[index]:
            self._awaited[index] = 0
            part.missing -= 1
            if not part.missing:
                self.part_has_come(part)

    def part_has_come(self, part: BucketPart) -> None:
        """All gradients of a part of a bucket have come."""
        if part.bucket.part_has_come(part):
            self.launch_ready_buckets()

    def mark_unhooked(self, indices: Sequence[int]) -> None:
        """Count the gradients of parameters that had lost their hooks."""
        for index in indices:
            self._used[index] = 1
            if self.buckets.of[index] is None:
                self.late[index] = None

    def launch_ready_buckets(self) -> None:
        """Launch every bucket whose turn has come, without waiting for anything: another rank may be at another module.

        A bucket that is held, as the one with the report is, waits for the end.
        """
        while self.next_bucket < len(self.buckets):
            bucket = self.buckets[self.next_bucket]
            if bucket.missing or bucket.held or not self._may_launch(bucket):
                return
            with torch.no_grad():
                self._launch_bucket(bucket)

    def _may_launch(self, bucket: GradientBucket) -> bool:
        """Whether a bucket may leave while backward runs: no call of its hooks may wait for other ranks."""
        hooks = self._setup.hooks
        if not (self._launches_early and self._setup.scheduler.exclusive):
            return False
        if not hooks.hooks or self._setup.collectives.follows_stream(bucket.members[0].spec.device):
            return True
        return not hooks.may_wait and all(pending.done() for pending in self._pending)

    def _launch_bucket(self, bucket: GradientBucket) -> None:
        setup = self._setup
        with setup.collectives.phases.phase("collect"):
            copied = bucket.copy_in(self._used if bucket.missing else None)
            self._graphs += copied.graphs
            self._undefined += copied.undefined
            if bucket is self.buckets.report_bucket:
                self._write_report(bucket.row)
        what = f"bucket {bucket.index + 1} of {len(self.buckets)}, round {self.number}"
        if setup.hooks.hooks:
            pending = self._launch_through_hooks(bucket, copied.flat, what)
        else:
            pending = setup.collectives.all_reduce(copied.flat, what, copied.factor)
        self._pending.append(pending)
        self.next_bucket += 1

    def _launch_through_hooks(self, bucket: GradientBucket, flat: Tensor, what: str) -> Waitable:
        setup, collectives = self._setup, self._setup.collectives
        self._wait_for_hooks(flat.device)
        begun = collectives.begun()
        try:
            with collectives.phases.phase("hook", what):
                last = bucket.index == len(self.buckets) - 1
                return setup.hooks.send(bucket, flat, last, collectives, self._divide_factor, setup.is_planned)
        except BaseException as error:
            if begun is None or collectives.begun() != begun:
                gist = f"{type(error).__name__}: {error}"
                setup.scheduler.lose(f"a communication hook raised {gist}, after it had begun to communicate")
            raise

    def _wait_for_hooks(self, device: torch.device) -> None:
        """Where hooks are not ordered by a stream, what one sends from a callback must not meet what comes next."""
        if not self._setup.collectives.follows_stream(device):
            while self._pending:
                self._pending.pop(0).wait()

    # ------------------------------------------------------------- finalizing: backward has ended

    def end_filling(self) -> None:
        """Backward has ended: what has not come counts as zero."""
        self._become(RoundPhase.FINALIZING)
        # Bytes that differ are of gradients that have come; as whole numbers, all of them at once.
        came = int.from_bytes(self._expected, "little") ^ int.from_bytes(self._awaited, "little")
        self._used[:] = (int.from_bytes(self._used, "little") | came).to_bytes(len(self._used), "little")

    def launch_rest(self) -> None:
        """Launch all that is left: buckets, buffers that do not ride in the report, and the report."""
        setup = self._setup
        setup.buffers.prepare_large()
        while self.next_bucket < len(self.buckets):
            self._launch_bucket(self.buckets[self.next_bucket])
        if setup.hooks.hooks:
            self._wait_for_hooks(setup.collectives.device)
        setup.buffers.send_large()
        row = setup.transport.own_row
        if row is not None:
            self._write_report(row)
            self._pending.append(setup.collectives.all_reduce(row, f"report, round {self.number}"))

    def _write_report(self, row: Tensor, failed: bool = False) -> None:
        for index in self._undefined:  # hooks have run, but there was no gradient
            self._used[index] = 0
        status, weight = self._describe(self.number, failed)
        self._setup.transport.write(row, self._used, list(self.late), status, weight)

    def wait(self) -> None:
        """Return when all has arrived."""
        with self._setup.collectives.phases.phase("wait"):
            for pending in self._pending:
                pending.wait()
        self._become(RoundPhase.REDUCED)

    @property
    def report_row(self) -> Tensor:
        """The report's place."""
        bucket, row = self.buckets.report_bucket, self._setup.transport.own_row
        if bucket is not None:
            return bucket.row
        assert row is not None
        return row

    def copy_out(
        self,
        report: Report,
        factor: float,
        newcomers: Sequence[ManagedParameter],
        earlier: Mapping[int, Tensor],
    ) -> None:
        """Give the parameters their reduced gradients, times ``factor``: what is in the buckets, and what was late.

        The ranks have just agreed on ``newcomers``, which have no bucket yet. If the report says that weighted
        contributions come on top of gradients from before, this rank's are in ``earlier``, by identity.
        """
        overdue = [*(self._setup.parameters[index] for index in report.late), *newcomers]
        graphs = [*self._graphs, *graphs_of(overdue)]
        late = reduce_late(overdue, self._setup.collectives, self._divide_factor) if overdue else []
        for bucket in self.buckets:
            if factor != 1:
                bucket.rescale(factor)
            bucket.copy_out(report)
        for each in late:
            each.copy_out(factor)
        if report.adds:
            self._add_earlier(report, factor, newcomers, earlier)
        if graphs or self._creates_graph:
            reduced = [member for member in self._setup.parameters if report.uses(member.index)]
            with_graphs(graphs, reduced, factor, self._setup.collectives)

    def _add_earlier(
        self, report: Report, factor: float, newcomers: Sequence[ManagedParameter], earlier: Mapping[int, Tensor]
    ) -> None:
        """What was there before the weighted contributions, and has been scaled with them by ``factor``, counts as it
        was: as the mean over the ranks that have batches."""
        collectives = self._setup.collectives
        used = [*(member for member in self._setup.parameters if report.uses(member.index)), *newcomers]
        active = collectives.world - sum(status.joined for status in report.ranks) - sum(report.idle)
        for each in reduce_again(used, earlier, collectives, active, "gradient from before"):
            each.copy_out(1 - factor * active / self._divide_factor)

    def parameters_in_order(self, report: Report, newcomers: Sequence[ManagedParameter]) -> list[Parameter]:
        """The parameters that any rank has used, in an order that is the same on all ranks: the plan's."""
        placed = [index for bucket in self.buckets for index in bucket.planned.indices]
        used = [self._setup.parameters[i] for i in (*placed, *self.buckets.unbucketed) if report.uses(i)]
        return [each.parameter for each in (*used, *newcomers)]

    # -------------------------------------------------------------------- abandoned: backward has failed

    def abandon(self) -> None:
        """Send what the other ranks wait for, in the order of :meth:`launch_rest`, without a gradient.

        Communication hooks run, too, on buckets of zeros: what they send is what the other ranks' hooks wait for.
        """
        self._become(RoundPhase.ABANDONED)
        setup, rest = self._setup, list(self.buckets)[self.next_bucket :]
        for bucket in rest:
            blank = self._make(bucket.blank)
            if setup.hooks.hooks:
                self._launch_blank_through_hooks(bucket, blank)
                continue
            if bucket is self.buckets.report_bucket:
                self.abandoned_row = blank[bucket.planned.layout.numel :]
                self._write_report(self.abandoned_row, failed=True)
            self._launch_abandoned(blank)
        if setup.hooks.hooks and not setup.collectives.follows_stream(setup.collectives.device):
            self.wait_abandoned()
        setup.buffers.send_large(failed=True)
        if setup.transport.own_row is not None:
            self.abandoned_row = setup.transport.own_row
            self._write_report(self.abandoned_row, failed=True)
            self._launch_abandoned(setup.transport.own_row)

    def _launch_abandoned(self, tensor: Tensor) -> None:
        self._pending.append(self._setup.collectives.all_reduce(tensor, f"round {self.number}, abandoned"))

    def _launch_blank_through_hooks(self, bucket: GradientBucket, blank: Tensor) -> None:
        setup = self._setup
        if not setup.collectives.follows_stream(blank.device):  # see _wait_for_hooks
            self.wait_abandoned()
        last = bucket.index == len(self.buckets) - 1
        pending = setup.hooks.send(
            BlankBucket(bucket), blank, last, setup.collectives, self._divide_factor, setup.is_planned
        )
        self._pending.append(pending)

    def wait_abandoned(self) -> None:
        """Return when all that an abandoned round has sent has arrived."""
        while self._pending:
            try:
                self._pending.pop(0).wait()
            except CommunicationError:
                raise
            except Exception as error:  # of a communication hook: its round has failed already
                logging.getLogger("lockstep").debug("round %d, abandoned: %r", self.number, error)

    def _make(self, make: Callable[[], Tensor]) -> Tensor:
        """New memory; where there is none left, what has been sent is waited for first, and given back."""
        try:
            return make()
        except (RuntimeError, MemoryError, OSError):
            self.wait_abandoned()
            return make()
