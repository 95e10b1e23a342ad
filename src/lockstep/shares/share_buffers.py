"""Buffers, share by share: each share begins with the values of the step, and the results of shares are averaged.

A floating-point buffer of 16 bits or more that any share has changed becomes the mean over all shares of the step,
added in the tree's order; a share that has not changed it counts with the value of the step. Any other buffer gets its
value from the lowest share that has changed it: a counter of batches, which every share advances from the same value,
advances by one a step.

Buffers that changed in the step before travel with the gradients and the report
(:mod:`lockstep.shares.share_exchange`). Others have collectives of their own when they change.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep._base.buckets import TensorSpec
from lockstep._base.deal import Deal
from lockstep._base.digests import Digests
from lockstep._base.inner_tensors import as_bytes
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.module.buffers import Buffer, BufferGroup, assign_all
from lockstep.shares.gradients import Values, sum_dtype
from lockstep.shares.share_exchange import ExchangePlan, ShareExchange
from lockstep.shares.share_report import number_of
from lockstep.shares.share_tree import PartialSums, ShareNode, add_up
from lockstep.shares.spare import SpareMemory

UNCHANGED = -1
_SMALL_BYTES = 256
"""A buffer that is not averaged travels with the report if it has at most this many bytes."""


class TravellingBuffers(NamedTuple):
    """The numbers of the buffers that travel with the gradients of a step, the same on every rank."""

    averaged: Sequence[int] = ()
    """Buffers after the gradients."""
    kept: Sequence[int] = ()
    """Buffers after the report, as bytes."""


def specs_of(buffers: Sequence[Buffer]) -> list[TensorSpec]:
    """Return the layouts in which averaged buffers are added."""
    return [TensorSpec.of(torch.empty(b.shape, dtype=sum_dtype(b.dtype), device=b.device)) for b in buffers]


Versions = Sequence[tuple[Tensor | None, list[int]]]
"""The tensors of buffers with their versions, to be compared later."""


class ShareBuffers:
    """The buffers of one module in one step whose shares are dealt so, which begin with their present values.

    ``left`` are the :meth:`versions` that the step before has left, if it is known that all ranks had equal values.
    """

    @torch.no_grad()
    def __init__(self, buffers: Sequence[Buffer], deal: Deal, left: Versions) -> None:
        self.buffers = buffers
        self._is_averaged = [buffer.can_be_averaged for buffer in buffers]
        self._start = [buffer.copy() for buffer in buffers]
        self._sums: PartialSums[Values] = PartialSums(self._merge)
        self._kept: dict[int, Tensor] = {}
        self._dirty = False
        self._deal = deal
        self._count = sum(deal)
        now = self.versions()
        is_left = len(left) == len(now) and all(a is b and v == w for (a, v), (b, w) in zip(left, now, strict=True))
        self.written = 0 if is_left else number_of(Digests([each for _, each in self.values()]).each())
        """A digest of the values of the step, if a program has written any since the step before; else 0."""
        self.first_change = [UNCHANGED] * len(buffers)
        """The first share of this rank that has changed each buffer, or -1."""

    def versions(self) -> Versions:
        """Return the present versions of the buffers."""
        inner = ((buffer.current(), buffer.inner() or []) for buffer in self.buffers)
        return [(tensor, [0 if each.is_inference() else each._version for each in found]) for tensor, found in inner]

    def values(self) -> list[tuple[str, Tensor]]:
        """Return the values of the step, by name: each inner tensor of a buffer."""
        pairs = zip(self.buffers, self._start, strict=True)
        return [(buffer.name, each) for buffer, start in pairs for each in start or ()]

    @property
    def is_used(self) -> bool:
        """True if any share has changed a buffer in the step under way."""
        return any(share != UNCHANGED for share in self.first_change)

    def restore(self) -> None:
        """Give the buffers the values of the step if a share has changed them since."""
        if self._dirty:
            pairs = [(b, start) for b, start in zip(self.buffers, self._start, strict=True) if start is not None]
            assign_all([buffer for buffer, _ in pairs], [start for _, start in pairs])
            self._dirty = False

    def now(self) -> list[Tensor | None]:
        """Return the buffers as the share under way has left them so far."""
        return [None if buffer.current() is None else buffer.sent() for buffer in self.buffers]

    def forget(self) -> None:
        """Give the buffers the values of the step, whatever a share has changed."""
        self._dirty = True
        self.restore()

    @torch.no_grad()
    def add(self, share: int) -> None:
        """End a share: record how it has changed the buffers."""
        leaf: Values = []
        current = [buffer.inner() for buffer in self.buffers]
        has_changed = _differ(current, self._start)
        for number, (buffer, now) in enumerate(zip(self.buffers, current, strict=True)):
            if now is None or not has_changed[number]:
                leaf.append(None)
                continue
            self._dirty = True
            if self.first_change[number] == UNCHANGED:
                self.first_change[number] = share
                if not self._is_averaged[number]:
                    self._kept[number] = buffer.sent().clone()
            leaf.append(now[0].to(sum_dtype(buffer.dtype), copy=True) if self._is_averaged[number] else None)
        self._sums.add(share, leaf)

    @torch.no_grad()
    def _merge(self, left_node: ShareNode, left: Values, right_node: ShareNode, right: Values) -> Values:
        merged: Values = []
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            if a is None and b is None:
                merged.append(None)
            else:
                a = self._as_at_start(number, left_node) if a is None else a
                merged.append(a.add_(self._as_at_start(number, right_node) if b is None else b))
        return merged

    def _as_at_start(self, number: int, node: ShareNode) -> Tensor:
        """Return the sum of a node's shares that have not changed a buffer, added in the tree's order."""
        start = self._start[number]
        assert start is not None
        return start[0].to(sum_dtype(start[0].dtype)).mul(2**node.level)  # exact, as are the sums of equal numbers

    def sums(self, numbers: Sequence[int]) -> list[list[Tensor]]:
        """Return this rank's partial sums of averaged buffers, in share order."""
        return [
            [self._as_at_start(n, node) if (value := values[n]) is None else value for n in numbers]
            for node, values in self._sums.sums
        ]

    def kept(self, numbers: Sequence[int]) -> Tensor:
        """Return values of buffers that are not averaged as bytes on the CPU, equally many on every rank."""
        return torch.cat(
            [torch.empty(0, dtype=torch.uint8, device="cpu"), *(self._bytes(number).cpu() for number in numbers)]
        )

    def split_kept(self, values: Tensor, numbers: Sequence[int]) -> dict[int, Tensor]:
        """Split the bytes that :meth:`kept` returned, by number of the buffer."""
        sizes = [self.buffers[number].nbytes for number in numbers]
        return dict(zip(numbers, values[: sum(sizes)].split(sizes), strict=True)) if sizes else {}

    def _bytes(self, number: int) -> Tensor:
        """Return the value that this rank has kept of a buffer; zeros if no share of this rank has changed it."""
        value = self._kept.get(number)
        return as_bytes(self.buffers[number].zeros() if value is None else value)

    def travelling_next(self, first_changes: Sequence[Sequence[int]]) -> TravellingBuffers:
        """Return the buffers that travel with the gradients of the next step, since they have changed in this one."""
        changed = self._changed(first_changes)
        averaged = tuple(number for number in changed if self._is_averaged[number])
        small = (number for number in changed if self.buffers[number].nbytes <= _SMALL_BYTES)
        return TravellingBuffers(averaged, tuple(number for number in small if number not in averaged))

    def _changed(self, first_changes: Sequence[Sequence[int]]) -> list[int]:
        return [number for number in range(len(self.buffers)) if any(row[number] >= 0 for row in first_changes)]

    @torch.no_grad()
    def finish(
        self,
        first_changes: Sequence[Sequence[int]],
        collectives: Collectives,
        sums: Mapping[int, Tensor],
        kept: Sequence[Mapping[int, Tensor]],
    ) -> None:
        """Give the buffers the values of the next step; all shares have ended.

        ``first_changes`` has :attr:`first_change` of each rank; ``sums`` those over all ranks, of buffers that
        travelled with the gradients; ``kept`` each rank's values of buffers that travelled with its report.
        """
        changed = self._changed(first_changes)
        averaged = [number for number in changed if self._is_averaged[number]]
        missing = [number for number in averaged if number not in sums]
        total = {**sums, **dict(zip(missing, self._add_up(missing, collectives), strict=True))}
        if averaged:
            values = [total[number] for number in averaged]
            torch._foreach_div_(values, self._count)
            assign_all([self.buffers[number] for number in averaged], [[value] for value in values])
        deciding: dict[int, list[int]] = {}
        for number in (number for number in changed if not self._is_averaged[number]):
            first = min((row[number], rank) for rank, row in enumerate(first_changes) if row[number] >= 0)
            deciding.setdefault(first[1], []).append(number)
        for rank, numbers in deciding.items():
            self._take_over(numbers, rank, collectives, kept[rank])

    def _add_up(self, numbers: Sequence[int], collectives: Collectives) -> list[Tensor]:
        """Return the sums over all shares of averaged buffers that have not travelled with the gradients."""
        if not numbers:
            return []
        sums = self.sums(numbers)
        if collectives.world == 1:
            nodes = [node for node, _ in self._sums.sums]
            pairs = list(zip(nodes, sums, strict=True))
            return add_up(pairs, self._count, lambda a, b: [x.add_(y) for x, y in zip(a, b, strict=True)]) or []
        specs = specs_of([self.buffers[number] for number in numbers])
        plan = ExchangePlan([], specs, self._deal, collectives, has_rows=False)
        exchange = ShareExchange(plan, 0, collectives, SpareMemory())
        exchange.send_rest(
            [[[*values]] for values in sums], torch.empty(0, dtype=torch.uint8, device="cpu"), blocking=True
        )
        return [value for _, value in sorted(exchange.receive(), key=lambda pair: pair[0])]

    def _take_over(
        self, numbers: Sequence[int], rank: int, collectives: Collectives, kept: Mapping[int, Tensor]
    ) -> None:
        """Give buffers the values that a rank has kept of them."""
        values = dict(kept)
        if missing := [number for number in numbers if number not in values]:
            flat = torch.cat([self._bytes(number) for number in missing])
            if collectives.world > 1:
                collectives.broadcast(flat, "buffers", rank).wait()
            values |= zip(missing, flat.split([self.buffers[number].nbytes for number in missing]), strict=True)
        for number in numbers:
            buffer = self.buffers[number]
            BufferGroup([buffer]).assign(values[number].clone().view(buffer.travels_as))


def _differ(ones: Sequence[Sequence[Tensor] | None], others: Sequence[Sequence[Tensor] | None]) -> list[bool]:
    """Return for each pair of lists of tensors whether they differ; False if one is None.

    Each accelerator is read once, for which the host waits."""
    found = [False] * len(ones)
    asked: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for number, pair in enumerate(zip(ones, others, strict=True)):
        for one, other in zip(*(each or () for each in pair), strict=False):
            if one.device.type == "cpu" or one.device != other.device or one.shape != other.shape:
                found[number] = found[number] or not torch.equal(one, other)
            else:
                asked.setdefault(one.device, []).append((number, (one == other).all()))
    for answers in asked.values():
        read = torch.stack([is_same for _, is_same in answers]).tolist()
        for (number, _), is_same in zip(answers, read, strict=True):
            found[number] = found[number] or not is_same
    return found
