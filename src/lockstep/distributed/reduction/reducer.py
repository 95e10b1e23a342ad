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
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from operator import attrgetter
from weakref import WeakMethod

import torch
from torch.nn import Parameter

from lockstep.distributed.reduction.graph import Reach
from lockstep.distributed.reduction.idle import IdleBatch
from lockstep.distributed.reduction.outcome import Outcome
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.parameter_hooks import run_held_hooks, take_over_optimizers
from lockstep.distributed.reduction.participation import Participation
from lockstep.distributed.reduction.passes import ForwardMark
from lockstep.distributed.reduction.round import Round
from lockstep.distributed.reduction.setup import Setup
from lockstep.errors import (
    AgreementError,
    CommunicationError,
    NotReplicableError,
    OptionError,
    PeerError,
    ShareError,
)

_parameter_of = attrgetter("parameter")


class Reducer:
    """Synchronises the gradients of one replicated module.

    Communicates, in each synchronising backward: one all-reduce for each bucket; nothing else, but what the head of
    this file lists as late, once, or large.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup  # what all ranks have alike
        self.collectives, self.scheduler, self.buffers = setup.collectives, setup.scheduler, setup.buffers
        self._lock = threading.RLock()
        self.outcome = Outcome(setup, self._lock)
        self.participation = Participation(setup, self.outcome, self._lock)
        self.passes = self.participation.passes
        self.retired = False  # another replication has taken over all parameters
        self.error = ""  # the last error of a round, for logging
        self.open = False  # a backward pass under way has reached the module
        self._round: Round | None = None  # if that pass synchronises
        self._round_follows = False  # or if its round is to open at its end: the batch counts nothing
        self._members = setup.members
        self._holds_hooks = False  # users have hooks on parameters
        self._gradients_reached: WeakMethod[Callable[[], None]] = WeakMethod(self.reached)

    @property
    def parameters(self) -> list[ManagedParameter]:
        """The parameters that the ranks have agreed on."""
        return self._members.parameters

    @property
    def rounds(self) -> int:
        """The number of the last round of which anything was sent."""
        return self.setup.rounds

    # ------------------------------------------------------------------------------------ open

    @property
    def reducing(self) -> bool:
        """Whether the backward pass under way has reached the module, and synchronises."""
        return self._round is not None or self._round_follows

    def forward_begins(self) -> None:
        """The module's forward begins: it has the buffers that have come with the last round."""
        self.outcome.update_buffers()
        if self.setup.watch is not None:
            self.setup.look_at_buffers(self.rounds + 1)

    def reached(self, forward: ForwardMark | None = None) -> None:
        """The backward pass has come to outputs of a forward; if it is None, to reduced gradients with a graph."""
        self.collectives.enter("backward")
        self.scheduler.expect_backward(self)
        self.passes.reach(forward, forward is None or self._members.is_own(forward.sample))
        if not self.open:
            self.participation.pass_comes()

    def _open(self) -> None:
        """A backward pass has reached the module: its first gradient has come."""
        if not self.scheduler.follow():
            return  # of a pass that has failed in another thread: nobody waits for it any more
        take_over_optimizers(map(_parameter_of, self._members.parameters))
        own, expected = self.participation, self.scheduler.expects(self)
        if own.requires_sync:
            self._check_alive()
        self.scheduler.enter(self)
        if own.requires_sync and own.idle_batch is None:
            self._open_round(expected)
        else:
            self.open, self._round_follows = True, own.requires_sync
            self._members.arrivals.accumulate()
        if own.idle_batch is None:  # what follows may fail on this rank alone: then the others are told
            own.begin_pass(expected)

    def _check_alive(self) -> None:
        try:
            self.collectives.check_alive()
            self.scheduler.check()
        except (CommunicationError, ShareError):
            self.scheduler.note_failure(self)
            raise

    def _open_round(self, expected: bool, passive: bool = False, create_graph: bool | None = None) -> None:
        """Open the round, also if the report of the last one says only now that it has failed on some rank.

        ``expected``: the pass was to go through the module; ``passive``: this rank takes part without one of its own;
        ``create_graph``: the pass was asked for a graph of the gradients, as it is known inside of it if None.
        """
        own = self.participation
        try:
            self.outcome.read_deferred()
        finally:
            self.outcome.wait_for_abandoned()
            self.setup.follow(self.scheduler.decisions.active)
            own.begin_round(expected)
            describe, used = partial(own.describe, passive), own.contribution.used
            graph = torch.is_grad_enabled() if create_graph is None else create_graph
            self._round = Round(self.rounds + 1, self.setup, used, describe, graph, self._gradients_reached)
            self.open = True

    # ------------------------------------------------------------------------------------ fill

    def mark_gradient_ready(self, index: int) -> None:
        """Autograd has accumulated the gradient of the parameter with that number."""
        with self._lock:
            current = self._round
            if current is None:  # the first gradient of a pass, or any of one that does not synchronise
                own, told = self.participation, self._members.parameters[index].parameter
                if own.idle_batch is None:
                    own.contribution.used[index] = 1
                if not self.open:
                    self._open()
                current = self._round
                if current is None:
                    self._members.arrivals.accumulated.append(told)
            if current is not None:
                current.mark_gradient_ready(index)

    def newcomer_arrived(self, parameter: Parameter, name: str) -> None:
        """Autograd has accumulated the gradient of a parameter that the ranks have not agreed on yet.

        Perhaps it is in the module no more: ``test_a_parameter_that_was_in_the_module_for_a_moment``.
        """
        take_over_optimizers([parameter])
        with self._lock:
            own = self.participation
            if not self.open:
                if not self.scheduler.expects(self):
                    own.look_for_changes()
                if own.opens_for(parameter):
                    self._open()
            if self._members.is_dropped:
                raise _no_longer_whole(name)
            own.newcomer_arrived(parameter)

    def is_marked(self) -> bool:
        """Whether compiled autograd has run hooks of the parameters."""
        return self._members.are_marked()

    def take_marked(self) -> None:
        """Take what it has left as if the hooks ran now."""
        self.passes.compile_forward()  # nor is it known which outputs it has gone through
        marked = self._members.take_marks()
        with self._lock:
            self._open()
            for index in [member.index for member in self.parameters if id(member.parameter) in marked]:
                self.mark_gradient_ready(index)

    # -------------------------------------------------------------------------------- finalize

    def finalize_backward(self, create_graph: bool) -> Sequence[Parameter]:
        """Reduce what is left, with ``create_graph`` to gradients that have a graph; returns the parameters whose hooks
        have waited for this.

        Raises :class:`PeerError` if another rank failed or is in another round.
        """
        with self._lock, torch.no_grad():
            try:
                if self.participation.idle_batch is not None:
                    return self._finalize_idle(self.participation.idle_batch, create_graph)
                without_gradient = not self.open  # this rank has none of the module, but another rank may have
                if without_gradient:
                    self._open_without_gradient(create_graph)
                return self._finish(without_gradient and self.passes.is_reached)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                raise
            finally:
                self.end_pass()

    def _finalize_idle(self, batch: IdleBatch, create_graph: bool) -> Sequence[Parameter]:
        """The same at a batch that counts nothing: contribute what has piled up before it, if anything has."""
        self._round_follows = False
        self._members.arrivals.end_pass()
        batch.undo()
        own = self.participation
        try:
            with nullcontext() if own.contribution.is_something else own.contributing_nothing(idle=True):
                self._open_without_gradient(create_graph)
                return self._finish(weighs=False)
        finally:
            batch.round_ended(self.buffers.keep())

    def _open_without_gradient(self, create_graph: bool) -> None:
        self._check_alive()
        try:
            self._open_round(self.scheduler.expects(self), not self.passes.is_reached, create_graph)
        except (PeerError, OptionError):
            self.abandon()
            raise
        self.participation.contribution.drift.look(True)

    def _finish(self, weighs: bool) -> Sequence[Parameter]:
        """``weighs``: no gradient has come, but what this rank contributes counts."""
        if self._round is None:
            return ()
        self.setup.get_ready()
        with self.collectives.phases.phase("finish", f"round {self._round.number}"):
            return self._finalize(self._round, weighs)

    def _finalize(self, current: Round, weighs: bool) -> Sequence[Parameter]:
        own = self.participation.contribution
        current.end_filling()
        try:
            if weighs:
                own.weights.use()
            own.weights.check()
            if 0 in own.used:
                current.mark_unhooked(self._members.find_swapped(own.used))
            current.launch_rest()
        except BaseException:  # of this rank alone: the others wait for what is not sent
            self.abandon()
            raise
        current.wait()
        if self._members.newcomers:
            take_over_optimizers(map(_parameter_of, self._members.newcomers))
        return self.outcome.conclude(current, own, self.participation.may_defer, lists_used=self._holds_hooks)

    def hold_hooks(self) -> None:
        """Some parameter has users' hooks, to be run when its gradient is reduced."""
        self._holds_hooks = True

    def run_held_hooks(self, parameters: Sequence[Parameter]) -> None:
        """Run users' hooks of parameters whose gradients have been reduced."""
        run_held_hooks(parameters, self)

    def reduce_without_batch(self) -> None:
        """Take part in a round of the other ranks, outside of any backward and without gradients.

        What this rank has - gradients, what has piled up, its weights - it has afterwards, too: see
        tests/procs/test_join_gradients.py.
        """
        with self.participation.contributing_nothing(joined=True):
            self.scheduler.reduce([self])

    def leave_out(self) -> None:
        """Take part in the round that the other ranks are in, without a gradient, and have all leave the batch out."""
        own = self.participation
        with own.leaving_out(), own.contributing_nothing(idle=True):
            self.scheduler.reduce([self])

    # ------------------------------------------------------------------- the end, however it comes

    def end_pass(self, failed: bool = False) -> None:
        """The backward pass is over, however it ended; ``failed`` if all ranks know that its round has failed."""
        with self._lock:
            accumulated = self._members.arrivals.end_pass()
            ended, self._round = self._round, None
            if ended is not None:
                if self.setup.watch is not None:
                    self.setup.watch.forget()
                # Else it may not have opened at all, for other ranks: test_a_failure_with_several_modules.
                if ended.has_begun:
                    self.setup.count_round(ended.number)
            self.participation.end_pass(ended, accumulated if self.open else None, failed)
            self.open = self._round_follows = False

    @torch.no_grad()
    def abandon(self) -> None:
        """Backward has failed on this rank: send what the others wait for, marked as failed, and do not wait."""
        number = self.rounds if self._round is None else self._round.number
        self.error = f"round {number}: the backward pass failed on this rank"
        if self.scheduler.lost:
            return
        with self.participation.leaving_out(self.scheduler.decisions.leaves_out_after(sys.exception())):
            try:
                self._abandon_round()
            except (CommunicationError, AgreementError) as error:  # the group has ended, or all raise
                logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
            except Exception as error:
                self.scheduler.lose(f"it could not take its part in a round that had failed: {error!r}")

    def _abandon_round(self) -> None:
        if self._round is None:
            self._check_alive()
            with suppress(PeerError, OptionError):  # which the others know of
                self._open_round(self.scheduler.expects(self))
        try:
            self.setup.get_ready()
        except BaseException:
            self.scheduler.note_failure(self)
            raise
        assert self._round is not None
        self.outcome.abandon(self._round)

    def is_within(self, reach: Reach, expected: bool) -> bool:
        """Whether a pass of that reach is a round, as :meth:`Participation.takes_part` has it or because it accumulates
        into a parameter; ``expected``: it goes through the module."""
        if not self.open:  # see test_a_failure_is_told_before_it_gets_to_parameters_that_are_new
            self.participation.look_for_changes()
        samples = reach.marks.get(id(self), ())
        own = id(self) in reach.elsewhere or any(self._members.is_own(sample) for sample in samples)
        return self._members.are_within(reach, expected or bool(samples), own)

    def retire(self) -> None:
        """Another replication has taken over all parameters."""
        self.retired = True
        self.participation.end_idle_batch()
        self.scheduler.modules.unregister(self)


def _no_longer_whole(name: str) -> NotReplicableError:
    return NotReplicableError(
        f"parameter {name} got a gradient, which nothing synchronises: it was put into a part of a replicated module "
        "after the module itself had been dropped. Keep the whole module while its parts change, or replicate the part"
    )
