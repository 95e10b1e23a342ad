"""The schedule of a module's gradients: parameter hooks -> buckets -> collectives -> gradients.

What one backward pass of one replicated module sends is a *round* (``round.py``). Its life, in the order of this file:

1. *open* - the first gradient of the module opens it. Only now is it decided whether this backward synchronises; if
   not, gradients accumulate, and the hooks note which.
2. *fill* - each gradient that comes is counted by its parameter's hook (``parameter_hooks.py``). A full bucket is
   launched at once if all before it have been: every rank sends the same buckets in the same order, whatever order its
   gradients come in.
3. *finalize* - at the end of backward (``scheduler.py``) the buckets are launched that never filled up: parameters
   without a gradient count as zero, or as what they had accumulated. The last bucket leaves now, and the report with
   it: who used which parameter, the round's number, failures, weights, buffers (``report.py``). Then all are waited
   for.
4. *copy out* - parameters that any rank used get the mean, all others keep what they had. Gradients that came after
   their bucket had left (a layer that reentrant checkpointing runs twice), or had no place in the plan (unfrozen, used
   for the first time), are in everybody's report, so every rank joins in reducing them now. Buffers are assigned.
5. *adapt* - the plan follows what the ranks use (``plan.py``): what is frozen or never used is never sent, without a
   flag. If other parameters stand in the module on any rank, all choose anew what they replicate (``members.py``), and
   reduce the gradients of what is new in the same round.

If backward fails, the round is abandoned instead: the other ranks get what they wait for, and are told.

Lifetimes: the reducer lives for as long as any of its parameters, whose hooks refer to it, and has the module with it.
Gradients live in buckets (``buckets.py``). What a rank has accumulated since the last round, and what it counts, is its
*contribution* (``contribution.py``), and goes with the round that reduces it.
"""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch.nn import Parameter

from lockstep.distributed.agreement import Description, Line, agree
from lockstep.distributed.buffers import BufferSync
from lockstep.distributed.collectives import Collectives, plain_memory
from lockstep.distributed.reduction.backward import Reach
from lockstep.distributed.reduction.buckets import BucketsInUse
from lockstep.distributed.reduction.comm_hooks import HookChain
from lockstep.distributed.reduction.contribution import Contribution
from lockstep.distributed.reduction.drift import Drift, warn_of_drift
from lockstep.distributed.reduction.late import graphs_of, reduce_again, reduce_late
from lockstep.distributed.reduction.members import Members, Membership
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.parameter_hooks import is_marked, run_held_hooks, take_mark, take_over_optimizers
from lockstep.distributed.reduction.passes import PassLog
from lockstep.distributed.reduction.plan import AdaptivePlan, ReductionPlan
from lockstep.distributed.reduction.report import RankStatus, Report, Weight, check_ranks, mean_factor, round_code
from lockstep.distributed.reduction.report_transport import ReportTransport
from lockstep.distributed.reduction.round import Round, Wiring, order_of_hooks
from lockstep.distributed.reduction.scheduler import GroupScheduler
from lockstep.distributed.reduction.second_order import with_graphs
from lockstep.distributed.reduction.usage import Usage
from lockstep.errors import AgreementError, CommunicationError, OptionError, PeerError


