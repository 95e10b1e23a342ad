"""A round: the reduction of one backward pass of one replicated module.

It is made when a backward pass that synchronises reaches the module, and dropped when the pass is over. Meanwhile it
records which gradients have come, and which buckets have been sent or have arrived.

There is one way through a round. A rank whose backward has failed, or that has nothing to give, sends the same messages
as the others, with zeros; only its status says so. Its round is kept until its messages have arrived: the program does
not wait for that, unless calls of the communication hook have to wait for each other.
"""

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep._base.texts import LONGEST_HEADLINE, shortened
from lockstep.distributed.comm.half_precision import MeanInHalf, begin_mean, gather_all
from lockstep.distributed.comm.rows import SumOfRows
from lockstep.distributed.reduction.autograd.gradients import GradientSnapshot, KeptGradient, find_kept, write_back
from lockstep.distributed.reduction.autograd.graph import has_means
from lockstep.distributed.reduction.buckets.bucket import NOTHING, Bucket, CopiedIn
from lockstep.distributed.reduction.buckets.comm_hooks import Waitable
from lockstep.distributed.reduction.buckets.gradient_buckets import reduce_late
from lockstep.distributed.reduction.buckets.plan import BucketKind
from lockstep.distributed.reduction.common_state import CommonState
from lockstep.distributed.reduction.module.managed_parameters import ManagedParameter
from lockstep.distributed.reduction.rank_state import RankState
from lockstep.distributed.reduction.report.status import Part, Status, Sums
from lockstep.distributed.reduction.report.verdict import Verdict, judge, judge_loops
from lockstep.distributed.reduction.report_transport import GatheredStatuses
from lockstep.errors import AgreementError, CommunicationError, OptionError, PeerError


