"""The step and the share under way on this rank.

A :class:`ShareWorld` stands for one process group as this rank sees it: the modules that are replicated with shares
over it, and the step that is under way. A step is opened, each of this rank's shares is entered and left, and the step
ends: then gradients are put together. One that is left in between is aborted: its gradients are dropped.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.compiler import outside_compiler
from lockstep.distributed.agreement import Line
from lockstep.distributed.collectives import Collectives, Group, Pending
from lockstep.distributed.decisions import decisions_of
from lockstep.distributed.group_state import shared_object, shared_objects, state_of
from lockstep.errors import CommunicationError, OptionError, PeerError, ShareError
from lockstep.phases import Phases
from lockstep.seeds import derive_seed
from lockstep.shares.audit_plan import Audit
from lockstep.shares.streams import random_streams
from lockstep.shares.tree import shares_of

_USED, _FAILED = 1, 2


@dataclass(frozen=True)
class Step:
    """One step of the whole world."""

    seed: int
    epoch: int
    batch: int
    rows: tuple[int, ...]
    """How many rows each share has; there is none without a row."""
    shares: int
    """How many shares a step has that is not short of rows."""
    next_count: int
    """How many the next step has, if batches are gone through in their order."""
    samples: int
    """How many the data set has."""
    is_shuffled: bool
    """Whether they come in an order of the epoch's own."""
    audit: Audit | None = None
    """What is computed a second time."""

    @property
    def count(self) -> int:
        """How many shares this step has."""
        return len(self.rows)

    def __str__(self) -> str:
        return f"batch {self.batch} of epoch {self.epoch}"

    def describe(self) -> list[Line]:
        """What must be the same on all ranks."""
        return [
            Line("epoch", str(self.epoch)),
            Line("batch of the epoch", str(self.batch)),
            Line("seed of the batches", str(self.seed)),
            Line("length of the data set", str(self.samples)),
            Line("order of the data set", "shuffled" if self.is_shuffled else "as it is"),
            Line("shares of the batches", str(self.shares)),
            Line("rows in each share", ", ".join(map(str, self.rows))),
            Line("shares of the next batch", str(self.next_count)),
            Line("audit", str(self.audit)),
        ]


