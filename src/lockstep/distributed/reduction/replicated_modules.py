"""The modules replicated over one group, and the question which of them take part in a pass.

Modules have numbers that are the same on all ranks. If several are replicated over a group, a rank does not know which
of them the other ranks reach. So nothing leaves while backward runs. When the pass has ended, or has failed, the ranks
tell each other in one small all-reduce which modules they have reached (:meth:`ReplicatedModules.ask`), and then reduce
each one that any rank has reached, one after the other. With a group each, buckets of every module leave during
backward.
"""

import operator
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lockstep.distributed.comm.collectives import Collectives, Pending
from lockstep.distributed.comm.record import FAILURE
from lockstep.distributed.reduction.report.status import Part

M = TypeVar("M")
"""What is registered for a module: its reducer, which this file does not know."""

_RANKS_AT_ONCE = 31
"""The number of ranks that share a number of 64 bits, each with two bits for what it sends for itself."""
_KEPT = 64
"""The number of rows that are kept to be told again, and of answers to be read again."""
_lock = threading.Lock()
_orders = 0  # the highest order of a group in this process


class Answer(NamedTuple, Generic[M]):
    """What all ranks have told each other about a pass, or about a forward in ``join()``."""

    packed: Sequence[int]
    """What each rank has sent for itself, from 0 to 3."""
    modules: list[M]
    """The modules that take part on any rank and still exist on this one, in the order of their creation."""
    failed: Mapping[str, int]
    """On how many ranks the backward pass has failed: totals of :data:`FAILURE`."""
    skipped: bool
    """True if some rank leaves out the batch."""

    def marks(self, world: int) -> list[int]:
        """Return the number that each rank has sent for itself."""
        return [self.packed[rank // _RANKS_AT_ONCE] >> 2 * (rank % _RANKS_AT_ONCE) & 3 for rank in range(world)]


class Question(NamedTuple):
    """A question to the other ranks, under way."""

    row: Tensor
    """The row being summed, to be kept until it has arrived."""
    pending: Pending


class ReplicatedModules(Generic[M]):
    """The modules replicated over one group in this process."""

    def __init__(self, collectives: Collectives) -> None:
        self.exclusive = True
        """True if there is at most one, on all ranks: agreed, see :meth:`register`."""
        self.next_id = 0
        """The number of the next module; ranks agree on the highest of their proposals."""
        self.order = 0
        """The group's number among those of this process, the same on all of its ranks."""
        self._collectives = collectives
        self._links: dict[int, weakref.ref[M]] = {}
        self._rows: dict[tuple[Any, ...], Tensor] = {}  # what this rank has told, while it has the same modules

    def __iter__(self) -> Iterator[M]:
        """Iterate over the modules in the order of their creation."""
        return filter(None, map(operator.call, list(self._links.values())))

    def numbered(self) -> dict[int, M]:
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

    def register(self, module: M, module_id: int, others: Collection[int], order: int) -> None:
        """Add a module under a number on which all ranks agree.

        ``others``: numbers of other modules on any rank; ``order``: the agreed place of the group.
        """
        global _orders
        with _lock:
            self.order, _orders = order, max(order, _orders)
        self.unregister(module)
        self._links = dict(sorted({**self._links, module_id: weakref.ref(module)}.items()))
        self.next_id = module_id + 1
        self._rows.clear()
        self.exclusive = not others

    def unregister(self, module: M) -> None:
        """Forget a module that is no longer reduced."""
        self._links = {number: link for number, link in self._links.items() if link() not in (None, module)}
        self._rows.clear()

    def tell(self, modules: Sequence[M], part: Part = Part.FULL, mark: int = 0, *, blocking: bool = False) -> Question:
        """Tell the other ranks with which modules, and how, this one takes part, without waiting; ``mark``: what it
        sends for itself; ``blocking``: the caller waits for it next."""
        key = *map(id, modules), part, mark
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) == _KEPT:
                self._rows.clear()
            row = self._rows[key] = self._row(modules, part, mark)
        row = row.clone()
        return Question(row, self._collectives.all_reduce(row, "which modules take part", blocking=blocking))

    def _row(self, modules: Sequence[M], part: Part, mark: int) -> Tensor:
        rank, marks = self._collectives.rank, [0] * self._head
        marks[rank // _RANKS_AT_ONCE] = mark << 2 * (rank % _RANKS_AT_ONCE)
        failure = FAILURE.encode(part is Part.FAILED, rank)
        own = [0] * self.next_id
        for number, module in self.numbered().items():
            own[number] = module in modules
        numbers = [*marks, *failure, part is Part.SKIPS, *own]
        return torch.tensor(numbers, dtype=torch.int64).to(self._collectives.device)

    @property
    def _head(self) -> int:
        return -(-self._collectives.world // _RANKS_AT_ONCE)

    def ask(self, modules: Sequence[M], mark: int = 0) -> Answer[M]:
        """Tell the other ranks that these modules take part, and wait for their answers."""
        question = self.tell(modules, mark=mark, blocking=True)
        question.pending.wait()
        sums, head = question.row.tolist(), self._head
        numbers, failed, skipped = _read(tuple(sums[head:]))
        there = self.numbered()
        return Answer(sums[:head], [there[each] for each in numbers if each in there], failed, skipped)


@lru_cache(_KEPT)
def _read(sums: tuple[int, ...]) -> tuple[list[int], Mapping[str, int], bool]:
    """Return the numbers of the modules that take part, who has failed, and whether a rank skips the batch."""
    failed, _ = FAILURE.decode(sums[: FAILURE.size])
    skips, *counts = sums[FAILURE.size :]
    return [number for number, count in enumerate(counts) if count], failed, skips > 0