class Round:
    """Reduces the gradients of one backward pass, together with the same round of the other ranks."""

    def __init__(self, number: int, common: CommonState, rank_state: RankState, before: GradientSnapshot) -> None:
        """``rank_state``: what this rank has accumulated; ``before``: the gradients before the pass."""
        self.number = number
        self.status: Status | None = None
        """What this rank says in the report, once backward has ended or failed."""
        self.has_failed = False
        """True if this rank has failed, and sends zeros from then on."""
        self.is_joined = False
        """True if this rank has run out of batches in ``Join``."""
        self.is_applied = False
        """True if the parameters have their gradients."""
        self.buckets = common.buckets
        self.next_bucket = 0
        """The first bucket that has not been sent."""
        self.late: dict[int, None] = {}
        """Parameters whose gradient came after its bucket had left, or has no bucket."""
        self._common = common
        self._rank_state = rank_state
        self._used = rank_state.contribution.used
        self._row = NOTHING  # in which the report travels
        self._behind = NOTHING  # what is behind the last bucket: the report, or small buffers alone
        self._statuses: GatheredStatuses | None = None  # asked for by this rank, which has failed
        self._decisions = common.decisions
        self._loop = self._decisions.innermost  # which may end before the report of a failed round is read
        self._divide_factor = common.gradient_divide_factor
        self._has_large_buffers = False  # buffers that are not in the report
        self._undefined: list[int] = []
        self._pending: list[Waitable] = []
        self._in_two_steps: list[MeanInHalf | SumOfRows] = []  # buckets in half precision, and those with rows
        self._begun: float | None = None  # when the first collective has begun
        scale = 1.0 if common.hook.hook else 1.0 / self._divide_factor  # a hook divides itself, as PyTorch's do
        for bucket in self.buckets.in_order:
            bucket.open(scale)
        self._kept = [] if before.is_empty else self._find_kept(before)
        self.moved_triggers: dict[int, int] = {}
        """The triggers that came too early, by the number of their parameter, and the parameters to which they move."""

    def _find_kept(self, before: GradientSnapshot) -> list[KeptGradient]:
        kept = find_kept(before, self.buckets.not_given(before.grads), self.buckets.storages())
        for each in kept:
            bucket = self.buckets.of[each.position] if each.position < len(self.buckets.of) else None
            if bucket is not None:
                bucket.reduce_copies()
        return kept

    @property
    def has_begun(self) -> bool:
        """True if anything of this round may have been sent to the other ranks."""
        return self.next_bucket > 0 or self.status is not None

    # ------------------------------------------------------------------------ filling: gradients come

    def bucket_triggered(self, index: int, snapshot: GradientSnapshot) -> None:
        """Handle the gradient of the parameter that is expected to be the last one of its bucket: if all gradients have
        come since the ``snapshot``, launch what is full; else the trigger is to move."""
        bucket = self.buckets.of[index]
        if bucket is None or bucket.is_full:
            return  # it has come again
        missing = bucket.note_gradients(snapshot)
        if missing is not None:
            self.moved_triggers[index] = missing
        else:
            self._launch_ready_buckets()

    def with_taken(self, came: Sequence[int]) -> Sequence[int]:
        """Return the gradients that ``came``, and those that were taken before the pass has ended."""
        taken = [index for bucket in self.buckets.in_order[: self.next_bucket] for index in bucket.planned.indices]
        return list({*taken, *came}) if taken else came

    def _launch_ready_buckets(self) -> None:
        """Launch all full buckets that are next in the order, without waiting.

        A bucket that has to wait for the end of backward, such as the one with the report, is not launched.
        """
        while self.next_bucket < self.buckets.early:
            bucket = self.buckets.in_order[self.next_bucket]
            if not bucket.is_full or not self._may_launch(bucket):
                return
            with torch.no_grad():
                self._launch_bucket(bucket, None)

    def _may_launch(self, bucket: Bucket) -> bool:
        # Ranks that use different parameters reach a mean inside of the pass at different times.
        if not self._common.is_ready or has_means():
            return False
        if bucket.has_stream and not bucket.is_on_current_stream():
            return False
        if not self._common.hook.hook or self._common.collectives.follows_stream(bucket.members[0].spec.device):
            return True
        return all(pending.done() for pending in self._pending)  # else an earlier call has to be waited for

    def _launch_bucket(self, bucket: Bucket, used: Sequence[int] | None, blocking: bool = False) -> None:
        """Send a bucket; zeros in place of its gradients if this rank has failed.

        ``used``: for each parameter, True if it has got a gradient since the last round; None: all of the bucket have.
        With ``blocking`` nothing else is launched.
        """
        common = self._common
        with common.collectives.phases.phase("collect"):
            copied = self._zeros_of(bucket) if self.has_failed else bucket.copy_in(used)
            self._undefined.extend(copied.undefined)
            if bucket is self.buckets.report_bucket:
                self._behind = copied.row
                if common.transport.own_row is None:
                    self._write_report(copied.row)
                else:
                    assert self.status is not None
                    common.transport.write_buffers(copied.row, self.status)
        what = self.buckets.labels[bucket.index]
        if common.hook.hook:
            self._send_through_hook(bucket, copied.flat, what)
        elif bucket.half is not None or copied.flat.is_sparse:
            self._begin_first_step(bucket, copied.flat, what, blocking)
        else:
            self._all_reduce(copied.flat, what, copied.factor, blocking)
        self.next_bucket += 1

    def _zeros_of(self, bucket: Bucket) -> CopiedIn:
        """Return zeros in new memory, as of :meth:`Bucket.copy_in`; the gradients stay where they are."""
        try:
            return bucket.zeros()
        except (RuntimeError, MemoryError, OSError):  # there is no memory: that of sent buckets is freed when all are
            self._wait_for_sent()
            return bucket.zeros()

    def _begin_first_step(self, bucket: Bucket, flat: Tensor, what: str, blocking: bool = False) -> None:
        """Begin to reduce a bucket that takes a second step once all ranks know that none has failed; ``flat``: its
        gradients."""
        if self._begun is None:
            self._begun = time.perf_counter()
        ranks, what = self._common.collectives, f"{what}, round {self.number}"
        both: MeanInHalf | SumOfRows
        if bucket.planned.kind is BucketKind.SPARSE:
            both = SumOfRows(ranks, flat, bucket.is_dense, what, bucket.accept)
        else:
            assert bucket.half is not None
            both = begin_mean(ranks, bucket.half, flat, what, ranks.world / self._divide_factor, blocking=blocking)
        self._in_two_steps.append(both)
        self._pending.append(both)

    def _all_reduce(self, tensor: Tensor, what: str, factor: float = 1.0, blocking: bool = False) -> None:
        """Begin to sum a tensor, times ``factor``, over the ranks."""
        if self._begun is None:
            self._begun = time.perf_counter()
        what = f"{what}, round {self.number}"
        self._pending.append(self._common.collectives.all_reduce(tensor, what, factor, blocking=blocking))

    # ------------------------------------------------------------- finalizing: backward has ended

    def end_filling(self) -> None:
        """Note that backward has ended: gradients that have not come count as zero."""
        for bucket in self.buckets.in_order[: self.next_bucket]:
            if bucket.has_gradients:
                late = [member.index for member in bucket.members if member.parameter.grad is not None]
                self.late.update(dict.fromkeys(late))
        # A parameter that no rank has used so far is in no bucket; its first gradient is reduced on its own.
        for index in self.buckets.unbucketed:
            if self._common.parameters[index].parameter.grad is None:
                self._used[index] = 0  # set to None meanwhile
            elif self._used[index]:
                self.late[index] = None

    def launch_rest(self, status: Status) -> None:
        """Launch the remaining buckets, the buffers that are not in the report, and the report with the ``status``."""
        self.status, self.is_joined = status, status.part is Part.JOINED
        common, row = self._common, self._common.transport.own_row
        has_large = self._has_large_buffers = common.buffers.prepare_large(zeros=self.has_failed)
        used = self._used if 0 in self._used else None
        # Nothing is left to do beside the last message, so this thread moves it, and wakes no other one.
        for bucket in self.buckets.in_order[self.next_bucket :]:
            is_last = bucket is self.buckets.report_bucket and not has_large and row is None
            self._launch_bucket(bucket, used, blocking=is_last and not self.has_failed)
        if common.hook.hook:
            self._order_hook_calls(common.device)
        if has_large:
            common.buffers.send_large()
        if row is not None:
            self._send_own(row)

    def fail(self, status: Status) -> None:
        """Send what the other ranks wait for, with zeros, and the ``status``, without waiting: this rank has failed.

        A communication hook runs on buckets of zeros, because those of the other ranks wait for its messages.
        """
        self.has_failed = True
        self.launch_rest(status)
        self._statuses = self._gather_statuses()  # as the report tells all ranks
        if status.part is Part.FAILED:  # the error may end the process
            self._statuses.linger()

    def _send_own(self, row: Tensor) -> None:
        """Send the report if it does not travel behind a bucket."""
        assert self.status is not None
        transport = self._common.transport
        self._write_report(row)
        if transport.own_buffers is not None:
            transport.write_buffers(transport.own_buffers, self.status)
            self._all_reduce(transport.own_buffers, "small buffers")
        self._all_reduce(row, "report", blocking=not self.has_failed)

    def _write_report(self, row: Tensor) -> None:
        assert self.status is not None
        self._row = row
        for index in self._undefined:  # hooks have run, but there was no gradient
            self._used[index] = 0
        self._common.transport.write(row, self._used, list(self.late), self.status)

    def wait(self) -> None:
        """Return when all messages have arrived."""
        collectives, since = self._common.collectives, time.perf_counter()
        with collectives.phases.phase("wait"):
            for pending in self._pending:
                pending.wait()
        collectives.comm_stats.waited(since, time.perf_counter(), self._begun)

    # -------------------------------------------------------------- reduced: the verdict is carried out

    def conclude(self, *, lists_used: bool) -> Sequence[Parameter]:
        """Read the report, and give the parameters their gradients.

        Returns the parameters that any rank has used, in an order that is the same on all, if ``lists_used``. Raises on
        every rank if the ranks were not in the same round.
        """
        common, transport = self._common, self._common.transport
        report = transport.read(self._row)
        if report.sums is not None and self._names_ranks(report.sums):
            report = report._replace(statuses=self._wait_for_statuses(report.sums))
        ranks = common.collectives
        verdict = judge(report, ranks.rank, ranks.global_ranks, common.gradient_divide_factor)
        added = () if verdict.is_usual and self._decisions.is_default else self._agree(verdict)
        if added is None:
            return ()
        common.drift.heard(verdict.some_told)
        try:
            self._copy_out(verdict, added)
            if self._kept:
                write_back(self._kept)
        except BaseException:  # of a late gradient, on every rank
            self._drop()
            raise
        if self._has_large_buffers:
            common.buffers.finish_large()
        if transport.has_buffers and not verdict.changed:  # those that go with the gradients
            alone = None if transport.splits else transport.own_row
            transport.take_buffers(self._behind if alone is None else alone)
        used = self._parameters_in_order(verdict, added) if lists_used else ()
        if verdict.changed:
            if common.renew():
                self._rank_state.renumber()
                # The hook of a parameter that has left would step values which its successor may share (weight_norm).
                there = {id(each.parameter) for each in common.parameters}
                used = [parameter for parameter in used if id(parameter) in there]
        elif verdict.late or common.plan.observes:
            common.adapt(verdict)
        if verdict.warning:
            common.warn_once(verdict.warning)
        return used

    def _names_ranks(self, sums: Sums) -> bool:
        """Return True if the verdict names ranks; the same on all of them."""
        return sums.name_ranks or self._decisions.innermost.needs_names(sums.ends, sums.ends == sums.ranks)

    def _wait_for_statuses(self, sums: Sums) -> Sequence[Status]:
        """Gather the status of each rank; of a rank that has failed and left, the sums have the number."""
        try:
            return self._gather_statuses().wait()
        except CommunicationError:
            if not sums.failed:
                raise
            return ()

    def _gather_statuses(self) -> GatheredStatuses:
        """Begin to gather the status of each rank, after the report, which has told all ranks that it is needed."""
        assert self.status is not None
        return GatheredStatuses(self._common.collectives, self.status, f"statuses, round {self.number}")

    def _agree(self, verdict: Verdict) -> Sequence[ManagedParameter] | None:
        """Carry out the agreement that the verdict asks for, and compare everything if optimizers have left something
        else on some rank; return new parameters of which some rank has a gradient, or None if the batch is left out.

        Raises as :meth:`conclude` does.
        """
        common = self._common
        self._decisions.update(verdict.loop, self._decisions.batch)
        try:
            if verdict.error is not None:
                raise verdict.error.exception()
            if verdict.skip:
                self._drop()
                return None
            if verdict.drift:
                common.drift.examine(takes_part=not self.is_joined)
            return common.agree_anew() if verdict.changed else ()
        except (PeerError, AgreementError, OptionError):
            self._drop()
            self._decisions.note_failure(at_backward=verdict.failed)
            raise

    def _drop(self) -> None:
        """Drop all gradients and buffers of the round: it has failed, or the batch is left out."""
        self._common.buffers.drop_large()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Let no parameter have a gradient."""
        kept, self._kept = self._kept, []
        self._common.members.drop_gradients(kept)

    def _copy_out(self, verdict: Verdict, added: Sequence[ManagedParameter]) -> None:
        """Give the parameters their reduced gradients, times the verdict's factor: from the buckets, and late ones.

        ``added``: parameters on which the ranks have just agreed, and which have no bucket yet.
        """
        if self._in_two_steps:
            self._take_second_steps()
        factor, overdue = verdict.factor, added
        if verdict.late:
            overdue = [*map(self._common.parameters.__getitem__, verdict.late), *added]
        late = reduce_late(overdue, self._common.collectives, self._divide_factor) if overdue else ()
        for bucket in self.buckets.in_order:
            if factor != 1:
                bucket.multiply(factor)
            bucket.copy_out(verdict.used)
        for each in late:
            each.copy_out(factor)
        self.is_applied = True

    def _take_second_steps(self) -> None:
        """Complete the buckets that have only begun so far, on all ranks."""
        collectives = self._common.collectives
        with collectives.phases.phase("wait"):
            gather_all(self._in_two_steps)
        collectives.comm_stats.has_waited(time.perf_counter())

    def _parameters_in_order(self, verdict: Verdict, added: Sequence[ManagedParameter]) -> list[Parameter]:
        """Return the parameters that any rank has used, in an order that is the same on all ranks: the plan's."""
        placed = [index for bucket in self.buckets.in_order for index in bucket.planned.indices]
        used = [self._common.parameters[i] for i in (*placed, *self.buckets.unbucketed) if verdict.uses(i)]
        return [each.parameter for each in (*used, *added)]

    # -------------------------------------------------------------------- failed: nobody has waited

    def finish_failed(self) -> None:
        """Return when all messages of a round in which this rank has failed have arrived, and its loop has read the
        report."""
        self._wait_for_sent()
        self._common.buffers.drop_large()
        statuses = () if self._statuses is None else self._statuses.wait()
        report = self._common.transport.read_earlier(self._row)
        if report is not None and report.sums is not None:
            assert self.status is not None
            # This rank has raised its own error; but whether the loop ends or stops is what all ranks have read here.
            loops = judge_loops(report.sums, statuses)
            self._decisions.update(loops, self.status.batch, self._loop, failed=True)

    # ----------------------------------------------------------------- what has been sent, and not waited for yet

    def _send_through_hook(self, bucket: Bucket, flat: Tensor, what: str) -> None:
        """Let the communication hook reduce a bucket, whose gradients are in ``flat``."""
        self._order_hook_calls(flat.device)
        collectives, begun = self._common.collectives, self._common.collectives.begun()
        try:
            with collectives.phases.phase("hook", f"{what}, round {self.number}"):
                is_last, common = bucket.index == len(self.buckets.in_order) - 1, self._common
                accept = bucket.accept if not self.has_failed else lambda _: None
                divisor, planned = self._divide_factor, common.is_planned
                sent = common.hook.send(bucket, flat, is_last, collectives, divisor, accept=accept, planned=planned)
                self._pending.append(sent)
        except BaseException as error:
            if begun is None or collectives.begun() != begun:
                gist = shortened(f"{type(error).__name__}: {error}", LONGEST_HEADLINE)
                collectives.lose(f"a communication hook raised {gist}, after it had begun to communicate")
            raise

    def _order_hook_calls(self, device: torch.device) -> None:
        """Wait for the calls of the hook so far, unless a stream orders them: a collective that a hook begins in a
        callback must not overtake one of the next call."""
        if not self._common.collectives.follows_stream(device):
            self._wait_for_sent()

    def _wait_for_sent(self) -> None:
        while self._pending:
            try:
                self._pending.pop(0).wait()
            except CommunicationError:
                raise
            except Exception as error:  # of a communication hook
                if not self.has_failed:
                    raise
                logging.getLogger("lockstep").debug("round %d, in which this rank has failed: %r", self.number, error)
