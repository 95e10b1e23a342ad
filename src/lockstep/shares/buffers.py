"""Buffers, share by share: each share begins from the values of the step, and what shares make of them is averaged.

A floating-point buffer that any share has changed becomes the mean over all shares of the step, added in the tree's
order; a share that has not changed it counts with the value of the step. Of any other buffer the lowest share that has
changed it decides: a counter of batches, which every share advances from the same value, advances by one a step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.buckets import TensorSpec
from lockstep.distributed.buffers import Buffer
from lockstep.distributed.collectives import Collectives
from lockstep.shares.gradients import Values, sum_dtype
from lockstep.shares.reduction import Exchange
from lockstep.shares.tree import Node, PartialSums, add_up

UNCHANGED = -1


class ShareBuffers:
    """The buffers of one module in one step."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self._is_averaged = [b.dtype.is_floating_point or b.dtype.is_complex for b in buffers]
        self._start: list[Tensor | None] = []
        self._sums: PartialSums[Values] = PartialSums(self._merge)
        self._kept: dict[int, Tensor] = {}
        self._dirty = False
        self._count = 0
        self.first_change = [UNCHANGED] * len(buffers)
        """The first share of this rank that has changed each buffer, or -1."""

    @torch.no_grad()
    def open(self, count: int) -> None:
        """A step of ``count`` shares begins: keep the values."""
        self._start = [None if (tensor := b.current()) is None else tensor.detach().clone() for b in self.buffers]
        self._sums, self._kept, self._dirty, self._count = PartialSums(self._merge), {}, False, count
        self.first_change = [UNCHANGED] * len(self.buffers)

    @property
    def is_used(self) -> bool:
        """Whether any share has changed a buffer in the step under way."""
        return any(share != UNCHANGED for share in self.first_change)

    def restore(self) -> None:
        """Give the buffers the values of the step, if a share has changed them since."""
        if self._dirty:
            for buffer, start in zip(self.buffers, self._start, strict=True):
                if start is not None:
                    buffer.assign(start)
            self._dirty = False

    def now(self) -> list[Tensor | None]:
        """What the share under way has made of them so far."""
        return [None if (tensor := buffer.current()) is None else tensor.detach() for buffer in self.buffers]

    def forget(self) -> None:
        """Give the buffers the values of the step again, whatever a share has made of them."""
        self._dirty = True
        self.restore()

    @torch.no_grad()
    def add(self, share: int) -> None:
        """A share has ended: take what it has made of the buffers."""
        leaf: Values = []
        for number, (buffer, start) in enumerate(zip(self.buffers, self._start, strict=True)):
            now = buffer.current()
            if now is None or start is None or torch.equal(now, start):
                leaf.append(None)
                continue
            self._dirty = True
            if self.first_change[number] == UNCHANGED:
                self.first_change[number] = share
                if not self._is_averaged[number]:
                    self._kept[number] = now.detach().clone()
            leaf.append(now.detach().to(sum_dtype(now.dtype), copy=True) if self._is_averaged[number] else None)
        self._sums.add(share, leaf)

    @torch.no_grad()
    def _merge(self, left_node: Node, left: Values, right_node: Node, right: Values) -> Values:
        merged: Values = []
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            if a is None and b is None:
                merged.append(None)
            else:
                a = self._as_at_start(number, left_node) if a is None else a
                merged.append(a.add_(self._as_at_start(number, right_node) if b is None else b))
        return merged

    def _as_at_start(self, number: int, node: Node) -> Tensor:
        """What shares give that have not changed a buffer, added in the tree's order."""
        start = self._start[number]
        assert start is not None
        return start.to(sum_dtype(start.dtype)).mul(2**node.level)  # exact, as are the sums of equal numbers

    @torch.no_grad()
    def finish(self, first_changes: Sequence[Sequence[int]], collectives: Collectives) -> None:
        """All shares have ended: give the buffers the values of the next step.

        ``first_changes``: :attr:`first_change` of each rank.
        """
        changed = [number for number in range(len(self.buffers)) if any(row[number] >= 0 for row in first_changes)]
        self._average([n for n in changed if self._is_averaged[n]], collectives)
        deciding: dict[int, list[int]] = {}
        for number in changed:
            if not self._is_averaged[number]:
                known = [(row[number], rank) for rank, row in enumerate(first_changes) if row[number] >= 0]
                deciding.setdefault(min(known)[1], []).append(number)
        for rank, numbers in deciding.items():
            self._take_over(numbers, rank, collectives)

    def _average(self, numbers: Sequence[int], collectives: Collectives) -> None:
        if not numbers:
            return
        sums = [
            (node, [self._as_at_start(n, node) if (value := values[n]) is None else value for n in numbers])
            for node, values in self._sums.sums
        ]
        total = _put_together([self._specs(n) for n in numbers], sums, self._count, collectives)
        for number, value in zip(numbers, total, strict=True):
            self.buffers[number].assign(value.div_(self._count))

    def _specs(self, number: int) -> TensorSpec:
        buffer = self.buffers[number]
        return TensorSpec.of(torch.empty(buffer.shape, dtype=sum_dtype(buffer.dtype), device=buffer.device))

    def _take_over(self, numbers: Sequence[int], rank: int, collectives: Collectives) -> None:
        """Give buffers the values that a rank has kept of them."""
        buffers = [self.buffers[number] for number in numbers]
        own = collectives.rank == rank
        values = [self._kept[n] if own else b.zeros() for n, b in zip(numbers, buffers, strict=True)]
        flat = torch.cat([value.contiguous().view(-1).view(torch.uint8) for value in values])
        if collectives.world > 1:
            collectives.broadcast(flat, "buffers", rank).wait()
        for buffer, piece in zip(buffers, flat.split([buffer.nbytes for buffer in buffers]), strict=True):
            buffer.assign(piece.clone().view(buffer.dtype).view(buffer.shape))


def _put_together(
    specs: Sequence[TensorSpec], sums: Sequence[tuple[Node, list[Tensor]]], shares: int, collectives: Collectives
) -> list[Tensor]:
    if collectives.world == 1:
        return add_up(sums, shares, lambda a, b: [x.add_(y) for x, y in zip(a, b, strict=True)]) or []
    exchange = Exchange(specs, shares, collectives)
    for number in range(len(exchange.buckets)):
        exchange.send(number, [[values] for _, values in sums])
    total: list[Tensor] = [torch.empty(0)] * len(specs)
    for bucket, flat in exchange.receive():
        for slot, view in zip(bucket.slots, bucket.views(flat), strict=True):
            total[slot.index] = view
    return total
