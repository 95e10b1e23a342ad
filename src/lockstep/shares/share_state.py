"""The step and the share under way on this rank.

A :class:`ShareWorld` stands for one process group as this rank sees it: the modules that are replicated with shares
over it, and the step that is under way. A step is opened, each of this rank's shares is entered and left, and the step
ends: then gradients are put together. One that is left in between is aborted: its gradients are dropped.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lockstep._base.deal import Dealt
from lockstep._base.devices import refuse_capture
from lockstep._base.optimizer_steps import observe_steps
from lockstep._base.seeds import Seed, derive_seed
from lockstep.distributed.comm.collectives import Collectives, Pending
from lockstep.distributed.comm.group_state import shared_object, state_of
from lockstep.distributed.comm.groups import Group
from lockstep.distributed.reduction.report.decisions import decisions_of
from lockstep.errors import CommunicationError, OptionError, PeerError, ShareError
from lockstep.phases import Phases
from lockstep.shares.balance import Pace, ShareClock
from lockstep.shares.module import ShareModule
from lockstep.shares.share_step import ShareStep
from lockstep.shares.share_streams import random_streams
from lockstep.shares.share_tree import shares_of

_USED, _FAILED = 1, 2


class ShareWorld:
    """One process group as this rank sees it; None stands for a world of one rank."""

    def __init__(self, group: Group | None) -> None:
        self.group = group
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.step: ShareStep | None = None
        self.share: int | None = None
        self.is_auditing = False
        """True if the share under way is computed for comparison only."""
        self.audits_every: int | None = None
        self.dealt: Dealt | None = None
        """How the shares of the last step were dealt; None before the first one."""
        self._clock = ShareClock()
        self._own = range(0)
        self._seed: Seed | None = None
        self._broken: ShareStep | None = None
        self._has_sent_flags = False
        self._modules: list[weakref.ref[ShareModule]] = []
        self._collectives: Collectives | None = None
        self._decisions = None if group is None else decisions_of(group)
        self._state = state_of(group)
        observe_steps(self)

    @property
    def joined(self) -> int:
        """The number of modules that have joined so far, which is the next one's number."""
        return self._state.modules_with_shares

    @property
    def modules(self) -> list[ShareModule]:
        """The modules that still exist, in the order in which they were replicated."""
        return [each for each, _ in self._present()]

    def _present(self) -> list[tuple[ShareModule, Module]]:
        """Return :attr:`modules`, each with its module: one that is in a cycle might be collected meanwhile."""
        every = [(link, each) for link in self._modules if (each := link()) is not None]
        found = [(link, each, module) for link, each in every if (module := each.module_or_none) is not None]
        self._modules = [link for link, _, _ in found]
        return [(each, module) for _, each, module in found]

    def join(self, module: ShareModule, undo: ExitStack) -> None:
        """Let a module take part from now on, also in the share under way, until ``undo``."""
        undo.callback(setattr, self._state, "modules_with_shares", self._state.modules_with_shares)
        undo.callback(setattr, self, "_modules", self._modules[:])
        self._modules.append(weakref.ref(module))
        self._state.modules_with_shares += 1
        if self.step is not None:
            module.open(self.step)
            if self.share is not None:
                self._enter(module, self.share)

    @contextmanager
    def under_way(self, step: ShareStep, ahead: Callable[[], int] = int) -> Iterator[list[Pace]]:
        """Run a step in the block, and finish it at the end; abort it if the block is left early.

        Yields a list that holds the reports of all ranks on their paces when the step has ended. ``ahead`` gives
        a part of this rank's.

        Raises :class:`OptionError` inside of a capture into a graph.
        """
        if self.step is not None:
            raise ShareError(
                f"{step} was begun while {self.step} is under way; run all shares of one batch before the next is begun"
            )
        self._own = shares_of(self.rank, step.deal)
        paces: list[Pace] = []
        self._broken = None
        self._has_sent_flags = False
        devices = {device for each in self.modules for device in each.devices}
        for device in devices:
            refuse_capture(device, "a step of shares")
        try:
            with random_streams(devices) as self._seed:
                self.step = step
                for each, _ in self._present():
                    each.open(step)
                self._clock.begin(devices)
                yield paces
            pace = Pace(self._clock.seconds(), ahead())
            for each in self._used_on_any_rank():
                paces[:] = each.finish(pace)
            if paces:
                self.dealt = Dealt(step.deal, tuple(pace.seconds for pace in paces))
            for each in self.modules:
                each.abort()  # modules that no rank has used
        except BaseException:
            self._broken = step
            self._tell_failure()
            for each in self.modules:
                each.abort()
            raise
        finally:
            self.step = self.share = None
            self.is_auditing = False

    @contextmanager
    def entered(self, share: int, *, again: bool = False) -> Iterator[None]:
        """Run one share of the step under way in the block: backward belongs to it, and random numbers are its own.

        ``again``: it is computed for comparison only.
        """
        step = self.step
        assert step is not None
        assert self._seed is not None
        self._seed(derive_seed(step.seed, "share", step.epoch, step.batch, share))
        self.share = share
        self.is_auditing = again
        for each in self.modules:
            self._enter(each, share)
        # Modules of the group that are replicated without shares must not synchronise inside.
        with nullcontext() if self._decisions is None else self._decisions.inside_share(share):
            yield
        for each in self.modules:
            each.leave()
        if not again and share == self._own[-2:][0]:
            self._clock.end(max(1, len(self._own) - 1))
        self.share = None
        self.is_auditing = False

    def _enter(self, module: ShareModule, share: int) -> None:
        module.enter(share, not self.is_auditing and share == self._own[-1], self.is_auditing)

    def _used_on_any_rank(self) -> list[ShareModule]:
        """Return the modules whose gradients are to be added up, the same on every rank.

        If there has only been one, it is that one. Otherwise ranks exchange flags: a module that was dropped may live
        on for a while on some ranks.
        """
        if self.size == 1 or self.joined < 2:
            return self.modules
        by_number = {each.number: each for each in self.modules}
        collectives, gathered, pending = self._send_flags([n for n, each in by_number.items() if each.is_used], _USED)
        self._has_sent_flags = True
        pending.wait()
        rows = gathered.view(self.size, self.joined).tolist()
        for rank, row in zip(collectives.global_ranks, rows, strict=True):
            if _FAILED in row:
                raise PeerError(
                    f"rank {rank} has left the loop over the shares of a batch before its end, by an error (see "
                    f"there), break or return, while this rank was at {self.step}; its gradients are not there"
                )
        used = [number for number, column in enumerate(zip(*rows, strict=True)) if any(column)]
        if missing := set(used) - by_number.keys():
            raise ShareError(
                f"rank {collectives.global_rank}: another rank has used a module in {self.step} that has been "
                f"dropped here, replicated as number {min(missing)} over this group; use the same modules on every rank"
            )
        return [by_number[number] for number in used]

    def _send_flags(self, numbers: Iterable[int], flag: int) -> tuple[Collectives, Tensor, Pending]:
        """Begin to send flags of these modules to all ranks; also return the tensor that will hold the flags of all."""
        self._collectives = self._collectives or Collectives(self.group, Phases())
        row = torch.zeros(self.joined, dtype=torch.uint8, device=self._collectives.device)
        for number in numbers:
            row[number] = flag
        gathered = row.new_empty(self.size * self.joined)
        return self._collectives, gathered, self._collectives.all_gather_flat(gathered, row, "modules of a step")

    def _tell_failure(self) -> None:
        """Tell ranks that exchange flags at the end of a step of a failure; they may be there, and are not waited
        for."""
        if self.size > 1 and self.joined > 1 and not self._has_sent_flags:
            with suppress(CommunicationError):
                self._send_flags(range(self.joined), _FAILED)

    def has_parameter_of(self, optimizer: Optimizer) -> bool | None:
        """Return True if an optimizer has a parameter of any of the modules; None if there are no modules."""
        found = [each.has_parameter_of(optimizer) for each in self.modules]
        return any(found) if found else None

    def step_begins(self, optimizer: Optimizer, closure: bool) -> None:
        """Raise if an optimizer's step would use gradients of a step that is not finished."""
        step = self.step or self._broken
        if step is None or not self.has_parameter_of(optimizer):
            return
        if self.step is not None:
            where = "between its shares" if self.share is None else f"inside of its share {self.share}"
            raise ShareError(
                f"optimizer.step() was called {where}, before all shares of {step} have been reduced; call it after "
                "the loop over the batch's shares has ended"
            )
        raise ShareError(
            f"optimizer.step() was called after {step} was left before its last share (by break, return or an "
            "error), so its gradients are not there; run the loop over a batch's shares to its end on every rank, or "
            "leave out the optimizer's step, too"
        )

    def step_ended(self, optimizer: Optimizer, closure: bool) -> None:
        """Do nothing."""


# -------------------------------------------------------------------------------- which group has which


def world_of(group: Group | None) -> ShareWorld:
    """Return the world of a group: one per process, for as long as something refers to it."""
    return shared_object(ShareWorld, group)


def check_shares(shares: Any, world: int | None, caller: str) -> int:
    """Return the number of shares; raise :class:`OptionError` if it is impossible with so many ranks."""
    if not isinstance(shares, int) or isinstance(shares, bool) or shares < 1:
        raise OptionError(f"{caller}: shares is a whole number from 1 on, got {shares!r}")
    if world is not None and world > shares:
        raise OptionError(
            f"{caller}: {shares} shares are too few for {world} ranks, of which {world - shares} would have nothing to "
            "do; shares are fixed for a run, so choose as many as the most ranks that it will have"
        )
    return shares
