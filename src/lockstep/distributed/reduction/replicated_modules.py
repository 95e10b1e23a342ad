"""The modules replicated over one group, and the exchange that tells which of them take part in a pass.

Modules have numbers that are the same on all ranks. If a pass may go through several modules, the ranks exchange the
modules that they have reached in one small collective: one number for each module, and two bits for each rank.
"""

import operator
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.distributed.comm.collectives import Collectives, Pending

Module = Any
"""What is registered for a module: its reducer."""


class Mark(IntEnum):
    """What a rank sends for a module. The marks of all ranks are added: each has 20 bits of the sum for itself."""

    TAKES_PART = 1
    FAILED = 1 << 20
    """Its backward pass has failed."""
    SKIPS = 1 << 40
    """It leaves out the batch."""


_RANKS_AT_ONCE = 31
"""The number of ranks that share a number of 64 bits, each with two bits for what it sends for itself."""
_lock = threading.Lock()
_orders = 0  # the highest order of a group in this process


class PassAgreement(NamedTuple):
    """The answers of all ranks."""

    packed: Sequence[int]
    """What each rank has sent for itself, from 0 to 3."""
    modules: list[Module]
    """The modules that take part on any rank and still exist on this one, in the order of their creation."""
    failed: bool
    """True if the backward pass has failed on some rank."""
    skipped: bool
    """True if some rank leaves out the batch."""

    def marks(self, world: int) -> list[int]:
        """Return the number that each rank has sent for itself."""
        return [self.packed[rank // _RANKS_AT_ONCE] >> 2 * (rank % _RANKS_AT_ONCE) & 3 for rank in range(world)]


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
        self._links: dict[int, weakref.ref[Module]] = {}

    def __iter__(self) -> Iterator[Module]:
        """Iterate over the modules in the order of their creation."""
        return filter(None, map(operator.call, list(self._links.values())))

    def numbered(self) -> dict[int, Module]:
        """Return the modules by number, in the order of their creation."""
        return {number: module for number, link in list(self._links.items()) if (module := link()) is not None}

    def propose_order(self) -> int:
        """Return the number that this rank wants for the group; ranks take the highest of theirs."""
        return self.order or _orders + 1

    def ids(self, leaving: Collection[object] = ()) -> list[int]:
        """Return the numbers of those that are still there on this rank, and not about to be replaced by another."""
        return [n for n, module in self.numbered().items() if not any(module is each for each in leaving)]

    def restore_later(self, undo: ExitStack) -> None:
        """Let ``undo`` restore what :meth:`register` sets beside the module, which :meth:`unregister` forgets."""
        for name in ("exclusive", "next_id", "order"):
            undo.callback(setattr, self, name, getattr(self, name))

    def register(self, module: Module, module_id: int, others: Collection[int], order: int) -> None:
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

    def unregister(self, module: Module) -> None:
        """Forget a module that is no longer reduced."""
        self._links = {number: link for number, link in self._links.items() if link() not in (None, module)}

    # --------------------------------------------------------------------- what ranks tell each other

    def tell(self, modules: Sequence[Module], mark: Mark, own: int = 0) -> tuple[Tensor, Pending]:
        """Send ``mark`` for some modules, and ``own`` for this rank; return the row being summed, and its
        collective."""
        head, place = self._head, divmod(self._collectives.rank, _RANKS_AT_ONCE)
        row = torch.zeros(head + self.next_id, dtype=torch.int64)
        row[place[0]] = own << 2 * place[1]
        for number, module in self.numbered().items():
            if any(module is each for each in modules):
                row[head + number] = mark
        row = row.to(self._collectives.device)
        return row, self._collectives.all_reduce(row, "which modules take part")

    @property
    def _head(self) -> int:
        return -(-self._collectives.world // _RANKS_AT_ONCE)

    def ask(self, modules: Sequence[Module], own: int = 0) -> PassAgreement:
        """Tell the other ranks that these modules take part, and wait for their answers; ``own``: sent for this
        rank."""
        row, pending = self.tell(modules, Mark.TAKES_PART, own)
        pending.wait()
        packed, counts = row[: self._head].tolist(), row[self._head :].tolist()
        return PassAgreement(
            packed,
            [module for number, module in self.numbered().items() if number < len(counts) and counts[number]],
            any(count % Mark.SKIPS >= Mark.FAILED for count in counts),
            any(count >= Mark.SKIPS for count in counts),
        )