class Participant(Protocol):
    """A module whose gradients a step puts together."""

    number: int
    """Its number among those of the group, the same on every rank."""

    @property
    def alive(self) -> bool:
        """Whether the module is still there."""

    @property
    def devices(self) -> set[torch.device]:
        """Where its parameters are."""

    @property
    def is_used(self) -> bool:
        """Whether a share of this rank has given anything in the step under way."""

    def open(self, step: Step, own: range) -> None:
        """A step begins, of which this rank computes the shares ``own``; raises if the module cannot take part."""

    def enter(self, share: int, is_last: bool) -> None:
        """A share begins."""

    def leave(self, share: int) -> None:
        """A share has ended."""

    def finish(self) -> None:
        """All shares of this rank have ended: put together what all ranks have."""

    def enter_again(self, share: int) -> None:
        """A share begins that is computed for comparison only."""

    def leave_again(self, share: int) -> None:
        """It has ended."""

    def abort(self) -> None:
        """The step will not be finished: drop what its shares gave."""

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer changes its parameters."""


class ShareWorld:
    """What this rank has of one process group; None stands for a world of one rank."""

    def __init__(self, group: Group | None) -> None:
        self.group = group
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.step: Step | None = None
        self.share: int | None = None
        self.is_auditing = False
        """Whether the share under way is computed for comparison only."""
        self.audits_every: int | None = None
        self._own = range(0)
        self._broken: Step | None = None
        self._has_sent_flags = False
        self._participants: list[weakref.ref[Participant]] = []
        self._collectives: Collectives | None = None
        self._decisions = None if group is None else decisions_of(group)
        self._state = state_of(group)

    @property
    def joined(self) -> int:
        """How many modules have joined so far: the next one's number."""
        return self._state.modules_with_shares

    @property
    def participants(self) -> list[Participant]:
        """The modules, in the order in which they were replicated."""
        found = [(link, each) for link in self._participants if (each := link()) is not None and each.alive]
        self._participants = [link for link, _ in found]
        return [each for _, each in found]

    def join(self, participant: Participant) -> None:
        """A module takes part from now on, in the share that is under way, too."""
        self._participants.append(weakref.ref(participant))
        self._state.modules_with_shares += 1
        if self.step is not None:
            participant.open(self.step, self._own)
            if self.share is not None:
                participant.enter(self.share, self.share == self._own[-1])

    @contextmanager
    def steps(self, step: Step) -> Iterator["OpenStep"]:
        """A step, from its first share to the end, where it is finished; aborted if the block is left before."""
        if self.step is not None:
            raise ShareError(
                f"{step} was begun while {self.step} is under way; run all shares of one batch before the next is begun"
            )
        self._own, self._broken, self._has_sent_flags = shares_of(self.rank, self.size, step.count), None, False
        devices = {device for each in self.participants for device in each.devices}
        try:
            with random_streams(devices) as seed:
                self.step = step
                for each in self.participants:
                    each.open(step, self._own)
                yield OpenStep(self, step, self._own, seed)
            for each in self._used_on_any_rank():
                each.finish()
            for each in self.participants:
                each.abort()  # those that no rank has used
        except BaseException:
            self._broken = step
            self._tell_failure()
            for each in self.participants:
                each.abort()
            raise
        finally:
            self.step = self.share = None
            self.is_auditing = False

    @contextmanager
    def entered(self, share: int) -> Iterator[None]:
        """One share of the step under way."""
        self.share = share
        for each in self.participants:
            each.enter(share, share == self._own[-1])
        with self._inside(share):
            yield
        for each in self.participants:
            each.leave(share)
        self.share = None

    @contextmanager
    def entered_again(self, share: int) -> Iterator[None]:
        """One share of the step under way that this rank computes for comparison only."""
        self.share, self.is_auditing = share, True
        for each in self.participants:
            each.enter_again(share)
        with self._inside(share):
            yield
        for each in self.participants:
            each.leave_again(share)
        self.share, self.is_auditing = None, False

    def _inside(self, share: int) -> AbstractContextManager[None]:
        """Modules of the group that are replicated without shares must not synchronise inside."""
        return nullcontext() if self._decisions is None else self._decisions.inside_share(share)

    def audit(self, every: int | None) -> None:
        """In how many steps a share is computed again in one; None: in none."""
        self.audits_every = every

    def _used_on_any_rank(self) -> list[Participant]:
        """The modules whose gradients are to be put together, the same on every rank.

        Where there has been one only, it is that one. Else ranks tell each other: a module that has been dropped may
        live on for a while on some ranks.
        """
        if self.size == 1 or self.joined < 2:
            return self.participants
        by_number = {each.number: each for each in self.participants}
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
        """Begin to tell the other ranks something of these modules; returns where what they tell will be, too."""
        self._collectives = self._collectives or Collectives(self.group, Phases())
        row = torch.zeros(self.joined, dtype=torch.uint8, device=self._collectives.device)
        for number in numbers:
            row[number] = flag
        gathered = row.new_empty(self.size * self.joined)
        return self._collectives, gathered, self._collectives.all_gather_flat(gathered, row, "modules of a step")

    def _tell_failure(self) -> None:
        """Where ranks begin the end of a step with their flags: the others may be there, and are not waited for."""
        if self.size > 1 and self.joined > 1 and not self._has_sent_flags:
            with suppress(CommunicationError):
                self._send_flags(range(self.joined), _FAILED)

    def check_before_optimizer(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer's step would use gradients of a step that is not finished."""
        step = self.step or self._broken
        if step is None or not any(each.has_parameter_of(optimizer) for each in self.participants):
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


class OpenStep:
    """A step under way."""

    def __init__(self, world: ShareWorld, step: Step, own: range, seed: Any) -> None:
        self._world, self._step, self._seed = world, step, seed
        self.own = own
        """The shares that this rank computes."""

    @contextmanager
    def share(self, share: int) -> Iterator[None]:
        """Inside of the block backward belongs to the share, and random numbers are the share's."""
        self._seed_for(share)
        with self._world.entered(share):
            yield

    @contextmanager
    def share_again(self, share: int) -> Iterator[None]:
        """The same for a share that is computed for comparison only."""
        self._seed_for(share)
        with self._world.entered_again(share):
            yield

    def _seed_for(self, share: int) -> None:
        step = self._step
        self._seed(derive_seed(step.seed, "share", step.epoch, step.batch, share))


# -------------------------------------------------------------------------------- which group has which


def world_of(group: Group | None) -> ShareWorld:
    """The world of a group: one in a process, for as long as somebody holds it."""
    _check_before_optimizers()
    return shared_object(ShareWorld, group)


@cache
def _check_before_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)


@outside_compiler
def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for world in shared_objects(ShareWorld):
        world.check_before_optimizer(optimizer)


def check_shares(shares: Any, world: int | None, caller: str) -> int:
    """The number of shares; raises :class:`OptionError` for one that makes no sense on so many ranks."""
    if not isinstance(shares, int) or isinstance(shares, bool) or shares < 1:
        raise OptionError(f"{caller}: shares is a whole number from 1 on, got {shares!r}")
    if world is not None and world > shares:
        raise OptionError(
            f"{caller}: {shares} shares are too few for {world} ranks, of which {world - shares} would have nothing to "
            "do; shares are fixed for a run, so choose as many as the most ranks that it will have"
        )
    return shares
