"""The reducer of one module: finds new gradients, fills buckets, reduces them over the ranks, and sets ``.grad``.

A *round* is the reduction of one backward pass of one replicated module (``round.py``). Its steps, in the order of this
file:

1. *note* - a backward pass begins: the reducer records the present gradients (``gradients.py``) and new parameters of
   the module, and decides whether this backward synchronises.
2. *fill* - while backward runs, triggers (``managed_parameters.py``) look whether all gradients of a bucket have come.
   A full bucket is launched at once if all before it have been: every rank sends the same buckets in the
   same order, whatever order its gradients come in. The first trigger opens the round. With several modules on the
   group nothing leaves before the end of the pass (``replicated_modules.py``).
3. *look* - the pass has ended: the reducer finds which gradients have changed. A pass that does not synchronise ends
   here.
4. *finalize* - buckets that are not full are launched: a parameter without a new gradient contributes its accumulated
   gradient, or zero. The last bucket leaves now with the report: the used parameters, the round's number, failures,
   weights, buffers (``status.py``). Then the reducer waits for all buckets.
5. *copy out* - parameters that any rank used get the mean, all others keep their ``.grad``. Some gradients came after
   their bucket had left (a layer that reentrant checkpointing runs twice), or have no bucket (parameters that are
   unfrozen, or used for the first time). The report names them, so all ranks reduce them now. Buffers are assigned.
6. *adapt* - the plan follows the parameters that the ranks use (``plan.py``): frozen and unused parameters are not
   sent, without a flag. If the module of any rank has other parameters than before, all ranks agree on the parameters
   again (``parameters.py``), and reduce the gradients of new ones in the same round.

If backward fails on this rank, it sends the messages that the other ranks wait for, with zeros, and a report that says
so.

Lifetimes: the replicated module keeps the reducer alive (``managed_parameters.py``). Gradients live in
buckets (``buckets/bucket.py``). The gradients and weights that a rank has accumulated since the last round are its
*contribution* (``contribution.py``), which ends with the round that reduces it.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep._base.devices import is_capturing, refuse_capture
from lockstep.distributed.comm.group_state import watchers
from lockstep.distributed.reduction.autograd.engine import (
    BackwardPass,
    current_pass,
    foreign_pass,
    is_autograd_compiled,
    note_failure,
)
from lockstep.distributed.reduction.autograd.gradients import GradientSnapshot
from lockstep.distributed.reduction.autograd.graph import ReachableLeaves
from lockstep.distributed.reduction.common_state import CommonState
from lockstep.distributed.reduction.module.managed_parameters import (
    ManagedParameter,
    PassHooks,
    StreamTrigger,
    Trigger,
    hooks_of,
    note_outlived,
    owner_of,
    users_hooks_of,
)
from lockstep.distributed.reduction.module.selection import APPLIED_IN_BACKWARD, check_optimizers
from lockstep.distributed.reduction.rank_state import RankState
from lockstep.distributed.reduction.report.decisions import at_padding
from lockstep.distributed.reduction.report.pass_log import ForwardMark
from lockstep.distributed.reduction.report.status import Part
from lockstep.distributed.reduction.round import Round
from lockstep.distributed.reduction.step import Step
from lockstep.errors import (
    AgreementError,
    CommunicationError,
    OptionError,
    PeerError,
    ShareError,
)


class Reducer:
    """Synchronises the gradients of one replicated module.

    Communicates, in each synchronising backward, one all-reduce for each bucket. Late gradients, large buffers and a
    change of the module take more, as the head of this file says.
    """

    retired = True
    """True if another replication has taken over all parameters, or the reducer is not complete yet."""
    has_lost_parameters = False
    """True if another reducer has claimed some of the parameters, and may still have them."""

    def __init__(self, common: CommonState, keeps: object) -> None:
        """``keeps``: an object to be kept alive by the reducer, the scheduler of the group."""
        self.common = common  # what all ranks have alike
        self.collectives = common.collectives
        self.decisions = common.decisions
        self.buffers = common.buffers
        self._keeps = keeps
        self._lock = threading.RLock()
        self.rank_state = RankState(
            common.members, common.buffers, common.drift, common.decisions, common.collectives.global_rank, self._lock
        )
        self.passes = self.rank_state.passes
        self.home = threading.get_ident()  # the thread in which the module is used
        self._steps: list[Step] = []  # of the passes under way that may reach the module, inside of one another
        self._failed: Round | None = None  # what it has sent may not have arrived yet
        self.has_failed = False
        """True if the last round has failed on some rank, or was left out; the same on all ranks."""
        self._members = common.members
        self.may_go_past_forward = True
        """True if backward passes may reach the module without going through outputs of its forward: until one pass has
        gone through them, and always once a pass has not."""
        self._has_gone_past_forward = False
        self.retired = False

    @property
    def parameters(self) -> list[ManagedParameter]:
        """The parameters that the ranks have agreed on."""
        return self._members.parameters

    @property
    def rounds(self) -> int:
        """The number of the last round in which anything was sent."""
        return self.common.rounds

    # ------------------------------------------------------------------------------------ note

    def forward_begins(self) -> None:
        """Note that the module's forward begins."""
        self.home = threading.get_ident()

    def pass_begins(self, this: BackwardPass) -> None:
        """Note that a backward pass begins, before it adds to any gradient."""
        with self._lock:
            if self._steps:
                outer = self._steps[-1]
                if outer.is_reached:
                    return  # it joins the pass around it: what both bring is reduced once, when the outer one ends
                if outer.this is None or not this.is_inside(outer.this):
                    self._drop_steps()  # of another thread, and never came here
            self._steps.append(self._begin_step(this))

    def _begin_step(self, this: BackwardPass) -> Step:
        rank_state = self.rank_state
        if not this.adds:
            return Step(this, GradientSnapshot(()), rank_state.requires_sync)
        captured = rank_state.requires_sync and self.common.is_on_accelerator and is_capturing(self.common.device)
        if captured and self.is_in_reach(this.reach):  # in the pass a stream might wait that must not: CUDA would raise
            self._check_alive()
        if not self._steps and self._members.look_for_retyped():  # else the pass around it has begun without
            self._renew_buckets()
        changed = rank_state.look_for_changes()
        if rank_state.contribution.weights:
            rank_state.contribution.check_gradients()
        parameters = self._members.tracked
        if APPLIED_IN_BACKWARD in sys.modules:
            check_optimizers(self._members.named)
        step = Step(this, GradientSnapshot(parameters), rank_state.requires_sync, changed and rank_state.requires_sync)
        triggers: dict[int, Trigger] = {}
        # Else nothing leaves before the pass has ended, and the order of gradients is known.
        if rank_state.requires_sync and (self.common.modules.exclusive or self.common.plan.observes):
            buckets = self.common.buckets
            if buckets.triggers is None:  # the plan has changed since the last pass
                buckets.triggers = self._choose_triggers()
            triggers = buckets.triggers
            if self.common.plan.observes:
                self.common.plan.begin_round()
        if triggers or any(map(hooks_of, parameters)):
            on = [(self.parameters[number].parameter, trigger) for number, trigger in triggers.items()]
            step.hooks = PassHooks(parameters, on)
            step.has_users_hooks = step.hooks.has_users
        if rank_state.padding_batch is not None:
            step.set_aside()
        return step

    def _begin_step_without_pass(self) -> Step:
        rank_state = self.rank_state
        if self._members.look_for_retyped():
            self._renew_buckets()
        rank_state.look_for_changes()  # the gradients of new parameters count, too
        parameters = self._members.tracked
        step = Step(None, GradientSnapshot(parameters), rank_state.requires_sync)
        step.has_users_hooks = any(map(users_hooks_of, parameters))
        self._steps.append(step)
        return step

    def _renew_buckets(self) -> None:
        """Make buckets of the parameters that have the shapes, dtypes and devices that were agreed on."""
        self.common.make_buckets()
        self.rank_state.renumber()

    def watches(self, this: BackwardPass) -> bool:
        """Return True if that pass, if any, may reach the module, and no other pass is under way inside of it."""
        innermost = self._steps[-1:]  # a copy: threads of other modules ask, while this one's ends a pass
        return bool(innermost) and innermost[0].this is this

    def counts_in_outer(self, this: BackwardPass) -> bool:
        """Return True if what that pass brings is reduced with the pass around it, which has reached the module: if it
        fails, and the program goes on, it has brought nothing."""
        innermost = self._steps[-1:]  # without the lock, which a thread that waits for this one may hold
        outer = innermost[0].this if innermost else None
        return outer is not None and this.is_inside(outer)

    @property
    def in_backward(self) -> bool:
        """Return True if a backward pass is under way that has reached the module."""
        with self._lock:
            return bool(self._steps) and self._steps[-1].is_reached

    @property
    def through_forward(self) -> bool:
        """Return True if the pass under way has gone through outputs of a forward."""
        innermost = self._steps[-1:]
        return bool(innermost) and innermost[0].through_forward

    @property
    def synchronises(self) -> bool:
        """Return True if the pass under way synchronises gradients, or the next one if none is."""
        innermost = self._steps[-1:]
        return innermost[0].synchronises if innermost else self.rank_state.requires_sync

    def on_output_grad(self, forward: ForwardMark | None = None) -> None:
        """Note that the backward pass has reached outputs of a forward; or, if that is None, a mean over the ranks that
        leads to the module's parameters on some rank."""
        if watchers:
            self.collectives.enter("backward")
        if self.retired:
            return
        with self._lock:
            step = self._steps[-1] if self._steps else self._begin_unseen_step()
            step.through_forward = True
            step.called = self.passes.note_reached(forward) | (step.called or 0)
            if forward is None or self._members.is_own_parameter(forward.bound_parameter):
                step.is_within_module = True

    def _begin_unseen_step(self) -> Step:
        """Begin the step of a pass whose beginning the reducer has not seen."""
        this = current_pass()
        step = self._begin_step(foreign_pass() if this is None else this.whole)
        self._steps.append(step)
        return step

    # ------------------------------------------------------------------------------------ fill

    def _choose_triggers(self) -> dict[int, Trigger]:
        """Return the triggers of a pass: on the parameters whose gradients are expected last in their bucket, or on all
        as long as the order is not known."""
        buckets = self.common.buckets
        if self.common.plan.observes:
            numbers = [member.index for member in self.parameters]
        else:
            early = [each for each in buckets.in_order if not each.waits_for_end]
            numbers = [each.planned.indices[-1] for each in early]
            numbers += [member.index for each in early for member in each.members if member.needs_stream]
        return {number: self._new_trigger(number) for number in numbers}

    def _new_trigger(self, number: int) -> Trigger:
        return (StreamTrigger if self.parameters[number].needs_stream else Trigger)(number, self)

    def note_stream(self, index: int) -> None:
        """Note the stream on which autograd has just accumulated the gradient of a parameter; the triggers of the next
        pass are others."""
        with self._lock:
            self.parameters[index].note_stream()
            self.common.buckets.triggers = None

    def gradient_triggered(self, index: int) -> None:
        """Note that autograd has accumulated the gradient of a parameter that has a trigger."""
        with self._lock:
            if self.retired:
                return
            step = self._steps[-1] if self._steps else self._begin_unseen_step()
            if step.round is None:
                if self.common.plan.observes:
                    self.common.plan.observe(index)
                elif step.this is not None and step.this.over:
                    return  # it has failed in another thread: nobody waits for it any more
                elif step.synchronises and self.rank_state.padding_batch is None and self.common.modules.exclusive:
                    self._check_alive()
                    self._open_round(step)
            if step.round is not None:
                step.round.bucket_triggered(index, step.before)

    def _check_alive(self) -> None:
        try:
            if not self.collectives.is_alive:
                self.collectives.check_alive()
            if self.decisions.shares:
                self.decisions.check_outside_share(self.collectives.global_rank)
            if self.common.is_on_accelerator:
                # The others cannot be told: that would be captured, too. They are expected to capture as well.
                refuse_capture(self.common.device, "backward() of a replicated module")
        except (CommunicationError, ShareError, OptionError):
            note_failure(self)
            raise

    def _open_round(self, step: Step) -> None:
        if self._failed is not None:
            self.finish_failed()
        others = self.common.begin_round(self.decisions.active)
        if not step.through_forward and self.rank_state.look_for_changes() and step.synchronises:
            others = True  # the pass was not expected here when it began
        step.differs = step.differs or others
        step.round = Round(self.common.rounds + 1, self.common, self.rank_state, step.before)

    # ------------------------------------------------------------------------------------ look

    def find_arrived(self) -> bool:
        """Find the gradients that the finished pass has set or changed; return True if there are any."""
        with self._lock:
            step = self._steps[-1]
            came = step.before.changed()
            if step.round is not None:
                came = step.round.with_taken(came)
            if came and self.has_lost_parameters:  # other modules may synchronise some of them by now
                came = [position for position in came if self._owns(step.before.parameters[position])]
            step.came = came
            if came and not step.through_forward:
                self.may_go_past_forward = self._has_gone_past_forward = True
                if is_autograd_compiled():
                    self.passes.compile_forward()  # it is not known which outputs it has gone through
            elif came and not self._has_gone_past_forward:
                self.may_go_past_forward = False
            return bool(came) or step.round is not None

    def takes_part(self, accumulates: bool) -> bool:
        """Return True if a backward pass that has gone through the module, but left no gradient in it, still takes part
        in a round.

        It does if other ranks may have gradients: on this rank the loss reaches only frozen parameters.
        """
        members = self._members
        trained = any(each.parameter.requires_grad for each in (*members.parameters, *members.added))
        return accumulates and self._steps[-1].is_within_module and trained

    def _owns(self, parameter: Parameter) -> bool:
        return owner_of(parameter) in (None, self)

    def accumulate(self) -> None:
        """Note that the pass has reached the module, and does not synchronise."""
        with self._lock:
            if self.rank_state.padding_batch is None:
                step = self._steps[-1]
                self.rank_state.accumulate(step.came, len(step.before.parameters))

    # -------------------------------------------------------------------------------- finalize

    def finalize_backward(self, part: Part = Part.FULL) -> Sequence[Parameter]:
        """Reduce all remaining buckets; return the parameters whose hooks have waited for that.

        ``part``: how this rank takes part.
        Raises :class:`PeerError` if another rank failed or is in another round.
        """
        phase = self.collectives.phases.phase("finish", f"round {self.common.rounds + 1}")
        with self._lock, torch.set_grad_enabled(False), phase:  # no_grad() takes twice as long
            try:
                if self.rank_state.padding_batch is not None:
                    return self._finalize_padding(part)
                step = self._steps[-1] if self._steps else None
                if step is None or not (step.came or step.round is not None):
                    # This rank has no gradient of the module, but another rank may have.
                    return self._finish_without_gradient(part)
                if step.this is not None and step.this.creates_graph:
                    _warn_of_graph()
                if step.round is None:
                    self._check_alive()
                    self._open_round(step)
                try:
                    self.rank_state.contribution.add(step.came, len(step.before.parameters))
                except BaseException:  # of this rank alone: the report tells the others
                    self.fail()
                    raise
                return self._finish(step, part)
            finally:
                self.end_pass()

    def _finalize_padding(self, part: Part) -> Sequence[Parameter]:
        """Finalize at a padding batch: contribute the gradients that were accumulated before it, if there are any."""
        rank_state = self.rank_state
        for step in self._steps:
            step.put_back()
        if rank_state.padding_batch is not None:
            rank_state.padding_batch.buffers.give_back()
        something = rank_state.contribution.is_something(self._members.added)
        if not something and part is Part.FULL:
            part = Part.PADDING
        # What it has accumulated before it ran out is reduced now, as the other ranks step next.
        try:
            with nullcontext() if something else rank_state.set_aside(self._is_kept):
                return self._finish_without_gradient(part)
        finally:
            rank_state.keep_padding()

    def _finish_without_gradient(self, part: Part) -> Sequence[Parameter]:
        self._check_alive()
        step = self._steps[-1] if self._steps else self._begin_step_without_pass()
        if not step.is_within_module:
            step.called = None
        try:
            self._open_round(step)
        except (PeerError, OptionError):
            self.fail()
            raise
        return self._finish(step, part)

    def _finish(self, step: Step, part: Part) -> Sequence[Parameter]:
        current = step.round
        if current is None:
            return ()
        if not self.common.is_ready:
            self.common.get_ready()
        current.end_filling()
        try:
            if self.rank_state.contribution.problem:
                raise OptionError(self.rank_state.contribution.problem)
            if at_padding and part is Part.FULL and self.decisions.pads_elsewhere:
                raise OptionError(
                    f"rank {self.collectives.global_rank} has run out of batches in a loop over batches() that does "
                    "not serve this module, which is replicated over another process group: its repeated rows would "
                    "count. Name all modules that the loop trains: lockstep.batches(loader, model, other)"
                )
            if self._members.layouts.changed():  # once the report has left, the other ranks could not be told
                self._members.check_layouts()
            current.launch_rest(self.rank_state.status(current.number, part, step.called, step.differs))
        except BaseException:  # of this rank alone: the others wait for what is not sent
            self.fail()
            raise
        current.wait()
        return current.conclude(lists_used=step.has_users_hooks)

    def run_hooks(self, parameters: Sequence[Parameter]) -> None:
        """Run users' hooks of parameters whose gradients have been reduced, unless another module reduces them."""
        for parameter in parameters:
            if self._owns(parameter):
                for hook in users_hooks_of(parameter):
                    hook(parameter)

    def _is_kept(self, parameter: Parameter) -> bool:
        """Return True if the gradient of a parameter stays as it was, after a round to which it did not contribute."""
        return parameter.grad is None and not self.has_failed

    # ------------------------------------------------------------------- the end, however it comes

    def end_pass(self, failed: bool = False) -> None:
        """End the backward pass, with or without an error; ``failed``: all ranks know that its round has failed."""
        with self._lock:
            step = self._steps.pop() if self._steps else None
            if step is not None and (step.hooks or step.aside):
                step.put_back()
            accumulated = step is not None and bool(step.came) and not step.synchronises
            ended = None if step is None else step.round
            del step  # whose references would look like the program's
            if ended is not None:
                self._end_round(ended)
            elif failed:
                self.has_failed = True
            # No rank steps on gradients of a failed round: those that it has had before are of an unfinished step.
            if failed or (ended is not None and self.has_failed):
                if ended is not None:
                    ended.drop_gradients()  # they differ by rank: test_after_a_failed_backward.py
                else:
                    self._members.drop_gradients()
            if failed or ended is not None:
                applied = ended is not None and not (failed or self.has_failed)
                knows_steps = applied and ended is not None and not ended.is_joined
                self.rank_state.end_round(ended is not None, applied, knows_steps)
            else:
                self.rank_state.end_pass(accumulated)
            for outer in self._steps:  # the gradients of this pass do not belong to those
                outer.before = GradientSnapshot(outer.before.parameters)

    def _end_round(self, ended: Round) -> None:
        self.has_failed = not ended.is_applied
        # Else it may not have opened at all, for other ranks: test_a_failure_with_several_modules.
        if ended.is_applied or ended.has_begun:
            self.common.rounds = self.common.drift.round = ended.number  # others may have had something of it
        triggers = self.common.buckets.triggers or {}
        for before, number in ended.moved_triggers.items():  # another gradient was the last one of its bucket
            if triggers.pop(before, None) is not None:
                triggers[number] = self._new_trigger(number)

    def _drop_steps(self) -> None:
        while self._steps:
            self.pass_leaves()

    def pass_leaves(self) -> None:
        """Note that the innermost pass is over, and has not reached the module."""
        with self._lock:
            self._steps.pop().put_back()

    @torch.no_grad()
    def fail(self) -> None:
        """After a failed backward on this rank, send what the others wait for, marked as failed, without waiting."""
        if self.collectives.is_lost:
            return
        part = Part.SKIPS if self.decisions.skips_after(sys.exception()) else Part.FAILED
        try:
            with self.collectives.phases.phase("finish", f"round {self.common.rounds + 1}"):
                self._send_zeros(part)
        except (CommunicationError, AgreementError, OptionError) as error:  # the group has ended, or all raise
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        except Exception as error:
            self.collectives.lose(f"it could not take its part in a round that had failed: {error!r}")

    def _send_zeros(self, part: Part) -> None:
        step = self._steps[-1] if self._steps else None
        if step is None or step.round is None:
            self._check_alive()
            step = step or self._begin_step_without_pass()
            with suppress(PeerError, OptionError):  # which the others know of
                self._open_round(step)
        try:
            self.common.get_ready()
        except BaseException:
            note_failure(self)
            raise
        assert step.round is not None
        # Kept until its messages have arrived, and the loop has read what the others have told.
        current = self._failed = step.round
        current.fail(self.rank_state.status(current.number, part, step.called, step.differs))
        self.decisions.finish_later(self.finish_failed)

    def finish_failed(self) -> None:
        """Return when all messages of a failed round have arrived, and the decisions of the ranks in it are known."""
        if self._failed is not None:
            with self._lock:
                failed, self._failed = self._failed, None
                if failed is not None:
                    failed.finish_failed()

    def is_in_reach(self, reach: ReachableLeaves) -> bool:
        """Return True if a pass of that reach accumulates into parameters of the module, as far as its graph shows."""
        if id(self) in reach.marks:
            return True
        return any(id(parameter) in reach.leaves for parameter in self._members.tracked)

    def is_within(self, reach: ReachableLeaves, expected: bool) -> bool:
        """Return True if a pass of that reach is a round, as :meth:`takes_part` has it or because it
        accumulates into a parameter; ``expected``: it goes through the module."""
        if not self._steps:
            self._members.look_for_changes()
        samples = reach.marks.get(id(self), ())
        own = any(self._members.is_own_parameter(bound_parameter) for bound_parameter in samples)
        return self._members.are_within(reach, expected or bool(samples), own)

    def retire(self) -> None:
        """Stop synchronising: another replication has taken over all parameters."""
        self.retired = True
        self.common.drift.stop()
        self.rank_state.end_padding_batch()
        self.common.modules.unregister(self)
        self._drop_steps()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending():  # the names below may be gone: test_a_program_ends_without_a_word
            return
        if self.retired:
            return
        self._drop_steps()
        for each in self.parameters:
            if owner_of(each.parameter) in (None, self):
                note_outlived(each.parameter, each.name)

    def manages(self, parameter: Parameter) -> bool:
        """Return True if it synchronises the parameter, or will once the ranks have agreed on it."""
        return self._members.tracks(parameter)

    def has_in_module(self, parameter: Parameter) -> bool:
        """Return True if its module has the parameter on this rank."""
        return self._members.has(parameter)

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer has a parameter that it synchronises."""
        return self._members.has_any_of(optimizer)

    def is_added(self, parameter: Parameter) -> bool:
        """Return True if the parameter is new on this rank, and not agreed on yet."""
        return self._members.is_added(parameter)

    def present(self) -> list[Parameter]:
        """Return the parameters that its module still has."""
        return [each.parameter for each in self._members.present]


@cache  # once in a process
def _warn_of_graph() -> None:
    warnings.warn(
        "backward(create_graph=True) went through a replicated module: gradients are reduced as always, and have no "
        "graph, so nothing can be differentiated through them. For gradients of gradients take those of this rank by "
        "torch.autograd.grad(loss, parameters, create_graph=True), and their mean by "
        "lockstep.loop.mean_over_ranks(), which stays differentiable",
        stacklevel=2,
    )
