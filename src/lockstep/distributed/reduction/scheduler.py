"""The modules replicated over one group, and which of them take part in a pass.

Modules have numbers that are the same on all ranks. If a pass may go through several modules, the ranks exchange the
modules that they have reached in one small collective: one number for each rank, and one for each module.
"""

import logging
import operator
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.distributed.comm.collectives import Collectives, Group, Pending
from lockstep.distributed.comm.group_state import shared_object
from lockstep.distributed.comm.run_all import RunAll
from lockstep.distributed.reduction.buffers import KeptBuffers
from lockstep.distributed.reduction.decisions import decisions_of
from lockstep.distributed.reduction.engine import BackwardPass, PassObserver, current_pass
from lockstep.distributed.reduction.graph import ReachableLeaves
from lockstep.errors import CommunicationError, PeerError, ShareError
from lockstep.phases import Phases

TAKES_PART, FAILED, SKIPPED = 1, 1 << 16, 1 << 32
"""Values that a rank sends for a module: it takes part, its backward pass has failed, or it skips the batch."""
_lock = threading.Lock()
_orders = 0  # the highest order of a group in this process


class ScheduledRankState(Protocol):
    """How this rank takes part in the rounds of a module, as the scheduler uses it."""

    requires_sync: bool
    """True if backward passes synchronise."""

    def look_for_changes(self) -> None:
        """Note that a backward pass is about to reach the module."""

    def takes_part(self, accumulates: bool) -> bool:
        """Return True if a pass that has gone through the module without any gradient of it is a round all the same."""

    def pass_failed(self) -> None:
        """Note that a backward pass has failed on this rank."""

    def begin_padding_batch(self) -> None:
        """Begin a batch that counts nothing, until :meth:`end_padding_batch`, unless one has begun."""

    def end_padding_batch(self) -> None:
        """End the batch: the loop goes on."""

    def drop_gradients(self) -> None:
        """Drop all gradients: the batch is left out."""

    def keep_buffers(self) -> KeptBuffers:
        """Return what the module's buffers are now."""


class ScheduledModule(Protocol):
    """The reducer of one replicated module, as the scheduler uses it."""

    home: int
    """The thread in which the module is used."""

    @property
    def may_go_past_forward(self) -> bool:
        """True if backward passes may come to the module otherwise than through outputs of its forward."""

    @property
    def rank_state(self) -> ScheduledRankState:
        """How this rank takes part in its rounds."""

    @property
    def retired(self) -> bool:
        """True if another replication has taken its place."""

    @property
    def synchronises(self) -> bool:
        """True if the current pass synchronises gradients, or the next one if none is under way."""

    @property
    def is_expected(self) -> bool:
        """True if the current pass has gone through outputs of a forward."""

    @property
    def rounds(self) -> int:
        """The number of rounds so far."""

    def on_output_grad(self) -> None:
        """Note that the backward pass has come to what may lead to the module's parameters, on some rank."""

    def is_in_reach(self, reach: ReachableLeaves) -> bool:
        """Return True if a pass with this reach accumulates into parameters of the module, as far as its graph
        shows."""

    def pass_begins(self, this: BackwardPass) -> None:
        """Note that a backward pass begins, and has added to no gradient yet."""

    def watches(self, this: BackwardPass) -> bool:
        """Return True if ``this`` may reach the module, and no pass nested in it is under way."""

    def find_arrived(self) -> bool:
        """At the end of a pass, return True if it has reached any parameter."""

    def reduce_settled(self) -> bool:
        """Reduce at the end of a pass about which nothing is unusual; else do nothing, and return False."""

    def pass_leaves(self) -> None:
        """Note that the pass under way is over, and has not come to the module."""

    def accumulate(self) -> None:
        """Note that the pass under way has come to the module, and does not synchronise."""

    def is_within(self, reach: ReachableLeaves, expected: bool) -> bool:
        """Return True if a pass of that reach is a round of the module; ``expected``: it goes through the module."""

    def finalize_backward(self) -> Sequence[Parameter]:
        """Reduce the remaining gradients; return the parameters whose users' hooks were held back."""

    def run_held_hooks(self, parameters: Sequence[Parameter]) -> None:
        """Run users' hooks of parameters whose gradients have been reduced."""

    def skip_batch(self) -> None:
        """Take part in the round of the other ranks without a gradient, and make all ranks skip the batch."""

    def abort(self) -> None:
        """Send what the other ranks wait for, marked as failed, without waiting for them."""

    def end_pass(self, failed: bool = False) -> None:
        """End the backward pass, however it went; ``failed``: all ranks know that its round has failed."""


class PassAgreement(NamedTuple):
    """The answers of all ranks."""

    marks: list[int]
    """The number that each rank has sent for itself."""
    modules: list[ScheduledModule]
    """The modules that take part on any rank and still exist on this one, in the order of their creation."""
    failed: bool
    """True if the backward pass has failed on some rank."""
    skipped: bool
    """True if some rank leaves out the batch."""


