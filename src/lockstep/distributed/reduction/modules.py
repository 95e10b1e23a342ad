"""The modules that are replicated over one group, and which of them take part.

They have numbers, on which all ranks agree. Where a pass may go through several modules, ranks tell each other in one
tiny collective which of them it has reached: one number for each rank, and one for each module.
"""

import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.distributed.buffers import KeptBuffers
from lockstep.distributed.collectives import Collectives, Pending
from lockstep.distributed.reduction.engine import BackwardPass
from lockstep.distributed.reduction.graph import Reach

TAKES_PART, FAILED, SKIPPED = 1, 1 << 16, 1 << 32
"""What a rank says of a module: it takes part, its backward pass has failed, or it leaves out the batch."""
_lock = threading.Lock()
_orders = 0  # the highest number of a group in this process


class RankParticipation(Protocol):
    """How this rank takes part in the rounds of a module, as its scheduler knows it."""

    requires_sync: bool
    """Whether backward passes synchronise."""

    def look_for_changes(self) -> None:
        """A backward pass is about to reach the module."""

    def takes_part(self, accumulates: bool) -> bool:
        """Whether a pass that has gone through the module without any gradient of it is a round all the same."""

    def pass_failed(self) -> None:
        """A backward pass has failed on this rank."""

    def begin_idle_batch(self) -> None:
        """The loop is at a batch that counts nothing, until :meth:`end_idle_batch`; or already was."""

    def end_idle_batch(self) -> None:
        """The loop goes on."""

    def drop_gradients(self) -> None:
        """The batch is left out: no parameter has a gradient."""

    def keep_buffers(self) -> KeptBuffers:
        """What the module's buffers are now."""


class ScheduledModule(Protocol):
    """What synchronises the gradients of one replicated module, as its scheduler knows it."""

    home: int
    """The thread in which the module is used."""

    @property
    def may_go_past_forward(self) -> bool:
        """True if backward passes may come to the module otherwise than through outputs of its forward."""

    @property
    def participation(self) -> RankParticipation:
        """How this rank takes part in its rounds."""

    @property
    def retired(self) -> bool:
        """Whether another replication has taken its place."""

    @property
    def synchronises(self) -> bool:
        """Return True if the pass under way synchronises gradients, or the next one if none is."""

    @property
    def is_expected(self) -> bool:
        """Return True if the pass under way has gone through outputs of a forward."""

    @property
    def rounds(self) -> int:
        """How many rounds there have been."""

    def reached(self) -> None:
        """The backward pass has come to what may lead to the module's parameters, on some rank."""

    def is_in_reach(self, reach: Reach) -> bool:
        """Return True if a pass of that reach accumulates into parameters of the module, as far as its graph shows."""

    def pass_begins(self, this: BackwardPass) -> None:
        """A backward pass begins, and has added to no gradient yet."""

    def watches(self, this: BackwardPass) -> bool:
        """Return True if that pass may come to the module, and no other one inside of it is under way."""

    def look(self) -> bool:
        """The pass under way is over: return True if it has come to any parameter."""

    def reduce_settled(self) -> bool:
        """The pass under way is over: reduce, if nothing about it is unusual; else do nothing, and return False."""

    def pass_leaves(self) -> None:
        """The pass under way is over, and has not come to the module."""

    def accumulate(self) -> None:
        """The pass under way has come to the module, and does not synchronise."""

    def is_within(self, reach: Reach, expected: bool) -> bool:
        """Whether a pass of that reach is a round of the module; ``expected``: it goes through the module."""

    def finalize_backward(self) -> Sequence[Parameter]:
        """Reduce what is left; returns the parameters whose users' hooks have waited for this."""

    def run_held_hooks(self, parameters: Sequence[Parameter]) -> None:
        """Run users' hooks of parameters whose gradients are reduced."""

    def leave_out(self) -> None:
        """Take part in the round of the other ranks without a gradient, and have them leave the batch out."""

    def abandon(self) -> None:
        """Send what the other ranks wait for, marked as failed, and wait for nobody."""

    def end_pass(self, failed: bool = False) -> None:
        """The backward pass is over, however it ended; ``failed`` if all ranks know that its round has failed."""


