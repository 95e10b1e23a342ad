"""The order in which the modules replicated over one group are reduced, when a backward pass has ended or failed."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep._base.optimizer_steps import observe_steps
from lockstep._base.run_all import RunAll, raise_all
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.group_state import shared_object, watchers
from lockstep.distributed.comm.groups import Group
from lockstep.distributed.comm.record import ranks_that_failed
from lockstep.distributed.reduction.autograd.engine import BackwardPass, PassObserver
from lockstep.distributed.reduction.autograd.graph import ReachableLeaves
from lockstep.distributed.reduction.module.buffers import KeptBuffers
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.reduction.replicated_modules import Answer, Question, ReplicatedModules
from lockstep.distributed.reduction.report.decisions import decisions_of
from lockstep.distributed.reduction.report.status import Part
from lockstep.errors import OptionError, PeerError
from lockstep.phases import Phases


class GroupScheduler(PassObserver):
    """Orders the rounds of all modules that are replicated over one group, in this process."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.decisions = decisions_of(group)
        """The state of this rank's loop, as it is reported to the other ranks."""
        self._question: Question | None = None  # kept until it has arrived
        self._kept: tuple[int, list[KeptBuffers]] = 0, []  # after that many rounds, from before a micro-batch
        self._collectives = Collectives(group, Phases())
        self.modules = ReplicatedModules[Reducer](self._collectives)
        """The modules that are replicated over the group."""
        super().__init__()
        observe_steps(self)

    @property
    def order(self) -> int:
        """The group's number among those of this process, the same on all of its ranks."""
        return self.modules.order

    # ----------------------------------------------------------------------- a pass, as it comes

    def pass_begins(self, this: BackwardPass) -> None:
        """Note that a backward pass begins, in the thread in which a module is used, or its graph leads to the
        module."""
        for module in self.modules:
            # The thread is asked first, since to search the graph takes long; that finds a backward in another thread
            # than the forward.
            if module.home == this.thread or module.is_in_reach(this.reach):
                module.pass_begins(this)

    # ------------------------------------------------------------------------- a pass, as it ends

    def pass_ended(self, this: BackwardPass) -> None:
        """Reduce the remaining gradients when a backward pass has ended, and give the parameters their means."""
        watching: list[Reducer] = []
        for module in self.modules:
            if module.watches(this):
                watching.append(module)  # noqa: PERF401  # a comprehension is one call more
        if not watching:
            return
        this.told.add(self)
        reached, silent = self._find_reached(watching, this)
        if reached or silent:
            self._reduce_reached(this, reached, silent)

    def _find_reached(self, watching: Sequence[Reducer], this: BackwardPass) -> tuple[list[Reducer], list[Reducer]]:
        """Return the modules for which the pass has brought gradients, and those through whose forward it has gone
        without bringing any; other modules are told that it has left."""
        reached: list[Reducer] = []
        silent: list[Reducer] = []
        others: list[Reducer] = []
        for module in watching:
            (reached if module.find_arrived() else silent if module.through_forward else others).append(module)
        if others and not (reached or silent):
            # A custom Function may return None for every gradient: then only the graph shows that a module was reached.
            reached = [each for each in others if each.may_go_past_forward and each.is_in_reach(this.reach)]
        for module in others:
            if module not in reached:
                module.pass_leaves()
        return reached, silent

    def _reduce_reached(self, this: BackwardPass, reached: Sequence[Reducer], silent: Sequence[Reducer]) -> None:
        """Accumulate the gradients of modules that do not synchronise, and reduce the others."""
        reducing: list[Reducer] = []
        accumulating: list[Reducer] = []
        for module in reached:
            (reducing if module.synchronises else accumulating).append(module)
        try:
            for module in accumulating:
                module.accumulate()
            if silent:
                accumulates = this.accumulates
                reducing += [each for each in silent if each.synchronises and each.takes_part(accumulates)]
            if self.modules.exclusive:
                self._reduce(reducing, [Part.FULL] * len(reducing))
            elif reducing:
                answer = self.modules.ask(reducing)
                self._check_not_inside(answer.modules, this)
                self.follow(answer, this=this)
            if watchers:
                self._collectives.enter("training")
        except BaseException:
            for module in reducing:
                this.note_failure(module)
                if module.watches(this):
                    module.end_pass()
            raise
        finally:
            for module in (*accumulating, *silent):
                if module.watches(this):
                    module.end_pass()

    def _check_not_inside(self, modules: Sequence[Reducer], this: BackwardPass) -> None:
        """Raise, on all ranks, if the pass around ``this`` has reached one of the modules on this rank, and has more of
        its gradients to bring, while on other ranks ``this`` pass has reached it first."""
        if this.outer is None or not any(module.in_backward and not module.watches(this) for module in modules):
            return
        steps = RunAll()
        for module in modules:
            with steps:
                module.fail()
            this.note_failure(module)
            module.end_pass(failed=True)
        steps.end()
        self.decisions.note_failure()
        raise OptionError(
            f"rank {self._collectives.global_rank}: a hook has run a backward pass inside of another one, and on other "
            "ranks it has reached a replicated module that here the pass around it had reached before: their gradients "
            "would be mixed. Run that pass after the other one, or give each module a group of its own "
            "(replicate(module, process_group=dist.new_group()))"
        )

    def follow(
        self,
        answer: Answer[Reducer],
        part_of: Callable[[Reducer], Part] | None = None,
        this: BackwardPass | None = None,
    ) -> None:
        """Reduce the modules on which the ranks have agreed, as :meth:`reduce` does; raise if the pass, ``this`` one,
        has failed on some rank."""
        if answer.failed["failed"]:
            self._end_rounds(this)
            self.decisions.note_failure()
            who = ranks_that_failed(answer.failed, self._collectives.global_ranks)
            raise PeerError(
                f"rank {self._collectives.global_rank}: the backward pass failed on {who} before its gradients were "
                "reduced; the error there says why. No gradient has been handed out"
            )
        if answer.skipped:
            self._end_rounds(this)
            self._note_skipped()
        elif part_of is None:
            self._reduce(answer.modules, [Part.FULL] * len(answer.modules))
        else:
            self.reduce(answer.modules, part_of)

    def reduce(self, modules: Sequence[Reducer], part_of: Callable[[Reducer], Part]) -> None:
        """Run the rounds of modules, one after the other, then users' hooks; ``part_of``: how this rank takes part in
        the round of each module.

        In ``Join``, a rank without batches keeps its gradients and its weights for a later round: see
        tests/loops/test_join_gradients.py.
        """
        parts = list(map(part_of, modules))
        with ExitStack() as stack:
            for module, part in zip(modules, parts, strict=True):
                if part is Part.JOINED:
                    stack.enter_context(module.rank_state.set_aside(lambda _: True))
            self._reduce(modules, parts)

    def _reduce(self, modules: Sequence[Reducer], parts: Sequence[Part]) -> None:
        errors, reduced = list[BaseException](), list[tuple[Reducer, Sequence[Parameter]]]()
        left_out = False
        # The other ranks reduce all of them, so an error in one does not keep this rank from the next.
        for module, part in zip(modules, parts, strict=True):
            try:
                reduced.append((module, module.finalize_backward(part)))
            except BaseException as error:
                errors.append(error)
            left_out |= module.has_failed
        # A hook may step, raise or communicate: not before all gradients are there.
        for module, parameters in reduced:
            try:
                if parameters:
                    module.run_hooks(parameters)
            except BaseException as error:
                errors.append(error)
        if modules:
            self.decisions.skips_next = False
        if errors:
            raise_all(errors)
        if left_out:  # the rank that skips drops what all modules have
            self._note_skipped()

    # ------------------------------------------------------------------------ a pass, as it fails

    def pass_failed(self, this: BackwardPass, reach: ReachableLeaves) -> None:
        """Tell the other ranks that a backward pass has failed, without waiting for them."""
        if self in this.told:  # the pass had ended here: another group's rounds, or a callback, have failed after it
            return
        watching = [module for module in self.modules if module.watches(this)]
        if self.decisions.is_padding and self.decisions.skips_after(sys.exception()):
            for each in watching:  # skip_on() takes part in the round after this
                each.end_pass()
            return
        failed = [module for module in watching if module.find_arrived()]
        for each in self.modules:
            if each in failed or each.counts_in_outer(this):
                continue
            # The pass has failed before it came here, and on the other ranks it comes: they wait for this module, too.
            if each.synchronises and each.is_within(reach, each in watching and each.through_forward):
                failed.append(each)
            else:
                each.rank_state.contribution.pass_lost()
        self.fail(failed, this)
        for each in watching:
            if each.watches(this):  # it does not synchronise, or no gradient of it was to come
                each.end_pass()

    @torch.no_grad()
    def fail(self, modules: Sequence[Reducer] | None = None, this: BackwardPass | None = None) -> None:
        """Tell the other ranks that this one cannot continue: its part in the rounds of ``modules``, or all, has
        failed; ``this``: the pass that has failed, if it was one."""
        modules = self._synchronising() if modules is None else modules
        failed = [each for each in modules if each.synchronises and not (this is not None and this.has_failed(each))]
        if failed:
            self.decisions.note_failure()
        try:
            if failed and self.modules.exclusive:
                failed[0].fail()
            elif failed:
                part = Part.SKIPS if self.decisions.skips_after(sys.exception()) else Part.FAILED
                self._question = self.modules.tell(failed, part)
        except RuntimeError as error:
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        finally:
            for module in modules:
                if this is not None:
                    this.note_failure(module)
                module.rank_state.pass_failed()
            if failed and not self.modules.exclusive:
                self._end_rounds(this)
            else:
                for module in modules:
                    module.end_pass(failed=any(module is each for each in failed))

    # ------------------------------------------------------------------------ an optimizer's step

    def step_begins(self, optimizer: Optimizer, closure: bool) -> None:
        """Note that an optimizer begins a step; warn if it uses gradients that are not reduced."""
        for module in self.modules:
            if module.has_parameter_of(optimizer):
                if not closure:
                    module.rank_state.warn_of_local_gradients(optimizer)
                module.rank_state.steps.step_begins(optimizer)

    def step_ended(self, optimizer: Optimizer, closure: bool) -> None:
        """Note that an optimizer has made a step; with a closure, warn of gradients that it has not reduced."""
        for module in self.modules:
            module.rank_state.steps.step_ended(optimizer)
            if closure:
                module.rank_state.warn_of_local_gradients(optimizer)

    def has_parameter_of(self, optimizer: Optimizer) -> bool | None:
        """Return True if an optimizer has a parameter of any of the modules; None if there are no modules."""
        found = [module.has_parameter_of(optimizer) for module in self.modules]
        return any(found) if found else None

    # --------------------------------------------------------------------- what ranks tell each other

    def announce_forward(self, module: Reducer, mark: int) -> list[int]:
        """Tell the other ranks in ``join()`` that a module's forward begins; return every rank's ``mark``, 0 for ranks
        that listen."""
        return self.modules.ask([module], mark).marks(self._collectives.world)

    def listen(self) -> tuple[list[int], Answer[Reducer]]:
        """On a rank in ``join()`` that has run out, return what the others do next, and with which modules.

        Either a module's forward begins, with a mark of each rank that is not listening; or no rank has a mark, and the
        modules are reduced: see :meth:`follow`.
        """
        answer = self.modules.ask([])
        return answer.marks(self._collectives.world), answer

    def _end_rounds(self, this: BackwardPass | None) -> None:
        """End the rounds of all modules: all ranks know that the pass has failed, but not which modules it would have
        reached on each rank. See tests/gradients/test_several_modules.py. A pass around it goes on with the modules
        that it has reached: test_a_pass_inside_that_fails_and_is_caught."""
        for module in self.modules:
            if this is None or this.outer is None or module.watches(this):
                module.end_pass(failed=True)

    # ----------------------------------------------------- batches that count nothing, or are left out

    @property
    def rounds(self) -> int:
        """The number of rounds of all modules together."""
        return sum(module.rounds for module in self.modules)

    @contextmanager
    def padding_batch(self) -> Iterator[None]:
        """Run a padding batch inside the block: this rank has run out in this loop, or in a loop around it."""
        try:
            with self.decisions.padding():
                for module in self.modules:
                    module.rank_state.begin_padding_batch()
                yield
        finally:
            for module in () if self.decisions.is_padding else self.modules:
                module.rank_state.end_padding_batch()

    def skip_batch(self) -> None:
        """Let all ranks leave out their current batch: take part in their round without a gradient.

        In a micro-batch that does not synchronise, the next round of this rank tells the others. If the round of this
        batch has failed, all ranks know already, and nothing is sent. At a padding batch no rank leaves out anything.
        """
        modules = list(self.modules)
        if self.decisions.is_padding and not self.decisions.has_failed:  # the batches of the other ranks count
            if self._synchronising():
                self._take_part(modules, Part.FULL)
            return
        if not self._synchronising():
            self.decisions.skip_in_next_round()
            for module in modules:
                module.rank_state.drop_gradients()
            return
        if any(module.passes.has_begun for module in modules):
            self.decisions.note_new_step()
        if not self.decisions.has_failed:
            for module in modules:
                module.rank_state.drop_gradients()
            try:
                self._take_part(modules, Part.SKIPS)
            except PeerError:
                if not self.decisions.has_failed:  # else another rank has failed at this batch, too
                    raise
        self._note_skipped()

    def _take_part(self, modules: Sequence[Reducer], part: Part) -> None:
        """Take part in the rounds of this batch without a pass."""
        if self.modules.exclusive:
            self.reduce(modules, lambda _: part)
            return
        answer = self.modules.ask([])
        if not (answer.modules or answer.skipped or answer.failed["failed"]):
            # No rank has reached a module: they tell each other in rounds of all what they do, one skips and one pads.
            answer = self.modules.ask(self._synchronising())
        self.follow(answer, lambda _: part)

    def check_no_open_window(self) -> None:
        """Raise :class:`OptionError` if gradients have accumulated, as ``skip_on()`` ends, that are to be synchronised
        later, outside of ``no_sync()``."""
        for module in self._synchronising():
            if module.rank_state.has_accumulated:
                raise OptionError(
                    "skip_on() has ended between the micro-batches of a step: if it left out one of them, it would not "
                    "be known whether others follow. Put it around all micro-batches of the step, or inside the block "
                    "of accumulate() or no_sync() of each. If they are those of another module, whose steps overlap "
                    "with this one's, replicate each over a group of its own"
                )

    def keep_buffers(self) -> list[KeptBuffers]:
        """Return copies of the buffers of all modules, to be restored later: from before the first micro-batch of this
        step in which it was called."""
        rounds, kept = self._kept
        if not kept or rounds != self.rounds:
            kept = [module.buffers.keep() for module in self.modules]
        self._kept = self.rounds, [] if self._synchronising() else kept
        return kept

    def _synchronising(self) -> list[Reducer]:
        return [module for module in self.modules if module.rank_state.requires_sync]

    def _note_skipped(self) -> None:
        for module in self.modules:
            module.has_failed = True
            module.rank_state.drop_gradients()
        self.decisions.note_skipped()


def scheduler_of(group: Group) -> GroupScheduler:
    """Return the scheduler of a group: one in a process, for as long as a module holds it."""
    return shared_object(GroupScheduler, group)
