"""The schedule: parameter hooks -> buckets -> collectives -> gradients.

A **round** is what one backward pass of one replicated module sends. Its life:

1. *open* - the first gradient of the module opens it (``mark_gradient_ready``). Only now is it decided whether this
   backward synchronises; if not, parameters are marked as touched, and their gradients pile up.
2. *send* - each gradient that arrives counts down its bucket. A full bucket leaves at once if all before it have left:
   every rank sends the same buckets in the same order, whatever order its gradients come in.
3. *finish* - the engine's final callback (``scheduler.py``) sends the buckets that never filled up: parameters without
   a gradient count as zero, or as what they had accumulated. The last bucket leaves now, and carries the report: who
   used which parameter, the round's number, failures, weights, buffers (``report_transport.py``). Then all are waited
   for.
4. *late* - gradients that came after their bucket had left (a layer that reentrant checkpointing runs twice), or had no
   place in the plan (unfrozen, used for the first time), are in everybody's report, so every rank joins in reducing
   them now.
5. *hand out* - parameters that any rank used get the mean, all others keep what they had; buffers are assigned; hooks
   that wait for reduced gradients run.

The plan adapts to what the ranks use (``adaptation.py``): what is frozen or never used is never sent, without a flag.
If other parameters stand in the module on any rank, all choose anew what they replicate (``membership.py``), and reduce
the gradients of what is new in the same round.

Lifetimes: the reducer lives for as long as any of its parameters, whose hooks hold it, and has the module with it.
Gradients live in buckets (``buckets.py``).
"""

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.distributed.agreement import Description, Line, agree
from lockstep.distributed.buffers import BufferSync
from lockstep.distributed.collectives import Collectives, plain_memory
from lockstep.distributed.reduction.abandoned import AbandonedRound
from lockstep.distributed.reduction.adaptation import AdaptivePlan
from lockstep.distributed.reduction.backward import Reach
from lockstep.distributed.reduction.buckets import GradientBucket, ManagedParameter
from lockstep.distributed.reduction.buckets_in_use import BucketsInUse
from lockstep.distributed.reduction.comm_hooks import Hook, HookChain, Waitable, check_hook, name_of
from lockstep.distributed.reduction.drift import Drift, DriftWatch, warn_of_drift
from lockstep.distributed.reduction.late import reduce_again, reduce_late
from lockstep.distributed.reduction.parameter_hooks import is_marked, run_held_hooks, run_marked, take_over_optimizers
from lockstep.distributed.reduction.passes import PassLog
from lockstep.distributed.reduction.plan import Kind, ReductionPlan
from lockstep.distributed.reduction.report import RankStatus, Report, Weight, check_ranks, mean_factor, round_code
from lockstep.distributed.reduction.report_transport import Reporting
from lockstep.distributed.reduction.scheduler import GroupScheduler
from lockstep.distributed.reduction.second_order import with_graphs
from lockstep.distributed.reduction.usage import Usage
from lockstep.distributed.reduction.weights import Weights
from lockstep.errors import AgreementError, CommunicationError, OptionError, PeerError


class Members(Protocol):
    """The parameters of a reducer, as they come and go."""

    @property
    def parameters(self) -> list[ManagedParameter]:
        """All of them, in their order."""

    @property
    def trained(self) -> list[int]:
        """Those, by number, that are trained on any rank."""

    @property
    def last(self) -> list[int]:
        """Those, by number, whose gradients leave last."""

    def changed(self) -> bool:
        """Whether there are others on this rank now, by a look at references."""

    def are_lent(self) -> bool:
        """Whether other tensors stand in for them at the moment, by a look at one."""

    def welcome(self, reducer: "Reducer") -> tuple[Sequence[ManagedParameter], Collection[int]]:
        """Hook those that are new on this rank, and return them, numbered as they will be, and the identities of those
        that have gone."""

    def hook_again(self, reducer: "Reducer", idle: Sequence[int]) -> list[int]:
        """Hook those among ``idle`` that had lost their hook; returns which of them have a gradient."""

    def renew(self, reducer: "Reducer", collectives: Collectives) -> list[ManagedParameter]:
        """Agree with all ranks on which there are; returns the new ones that any rank has a gradient of."""


