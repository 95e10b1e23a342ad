"""Moves the partial sums of one bucket between ranks, and adds them on the way.

On ranks that share memory (``shm`` on one host) each rank reads its slice of all parts where they are, and writes the
sum to all ranks. Elsewhere slice ``r`` of all parts goes to rank ``r``, in one all-to-all; that rank adds them, and the
sums are gathered. If ranks have one partial sum each (8 shares on 2, 4 or 8), these are the bytes of a ring all-reduce;
on three ranks, two of which have two partial sums, it is up to a half more.

A *row* of bytes from each rank may travel with a bucket, in the same collective. It arrives before the sums do.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep._base.abilities import Addition, PlaceOfPart
from lockstep._base.buckets import FlatBucket
from lockstep._base.deal import Deal
from lockstep.distributed.comm.collectives import Collectives, Pending
from lockstep.shares.share_tree import nodes_of, plan_additions, shares_of
from lockstep.shares.spare import SpareMemory

_NOTHING = -0.0
"""Sent where no share of a partial sum has a value: added to any number, it leaves it as it is, with its sign."""

Terms = list[list[Tensor | None]]
"""A partial sum as terms, each of which is added to the sum of all after it; a term has a value for each tensor."""


class Layout:
    """The partial sums of each rank in a step whose shares are dealt so, and the order in which they are added."""

    def __init__(self, deal: Deal) -> None:
        own = [shares_of(rank, deal) for rank in range(len(deal))]
        owned = [nodes_of(each) for each in own]
        self.counts = [len(nodes) for nodes in owned]
        """Number of partial sums of each rank."""
        self.first_shares = [[node.first for node in nodes] for nodes in owned]
        """The first share of each partial sum, by rank."""
        self.terms = [len(nodes_of(each[:-1])) + 1 for each in own]
        """Number of terms of each rank's partial sums while its last share runs."""
        self.additions = plan_additions([node for nodes in owned for node in nodes], sum(deal))
        places = [PlaceOfPart(rank, part) for rank, count in enumerate(self.counts) for part in range(count)]
        self.placed = [Addition(places[into], places[place]) for into, place in self.additions]
        """The additions by rank and part."""