class Attendance(NamedTuple):
    """What all ranks have said."""

    marks: list[int]
    """Each rank's own number."""
    modules: list[ScheduledModule]
    """Those that take part on any rank, and are still there on this one, in the order of their creation."""
    failed: bool
    """Whether the backward pass has failed on some rank."""
    skipped: bool
    """Whether some rank leaves out the batch."""


class ReplicatedModules:
    """Those of one group, in this process."""

    def __init__(self, collectives: Collectives) -> None:
        self.exclusive = True
        """Whether there is at most one, on all ranks: agreed, see :meth:`register`."""
        self.next_id = 0
        """The number of the next module; ranks take the highest of theirs."""
        self.order = 0
        """The group's number among those of this process, the same on all of its ranks."""
        self._collectives = collectives
        self._links: dict[int, weakref.ref[ScheduledModule]] = {}

    def __iter__(self) -> Iterator[ScheduledModule]:
        """Go through them in the order of their creation."""
        for link in list(self._links.values()):
            module = link()
            if module is not None:
                yield module

    def numbered(self) -> dict[int, ScheduledModule]:
        """Return them by their numbers, in the order of their creation."""
        return {number: module for number, link in list(self._links.items()) if (module := link()) is not None}

    def propose_order(self) -> int:
        """The number that this rank wants for the group; ranks take the highest of theirs."""
        return self.order or _orders + 1

    def ids(self, leaving: Collection[object] = ()) -> list[int]:
        """The numbers of those that are still there on this rank, and not about to be replaced by another."""
        return [n for n, module in self.numbered().items() if not any(module is each for each in leaving)]

    def register(self, module: ScheduledModule, module_id: int, others: Collection[int], order: int) -> None:
        """Add a module under a number that all ranks agree on; ``others`` are those that any rank has besides,
        ``order`` is the group's number."""
        global _orders
        with _lock:
            self.order, _orders = order, max(order, _orders)
        self.unregister(module)
        self._links = dict(sorted({**self._links, module_id: weakref.ref(module)}.items()))
        self.next_id = module_id + 1
        self.exclusive = not others

    def unregister(self, module: ScheduledModule) -> None:
        """Forget a module that reduces no more."""
        self._links = {number: link for number, link in self._links.items() if link() not in (None, module)}

    # --------------------------------------------------------------------- what ranks tell each other

    def tell(self, modules: Sequence[ScheduledModule], mark: int, own: int = 0) -> tuple[Tensor, Pending]:
        """Say ``mark`` of some modules, and ``own`` of this rank; returns what :meth:`read` takes when all have come,
        and what to wait for, or to keep until then."""
        world = self._collectives.world
        row = torch.zeros(world + self.next_id, dtype=torch.int64)
        row[self._collectives.rank] = own
        for number, module in self.numbered().items():
            if any(module is each for each in modules):
                row[world + number] = mark
        row = row.to(self._collectives.device)
        return row, self._collectives.all_reduce(row, "which modules take part")

    def ask(self, modules: Sequence[ScheduledModule], own: int = 0) -> Attendance:
        """Say that some modules take part, and ``own`` of this rank; wait for what all ranks say."""
        row, pending = self.tell(modules, TAKES_PART, own)
        pending.wait()
        marks, counts = row[: self._collectives.world].tolist(), row[self._collectives.world :].tolist()
        return Attendance(
            [int(each) for each in marks],
            [module for number, module in self.numbered().items() if number < len(counts) and counts[number]],
            any(count % SKIPPED >= FAILED for count in counts),
            any(count >= SKIPPED for count in counts),
        )