class ReplicatedModules:
    """The modules replicated over one group in this process."""

    def __init__(self, collectives: Collectives) -> None:
        self.exclusive = True
        """True if there is at most one, on all ranks: agreed, see :meth:`register`."""
        self.next_id = 0
        """The number of the next module; ranks agree on the highest of their proposals."""
        self.order = 0
        """The group's number among those of this process, the same on all of its ranks."""
        self._collectives = collectives
        self._links: dict[int, weakref.ref[ScheduledModule]] = {}

    def __iter__(self) -> Iterator[ScheduledModule]:
        """Iterate over the modules in the order of their creation."""
        return filter(None, map(operator.call, list(self._links.values())))

    def numbered(self) -> dict[int, ScheduledModule]:
        """Return the modules by number, in the order of their creation."""
        return {number: module for number, link in list(self._links.items()) if (module := link()) is not None}

    def propose_order(self) -> int:
        """Return the number that this rank wants for the group; ranks take the highest of theirs."""
        return self.order or _orders + 1

    def ids(self, leaving: Collection[object] = ()) -> list[int]:
        """Return the numbers of those that are still there on this rank, and not about to be replaced by another."""
        return [n for n, module in self.numbered().items() if not any(module is each for each in leaving)]

    def register(self, module: ScheduledModule, module_id: int, others: Collection[int], order: int) -> None:
        """Add a module under a number on which all ranks agree.

        ``others``: numbers of other modules on any rank; ``order``: the agreed place of the group.
        """
        global _orders
        with _lock:
            self.order, _orders = order, max(order, _orders)
        self.unregister(module)
        self._links = dict(sorted({**self._links, module_id: weakref.ref(module)}.items()))
        self.next_id = module_id + 1
        self.exclusive = not others

    def unregister(self, module: ScheduledModule) -> None:
        """Forget a module that is no longer reduced."""
        self._links = {number: link for number, link in self._links.items() if link() not in (None, module)}

    # --------------------------------------------------------------------- what ranks tell each other

    def tell(self, modules: Sequence[ScheduledModule], mark: int, own: int = 0) -> tuple[Tensor, Pending]:
        """Send ``mark`` for some modules, and ``own`` for this rank; return the row being summed, and its
        collective."""
        world = self._collectives.world
        row = torch.zeros(world + self.next_id, dtype=torch.int64)
        row[self._collectives.rank] = own
        for number, module in self.numbered().items():
            if any(module is each for each in modules):
                row[world + number] = mark
        row = row.to(self._collectives.device)
        return row, self._collectives.all_reduce(row, "which modules take part")

    def ask(self, modules: Sequence[ScheduledModule], own: int = 0) -> PassAgreement:
        """Tell the other ranks that these modules take part, and wait for their answers; ``own``: sent for this
        rank."""
        row, pending = self.tell(modules, TAKES_PART, own)
        pending.wait()
        marks, counts = row[: self._collectives.world].tolist(), row[self._collectives.world :].tolist()
        return PassAgreement(
            [int(each) for each in marks],
            [module for number, module in self.numbered().items() if number < len(counts) and counts[number]],
            any(count % SKIPPED >= FAILED for count in counts),
            any(count >= SKIPPED for count in counts),
        )