class Transport(ABC):
    """One bucket under way: filled, sent, waited for, gathered, and received."""

    def __init__(self, bucket: FlatBucket, layout: Layout, collectives: Collectives, row_bytes: int) -> None:
        self._bucket = bucket
        self._layout = layout
        self._collectives = collectives
        self._row_bytes = row_bytes

    def place(self, part: int, values: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Copy values of the bucket's tensors, with which a partial sum begins, to the memory that it is sent from, so
        that the rest is added there; return the copies, or the same values if there is no such memory."""
        return values

    @abstractmethod
    def fill(self, sums: Sequence[Terms]) -> None:
        """Write this rank's partial sums, in share order; none if the step has failed: then anything is sent."""

    @abstractmethod
    def send(self, row: Tensor | None, *, blocking: bool) -> None:
        """Begin to send; ``blocking`` if :meth:`wait` is called at once."""

    def settle(self) -> None:  # noqa: B027  (only one of the two has to)
        """Free the memory that the sums do not need, if the bucket holds more while it is under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the rows of all ranks have arrived."""

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """The rows of all ranks, in rank order, as bytes."""

    def gather(self) -> None:  # noqa: B027  (only one of the two has to)
        """Begin to give the sums to all ranks, unless they have them. Every rank calls it in the same order."""

    @abstractmethod
    def result(self) -> Tensor:
        """Return the sums over all shares: a flat tensor that belongs to the caller."""


def transport_of(
    bucket: FlatBucket, layout: Layout, collectives: Collectives, row_bytes: int, spare: SpareMemory
) -> Transport:
    """Return the transport of a bucket; with ``row_bytes``, the ranks' rows travel with it."""
    if collectives.can_add_in_order(bucket.device):
        return _SharedMemoryTransport(bucket, layout, collectives, row_bytes)
    return _AllToAllTransport(bucket, layout, collectives, row_bytes, spare)


class _SharedMemoryTransport(Transport):
    """A bucket whose ranks write their sums to each other."""

    def __init__(self, bucket: FlatBucket, layout: Layout, collectives: Collectives, row_bytes: int) -> None:
        super().__init__(bucket, layout, collectives, row_bytes)
        parts = max(layout.counts)
        self._numel = parts * bucket.numel
        self._gathered = row_bytes // bucket.dtype.itemsize
        numel = self._numel + collectives.world * self._gathered
        self._whole = collectives.empty(numel, bucket.dtype, bucket.device)
        self._views = [bucket.views(flat) for flat in self._whole[: self._numel].view(parts, bucket.numel)]

    def place(self, part: int, values: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        views = self._views[part]
        _copy(views, values)
        return [None if value is None else view for view, value in zip(views, values, strict=True)]

    def fill(self, sums: Sequence[Terms]) -> None:
        for views, terms in zip(self._views, sums, strict=False):  # values that were placed are there already
            _fill(self._bucket, views, terms)

    def send(self, row: Tensor | None, *, blocking: bool) -> None:
        if row is not None:
            self.rows[self._collectives.rank].copy_(row)
        numel, additions = self._bucket.numel, self._layout.placed
        self._pending = self._collectives.add_in_order(
            self._whole, numel, additions, "partial sums", self._gathered, blocking=blocking
        )

    def wait(self) -> None:
        self._pending.wait()

    @property
    def rows(self) -> Tensor:
        return self._whole[self._numel :].view(torch.uint8).view(self._collectives.world, -1)

    def result(self) -> Tensor:
        return self._whole[: self._bucket.numel]


class _AllToAllTransport(Transport):
    """A bucket in which each rank adds one slice. Parts travel one after the other, beginning with each rank's
    first."""

    def __init__(
        self, bucket: FlatBucket, layout: Layout, collectives: Collectives, row_bytes: int, spare: SpareMemory
    ) -> None:
        super().__init__(bucket, layout, collectives, row_bytes)
        self._spare = spare
        self._slice = -(-bucket.numel // collectives.world)
        """Number of elements that a rank adds."""
        self._slice_bytes = self._slice * bucket.dtype.itemsize
        self._outgoing: list[Tensor] = []
        self._coming: list[tuple[Tensor, list[int], Pending]] = []
        """For each part: the incoming bytes, their number by rank, and the pending collective."""
        self._sums = self._whole = self._rows = torch.empty(0)

    def fill(self, sums: Sequence[Terms]) -> None:
        world, bucket = self._collectives.world, self._bucket
        for part in range(self._layout.counts[self._collectives.rank]):
            self._spare.give_back(world * self._slice_bytes)
            flat = torch.empty(world * self._slice, dtype=bucket.dtype, device=bucket.device)
            if part < len(sums):
                _fill(bucket, bucket.views(flat[: bucket.numel]), sums[part])
            self._outgoing.append(flat)

    def send(self, row: Tensor | None, *, blocking: bool) -> None:
        world, empty = self._collectives.world, torch.empty(0, dtype=torch.uint8, device=self._bucket.device)
        for part in range(max(self._layout.counts)):
            pieces = self._outgoing[part].view(torch.uint8) if part < len(self._outgoing) else empty
            row_bytes = self._row_bytes if part == 0 else 0
            if row is not None and part == 0:
                rows = row.to(pieces.device).expand(world, -1)
                pieces = torch.cat([pieces.view(world, len(pieces) // world), rows], dim=1).view(-1)
            received = [row_bytes + self._slice_bytes * (part < count) for count in self._layout.counts]
            self._spare.give_back(sum(received))
            incoming, sent = pieces.new_empty(sum(received)), [len(pieces) // world] * world
            pending = self._collectives.all_to_all(incoming, pieces, received, sent, "partial sums")
            self._coming.append((incoming, received, pending))

    def settle(self) -> None:
        self.wait()

    def wait(self) -> None:
        """Return when the rows of all ranks have arrived, and the slices are added."""
        if not self._coming:
            return
        pieces = []
        while self._coming:  # a pending collective holds the memory that it has sent
            incoming, received, pending = self._coming.pop(0)
            pending.wait()
            pieces.append(incoming.split(received))
        del pending
        self._outgoing = []
        parts: list[Tensor] = []
        for rank, count in enumerate(self._layout.counts):
            parts += (pieces[part][rank][: self._slice_bytes].view(self._bucket.dtype) for part in range(count))
        for into, place in self._layout.additions:
            parts[into].add_(parts[place])
        self._rows = torch.stack([piece[len(piece) - self._row_bytes :] for piece in pieces[0]])
        self._sums = parts[0].clone()  # a copy, which holds no more memory than it needs

    @property
    def rows(self) -> Tensor:
        return self._rows

    def gather(self) -> None:
        self._spare.give_back(self._collectives.world * self._slice_bytes)
        self._whole = self._sums.new_empty(self._collectives.world * self._slice)
        self._gathering = self._collectives.all_gather_flat(self._whole, self._sums, "sums")

    def result(self) -> Tensor:
        self._gathering.wait()
        return self._whole


def _fill(bucket: FlatBucket, views: Sequence[Tensor], terms: Terms) -> None:
    *others, last = ([term[slot.index] for slot in bucket.slots] for term in terms)
    for view, value in zip(views, last, strict=True):
        if value is None:
            view.fill_(_NOTHING)
    _copy(views, last)
    for term in reversed(others):
        into, values = _present(views, term)
        if into:
            torch._foreach_add_(into, values)


def _copy(views: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Write those values that exist and are not in their places yet."""
    into, present = _present(views, values)
    if into:
        torch._foreach_copy_(into, present)


def _present(views: Sequence[Tensor], values: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [
        (view, value) for view, value in zip(views, values, strict=True) if value is not None and value is not view
    ]
    return [view for view, _ in pairs], [value for _, value in pairs]