class Reducer:
    """Synchronises the gradients of one replicated module.

    Communicates, in each synchronising backward: one all-reduce for each bucket; nothing else, but what the head of
    this file lists as late, once, or large.
    """

    def __init__(
        self,
        membership: Membership,
        collectives: Collectives,
        scheduler: GroupScheduler,
        buffers: BufferSync,
        caps: Sequence[int],
    ) -> None:
        self.collectives, self.scheduler, self.buffers = collectives, scheduler, buffers
        self.requires_sync = True
        self.retired = False
        """Whether another replication has taken over all parameters."""
        self.rounds = 0
        """The number of the last round of which anything was sent."""
        self.error = ""
        """The last error of a round, for logging."""
        self.passes = PassLog()
        """What tells this rank's backward passes from others."""
        self.usage = Usage()
        self._caps = tuple(caps)
        self._hooks = HookChain()
        self._gradient_divide_factor = float(collectives.world)
        self._before_next_round: list[Callable[[], object]] = []
        self._lock = threading.RLock()
        self._round: Round | None = None
        self._accumulates = False  # a pass is under way that does not synchronise
        self._creates_graph = False  # the pass under way does, under create_graph=True
        self._abandoned: Round | None = None  # what it has sent may not have arrived yet
        self._has_failed = False  # in the last round
        self._members_changed = False  # this rank has other parameters, buffers or hooks than were agreed on
        self._has_joined = False  # this rank has run out of batches
        self._holds_hooks = False  # users have hooks on parameters
        self._members = Members(membership)
        self._contribution = Contribution(self.parameters, collectives.global_rank)
        self._plan_anew()

    # ------------------------------------------------------------------------------------ plan

    @property
    def parameters(self) -> list[ManagedParameter]:
        """The parameters that the ranks have agreed on."""
        return self._members.parameters

    @property
    def plan(self) -> ReductionPlan:
        """The buckets, as they are now."""
        return self._plan.current

    @property
    def is_planned(self) -> bool:
        """Whether the plan has been made anew after the first round."""
        return not self._plan.observes

    def _plan_anew(self) -> None:
        """Make everything that depends on which parameters there are."""
        parameters = self.parameters
        specs, trained = [p.spec for p in parameters], [p.index for p in parameters if p.parameter.requires_grad]
        sparse = [p.index for p in parameters if p.sparse]
        self._plan = AdaptivePlan(specs, trained, sparse, self._members.last, self._caps)
        self._transport = ReportTransport(len(parameters), self.collectives, self.buffers)
        self._make_buckets()

    def _make_buckets(self) -> None:
        """Build what the plan says."""
        planned, hooked = self.plan.buckets, bool(self._hooks.hooks)
        rides = bool(planned) and planned[-1].can_carry and not hooked  # hooks would change the report
        device = self.parameters[0].spec.device if self.parameters else self.collectives.device
        self._transport.lay_out(planned[-1].layout.dtype if rides else None, device)
        empty = plain_memory if hooked else self.collectives.empty  # some hooks resize what they are given
        numel = self._transport.numel if rides else 0
        self._buckets = BucketsInUse(self._plan, self.parameters, numel, empty)
        self._wiring = Wiring(
            collectives=self.collectives,
            scheduler=self.scheduler,
            hooks=self._hooks,
            buckets=self._buckets,
            transport=self._transport,
            buffers=self.buffers,
            is_planned=self.is_planned,
        )

    def restore(self, rounds: int, plan: str) -> None:
        """Go on where an earlier run was; all ranks must."""
        self.rounds = rounds
        before = self.plan
        self._plan.restore(plan)
        if self.plan != before:
            self.do_before_next_round(lambda: agree(Description([Line("plan", plan)]), [], self.collectives))
        self._make_buckets()

    def register_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Add a communication hook; the report travels on its own from now on.

        After the first round, it takes part when all ranks have it: that is agreed on at the end of the next one.
        """
        if self._hooks.register(state, hook):
            self._make_buckets()

    def do_before_next_round(self, call: Callable[[], object]) -> None:
        """Call ``call``, which may communicate, before anything of the next round is sent, once."""
        self._before_next_round.append(call)

    # ------------------------------------------------------------------------------------ open

    @property
    def open(self) -> bool:
        """Whether a backward pass under way has reached the module."""
        return self._round is not None or self._accumulates

    @property
    def reducing(self) -> bool:
        """Whether it synchronises."""
        return self._round is not None

    def look_for_changes(self) -> None:
        """A backward pass is about to reach the module: see whether it has other parameters than were agreed on."""
        known = bool(self._members.newcomers or self._members.departed)
        changed = self._members.look()
        self._members_changed = self.requires_sync and changed
        if changed or known:
            self._contribution.watch(self.parameters, self._members.newcomers, self._members.departed)

    def reached(self) -> None:
        """The backward pass under way has come to outputs of the module; its gradients are as they were."""
        if not self.open:
            self._contribution.weights.before_pass()

    def _open(self, new: Collection[int], compiled: bool = False) -> None:
        """A backward pass has reached the module: its first gradients, of the parameters ``new`` by identity, have
        come; ``compiled``: all that it has."""
        if not self.scheduler.follow():
            return  # of a pass that has failed in another thread: nobody waits for it any more
        take_over_optimizers(self.parameters)
        if self.requires_sync:
            self._check_alive()
        self.scheduler.enter(self)
        self._creates_graph = torch.is_grad_enabled()  # in backward: under create_graph=True
        if self.requires_sync:
            self._open_round()
        else:
            self._accumulates = True
            self._members.arrivals.accumulate()
        own = self._contribution
        if compiled or not self.scheduler.expects(self):
            own.weights.before_pass(new)
        own.weights.use()  # may fail on this rank alone, as the line before: then the others are told
        own.drift.look(self.reducing)

    def _check_alive(self) -> None:
        try:
            self.collectives.check_alive()
            self.scheduler.check()
        except BaseException:
            self.scheduler.note_failure(self)
            raise

    def _open_round(self, passive: bool = False) -> None:
        """Open the round, also if the report of the last one says only now that it has failed on some rank.

        ``passive``: this rank takes part without a backward pass of its own.
        """
        try:
            self._read_deferred()
        finally:
            self._start_round(passive)

    def _start_round(self, passive: bool) -> None:
        if self._abandoned is not None:
            abandoned, self._abandoned = self._abandoned, None
            abandoned.wait_abandoned()
            self.buffers.drop_large()
        if not self.scheduler.expects(self):
            self.look_for_changes()
        self._members_changed = self._members_changed or self._hooks.has_changed or self.buffers.changed()
        used = self._contribution.used
        for index in self._buckets.unbucketed:
            if used[index] and self.parameters[index].parameter.grad is None:
                used[index] = 0  # given up
        early = self._hooks.are_agreed and not self._before_next_round
        describe = partial(self._describe, passive)
        self._round = Round(self.rounds + 1, self._wiring, self._gradient_divide_factor, used, describe, early)
        arrivals, expected = self._members.arrivals, self._buckets.expected
        if self._plan.observes:
            self._plan.begin_round()
            self._round.open(expected, bytearray(expected))  # each gradient is looked at, to note the order
        else:
            self._round.open(expected, arrivals.expect(self._buckets.of, expected))

    # ------------------------------------------------------------------------------------ fill

    def mark_gradient_ready(self, index: int) -> None:
        """Autograd has accumulated the gradient of the parameter with that number, which no bucket waits for now."""
        with self._lock:
            self._contribution.used[index] = 1
            if not self.open:
                told, before = self.parameters[index].parameter, self.parameters
                self._open([id(told)])
                if before is not self.parameters:  # the ranks have just agreed on others, with other numbers
                    index = next((each.index for each in self.parameters if each.parameter is told), -1)
            if self._round is not None and index >= 0:
                if self._plan.observes:
                    self._plan.observe(index)
                self._round.mark_gradient_ready(index)

    def launch_ready_buckets(self) -> None:
        """The last gradient of a bucket has come."""
        with self._lock:
            if self._round is not None:
                self._round.launch_ready_buckets()

    def newcomer_arrived(self, parameter: Parameter) -> None:
        """Autograd has accumulated the gradient of a parameter that the ranks have not agreed on yet.

        Perhaps it is in the module no more: ``test_a_parameter_that_was_in_the_module_for_a_moment``.
        """
        with self._lock:
            weights = self._contribution.weights
            if not self.open:
                if not self.scheduler.expects(self):
                    self.look_for_changes()
                if self._members_changed or weights.announced:
                    self._open([id(parameter)])
            weights.newcomer_arrived(parameter)

    def is_marked(self) -> bool:
        """Whether compiled autograd has run hooks of the parameters."""
        return any(is_marked(member.parameter) for member in self.parameters)

    def take_marked(self) -> None:
        """Take what it has left as if the hooks ran now."""
        self.passes.compile_forward()  # nor is it known which outputs it has gone through
        marked = {id(member.parameter) for member in self.parameters if take_mark(member.parameter)}
        with self._lock:
            self._open(marked, compiled=True)
            for index in [member.index for member in self.parameters if id(member.parameter) in marked]:
                self.mark_gradient_ready(index)

    # -------------------------------------------------------------------------------- finalize

    @torch.no_grad()
    def finalize_backward(self) -> Sequence[Parameter]:
        """Reduce what is left; returns the parameters whose hooks have waited for this.

        Raises :class:`PeerError` if another rank failed or is in another round.
        """
        with self._lock:
            try:
                without_gradient = not self.open  # this rank has none of the module, but another rank may have
                if without_gradient:
                    self._open_without_gradient()
                if self._round is None:
                    return ()
                self._get_ready()
                with self.collectives.phases.phase("finish", f"round {self._round.number}"):
                    return self._finalize(self._round, without_gradient and self.passes.is_reached)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                raise
            finally:
                self.end_pass()

    def _open_without_gradient(self) -> None:
        self._check_alive()
        try:
            self._open_round(passive=not self.passes.is_reached)
        except (PeerError, OptionError):
            self.abandon()
            raise
        self._contribution.drift.look(True)

    def _get_ready(self) -> None:
        """Do what has to be done before anything of the round is sent. What fails here fails on every rank, and leaves
        nothing to send.

        Ranks wait for each other here, so this is done at the end of backward: until then they may go through several
        modules in orders of their own.
        """
        try:
            while self._before_next_round:
                self._before_next_round[0]()
                del self._before_next_round[0]
            if not self._hooks.are_agreed:
                self._hooks.agree(self.collectives)
        except BaseException:
            self.scheduler.note_failure(self)
            raise

    def _finalize(self, current: Round, weighs: bool) -> Sequence[Parameter]:
        """``weighs``: no gradient has come, but what this rank contributes counts."""
        current.end_filling()
        try:
            if weighs:
                self._contribution.weights.use()
            self.find_swapped()
            current.launch_rest()
        except BaseException:  # of this rank alone: the others wait for what is not sent
            self.abandon()
            raise
        current.wait()
        report = self._transport.read(current.report_row, self._may_defer(current))
        self._has_failed = False
        renews = report.all_moved or (report.moved and not self._transport.deferred)
        compares = report.all_changed or (report.changed and not self._transport.deferred)
        try:
            factor = self._check(report, current.number)
            newcomers = self._agree_anew() if renews else []
            drift = self._find_drift() if compares else None
        except (PeerError, AgreementError, OptionError):
            self._has_failed = True
            self._transport.drop_deferred()  # it has been raised
            self.buffers.drop_large()
            raise
        self.buffers.finish_large()
        self._copy_out(current, report, newcomers, factor)
        held = self._parameters_with_held_hooks(report, newcomers)
        self._renew() if renews else self._adapt(report)
        warn_of_drift(drift, self.collectives.global_rank)
        return held

    def _describe(self, passive: bool, failed: bool) -> tuple[RankStatus, Weight]:
        """What this rank says of its round."""
        own, backward = self._contribution, None if passive else self.passes.summarize()
        number = round_code(self.rounds + 1 if self._round is None else self._round.number)
        flags = failed, own.weights.given, self._has_joined, self._members_changed, own.drift.suspects
        return RankStatus(number, *flags, backward), Weight(own.weights.total, bool(own.weights.earlier.copies))

    def _check(self, report: Report, number: int) -> float:
        """Raise if the ranks were not all in the same round; returns what the mean is to be multiplied by."""
        ranks = self.collectives.global_ranks
        check_ranks(report, number, self.collectives.rank, ranks)
        return mean_factor(report, self._gradient_divide_factor, number, ranks)

    def takes_part(self, accumulates: bool) -> bool:
        """Whether a backward pass that has gone through the module without a gradient of it is a round all the same.

        It is if other ranks may have gradients: a loss that, on this rank, reaches only what is frozen.
        """
        trained = any(member.parameter.requires_grad for member in self.parameters)
        return self.find_swapped() or (accumulates and self.passes.is_reached and trained)

    def find_swapped(self) -> bool:
        """Count gradients of parameters whose tensor was swapped, and with it the hook; returns whether there are
        any."""
        used = self._contribution.used
        if 0 not in used:
            return False
        found = self._members.hook_again([index for index, is_used in enumerate(used) if not is_used])
        for index in found:
            used[index] = 1
            if self._round is not None:
                self._round.mark_unhooked(index)
        return bool(found)

    def _may_defer(self, current: Round) -> bool:
        """Whether this rank has used every parameter, in time, in a round like all others, and has not failed in the
        one before: others that have not read of that yet fail in this one."""
        own = self._contribution
        settled = self._plan.is_whole and self.is_planned and 0 not in own.used
        unusual = current.late or own.weights.given or self._has_joined or self._members_changed or self._has_failed
        return settled and not unusual and not own.drift.suspects

    def _read_deferred(self) -> None:
        """What the last round's report said beside: every rank learns it here, before it sends anything."""
        report = self._transport.read_deferred()
        if report is not None:
            self._check(report, self.rounds)
            if report.moved and not report.all_moved:  # else every rank has waited for the report
                self._agree_anew()
                self._renew()
            if report.changed and not report.all_changed:
                warn_of_drift(self._find_drift(), self.collectives.global_rank)

    # -------------------------------------------------------------------------------- copy out

    def _copy_out(self, current: Round, report: Report, newcomers: Sequence[ManagedParameter], factor: float) -> None:
        overdue = [*(self.parameters[index] for index in report.late), *newcomers]
        graphs = [*current.graphs, *graphs_of(overdue)]
        late = reduce_late(overdue, self.collectives, self._gradient_divide_factor) if overdue else []
        current.copy_out(report, factor)
        for each in late:
            each.copy_out(factor)
        if report.adds:
            self._add_earlier(report, newcomers, factor)
        if graphs or self._creates_graph:
            reduced = [member for member in self.parameters if report.uses(member.index)]
            with_graphs(graphs, reduced, factor, self.collectives)
        if not report.moved:
            self._transport.take_buffers(current.report_row)
        self.usage.look(self._contribution.used)
        self._contribution.weights.reduced()
        self._contribution.forget()

    def _add_earlier(self, report: Report, newcomers: Sequence[ManagedParameter], factor: float) -> None:
        """What was there before the weighted contributions, and has been scaled with them by ``factor``, counts as it
        was: as the mean over the ranks that have batches."""
        used = [*(member for member in self.parameters if report.uses(member.index)), *newcomers]
        active = self.collectives.world - sum(status.joined for status in report.ranks)
        copies = self._contribution.weights.earlier.copies
        for each in reduce_again(used, copies, self.collectives, active, "gradient from before"):
            each.copy_out(1 - factor * active / self._gradient_divide_factor)

    def _parameters_with_held_hooks(self, report: Report, newcomers: Sequence[ManagedParameter]) -> list[Parameter]:
        """The parameters that any rank has used, in an order that is the same on all ranks, if users have hooks."""
        if not self._holds_hooks:
            return []
        return [each.parameter for each in (*order_of_hooks(self._buckets, self.parameters, report), *newcomers)]

    def hold_hooks(self) -> None:
        """Some parameter has users' hooks, to be run when its gradient is reduced."""
        self._holds_hooks = True

    def run_held_hooks(self, parameters: Sequence[Parameter]) -> None:
        """Run users' hooks of parameters whose gradients have been reduced."""
        run_held_hooks(parameters, self)

    # ----------------------------------------------------------------------------------- adapt

    def _adapt(self, report: Report) -> None:
        """Let the plan follow what the ranks have used. Communicates one broadcast, the first time."""
        if self._plan.observes:
            told = torch.tensor(self._plan.observed_order, dtype=torch.int64, device=self.collectives.device)
            self.collectives.broadcast(told, "order of gradients").wait()
            self._plan.rebuild(index for index in told.tolist() if report.uses(index))
        elif not self._plan.adapt(report.late):
            return
        self._make_buckets()

    def _agree_anew(self) -> list[ManagedParameter]:
        """Agree with all ranks on hooks and parameters; returns the new ones that any rank has a gradient of."""
        self._hooks.agree(self.collectives)
        return self._members.agree_anew(self.collectives)

    def _renew(self) -> None:
        """Go on with the parameters, hooks and buffers that all ranks have now."""
        before = self.parameters
        if self._members.take_over():
            self._contribution.renumber(before, self.parameters)
            self._plan_anew()
        self.buffers.renew()
        self._make_buckets()

    def _find_drift(self) -> Drift | None:
        """Compare the parameters, as they are now, with those of all other ranks, which do the same."""
        return self._contribution.drift.compare(self._members.current, self.collectives)

    # ------------------------------------------------------------------- the end, however it comes

    def end_pass(self, failed: bool = False) -> None:
        """The backward pass is over, however it ended; ``failed`` if all ranks know that its round has failed."""
        with self._lock:
            ended, self._round = self._round, None
            accumulated = self._members.arrivals.end_pass()
            if ended is not None:
                self._contribution.forget()  # after a failure, too: what was to be contributed is gone
                if ended.has_begun:  # else it may not have opened at all, for other ranks
                    self.rounds = ended.number
            elif self._accumulates:
                self._contribution.accumulate(accumulated)
            if ended is not None or failed:
                self.passes.end_round()
            self.passes.end_pass()
            self._accumulates = self._creates_graph = False

    @torch.no_grad()
    def abandon(self) -> None:
        """Backward has failed on this rank: send what the others wait for, marked as failed, and do not wait."""
        number = self.rounds if self._round is None else self._round.number
        self.error = f"round {number}: the backward pass failed on this rank"
        if self.scheduler.lost:
            return
        try:
            if not self.open:
                self._check_alive()
                with suppress(PeerError, OptionError):  # which the others know of
                    self._open_round()
            self._get_ready()
            assert self._round is not None
            self._has_failed, self._abandoned = True, self._round
            self._round.abandon()
        except (CommunicationError, AgreementError) as error:  # the group has ended, or all raise
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        except Exception as error:
            self.scheduler.lose(f"it could not take its part in a round that had failed: {error!r}")
        finally:
            self._contribution.forget()

    def is_within(self, reach: Reach, expected: bool) -> bool:
        """Whether a pass of that reach accumulates into a parameter; ``expected``: it goes through the module."""
        return self._members.are_within(reach, expected or id(self) in reach.marks)

    # ------------------------------------------------------------------------------ for others

    def set_requires_sync(self, required: bool) -> None:
        """Whether backward passes that begin from now on synchronise."""
        self.requires_sync = required

    def set_participants(self, ranks: Sequence[int], divide_by: float) -> None:
        """Inside ``join()``: which ranks have batches. The first one's buffers count; sums are divided by
        ``divide_by``."""
        self.buffers.set_source(ranks[0])
        self._gradient_divide_factor = float(divide_by)

    def are_lent(self) -> bool:
        """Whether other tensors stand in for the parameters, as ``torch.func.functional_call`` has it."""
        return self._members.are_lent()

    def announce(self, weight: float | None) -> None:
        """What the loss of the next backward passes counts, on top of what has been counted since the last round."""
        if weight is not None:
            self.look_for_changes()  # what new parameters get has a weight, too
        self._contribution.weights.announce(weight)

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
        own, self._contribution = self._contribution, Contribution(before, self.collectives.global_rank)
        self._has_joined = True
        for member in before:
            member.parameter.grad = None
        try:
            self.scheduler.reduce([self])
        finally:
            self._has_joined, self._contribution = False, own
            if self.parameters is not before:  # the ranks have agreed on others meanwhile
                own.renumber(before, self.parameters)
            own.watch(self.parameters, self._members.newcomers, self._members.departed)
            for member, grad in zip(before, had, strict=True):
                member.parameter.grad = grad