class GroupScheduler(PassObserver):
    """Orders the rounds of all modules that are replicated over one group, in this process."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.broken = ""
        """Why this rank cannot communicate over the group any more, if so."""
        self.decisions = decisions_of(group)
        """What the loop of this rank says to the other ranks."""
        self._aborted: tuple[Tensor, Pending] | None = None
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
        """Note that a backward pass begins, in the thread in which a module is used, or its graph leads to the
        module."""
        for module in self.modules:
            if module.home == this.thread or module.is_in_reach(this.reach):
                module.pass_begins(this)

    def note_failure(self, module: ScheduledModule) -> None:
        """Note that all ranks know that the round of a module has failed, in the pass under way: none has to be
        told."""
        this = current_pass()
        if this is not None:
            this.note_failure(module)

    # ------------------------------------------------------------------------- a pass, as it ends

    def pass_ended(self, this: BackwardPass) -> None:
        """Reduce what is left when a backward pass has ended, and give the parameters their gradients."""
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
            if module.find_arrived():
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
            reducing += [each for each in silent if each.synchronises and each.rank_state.takes_part(accumulates)]
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
        steps = RunAll()
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

    def pass_failed(self, this: BackwardPass, reach: ReachableLeaves) -> None:
        """Let the other ranks know that a backward pass has failed, and wait for nobody."""
        if self in this.told:
            return
        watching = [module for module in self.modules if module.watches(this)]
        failing = [module for module in watching if module.find_arrived()]
        for each in self.modules:
            if (
                each not in failing
                and each.synchronises
                and each.is_within(reach, each in watching and each.is_expected)
            ):
                failing.append(each)
        self._abort(failing, this)
        for each in watching:
            if each.watches(this):  # it does not synchronise, or no gradient of it was to come
                each.end_pass()

    @torch.no_grad()
    def _abort(self, modules: Sequence[ScheduledModule], this: BackwardPass | None) -> None:
        failing = [each for each in modules if each.synchronises]
        failing = [each for each in failing if this is None or not this.is_known_to_fail(each)]
        if failing:
            self.decisions.note_failure()
        try:
            if failing and not self.modules.exclusive:
                mark = SKIPPED if self.decisions.skips_after(sys.exception()) else FAILED
                self._aborted = self.modules.tell(failing, mark)  # kept until it has arrived
            for module in failing if self.modules.exclusive else ():
                module.abort()
        except RuntimeError as error:
            logging.getLogger("lockstep").debug("the other ranks could not be told of a failure: %s", error)
        finally:
            for module in modules:
                if this is not None:
                    this.note_failure(module)
                module.rank_state.pass_failed()
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
        """Return the modules that take part on any rank, in the order of their creation."""
        return self._that_take_part(self.modules.ask(modules))

    def _that_take_part(self, told: PassAgreement) -> list[ScheduledModule]:
        if told.failed:
            self._end_rounds()
            self.decisions.note_failure()
            raise PeerError(
                f"rank {self._collectives.global_rank}: the backward pass failed on another rank before its gradients "
                "were reduced; that rank's own error says why. No gradient has been handed out"
            )
        if told.skipped:
            self._end_rounds()
            self._note_skipped()
            return []
        return told.modules

    def _end_rounds(self) -> None:
        """End the rounds of all modules: all ranks know that the pass has failed, but not which modules each rank would
        have gone through. See tests/gradients/test_several_modules.py."""
        for module in self.modules:
            module.end_pass(failed=True)

    # ----------------------------------------------------- batches that count nothing, or are left out

    @property
    def rounds(self) -> int:
        """How many rounds the modules have had, together."""
        return sum(module.rounds for module in self.modules)

    @contextmanager
    def padding_batch(self) -> Iterator[None]:
        """Inside, the loop is at a batch that counts nothing: the rank has run out. So it may be in a loop around it,
        too."""
        try:
            with self.decisions.padding():
                for module in self.modules:
                    module.rank_state.begin_padding_batch()
                yield
        finally:
            for module in () if self.decisions.is_padding else self.modules:
                module.rank_state.end_padding_batch()

    @torch.no_grad()
    def fail(self) -> None:
        """Let the other ranks know that this one cannot go on."""
        self._abort(self._synchronising(), None)

    def skip_batch(self) -> None:
        """Have all ranks leave out the batch that they are at: take part in their round without a gradient.

        Of a micro-batch that does not synchronise they hear in this rank's next round. Where the round of this batch
        has failed, so that all ranks know, nothing is sent.
        """
        modules = list(self.modules)
        if self.decisions.take_local_failure() or not self._synchronising():
            self.decisions.skip_in_next_round()
            for module in modules:
                module.rank_state.drop_gradients()
            return
        if not self.decisions.has_failed:
            if not self.modules.exclusive:
                _, modules = self.listen()
            try:
                self._skip_batch(modules)
            except PeerError:
                if not self.decisions.has_failed:  # else another rank has failed at this batch, too
                    raise
        self._note_skipped()

    def _skip_batch(self, modules: Sequence[ScheduledModule]) -> None:
        steps = RunAll()
        for module in modules:
            with steps:
                module.skip_batch()
        steps.end()

    def keep_buffers(self) -> list[KeptBuffers]:
        """Return what the buffers of all modules are now, to be given back."""
        return [module.rank_state.keep_buffers() for module in self.modules]

    def _synchronising(self) -> list[ScheduledModule]:
        return [module for module in self.modules if module.rank_state.requires_sync]

    def _note_skipped(self) -> None:
        for module in self.modules:
            module.rank_state.drop_gradients()
        self.decisions.note_skipped()

    # ----------------------------------------------------------------------------- a rank that is lost

    def mark_broken(self, reason: str) -> None:
        """Send nothing more: others wait for what this rank cannot send, and would take anything else for it.

        Ends the group on all ranks, if that can be done.
        """
        if not self.broken:
            self.broken = reason
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
        if self.broken:
            raise CommunicationError(
                f"rank {self._collectives.global_rank} can no longer take part in what the other ranks of its process "
                f"group do: {self.broken}. Destroy the group and make another, or start anew"
            )


def scheduler_of(group: Group) -> GroupScheduler:
    """Return the scheduler of a group: one in a process, for as long as a module holds it."""
    return shared_object(GroupScheduler, group)
