"""Which replicated modules of a group reduce at the end of a backward pass, and in which order.

A round closes where the backward pass ends: the outermost one, where reentrant checkpointing nests them
(``engine.py``). All ranks must send the same buckets in the same order over a
group. With one replicated module on a group that is the order of its plan, and buckets leave while backward runs. With
several, one rank's branches could make another module's bucket ready first; so they wait for the end of backward,
where the ranks tell each other, in one tiny collective, which modules take part, and then reduce them in the order of
their creation.

One backward pass may go through modules on several groups, and on another rank in another order. So their ends wait for
the end of the pass as a whole, and come one group after the other, in an order that is the same on every rank: the
group's number, which its ranks agree on when they first replicate a module over it, is higher than that of any group
that one of them has had before.

If backward fails, this rank takes its part in what the other ranks wait for, with a mark that says so, before the
exception reaches the program: they raise instead of hanging. Which modules the others wait for is what the pass had
reached, and what its graph says that it would have.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.distributed.buffers import KeptBuffers
from lockstep.distributed.collectives import Collectives, Group, Pending
from lockstep.distributed.decisions import decisions_of
from lockstep.distributed.group_state import shared_object
from lockstep.distributed.one_by_one import OneByOne
from lockstep.distributed.reduction.engine import BackwardPass, PassObserver, current_pass
from lockstep.distributed.reduction.graph import Reach
from lockstep.distributed.reduction.modules import FAILED, SKIPPED, Attendance, ReplicatedModules, ScheduledModule
from lockstep.errors import CommunicationError, PeerError, ShareError
from lockstep.phases import Phases


class GroupScheduler(PassObserver):
    """Orders the rounds of all modules that are replicated over one group, in this process."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.lost = ""
        """Why this rank cannot communicate over the group any more, if so."""
        self.decisions = decisions_of(group)
        """What the loop of this rank says to the other ranks."""
        self._abandoned: tuple[Tensor, Pending] | None = None
        self._collectives = Collectives(group, Phases())
        self.modules = ReplicatedModules(self._collectives)
        """Those that are replicated over the group."""
        super().__init__()

    @property
    def order(self) -> int:
        """The group's number among those of this process, the same on all of its ranks."""
        return self.modules.order

    # ----------------------------------------------------------------------- a pass, as it comes

    def pass_begins(self, this: BackwardPass) -> None:
        """A backward pass begins, in the thread in which a module is used, or its graph leads to the module."""
        for module in self.modules:
            if module.home == this.thread or module.is_in_reach(this.reach):
                module.pass_begins(this)

    def note_failure(self, module: ScheduledModule) -> None:
        """All ranks know that the round of a module has failed, in the pass under way: none has to be told."""
        this = current_pass()
        if this is not None:
            this.note_failure(module)

    # ------------------------------------------------------------------------- a pass, as it ends

    def pass_ended(self, this: BackwardPass) -> None:
        """The backward pass has ended: reduce what is left, and give the parameters their gradients."""
        watching = [module for module in self.modules if module.watches(this)]
        if not watching:
            return
        this.told.add(self)
        if self.modules.exclusive and len(watching) == 1:
            try:
                if watching[0].reduce_settled():
                    self._collectives.enter("training")
                    return
            except BaseException:
                this.note_failure(watching[0])
                raise
        reached: list[ScheduledModule] = []
        silent: list[ScheduledModule] = []
        others: list[ScheduledModule] = []
        for module in watching:
            if module.look():
                reached.append(module)
            elif module.is_expected:
                silent.append(module)
            else:
                others.append(module)
        if others and not (reached or silent):  # functions may have left all gradients of this rank undefined
            reached = [each for each in others if each.may_go_past_forward and each.is_in_reach(this.reach)]
        for module in others:
            if module not in reached:
                module.pass_leaves()
        reducing = [module for module in reached if module.synchronises]
        if silent:
            accumulates = this.accumulates
            reducing += [each for each in silent if each.synchronises and each.participation.takes_part(accumulates)]
        try:
            for module in reached:
                if not module.synchronises:
                    module.accumulate()
            if reducing:
                modules = reducing if self.modules.exclusive else self._agree_who_takes_part(reducing)
                self.reduce(modules)
            if reached or silent:
                self._collectives.enter("training")
        except BaseException:
            for module in reducing:
                this.note_failure(module)
                if module.watches(this):
                    module.end_pass()
            raise
        finally:
            for module in (*reached, *silent):
                if module.watches(this):
                    module.end_pass()

    def reduce(self, modules: Sequence[ScheduledModule]) -> None:
        """Run the rounds of modules; then users' hooks."""
        steps = OneByOne()
        reduced: list[tuple[ScheduledModule, Sequence[Parameter]]] = []
        for module in modules:
            with steps:
                reduced.append((module, module.finalize_backward()))
        for module, parameters in reduced:
            if parameters:
                with steps:
                    module.run_held_hooks(parameters)
        if modules:
            self.decisions.round_ended()
        steps.end()

    # ------------------------------------------------------------------------ a pass, as it fails

    def pass_failed(self, this: BackwardPass, reach: Reach) -> None:
        """A backward pass has failed: let the other ranks know, and wait for nobody."""
        if self in this.told:
            return
        watching = [module for module in self.modules if module.watches(this)]
        failing = [module for module in watching if module.look()]
        for each in self.modules:
            if (
                each not in failing
                and each.synchronises
                and each.is_within(reach, each in watching and each.is_expected)
            ):
                failing.append(each)
        self._abandon(failing, this)
        for each in watching:
            if each.watches(this):  # it does not synchronise, or no gradient of it was to come
                each.end_pass()

    @torch.no_grad()
    def _abandon(self, modules: Sequence[ScheduledModule], this: BackwardPass | None) -> None:
        failing = [each for each in modules if each.synchronises]
        failing = [each for each in failing if this is None or not this.is_known_to_fail(each)]
        if failing:
            self.decisions.note_failure()
        try:
            if failing and not self.modules.exclusive:
                mark = SKIPPED if self.decisions.leaves_out_after(sys.exception()) else FAILED
                self._abandoned = self.modules.tell(failing, mark)  # kept until it has arrived
            for module in failing if self.modules.exclusive else ():
                module.abandon()
        except RuntimeError as error:
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        finally:
            for module in modules:
                if this is not None:
                    this.note_failure(module)
                module.participation.pass_failed()
                module.end_pass(failed=any(module is each for each in failing))
            if failing and not self.modules.exclusive:
                self._end_rounds()

    # --------------------------------------------------------------------- what ranks tell each other

    def announce_forward(self, module: ScheduledModule, mark: int) -> list[int]:
        """Inside ``join()``: a module's forward begins. Returns every rank's ``mark``, 0 of those that listen."""
        return self.modules.ask([module], mark).marks

    def listen(self) -> tuple[list[int], list[ScheduledModule]]:
        """Inside ``join()``, for a rank that has run out: what the others do next, and with which modules.

        Either a module's forward begins, with a mark of each rank that is not listening, or no rank has a mark, and
        the modules are reduced.
        """
        told = self.modules.ask([])
        return told.marks, self._that_take_part(told)

    def _agree_who_takes_part(self, modules: Sequence[ScheduledModule]) -> list[ScheduledModule]:
        """The modules that take part on any rank, in the order of their creation."""
        return self._that_take_part(self.modules.ask(modules))

    def _that_take_part(self, told: Attendance) -> list[ScheduledModule]:
        if told.failed:
            self._end_rounds()
            self.decisions.note_failure()
            raise PeerError(
                f"rank {self._collectives.global_rank}: the backward pass failed on another rank before its gradients "
                "were reduced; that rank's own error says why. No gradient has been handed out"
            )
        if told.skipped:
            self._end_rounds()
            self._note_left_out()
            return []
        return told.modules

    def _end_rounds(self) -> None:
        """All ranks know that the pass has failed, but not which of the modules each of them would have gone through:
        end the rounds of all. See tests/ranks/test_several_modules.py."""
        for module in self.modules:
            module.end_pass(failed=True)

    # ----------------------------------------------------- batches that count nothing, or are left out

    @property
    def rounds(self) -> int:
        """How many rounds the modules have had, together."""
        return sum(module.rounds for module in self.modules)

    @contextmanager
    def idle_batch(self) -> Iterator[None]:
        """Inside, the loop is at a batch that counts nothing: the rank has run out. So it may be in a loop around it,
        too."""
        try:
            with self.decisions.padding():
                for module in self.modules:
                    module.participation.begin_idle_batch()
                yield
        finally:
            for module in () if self.decisions.is_padding else self.modules:
                module.participation.end_idle_batch()

    @torch.no_grad()
    def fail(self) -> None:
        """Let the other ranks know that this one cannot go on."""
        self._abandon(self._synchronising(), None)

    def leave_out(self) -> None:
        """Have all ranks leave out the batch that they are at: take part in their round without a gradient.

        Of a micro-batch that does not synchronise they hear in this rank's next round. Where the round of this batch
        has failed, so that all ranks know, nothing is sent.
        """
        modules = list(self.modules)
        if self.decisions.take_local_failure() or not self._synchronising():
            self.decisions.skip_in_next_round()
            for module in modules:
                module.participation.drop_gradients()
            return
        if not self.decisions.has_failed:
            if not self.modules.exclusive:
                _, modules = self.listen()
            try:
                self._leave_out(modules)
            except PeerError:
                if not self.decisions.has_failed:  # else another rank has failed at this batch, too
                    raise
        self._note_left_out()

    def _leave_out(self, modules: Sequence[ScheduledModule]) -> None:
        steps = OneByOne()
        for module in modules:
            with steps:
                module.leave_out()
        steps.end()

    def keep_buffers(self) -> list[KeptBuffers]:
        """What the buffers of all modules are now, to be given back."""
        return [module.participation.keep_buffers() for module in self.modules]

    def _synchronising(self) -> list[ScheduledModule]:
        return [module for module in self.modules if module.participation.requires_sync]

    def _note_left_out(self) -> None:
        for module in self.modules:
            module.participation.drop_gradients()
        self.decisions.note_skipped()

    # ----------------------------------------------------------------------------- a rank that is lost

    def lose(self, reason: str) -> None:
        """Send nothing more: others wait for what this rank cannot send, and would take anything else for it.

        Ends the group on all ranks, if that can be done.
        """
        if not self.lost:
            self.lost = reason
            self._collectives.end(f"rank {self._collectives.global_rank} is lost: {reason}")

    def check(self) -> None:
        """Raise :class:`CommunicationError` if this rank cannot communicate over the group any more, and
        :class:`ShareError` inside of a share, of which another rank may have more or fewer."""
        if self.decisions.share is not None:
            raise ShareError(
                f"rank {self._collectives.global_rank}: a backward pass in share {self.decisions.share} of a batch has "
                "reached a module that is replicated without shares over the same process group, and would synchronise "
                "it once for each share, of which ranks have different numbers; replicate it with as many shares, too, "
                "run its backward after the loop over the batch's shares, or its forward under torch.no_grad()"
            )
        if self.lost:
            raise CommunicationError(
                f"rank {self._collectives.global_rank} can no longer take part in what the other ranks of its process "
                f"group do: {self.lost}. Destroy the group and make another, or start anew"
            )


def scheduler_of(group: Group) -> GroupScheduler:
    """The scheduler of a group: one in a process, for as long as a module holds it."""
    return shared_object(GroupScheduler, group)
