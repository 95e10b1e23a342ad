"""The exchange of partial sums: each rank adds its slice of the elements in the tree's order, and all get the result.

Tensors are laid out in flat buckets (:mod:`lockstep.buckets`). Of a bucket a rank has one flat part for each of its
partial sums. On ranks that share memory (``shm`` on one host) each rank reads its slice of all parts where they are,
and writes the sum to everybody. Elsewhere slice ``r`` of all parts goes to rank ``r``, in one all-to-all; that rank
adds them, and the sums are gathered. Where ranks have one partial sum each (8 shares on 2, 4 or 8), that are the
bytes of a ring all-reduce; on three ranks, of which two have two partial sums, up to a half more.

What no share of a partial sum has is sent as -0.0, which leaves every number that it is added to as it is, with its
sign.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.buckets import Bucket, TensorSpec, plan_buckets
from lockstep.distributed.collectives import Collectives, Pending
from lockstep.shares.tree import nodes_of, plan_additions, shares_of
from lockstep.shm.algorithm import Addition, Place

CAP_BYTES = 25 * 1024 * 1024
_NOTHING = -0.0
Terms = Sequence[Sequence[Tensor | None]]
"""A partial sum as terms, each of which is added to the sum of all behind it; a term has a value for each tensor."""


class Exchange:
    """Puts together partial sums of tensors like ``specs`` from all ranks; a step has ``shares`` shares."""

    def __init__(self, specs: Sequence[TensorSpec], shares: int, collectives: Collectives) -> None:
        self._collectives = collectives
        self.buckets = plan_buckets(specs, CAP_BYTES).buckets
        """Which tensors travel together, in the order in which they are to be sent."""
        owned = [nodes_of(shares_of(rank, collectives.world, shares)) for rank in range(collectives.world)]
        self._counts = [len(nodes) for nodes in owned]
        self._additions = plan_additions([node for nodes in owned for node in nodes], shares)
        places = [Place(rank, part) for rank, count in enumerate(self._counts) for part in range(count)]
        self._placed = [Addition(places[into], places[place]) for into, place in self._additions]
        self._on_their_way: dict[int, _InSharedMemory | _AllToAll] = {}

    @torch.no_grad()
    def send(self, number: int, sums: Sequence[Terms]) -> None:
        """Begin with a bucket, in place of what has been sent of it before, if anything; ``sums`` are this rank's
        partial sums, in the order of shares (if there are too few, the step has failed, and anything is sent)."""
        bucket, collectives = self.buckets[number], self._collectives
        if collectives.can_add_in_order(bucket.device):
            whole = collectives.empty(max(self._counts) * bucket.numel, bucket.dtype, bucket.device)
            for flat, terms in zip(whole.view(-1, bucket.numel), sums, strict=False):
                _fill(bucket, flat, terms)
            pending = collectives.add_in_order(whole, bucket.numel, self._placed, "partial sums")
            self._on_their_way[number] = _InSharedMemory(whole, bucket.numel, pending)
            return
        world, parts = collectives.world, self._counts[collectives.rank]
        each = -(-bucket.numel // world)
        flats = torch.empty((parts, world * each), dtype=bucket.dtype, device=bucket.device)
        for flat, terms in zip(flats, sums, strict=False):
            _fill(bucket, flat, terms)
        outgoing = flats if parts == 1 else flats.view(parts, world, each).transpose(0, 1).contiguous()
        incoming = flats.new_empty(sum(self._counts) * each)
        received, sent = [count * each for count in self._counts], [parts * each] * world
        pending = collectives.all_to_all(incoming, outgoing.view(-1), received, sent, "partial sums")
        self._on_their_way[number] = _AllToAll(outgoing.view(-1), incoming.view(-1, each), pending)

    @torch.no_grad()
    def receive(self) -> Iterator[tuple[Bucket, Tensor]]:
        """The sums over all shares, bucket by bucket: flat tensors, which are the caller's."""
        coming = [
            (self.buckets[n], self._on_their_way.pop(n).add(self._additions, self._collectives))
            for n in range(len(self.buckets))
        ]
        for bucket, sums in coming:
            sums.pending.wait()
            yield bucket, sums.result()


class _InSharedMemory(NamedTuple):
    """A bucket whose sum all ranks write to each other."""

    parts: Tensor
    numel: int
    pending: Pending

    def result(self) -> Tensor:
        """The sum, which holds no more memory than it needs."""
        return self.parts if self.parts.numel() == self.numel else self.parts[: self.numel].clone()

    def add(self, additions: Sequence[tuple[int, int]], collectives: Collectives) -> "_InSharedMemory":
        """Nothing is left to do."""
        return self


class _AllToAll(NamedTuple):
    """A bucket of which this rank gets its slice."""

    outgoing: Tensor
    incoming: Tensor
    pending: Pending

    def add(self, additions: Sequence[tuple[int, int]], collectives: Collectives) -> _InSharedMemory:
        """Add the slices, and begin to gather the sums."""
        self.pending.wait()
        for into, place in additions:
            self.incoming[into].add_(self.incoming[place])
        numel = collectives.world * self.incoming.shape[1]
        whole = self.outgoing if self.outgoing.numel() == numel else self.incoming.new_empty(numel)
        return _InSharedMemory(whole, numel, collectives.all_gather_flat(whole, self.incoming[0], "sums"))


def _fill(bucket: Bucket, flat: Tensor, terms: Terms) -> None:
    """Write a partial sum into its part."""
    views = bucket.views(flat[: bucket.numel])
    *others, last = ([term[slot.index] for slot in bucket.slots] for term in terms)
    if any(value is None for value in last):
        flat.fill_(_NOTHING)
    into, values = _present(views, last)
    if into:
        torch._foreach_copy_(into, values)
    for term in reversed(others):
        into, values = _present(views, term)
        if into:
            torch._foreach_add_(into, values)


def _present(views: Sequence[Tensor], values: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [(view, value) for view, value in zip(views, values, strict=True) if value is not None]
    return [view for view, _ in pairs], [value for _, value in pairs]
