"""The exchange of partial sums: each rank adds its slice of the elements in the tree's order, and all get the result.

Tensors are laid out in flat buckets (:mod:`lockstep.buckets`). Of a bucket a rank has one flat tensor for each of its
partial sums; slice ``r`` of all of them goes to rank ``r``, in one all-to-all. That rank adds what all ranks have sent
in the tree's order, and the results are gathered. Where ranks have one partial sum each (8 shares on 2, 4 or 8), that
are the bytes of a ring all-reduce; on three ranks, of which two have two partial sums, up to a half more.

What no share of a partial sum has is sent as -0.0, which leaves every number that it is added to as it is, with its
sign.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.buckets import Bucket, TensorSpec, plan_buckets
from lockstep.distributed.collectives import Collectives, Pending
from lockstep.shares.tree import Node, nodes_of, plan_additions, shares_of

CAP_BYTES = 25 * 1024 * 1024
_NOTHING = -0.0


class Exchange:
    """Puts together partial sums of tensors like ``specs`` from all ranks; the shares of a step are ``shares``."""

    def __init__(self, specs: Sequence[TensorSpec], shares: int, collectives: Collectives) -> None:
        self._specs, self._collectives = specs, collectives
        self._buckets = plan_buckets(specs, CAP_BYTES).buckets
        self._pieces = [_pieces(rank, collectives.world, shares) for rank in range(collectives.world)]
        self._additions = plan_additions([node for nodes in self._pieces for node in nodes], shares)
        self._sent: list[_Sent] = []

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Which tensors travel together, in the order in which they are sent."""
        return self._buckets

    @torch.no_grad()
    def send(self, bucket: Bucket, sums: Sequence[Sequence[Tensor | None]]) -> None:
        """Begin with a bucket; ``sums`` are this rank's partial sums, in the order of shares."""
        world, rank = self._collectives.world, self._collectives.rank
        each = -(-bucket.numel // world)
        flats = torch.empty((len(sums), world * each), dtype=bucket.dtype, device=bucket.device)
        for flat, values in zip(flats, sums, strict=True):
            _fill(bucket, flat, values)
        outgoing = flats if len(sums) == 1 else flats.view(len(sums), world, each).transpose(0, 1).contiguous()
        counts = [len(nodes) for nodes in self._pieces]
        incoming = flats.new_empty(sum(counts) * each)
        pending = self._collectives.all_to_all(
            incoming, outgoing.view(-1), [n * each for n in counts], [counts[rank] * each] * world, "partial sums"
        )
        self._sent.append(_Sent(bucket, each, outgoing, incoming, pending))

    @torch.no_grad()
    def receive(self) -> Iterator[tuple[Bucket, Tensor]]:
        """The sums over all shares, bucket by bucket: flat tensors."""
        gathering: list[tuple[Bucket, Tensor, Pending]] = []
        for bucket, each, outgoing, incoming, pending in self._sent:
            pending.wait()
            parts = incoming.view(-1, each)
            for into, place in self._additions:
                parts[into].add_(parts[place])
            world = self._collectives.world
            numel = world * each
            whole = outgoing.view(-1)[:numel] if outgoing.numel() >= numel else incoming.new_empty(numel)
            gathering.append((bucket, whole, self._collectives.all_gather_flat(whole, parts[0], "sums")))
        self._sent.clear()
        for bucket, whole, pending in gathering:
            pending.wait()
            yield bucket, whole

    def drop(self) -> None:
        """Nobody waits for what has been sent."""
        self._sent.clear()


class _Sent(NamedTuple):
    bucket: Bucket
    each: int
    outgoing: Tensor
    incoming: Tensor
    pending: Pending


def _pieces(rank: int, world: int, shares: int) -> list[Node]:
    return nodes_of(shares_of(rank, world, shares))


def _fill(bucket: Bucket, flat: Tensor, values: Sequence[Tensor | None]) -> None:
    pairs = list(zip(bucket.views(flat[: bucket.numel]), [values[slot.index] for slot in bucket.slots], strict=True))
    given = [(view, value) for view, value in pairs if value is not None]
    if len(given) < len(pairs):
        flat.fill_(_NOTHING)
    if given:
        torch._foreach_copy_([view for view, _ in given], [value for _, value in given])