class Reducer:
    """Synchronises the gradients of one replicated module.

    Communicates, in each synchronising backward: one all-reduce for each bucket; nothing else, but what the head of
    this file lists as late, once, or large.
    """

    def __init__(
        self,
        members: Members,
        collectives: Collectives,
        scheduler: GroupScheduler,
        buffers: BufferSync,
        caps: Sequence[int],
    ) -> None:
        self._members = weakref.ref(members)  # they lead to modules, which hold the reducer
        self.collectives, self.buffers, self._caps = collectives, buffers, tuple(caps)
        self.hooks = HookChain()
        self._hooks_agreed = False
        self._offered: list[Hook] = []  # registered since, and not in use yet
        self.requires_sync = True
        self.round = 0
        self.divisor = float(collectives.world)
        """What sums are divided by: the world size, but where joined ranks do not count."""
        self.scheduler = scheduler
        self.before_round: list[Callable[[], object]] = []
        """What the ranks have to do before the next round opens, once."""
        self._lock = threading.RLock()
        self.open = False
        """Whether a backward pass under way has reached the module."""
        self.reducing = False
        """Whether it synchronises."""
        self._begun = False  # something of this round has been sent
        self._next = 0
        self._pending: list[Waitable] = []
        self._late: dict[int, None] = {}
        self._marked: list[int] = []  # parameters whose gradients a compiled backward pass has left
        self._holds_hooks = False  # users have hooks on parameters
        self._graphs: list[tuple[ManagedParameter, Tensor]] = []
        self._creates_graph = False
        self._weights = Weights()
        self.usage = Usage()
        self.error = ""
        """The last error of a round, for logging."""
        self.passes = PassLog()
        """What tells this rank's backward passes from others."""
        self._passive = False  # takes part in this round without a backward pass of its own
        self._joined = False
        self._abandoned: AbandonedRound | None = None
        self._has_failed = False  # in the last round
        self._moved = False  # this rank has other parameters or buffers than were agreed on
        self.retired = False
        """Whether another replication has taken over all parameters."""
        self._take_parameters(members)

    def _take_parameters(self, members: Members) -> None:
        """Make everything that depends on which parameters there are."""
        self._newcomers: Sequence[ManagedParameter] = ()  # which the ranks have not agreed on yet
        self.parameters = members.parameters
        for parameter in self.parameters:
            parameter.graphs = self._graphs
        self._plan = AdaptivePlan(self.parameters, members.trained, self._caps, members.last, self.collectives)
        self._touched = bytearray(len(self.parameters))  # had a gradient since the last round
        self._arrived = bytearray(len(self.parameters))  # in this round, in time for their bucket
        self._reporting = Reporting(len(self.parameters), self.collectives, self.buffers)
        self._drift = DriftWatch(self.parameters, self.collectives.global_rank)
        self._weights.watch(self.parameters)
        self._make_buckets()

    # ------------------------------------------------------------------------------------ plan

    @property
    def plan(self) -> ReductionPlan:
        """The buckets, as they are now."""
        return self._plan.current

    @property
    def is_planned(self) -> bool:
        """Whether the plan has been made anew after the first round."""
        return self._plan.arrivals is None

    def restore(self, round_number: int, plan: str) -> None:
        """Go on where an earlier run was; all ranks must."""
        self.round = round_number
        before = self.plan
        self._plan.restore(plan)
        if self.plan != before:
            self._make_buckets()
            self.before_round.append(lambda: agree(Description([Line("plan", plan)]), [], self.collectives))

    def register_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Add a communication hook; the report travels on its own from now on.

        After the first round, it takes part when all ranks have it: that is agreed on at the end of the next one.
        """
        check_hook(hook)
        if self._hooks_agreed:
            self._offered.append(Hook(state, hook))
        else:
            self.hooks.register(state, hook)
            self._make_buckets()

    def _agree_on_hooks(self) -> None:
        """Compare the communication hooks of all ranks: without one, a rank would send what the others do not."""
        chain = [*self.hooks.hooks, *self._offered]
        lines = [Line("number of communication hooks", str(len(chain)))]
        lines += [Line(f"communication hook {number}", name_of(hook.call)) for number, hook in enumerate(chain)]
        agree(Description(lines), [], self.collectives)
        for hook in self._offered:
            self.hooks.register(hook.state, hook.call)
        self._hooks_agreed = True
        self._offered.clear()

    def _make_buckets(self) -> None:
        """Build what the plan says."""
        hooked = bool(self.hooks.hooks)
        empty = plain_memory if hooked else self.collectives.empty  # some hooks resize what they are given
        self._buckets = BucketsInUse(self._plan, self.parameters, self._reporting, hooked, empty)
        self._bucket_of = self._buckets.of

    # ------------------------------------------------------------------------------------ open

    def mark_gradient_ready(self, index: int) -> None:
        """Autograd has accumulated the gradient of the parameter with that number. Runs for every parameter."""
        self._touched[index] = 1
        if self.open and not self.reducing:
            return
        with self._lock:
            if not self.open:
                before = self.parameters
                self._begin(id(self.parameters[index].parameter))
                if not self.reducing:
                    return
                if before is not self.parameters:  # the ranks have just agreed on others, with other numbers
                    self._arrived_first(before[index])
                    return
            if self._plan.arrivals is not None:
                self._plan.arrivals[index] = None
            bucket = self._bucket_of[index]
            if bucket is None or bucket.sent:
                self._late[index] = None
            elif not self._arrived[index]:
                self._arrived[index] = 1
                bucket.missing -= 1
                if not bucket.missing and bucket.index >= self._next and self.scheduler.exclusive:
                    self._send_full()

    def _arrived_first(self, told: ManagedParameter) -> None:
        for each in self.parameters:
            if each.parameter is told.parameter:
                self.mark_gradient_ready(each.index)

    def newcomer_arrived(self, parameter: Parameter) -> None:
        """Autograd has accumulated the gradient of a parameter that the ranks have not agreed on yet.

        Perhaps it is in the module no more: ``test_a_parameter_that_was_in_the_module_for_a_moment``.
        """
        with self._lock:
            if not self.open:
                if not self.scheduler.expects(self):
                    self.look_for_changes()
                if self._moved or self._weights.announced:
                    self._begin(id(parameter))
            self._weights.newcomer_arrived(parameter)

    def look_for_changes(self) -> None:
        """A backward pass is about to reach the module: see whether it has other parameters than were agreed on."""
        members = self._members()
        changed = members is not None and members.changed()
        self._moved = self.requires_sync and changed
        if members is not None and changed:
            self._newcomers, departed = members.welcome(self)
            self._weights.watch(self.parameters, self._newcomers, departed)
        elif self._newcomers:  # put back
            self._newcomers = ()
            self._weights.watch(self.parameters)

    def reached(self) -> None:
        """The backward pass under way has come to outputs of the module; its gradients are as they were."""
        if not self.open:
            self._weights.before_pass()

    def _begin(self, *new: int) -> None:
        if not self.scheduler.follow():
            return  # of a pass that has failed in another thread: nobody waits for it any more
        take_over_optimizers(self.parameters)
        if self.requires_sync:
            self._check_alive()
        self.scheduler.enter(self)
        self.open = True
        self.reducing = self.requires_sync
        self._creates_graph = torch.is_grad_enabled()  # in backward: under create_graph=True
        if self.reducing:
            self._open_round()
        if self._marked or not self.scheduler.expects(self):
            self._weights.before_pass(self._marked or new)
        self._weights.use()  # may fail on this rank alone, as the line before: then the others are told
        self._drift.look(self.reducing)

    def _check_alive(self) -> None:
        try:
            self.collectives.check_alive()
            self.scheduler.check()
        except BaseException:
            self.scheduler.note_failure(self)
            raise

    def _get_ready(self) -> None:
        """Do what has to be done before anything of the round is sent. What fails here fails on every rank, and leaves
        nothing to send.

        Ranks wait for each other here, so this is done at the end of backward: until then they may go through several
        modules in orders of their own.
        """
        try:
            while self.before_round:
                self.before_round[0]()
                del self.before_round[0]
            if not self._hooks_agreed:
                self._agree_on_hooks()
        except BaseException:
            self.scheduler.note_failure(self)
            raise

    def _open_round(self) -> None:
        """Open the round, also if the report of the last one says only now that it has failed on some rank."""
        try:
            self._read_deferred()
        finally:
            self._start_round()

    def _start_round(self) -> None:
        self._wait_for_abandoned()
        if not self.scheduler.expects(self):
            self.look_for_changes()
        self._moved = self._moved or bool(self._offered) or self.buffers.changed()
        self.round += 1
        self._begun = False
        self._next = 0
        # What has piled up without a place in the plan may not arrive again before the end of this backward.
        for index in self._buckets.placeless:
            if self._touched[index] and self.parameters[index].parameter.grad is None:
                self._touched[index] = 0  # given up
        self._late = {index: None for index in self._buckets.placeless if self._touched[index]}
        if self._plan.arrivals is not None:
            self._plan.arrivals.clear()
        for bucket in self._buckets:
            bucket.open()
        self._arrived[:] = bytes(len(self._arrived))

    # ------------------------------------------------------------------------------------ send

    def _send_full(self) -> None:
        """Send every bucket whose turn has come, without waiting for anything: another rank may be at another module.

        A bucket that is held, as the one with the report is, waits for the end.
        """
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if (
                bucket.missing
                or bucket.held
                or not self._hooks_agreed
                or self.before_round
                or not self._hooks_are_done(bucket)
            ):
                return
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: GradientBucket) -> None:
        with self.collectives.phases.phase("collect"):
            scale = 1.0 if self.hooks.hooks else 1.0 / self.divisor
            # The report's row must not be scaled, and sparse gradients are made anew when they are.
            at_once = bucket is self._buckets.carrier or bucket.planned.kind is Kind.SPARSE
            outgoing = bucket.collect(scale if at_once else 1.0, self._touched)
            if bucket is self._buckets.carrier:
                self._write_report(bucket.row)
        what = f"bucket {bucket.index + 1} of {len(self._buckets)}, round {self.round}"
        if self.hooks.hooks:
            pending = self._send_through_hooks(bucket, outgoing, what)
        else:
            pending = self.collectives.all_reduce(outgoing, what, 1.0 if at_once else scale)
        self._pending.append(pending)
        bucket.sent = self._begun = True
        self._next += 1

    def _send_through_hooks(self, bucket: GradientBucket, outgoing: Tensor, what: str) -> Waitable:
        self._wait_for_hooks(outgoing.device)
        begun = self.collectives.begun()
        try:
            with self.collectives.phases.phase("hook", what):
                last = bucket.index == len(self._buckets) - 1
                return self.hooks.send(bucket, outgoing, last, self.collectives, self.divisor, self.is_planned)
        except BaseException as error:
            if begun is None or self.collectives.begun() != begun:
                gist = f"{type(error).__name__}: {error}"
                self.scheduler.lose(f"a communication hook raised {gist}, after it had begun to communicate")
            raise

    def _wait_for_hooks(self, device: torch.device) -> None:
        """Where hooks are not ordered by a stream, what one sends from a callback must not meet what comes next."""
        if not self.collectives.follows_stream(device):
            while self._pending:
                self._pending.pop(0).wait()

    def _hooks_are_done(self, bucket: GradientBucket) -> bool:
        """Whether calling hooks for a bucket would not wait for other ranks."""
        if not self.hooks.hooks or self.collectives.follows_stream(bucket.members[0].spec.device):
            return True
        return not self.hooks.may_wait and all(pending.done() for pending in self._pending)

    def _write_report(self, row: Tensor, failed: bool = False) -> None:
        backward = None if self._passive else self.passes.summarize()
        weight = Weight(self._weights.total, bool(self._weights.earlier.copies))
        flags = failed, self._weights.given, self._joined, self._moved, self._drift.suspects
        status = RankStatus(round_code(self.round), *flags, backward)
        self._reporting.write(row, self._touched, list(self._late), status, weight)

    # ---------------------------------------------------------------------------------- finish

    def finalize_backward(self) -> Sequence[Parameter]:
        """The end of backward; returns the parameters whose hooks have waited for this.

        Raises :class:`PeerError` if another rank failed or is in another round.
        """
        with self._lock:
            try:
                idle = not self.open  # this rank has no gradient of the module, but another rank may have
                if idle:
                    self._check_alive()
                    self.open = self.reducing = True
                    self._passive = not self.passes.is_reached
                    self._open_round_or_abandon()
                    self._drift.look(True)
                if not self.reducing:
                    return ()
                self._get_ready()
                with self.collectives.phases.phase("finish", f"round {self.round}"):
                    return self._finish(idle and not self._passive)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                raise
            finally:
                self.end_pass()

    def _open_round_or_abandon(self) -> None:
        try:
            self._open_round()
        except (PeerError, OptionError):
            self.abandon()
            raise

    def _finish(self, weighs: bool) -> Sequence[Parameter]:
        self._begun = True
        try:
            if weighs:  # no gradient has come, but what it counts does
                self._weights.use()
            self.find_swapped()
            self._send_rest()
        except BaseException:  # of this rank alone: the others wait for what is not sent
            self.abandon()
            raise
        with self.collectives.phases.phase("wait"):
            for pending in self._pending:
                pending.wait()
        row = self._buckets.carrier.row if self._buckets.carrier is not None else self._reporting.own_row
        assert row is not None
        report = self._reporting.read(row, quiet=self._is_quiet())
        self._has_failed = False
        renews = report.all_moved or (report.moved and not self._reporting.deferred)
        compares = report.all_changed or (report.changed and not self._reporting.deferred)
        try:
            check_ranks(report, self.round, self.collectives.rank, self.collectives.global_ranks)
            factor = mean_factor(report, self.divisor, self.round, self.collectives.global_ranks)
            newcomers = self._agree_anew() if renews else []
            drift = self._find_drift() if compares else None
        except (PeerError, AgreementError, OptionError):
            self._has_failed = True
            self._reporting.drop_deferred()  # it has been raised
            self.buffers.drop_large()
            raise
        self.buffers.finish_large()
        self._hand_out(report, row, newcomers, factor)
        reduced = self._in_order(report, newcomers) if self._holds_hooks else ()
        if renews:
            self._renew()
        elif self._plan.adapt(report):
            self._make_buckets()
        warn_of_drift(drift, self.collectives.global_rank)
        return reduced

    def _send_rest(self) -> None:
        self.buffers.prepare_large()
        while self._next < len(self._buckets):
            self._send(self._buckets[self._next])
        if self.hooks.hooks:
            self._wait_for_hooks(self.collectives.device)
        self.buffers.send_large()
        row = self._reporting.own_row
        if row is not None:
            self._write_report(row)
            self._pending.append(self.collectives.all_reduce(row, f"report, round {self.round}"))

    def _in_order(self, report: Report, newcomers: Sequence[ManagedParameter]) -> Sequence[Parameter]:
        """The parameters that any rank has used, in an order that is the same on all ranks: the plan's."""
        placed = [index for bucket in self._buckets for index in bucket.planned.indices]
        order = (*placed, *self._buckets.placeless)
        used = [self.parameters[index].parameter for index in order if report.uses(index)]
        return [*used, *(each.parameter for each in newcomers)]

    def takes_part(self, accumulates: bool) -> bool:
        """Whether a backward pass that has gone through the module without a gradient of it is a round all the same.

        It is if other ranks may have gradients: a loss that, on this rank, reaches only what is frozen.
        """
        trained = any(member.parameter.requires_grad for member in self.parameters)
        return self.find_swapped() or (accumulates and self.passes.is_reached and trained)

    def find_swapped(self) -> bool:
        """Count gradients of parameters whose tensor was swapped, and with it the hook; returns whether there are
        any."""
        if 0 not in self._touched:
            return False
        idle = [index for index, touched in enumerate(self._touched) if not touched]
        members = self._members()
        found = [] if members is None else members.hook_again(self, idle)
        for index in found:
            self._touched[index] = 1
            if self._bucket_of[index] is None:
                self._late[index] = None
        return bool(found)

    def _is_quiet(self) -> bool:
        """Whether this rank has used every parameter, in time, in a round like all others, and has not failed in the
        one before: others that have not read of that yet fail in this one."""
        settled = self._plan.is_whole and self._plan.arrivals is None and 0 not in self._touched
        unusual = self._late or self._weights.given or self._joined or self._moved or self._has_failed
        unusual = unusual or self._drift.suspects
        return settled and not unusual

    def _read_deferred(self) -> None:
        """What the last round's report said beside: every rank learns it here, before it sends anything."""
        report = self._reporting.read_deferred()
        if report is not None:
            check_ranks(report, self.round, self.collectives.rank, self.collectives.global_ranks, late=True)
            mean_factor(report, self.divisor, self.round, self.collectives.global_ranks)
            if report.moved and not report.all_moved:  # else every rank has waited for the report
                self._agree_anew()
                self._renew()
            if report.changed and not report.all_changed:
                warn_of_drift(self._find_drift(), self.collectives.global_rank)

    def _find_drift(self) -> Drift | None:
        """Compare the parameters, as they are now, with those of all other ranks, which do the same."""
        members = self._members()
        return self._drift.compare(self.parameters if members is None else members.parameters, self.collectives)

    def _agree_anew(self) -> list[ManagedParameter]:
        """Agree with all ranks on which parameters there are; returns the new ones that any rank has a gradient of."""
        self._agree_on_hooks()
        members = self._members()
        if members is not None:
            return members.renew(self, self.collectives)
        gone = "the replicated module has been dropped, and only parts of it are left"
        agree(Description([], gone), [], self.collectives)
        return []

    def _carry_over(self, before: Sequence[ManagedParameter], touched: bytearray) -> None:
        """What has had a gradient under the old numbers has it under the new ones."""
        used = {id(each.parameter) for each in compress(before, touched)}
        self._touched[:] = bytes(id(each.parameter) in used for each in self.parameters)

    def _renew(self) -> None:
        """Go on with the parameters and buffers that all ranks have now."""
        members = self._members()
        if members is not None and self.parameters is not members.parameters:
            before, touched = self.parameters, self._touched
            self._take_parameters(members)
            self._carry_over(before, touched)
        self.buffers.renew()
        self._make_buckets()

    @torch.no_grad()
    def _hand_out(self, report: Report, row: Tensor, newcomers: Sequence[ManagedParameter], factor: float) -> None:
        overdue = [*(self.parameters[index] for index in report.late), *newcomers]
        late = reduce_late(overdue, self.collectives, self.divisor) if overdue else []
        for bucket in self._buckets:
            if factor != 1:
                bucket.rescale(factor)
            bucket.hand_out(report)
        for each in late:
            each.hand_out(factor)
        if report.adds:
            self._add_earlier(report, newcomers, factor)
        if self._graphs or self._creates_graph:
            reduced = [member for member in self.parameters if report.uses(member.index)]
            with_graphs(self._graphs, reduced, factor, self.collectives)
        if not report.moved:
            self._reporting.take_buffers(row)
        self.usage.look(self._touched)
        self._weights.reduced()
        self._forget()

    def _add_earlier(self, report: Report, newcomers: Sequence[ManagedParameter], factor: float) -> None:
        """What was there before the weighted contributions, and has been scaled with them by ``factor``, counts as it
        was: as the mean over the ranks that have batches."""
        used = [*(member for member in self.parameters if report.uses(member.index)), *newcomers]
        active = self.collectives.world - sum(status.joined for status in report.ranks)
        copies = self._weights.earlier.copies
        for each in reduce_again(used, copies, self.collectives, active, "gradient from before"):
            each.hand_out(1 - factor * active / self.divisor)

    def _forget(self) -> None:
        """What has been contributed is not this rank's alone any more; after a failure it is gone."""
        self._touched[:] = bytes(len(self._touched))
        self._drift.forget()
        self._weights.give_up()

    # --------------------------------------------------------------------------------- failure

    def end_pass(self, failed: bool = False) -> None:
        """The backward pass is over, however it ended; ``failed`` if all ranks know that its round has failed."""
        with self._lock:
            if self.reducing:
                self._forget()  # after a failure, too: what was to be contributed is gone
                if not self._begun:
                    self.round -= 1  # nothing of it has been sent: for other ranks it may not have opened at all
            elif self.open:
                self._weights.pass_ended(self._touched)
            if self.reducing or failed:
                self.passes.end_round()
            self.passes.end_pass()
            self.open = self.reducing = self._passive = False
            self._pending.clear()
            self._graphs.clear()
            self._creates_graph = False

    def abandon(self) -> None:
        """Backward has failed on this rank: send what the others wait for, marked as failed, and do not wait."""
        self.error = f"round {self.round}: the backward pass failed on this rank"
        if self.scheduler.lost:
            return
        try:
            if not self.open:
                self._check_alive()
                self.open = self.reducing = True
                with suppress(PeerError, OptionError):  # which the others know of
                    self._open_round()
            self._get_ready()
            self._begun = True
            self._abandon()
        except (CommunicationError, AgreementError) as error:  # the group has ended, or all raise
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        except Exception as error:
            self.scheduler.lose(f"it could not take its part in a round that had failed: {error!r}")
        finally:
            self._forget()

    @torch.no_grad()
    def _abandon(self) -> None:
        """In the order of :meth:`_finish`."""
        self._has_failed = True
        round_ = self._abandoned = AbandonedRound(self.collectives, self.round, self._pending)
        self._pending = []
        rest = list(self._buckets)[self._next :]
        if self.hooks.hooks:
            round_.send_through(self.hooks, rest, self.divisor, self.is_planned)
        else:
            round_.send_buckets(rest, self._buckets.carrier, self._write_failure)
        self.buffers.send_large(failed=True)
        if self._reporting.own_row is not None:
            self._write_failure(self._reporting.own_row)
            round_.send(self._reporting.own_row)

    def _write_failure(self, row: Tensor) -> None:
        self._write_report(row, failed=True)

    def _wait_for_abandoned(self) -> None:
        round_, self._abandoned = self._abandoned, None
        if round_ is not None:
            round_.wait()
            self.buffers.drop_large()

    def is_within(self, reach: Reach, expected: bool) -> bool:
        """Whether a pass of that reach accumulates into a parameter; ``expected``: it goes through the module."""
        known = [member.parameter for member in (*self.parameters, *self._newcomers)]
        trained = [parameter for parameter in known if parameter.requires_grad]
        return any(id(p) in reach.leaves for p in trained) or bool(
            reach.hidden and trained and (expected or id(self) in reach.marks)
        )

    # ------------------------------------------------------------------------------ for others

    def hold_hooks(self) -> None:
        """Some parameter has users' hooks, to be run when its gradient is reduced."""
        self._holds_hooks = True

    def are_lent(self) -> bool:
        """Whether other tensors stand in for the parameters, as ``torch.func.functional_call`` has it."""
        members = self._members()
        return members is not None and members.are_lent()

    def run_held_hooks(self, parameters: Sequence[Parameter]) -> None:
        """Run users' hooks of parameters whose gradients have been reduced."""
        run_held_hooks(parameters, self)

    def is_marked(self) -> bool:
        """Whether compiled autograd has run hooks of the parameters."""
        return any(is_marked(member.parameter) for member in self.parameters)

    def take_marked(self) -> None:
        """Take what it has left as if the hooks ran now."""
        self.passes.compile_forward()  # nor is it known which outputs it has gone through
        self._marked = [id(member.parameter) for member in self.parameters if is_marked(member.parameter)]
        try:
            for member in self.parameters:
                run_marked(member.parameter)
        finally:
            self._marked = []

    def announce(self, weight: float | None) -> None:
        """What the loss of the next backward passes counts, on top of what has been counted since the last round."""
        if weight is not None:
            self.look_for_changes()  # what new parameters get has a weight, too
        self._weights.announce(weight)

    def retire(self) -> None:
        """Another replication has taken over all parameters."""
        self.retired = True
        self.scheduler.unregister(self)

    def shadow(self) -> None:
        """Take part in a round of the other ranks, outside of any backward and without gradients.

        What this rank has - gradients, what has piled up, its weights - it has afterwards, too: see
        tests/procs/test_join_gradients.py.
        """
        before, had = self.parameters, [member.parameter.grad for member in self.parameters]
        own = self._touched, self._weights, self._drift
        self._touched = bytearray(len(self.parameters))
        self._weights, self._drift = Weights(), DriftWatch(self.parameters, self.collectives.global_rank)
        self._joined = True
        for member in self.parameters:
            member.parameter.grad = None
        try:
            self.scheduler.reduce([self])
        finally:
            self._joined = False
            touched, self._weights, drift = own
            self._weights.watch(self.parameters, self._newcomers)
            if self.parameters is before:
                self._touched, self._drift = touched, drift
            else:  # the ranks have agreed on others meanwhile
                self._carry_over(before, touched)
            for member, grad in zip(before, had, strict=True):
                member.parameter.grad = grad
