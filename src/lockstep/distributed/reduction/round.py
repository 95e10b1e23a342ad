"""A round: one backward pass of one replicated module, as it is reduced.

It is made when a backward pass that synchronises reaches the module, and dropped when the pass is over. Meanwhile it
knows what has come, what has left, and what is on its way; :class:`RoundPhase` says what may follow. When backward
fails, the round is abandoned: this rank sends all that the others wait for, without a gradient, and a report that says
so. An abandoned round is kept until what it has sent has arrived; nobody waits for that, unless communication hooks
have to be ordered by waiting.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from lockstep.distributed.buffers import BufferSync
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.reduction.buckets import BlankBucket, BucketsInUse, GradientBucket
from lockstep.distributed.reduction.comm_hooks import HookChain, Waitable
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.plan import Kind
from lockstep.distributed.reduction.report import RankStatus, Report, Weight
from lockstep.distributed.reduction.report_transport import ReportTransport
from lockstep.distributed.reduction.scheduler import GroupScheduler
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


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """What all rounds of one plan have in common: what they go through."""

    collectives: Collectives
    scheduler: GroupScheduler
    hooks: HookChain
    buckets: BucketsInUse
    transport: ReportTransport
    buffers: BufferSync
    is_planned: bool
    """Whether the plan has been made anew after the first round."""


class Round:
    """Reduces the gradients of one backward pass, together with the same round of the other ranks."""

    def __init__(
        self,
        number: int,
        wiring: Wiring,
        divide_factor: float,
        used: bytearray,
        describe: Callable[[bool], tuple[RankStatus, Weight]],
        launches_early: bool,
    ) -> None:
        self.number, self.phase = number, RoundPhase.FILLING
        self.buckets = wiring.buckets
        self.next_bucket = 0
        """The first bucket that has not left."""
        self.late: dict[int, None] = {}
        """Parameters whose gradient came after its bucket had left, or has no bucket."""
        self.graphs: list[tuple[ManagedParameter, Tensor]] = []
        """Gradients that backward made with ``create_graph=True``."""
        self.used = used
        """Has a one for each parameter that has had a gradient on this rank since the last round; of those that come in
        time for their bucket, only from :meth:`end_filling` on."""
        self._wiring, self._divide_factor, self._launches_early = wiring, divide_factor, launches_early
        self._describe = describe
        self._expected = b""
        self._awaited = bytearray()
        self._undefined: list[int] = []
        self._pending: list[Waitable] = []

    @property
    def has_begun(self) -> bool:
        """Whether the other ranks may have had anything of this round."""
        return self.next_bucket > 0 or self.phase is not RoundPhase.FILLING

    def _become(self, phase: RoundPhase) -> None:
        if not self.phase.may_become(phase):
            raise RuntimeError(f"round {self.number} is {self.phase.name} and becomes {phase.name}; a bug in lockstep")
        self.phase = phase

    # ------------------------------------------------------------------------ filling: gradients come

    def open(self, expected: bytes, awaited: bytearray) -> None:
        """Begin: ``expected`` are the parameters whose gradients buckets wait for; ``awaited``, which hooks may write,
        those that have not come."""
        self._expected, self._awaited = expected, awaited
        for bucket in self.buckets:
            bucket.open()
        # What has piled up without a place in the plan may not come again before the end of this backward.
        for index in self.buckets.unbucketed:
            if self.used[index]:
                self.late[index] = None

    def mark_gradient_ready(self, index: int) -> None:
        """Count a gradient that the hooks have not counted: the first of a pass, or one that may be late."""
        self.used[index] = 1
        bucket = self.buckets.of[index]
        if bucket is None or bucket.index < self.next_bucket:
            self.late[index] = None
        elif self._awaited[index]:
            self._awaited[index] = 0
            bucket.missing -= 1
            if not bucket.missing:
                self.launch_ready_buckets()

    def mark_unhooked(self, index: int) -> None:
        """Count the gradient of a parameter that had lost its hook."""
        self.used[index] = 1
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
        hooks = self._wiring.hooks
        if not (self._launches_early and self._wiring.scheduler.exclusive):
            return False
        if not hooks.hooks or bucket.members[0].spec.device.type != "cpu":
            return True
        return not hooks.may_wait and all(pending.done() for pending in self._pending)

    def _launch_bucket(self, bucket: GradientBucket) -> None:
        wiring = self._wiring
        with wiring.collectives.phases.phase("collect"):
            scale = 1.0 if wiring.hooks.hooks else 1.0 / self._divide_factor
            # The report's row must not be scaled, and sparse gradients are made anew when they are.
            at_once = bucket is self.buckets.report_bucket or bucket.planned.kind is Kind.SPARSE
            copied = bucket.copy_in(scale if at_once else 1.0, self.used if bucket.missing else None)
            self.graphs += copied.graphs
            self._undefined += copied.undefined
            if bucket is self.buckets.report_bucket:
                self._write_report(bucket.row)
        what = f"bucket {bucket.index + 1} of {len(self.buckets)}, round {self.number}"
        if wiring.hooks.hooks:
            pending = self._launch_through_hooks(bucket, copied.flat, what)
        else:
            pending = wiring.collectives.all_reduce(copied.flat, what, 1.0 if at_once else scale)
        self._pending.append(pending)
        self.next_bucket += 1

    def _launch_through_hooks(self, bucket: GradientBucket, flat: Tensor, what: str) -> Waitable:
        wiring, collectives = self._wiring, self._wiring.collectives
        self._wait_for_hooks(flat.device)
        begun = collectives.begun()
        try:
            with collectives.phases.phase("hook", what):
                last = bucket.index == len(self.buckets) - 1
                return wiring.hooks.send(bucket, flat, last, collectives, self._divide_factor, wiring.is_planned)
        except BaseException as error:
            if begun is None or collectives.begun() != begun:
                gist = f"{type(error).__name__}: {error}"
                wiring.scheduler.lose(f"a communication hook raised {gist}, after it had begun to communicate")
            raise

    def _wait_for_hooks(self, device: torch.device) -> None:
        """Where hooks are not ordered by a stream, what one sends from a callback must not meet what comes next."""
        if device.type == "cpu":
            while self._pending:
                self._pending.pop(0).wait()

    # ------------------------------------------------------------- finalizing: backward has ended

    def end_filling(self) -> None:
        """Backward has ended: what has not come counts as zero."""
        self._become(RoundPhase.FINALIZING)
        # Bytes that differ are of gradients that have come; as whole numbers, all of them at once.
        came = int.from_bytes(self._expected, "little") ^ int.from_bytes(self._awaited, "little")
        self.used[:] = (int.from_bytes(self.used, "little") | came).to_bytes(len(self.used), "little")

    def launch_rest(self) -> None:
        """Launch all that is left: buckets, buffers that do not ride in the report, and the report."""
        wiring = self._wiring
        wiring.buffers.prepare_large()
        while self.next_bucket < len(self.buckets):
            self._launch_bucket(self.buckets[self.next_bucket])
        if wiring.hooks.hooks:
            self._wait_for_hooks(wiring.collectives.device)
        wiring.buffers.send_large()
        row = wiring.transport.own_row
        if row is not None:
            self._write_report(row)
            self._pending.append(wiring.collectives.all_reduce(row, f"report, round {self.number}"))

    def _write_report(self, row: Tensor, failed: bool = False) -> None:
        for index in self._undefined:  # hooks have run, but there was no gradient
            self.used[index] = 0
        status, weight = self._describe(failed)
        self._wiring.transport.write(row, self.used, list(self.late), status, weight)

    def wait(self) -> None:
        """Return when all has arrived."""
        with self._wiring.collectives.phases.phase("wait"):
            for pending in self._pending:
                pending.wait()
        self._become(RoundPhase.REDUCED)

    @property
    def report_row(self) -> Tensor:
        """The report's place."""
        bucket, row = self.buckets.report_bucket, self._wiring.transport.own_row
        if bucket is not None:
            return bucket.row
        assert row is not None
        return row

    def copy_out(self, report: Report, factor: float) -> None:
        """Give the parameters their reduced gradients, times ``factor``."""
        for bucket in self.buckets:
            if factor != 1:
                bucket.rescale(factor)
            bucket.copy_out(report)

    # -------------------------------------------------------------------- abandoned: backward has failed

    def abandon(self) -> None:
        """Send what the other ranks wait for, in the order of :meth:`launch_rest`, without a gradient.

        Communication hooks run, too, on buckets of zeros: what they send is what the other ranks' hooks wait for.
        """
        self._become(RoundPhase.ABANDONED)
        wiring, rest = self._wiring, list(self.buckets)[self.next_bucket :]
        for bucket in rest:
            blank = self._make(bucket.blank)
            if wiring.hooks.hooks:
                self._launch_blank_through_hooks(bucket, blank)
                continue
            if bucket is self.buckets.report_bucket:
                self._write_report(blank[bucket.planned.layout.numel :], failed=True)
            self._launch_abandoned(blank)
        if wiring.hooks.hooks and wiring.collectives.device.type == "cpu":
            self.wait_abandoned()
        wiring.buffers.send_large(failed=True)
        if wiring.transport.own_row is not None:
            self._write_report(wiring.transport.own_row, failed=True)
            self._launch_abandoned(wiring.transport.own_row)

    def _launch_abandoned(self, tensor: Tensor) -> None:
        self._pending.append(self._wiring.collectives.all_reduce(tensor, f"round {self.number}, abandoned"))

    def _launch_blank_through_hooks(self, bucket: GradientBucket, blank: Tensor) -> None:
        wiring = self._wiring
        if blank.device.type == "cpu":  # see _wait_for_hooks
            self.wait_abandoned()
        last = bucket.index == len(self.buckets) - 1
        pending = wiring.hooks.send(
            BlankBucket(bucket), blank, last, wiring.collectives, self._divide_factor, wiring.is_planned
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


def order_of_hooks(
    buckets: BucketsInUse, parameters: Sequence[ManagedParameter], report: Report
) -> list[ManagedParameter]:
    """The parameters that any rank has used, in an order that is the same on all ranks: the plan's."""
    placed = [index for bucket in buckets for index in bucket.planned.indices]
    return [parameters[index] for index in (*placed, *buckets.unbucketed) if report.uses(index)]
