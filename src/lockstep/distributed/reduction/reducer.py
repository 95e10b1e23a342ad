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
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.distributed.buffers import KeptBuffers
from lockstep.distributed.decisions import Decisions
from lockstep.distributed.reduction.backward import Reach
from lockstep.distributed.reduction.contribution import Contribution, gradients_set_aside
from lockstep.distributed.reduction.idle import IdleBatch, contributing_nothing
from lockstep.distributed.reduction.outcome import Outcome
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.parameter_hooks import listener_of, run_held_hooks, take_over_optimizers
from lockstep.distributed.reduction.passes import NOT_STEPPED, PassLog
from lockstep.distributed.reduction.report import RankStatus, Weight
from lockstep.distributed.reduction.round import Round
from lockstep.distributed.reduction.setup import Setup
from lockstep.distributed.reduction.unread_reports import before_next_step
from lockstep.distributed.reduction.weights import give_up_after_next_step
from lockstep.errors import AgreementError, CommunicationError, OptionError, PeerError

_parameter_of = attrgetter("parameter")


class Reducer:
    """Synchronises the gradients of one replicated module.

    Communicates, in each synchronising backward: one all-reduce for each bucket; nothing else, but what the head of
    this file lists as late, once, or large.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup  # what all ranks have alike
        self.collectives, self.scheduler, self.buffers = setup.collectives, setup.scheduler, setup.buffers
        self.requires_sync = True
        self.retired = False  # another replication has taken over all parameters
        self.rounds = 0  # the number of the last round of which anything was sent
        self.error = ""  # the last error of a round, for logging
        self.passes = PassLog()  # what tells this rank's backward passes from others
        self.outcome = Outcome(setup)
        self._lock = threading.RLock()
        self._members = setup.members
        self._contribution = Contribution(self.parameters, self.collectives.global_rank)
        self.open = False  # a backward pass under way has reached the module
        self._round: Round | None = None  # if that pass synchronises
        self._idle: IdleBatch | None = None  # the loop is at a batch that counts nothing
        self._idles = False  # a pass of such a batch is under way that is to synchronise
        self._skips = False  # this rank leaves out the batch
        self._differs = False  # this rank has other parameters, buffers or hooks than were agreed on
        self._holds_hooks = False  # users have hooks on parameters

    @property
    def parameters(self) -> list[ManagedParameter]:
        """The parameters that the ranks have agreed on."""
        return self._members.parameters

    @property
    def decisions(self) -> Decisions:
        """What the loops of this and the other ranks have decided."""
        return self.scheduler.decisions

    @property
    def present(self) -> list[ManagedParameter]:
        """Those that the module still has on this rank."""
        return self._members.present

    # ------------------------------------------------------------------------------------ open

    @property
    def reducing(self) -> bool:
        """Whether the backward pass under way has reached the module, and synchronises."""
        return self._round is not None or self._idles

    def look_for_changes(self) -> None:
        """A backward pass is about to reach the module: see whether it has other parameters than were agreed on."""
        known = bool(self._members.newcomers or self._members.departed)
        changed = self._members.look()
        found = self._round is not None and self._differs  # in this pass, which goes past forward, too
        self._differs = found or (self.requires_sync and changed)
        if changed or known:
            self._contribution.weights.watch(self.parameters, self._members.newcomers, self._members.departed)

    def reached(self) -> None:
        """The backward pass under way has come to outputs of the module; its gradients are as they were."""
        if not self.open and self._idle is None:
            self._contribution.weights.before_pass()

    def _open(self, new: Collection[int], compiled: bool = False) -> None:
        """A backward pass has reached the module: its first gradients, of the parameters ``new`` by identity, have
        come; ``compiled``: all that it has."""
        if not self.scheduler.follow():
            return  # of a pass that has failed in another thread: nobody waits for it any more
        take_over_optimizers(map(_parameter_of, self.parameters))
        if self.requires_sync:
            self._check_alive()
        self.scheduler.enter(self)
        if self.requires_sync and self._idle is None:
            self._open_round()
        else:
            self.open, self._idles = True, self.requires_sync
            self._members.arrivals.accumulate()
        if self._idle is not None:
            return
        own = self._contribution
        if compiled or not self.scheduler.expects(self):
            own.weights.before_pass(new)
        own.weights.use()  # may fail on this rank alone, as the line before: then the others are told
        own.drift.look(self.reducing)

    def _check_alive(self) -> None:
        try:
            self.collectives.check_alive()
            self.scheduler.check()
        except CommunicationError:
            self.scheduler.note_failure(self)
            raise

    def _open_round(self, passive: bool = False) -> None:
        """Open the round, also if the report of the last one says only now that it has failed on some rank.

        ``passive``: this rank takes part without a backward pass of its own.
        """
        try:
            self.outcome.read_deferred(self.rounds, self._contribution)
        finally:
            self._start_round(passive)

    def _start_round(self, passive: bool) -> None:
        self.outcome.wait_for_abandoned()
        if not self.scheduler.expects(self):
            self.look_for_changes()
        self._differs = self._differs or self.setup.differs()
        describe, create_graph = partial(self._describe, passive), torch.is_grad_enabled()
        self._round = Round(self.rounds + 1, self.setup, self._contribution.used, describe, create_graph)
        self.open = True

    # ------------------------------------------------------------------------------------ fill

    def mark_gradient_ready(self, index: int) -> None:
        """Autograd has accumulated the gradient of the parameter with that number."""
        with self._lock:
            if self._idle is None:
                self._contribution.used[index] = 1
            before = self._members.parameters
            told = before[index].parameter
            if not self.open:
                self._open([id(told)])
                if before is not self._members.parameters:  # the ranks have just agreed on others, with other numbers
                    index = next((each.index for each in self.parameters if each.parameter is told), -1)
            if self._round is None:
                self._members.arrivals.accumulated.append(told)
            elif index >= 0:
                self._round.mark_gradient_ready(index)

    def newcomer_arrived(self, parameter: Parameter) -> None:
        """Autograd has accumulated the gradient of a parameter that the ranks have not agreed on yet.

        Perhaps it is in the module no more: ``test_a_parameter_that_was_in_the_module_for_a_moment``.
        """
        take_over_optimizers([parameter])
        with self._lock:
            weights = self._contribution.weights
            if not self.open:
                if not self.scheduler.expects(self):
                    self.look_for_changes()
                is_new = any(each.parameter is parameter for each in self._members.newcomers)
                if self._differs or (is_new and weights.concerned):
                    self._open([id(parameter)])
            if self._idle is None:
                weights.newcomer_arrived(parameter)

    def is_marked(self) -> bool:
        """Whether compiled autograd has run hooks of the parameters."""
        return self._members.are_marked()

    def take_marked(self) -> None:
        """Take what it has left as if the hooks ran now."""
        self.passes.compile_forward()  # nor is it known which outputs it has gone through
        marked = self._members.take_marks()
        with self._lock:
            self._open(marked, compiled=True)
            for index in [member.index for member in self.parameters if id(member.parameter) in marked]:
                self.mark_gradient_ready(index)

    # -------------------------------------------------------------------------------- finalize

    def finalize_backward(self) -> Sequence[Parameter]:
        """Reduce what is left; returns the parameters whose hooks have waited for this.

        Raises :class:`PeerError` if another rank failed or is in another round.
        """
        with self._lock, torch.no_grad():
            try:
                if self._idle is not None:
                    return self._take_part_idle(self._idle)
                without_gradient = not self.open  # this rank has none of the module, but another rank may have
                if without_gradient:
                    self._open_without_gradient()
                return self._finish(without_gradient and self.passes.is_reached)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                raise
            finally:
                self.end_pass()

    def _finish(self, weighs: bool) -> Sequence[Parameter]:
        if self._round is None:
            return ()
        self.setup.get_ready()
        with self.collectives.phases.phase("finish", f"round {self._round.number}"):
            return self._finalize(self._round, weighs)

    def _take_part_idle(self, batch: IdleBatch) -> Sequence[Parameter]:
        """The same at a batch that counts nothing: contribute what has piled up before it, if anything has."""
        self._idles = False
        self._members.arrivals.end_pass()
        batch.undo()
        try:
            if self._contribution.is_something:
                self._open_without_gradient()
                return self._finish(weighs=False)
            with self._contributing(idle=True):
                self._open_without_gradient()
                return self._finish(weighs=False)
        finally:
            batch.round_ended(self.buffers.keep())

    @contextmanager
    def _contributing(self, joined: bool = False, idle: bool = False) -> Iterator[None]:
        """Inside, this rank contributes nothing; what it was to contribute, it is still to contribute afterwards.
        Parameters have the reduced gradients then, unless the rank has ``joined``."""
        before = self.parameters
        self.look_for_changes()
        rank, parameters = self.collectives.global_rank, [*before, *self._members.newcomers]
        own, self._contribution = self._contribution, Contribution(before, rank, joined, idle)
        try:
            counts = lambda: not self.outcome.has_failed  # noqa: E731
            with gradients_set_aside(parameters) if joined else contributing_nothing(parameters, counts):
                yield
        finally:
            self._contribution = own
            if self.parameters is not before:  # the ranks have agreed on others meanwhile
                own.renumber(before, self.parameters)
            own.weights.watch(self.parameters, self._members.newcomers, self._members.departed)

    def _open_without_gradient(self) -> None:
        self._check_alive()
        try:
            self._open_round(passive=not self.passes.is_reached)
        except (PeerError, OptionError):
            self.abandon()
            raise
        self._contribution.drift.look(True)

    def _finalize(self, current: Round, weighs: bool) -> Sequence[Parameter]:
        """``weighs``: no gradient has come, but what this rank contributes counts."""
        current.end_filling()
        try:
            if weighs:
                self._contribution.weights.use()
            if 0 in self._contribution.used:
                current.mark_unhooked(self._members.find_swapped(self._contribution.used))
            current.launch_rest()
        except BaseException:  # of this rank alone: the others wait for what is not sent
            self.abandon()
            raise
        current.wait()
        if self._members.newcomers:
            take_over_optimizers(map(_parameter_of, self._members.newcomers))
        usual = self.setup.is_settled and self._contribution.is_usual and not (current.late or self._differs)
        usual = usual and not self.decisions.may_be_idle
        used = self.outcome.conclude(current, self._contribution, may_defer=usual, lists_used=self._holds_hooks)
        if self.outcome.is_unread:
            before_next_step(self)
            self.decisions.has_unread(self)
        return used

    def _describe(self, passive: bool, number: int, failed: bool) -> tuple[RankStatus, Weight]:
        """What this rank says of a round."""
        loop = self.decisions.say(self._contribution.is_idle, self._skips)
        failed = failed and not self._skips
        backward = None if passive or self._skips else self.passes.summarize()
        return self._contribution.describe(number, failed, self._differs, backward, loop)

    def takes_part(self, accumulates: bool) -> bool:
        """Whether a backward pass that has gone through the module without a gradient of it is a round all the same.

        It is if other ranks may have gradients: a loss that, on this rank, reaches only what is frozen.
        """
        trained = any(each.parameter.requires_grad for each in (*self.parameters, *self._members.newcomers))
        swapped = self._members.find_swapped(self._contribution.used)
        return bool(swapped) or (accumulates and self.passes.is_reached and trained)

    def hold_hooks(self) -> None:
        """Some parameter has users' hooks, to be run when its gradient is reduced."""
        self._holds_hooks = True

    def run_held_hooks(self, parameters: Sequence[Parameter]) -> None:
        """Run users' hooks of parameters whose gradients have been reduced."""
        run_held_hooks(parameters, self)

    # ------------------------------------------------------- a report that backward has not waited for

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer uses the gradients of the module."""
        return any(listener_of(each) is self for group in optimizer.param_groups for each in group["params"])

    def read_before_step(self) -> None:
        """An optimizer is about to use the gradients; raises if their round has failed on some rank."""
        with self._lock:
            self.outcome.read_unread(self.rounds, NOT_STEPPED)

    def read_for_loop(self) -> None:
        """The loop asks what the ranks have decided."""
        with self._lock:
            self.outcome.read_quietly(self.rounds)

    def forward_begins(self) -> None:
        """The module's forward begins: it has the buffers that have come with the last round."""
        self.update_buffers()
        if self.setup.watch is not None:
            self.setup.watch.forward_begins(self.rounds + 1)

    def update_buffers(self) -> None:
        """Assign the buffers that have come with the last round, if that has waited for its report."""
        if self.outcome.is_unread:
            with self._lock:
                self.outcome.update_buffers(self.rounds)

    # ------------------------------------------------------------------- the end, however it comes

    def end_pass(self, failed: bool = False) -> None:
        """The backward pass is over, however it ended; ``failed`` if all ranks know that its round has failed."""
        with self._lock:
            accumulated = self._members.arrivals.end_pass()
            ended, self._round = self._round, None
            if ended is not None:
                if self.setup.watch is not None:
                    self.setup.watch.forget()
                self._contribution.forget()  # after a failure, too: what was to be contributed is gone
                if ended.has_begun:  # else it may not have opened at all, for other ranks
                    self.rounds = ended.number
            elif self._idle is not None:
                self._idle.undo()
            elif self.open:
                self._contribution.accumulate(accumulated)
            if ended is not None or failed:
                self.passes.end_round()
            self.passes.end_pass()
            self.open = self._idles = False

    @torch.no_grad()
    def abandon(self) -> None:
        """Backward has failed on this rank: send what the others wait for, marked as failed, and do not wait."""
        number = self.rounds if self._round is None else self._round.number
        self.error = f"round {number}: the backward pass failed on this rank"
        if self.scheduler.lost:
            return
        self._skips = self.decisions.leaves_out_after(sys.exception())
        try:
            if self._round is None:
                self._check_alive()
                with suppress(PeerError, OptionError):  # which the others know of
                    self._open_round()
            try:
                self.setup.get_ready()
            except BaseException:
                self.scheduler.note_failure(self)
                raise
            assert self._round is not None
            self.outcome.abandon(self._round)
            self.decisions.has_unread(self)
        except (CommunicationError, AgreementError) as error:  # the group has ended, or all raise
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        except Exception as error:
            self.scheduler.lose(f"it could not take its part in a round that had failed: {error!r}")
        finally:
            self._skips = False
            self._contribution.forget()

    def is_within(self, reach: Reach, expected: bool) -> bool:
        """Whether a pass of that reach is a round, as :meth:`takes_part` has it or because it accumulates into a
        parameter; ``expected``: it goes through the module."""
        if not self.open:  # see test_a_failure_is_told_before_it_gets_to_parameters_that_are_new
            self.look_for_changes()
        samples = reach.marks.get(id(self), ())
        own = any(self._members.is_own(sample) for sample in samples)
        return self._members.are_within(reach, expected or bool(samples), own)

    # ------------------------------------------------------------------------------ for others

    def restore(self, rounds: int, plan: str) -> None:
        """Go on where an earlier run was; all ranks must."""
        self.rounds = rounds
        self.setup.restore(plan)

    def set_requires_sync(self, required: bool) -> None:
        """Whether backward passes that begin from now on synchronise."""
        self.requires_sync = required

    # ---------------------------------------------------------------- batches that count nothing, or are left out

    def follow_rank(self, rank: int) -> None:
        """Buffers of the next round are those of ``rank``."""
        self.update_buffers()
        self.setup.follow_rank(rank)

    def begin_idle_batch(self) -> None:
        """The loop is at a batch that counts nothing, until :meth:`end_idle_batch`."""
        parameters = [member.parameter for member in (*self.parameters, *self._members.newcomers)]
        self._idle = IdleBatch(parameters, self.keep_buffers())

    def end_idle_batch(self) -> None:
        """The loop goes on."""
        if self._idle is not None:
            self._idle.end()
        self._idle = None

    def leave_out(self) -> None:
        """Take part in the round that the other ranks are in, without a gradient, and have all leave the batch out."""
        self._skips = True
        try:
            with self._contributing(idle=True):
                self.scheduler.reduce([self])
        finally:
            self._skips = False
        self.drop_gradients()

    def keep_buffers(self) -> KeptBuffers:
        """What the module's buffers are now, to be given back."""
        self.update_buffers()
        return self.buffers.keep()

    def drop_gradients(self) -> None:
        """The batch is left out: no parameter has a gradient, and nothing is to be contributed any more."""
        with self._lock:
            self._contribution.leave_out()
            self.setup.drop_gradients()

    def announce(self, weight: float | None) -> None:
        """What the loss of the next backward passes counts, on top of what has been counted since the last round."""
        if self._idle is not None:
            return
        if weight is not None:
            self.look_for_changes()  # what new parameters get has a weight, too
        self._contribution.weights.announce(weight)

    def count_without_gradient(self) -> None:
        """A ``backward()`` has ended, perhaps without a gradient of the module: its loss counts all the same."""
        with self._lock:
            if self._contribution.weights.use_without_gradient():
                give_up_after_next_step(self)

    def give_up_without_gradients(self) -> None:
        """The batch has been given up, as gradients show, where there are any."""
        with self._lock:
            self._contribution.weights.give_up_without_gradients()

    def retire(self) -> None:
        """Another replication has taken over all parameters."""
        self.retired = True
        self.scheduler.unregister(self)

    def reduce_without_batch(self) -> None:
        """Take part in a round of the other ranks, outside of any backward and without gradients.

        What this rank has - gradients, what has piled up, its weights - it has afterwards, too: see
        tests/procs/test_join_gradients.py.
        """
        with self._contributing(joined=True):
            self.scheduler.reduce([self])
