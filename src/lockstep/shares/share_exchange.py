"""Exchanges the partial sums of a step: each rank adds its slice in the tree's order, and all ranks get the result.

Tensors are laid out in flat buckets (:mod:`lockstep._base.buckets`): the gradients, in the order in which backward
computes them, and the averaged buffers. A rank has one flat part of each bucket for each of its partial sums;
:mod:`lockstep.shares.transport` says how these travel. Buckets are sent in order; with the last one, each rank sends a
row of bytes, its report.

Some buckets are sent while the backward pass of the last share runs, each when it has all the gradients that it had in
the step before. Partial sums and gradients are kept meanwhile: if another gradient comes after all - a share runs a
second backward - all ranks send these buckets once more at the end.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lockstep._base.buckets import FlatBucket, TensorSpec, plan_buckets
from lockstep._base.deal import Deal
from lockstep.distributed.comm.collectives import Collectives
from lockstep.shares.spare import SpareMemory
from lockstep.shares.transport import Layout, Terms, Transport, transport_of

CAP_BYTES = 25 * 1024 * 1024
SMALL_BYTES = 1024 * 1024
"""Up to this size, the last gradients wait for buffers and report, and travel with them."""
_ALIGNMENT = 16
"""Size of the largest element: rows are padded to a multiple of it, so that what follows can be viewed in any dtype."""


class ExchangePlan:
    """The tensors that travel together in steps of this ``deal``: ``gradients`` first, then ``buffers``, with rows
    of the ranks if ``has_rows``."""

    def __init__(
        self,
        gradients: Sequence[TensorSpec],
        buffers: Sequence[TensorSpec],
        deal: Deal,
        collectives: Collectives,
        *,
        has_rows: bool = True,
    ) -> None:
        self.layout = Layout(deal)
        buckets = _plan(gradients, buffers, collectives.device)
        if has_rows and buckets[-1].device != collectives.device:  # to read them there, the host would wait for it
            buckets = (*buckets, FlatBucket(torch.uint8, collectives.device, 0, ()))
        self.buckets = buckets
        """The buckets in the order in which they are sent."""
        self.leave_early = 0
        """Number of buckets that are sent while backward runs: never the last gradients, with which it ends, nor
        buckets that need more memory (see :meth:`_fits`). It is 0 if ranks share memory: processors that add for others
        have no time for backward."""
        for number, bucket in enumerate(self.buckets):
            is_last = any(slot.index + 1 >= len(gradients) for slot in bucket.slots)
            is_shared = collectives.can_add_in_order(bucket.device)
            if is_last or not bucket.slots or is_shared or not self._fits(number, sum(deal)):
                break
            self.leave_early = number + 1
        leaving = enumerate(self.buckets[: self.leave_early])
        self.early = {slot.index: number for number, bucket in leaving for slot in bucket.slots}
        """The number of the bucket of each gradient that is sent while backward runs."""

    def _fits(self, number: int, shares: int) -> bool:
        """Return True if memory for log2(shares) + 1 gradients suffices on every rank while a bucket is under way,
        backward ends, and all partial sums are kept."""
        sizes, world = [bucket.nbytes for bucket in self.buckets], len(self.layout.counts)
        whole, own, most = sum(sizes), sizes[number], (shares - 1).bit_length() + 1
        slices, incoming = sum(sizes[:number]) / world, sum(self.layout.counts) * own / world
        return all(
            terms * whole + slices + parts * own + incoming <= most * whole
            for parts, terms in zip(self.layout.counts, self.layout.terms, strict=True)
        )


def _plan(
    gradients: Sequence[TensorSpec], buffers: Sequence[TensorSpec], device: torch.device
) -> tuple[FlatBucket, ...]:
    """Plan the buckets of gradients, and one or more at the end with the buffers, or nothing, and perhaps the last few
    gradients."""
    buckets = plan_buckets(gradients, CAP_BYTES).buckets
    if buckets and buckets[-1].nbytes <= SMALL_BYTES:
        return plan_buckets([*gradients, *buffers], CAP_BYTES).buckets
    behind = [
        replace(bucket, slots=tuple(replace(slot, index=slot.index + len(gradients)) for slot in bucket.slots))
        for bucket in plan_buckets(buffers, CAP_BYTES).buckets
    ]
    return *buckets, *(behind or [FlatBucket(torch.uint8, device, 0, ())])


def with_buffers(gradients: list[Terms], buffers: Sequence[Sequence[Tensor]]) -> list[Terms]:
    """Return the partial sums of gradients, with the values of buffers appended to their last terms."""
    for terms, values in zip(gradients, buffers, strict=True):
        for term in terms[:-1]:
            term += [None] * len(values)
        terms[-1] += values
    return gradients


class ShareExchange:
    """Adds up the partial sums of all ranks in one step, and gives all ranks rows of ``row_bytes`` bytes.

    ``spare`` takes the memory of partial sums that have been sent.
    """

    def __init__(self, plan: ExchangePlan, row_bytes: int, collectives: Collectives, spare: SpareMemory) -> None:
        self.plan = plan
        self._sent = 0
        self._collectives = collectives
        self._spare = spare
        self._row_bytes = row_bytes + -row_bytes % _ALIGNMENT
        self.places = any(bucket.slots and collectives.can_add_in_order(bucket.device) for bucket in plan.buckets)
        """True if :meth:`place` copies values."""
        self._transports = [self._transport(number) for number in range(len(plan.buckets))]
        self._sums: Sequence[Terms] = ()
        self._missing: list[set[int]] = []
        """The gradients that each bucket waits for, of those that are sent while backward runs."""
        self.is_late = False
        """True if a bucket was sent before another of its gradients came."""

    @torch.no_grad()
    def place(self, first_share: int, values: list[Tensor | None]) -> list[Tensor | None]:
        """Copy the values of ``first_share`` to the memory that they are sent from, if a partial sum of this rank
        begins with it and such memory exists before the end of the step. Return the copies, or the values."""
        begins = self.plan.layout.first_shares[self._collectives.rank]
        if first_share not in begins:
            return values
        of_buffers = sum(len(bucket.slots) for bucket in self.plan.buckets) - len(values)
        placed = [*values, *[None] * of_buffers]
        for bucket, transport in zip(self.plan.buckets, self._transports, strict=True):
            given = [placed[slot.index] for slot in bucket.slots]
            for slot, value in zip(bucket.slots, transport.place(begins.index(first_share), given), strict=True):
                placed[slot.index] = value
        return placed[: len(values)]

    def send_early(self, expected: Collection[int]) -> None:
        """From now on send buckets while backward runs, as soon as they have the gradients with these numbers."""
        self._missing = [set() for _ in range(self.plan.leave_early)]
        for number in expected:
            if number in self.plan.early:
                self._missing[self.plan.early[number]].add(number)

    @torch.no_grad()
    def arrived(self, number: int, find_sums: Callable[[], Sequence[Terms]]) -> None:
        """Record a parameter's gradient; begin to send the buckets that are complete now.

        ``find_sums`` returns this rank's partial sums, in share order. They are kept, since a bucket may have to be
        sent again.
        """
        bucket = self.plan.early.get(number)
        if bucket is None or not self._missing:
            return
        if bucket < self._sent:
            self.is_late = True
            return
        self._missing[bucket].discard(number)
        while self._sent < len(self._missing) and not self._missing[self._sent]:
            self._settle()
            self._transports[self._sent].fill(find_sums())
            self._transports[self._sent].send(None, blocking=False)
            self._sent += 1

    @torch.no_grad()
    def send_rest(self, sums: Sequence[Terms], row: Tensor, *, blocking: bool) -> None:
        """Begin to send all remaining buckets, and a row of bytes, equally long on every rank. ``sums`` is used up; it
        is empty if only the rows matter: then anything is sent."""
        self._sums = sums
        padded = torch.nn.functional.pad(row, (0, self._row_bytes - len(row)))
        for number in range(self._sent, len(self._transports)):
            is_last = number + 1 == len(self._transports)
            if sums or blocking:  # else other ranks are told of a failure, without waiting
                self._settle()
            self._transports[number].fill(self._sums)
            if number >= self.plan.leave_early:  # else a rank that has sent it early may ask for it again
                self._drop(number)
            self._transports[number].send(padded if is_last else None, blocking=blocking and is_last)
            self._sent += 1

    def rows(self) -> Tensor:
        """Return the rows of all ranks, in rank order, on the CPU; waits for them."""
        self._transports[-1].wait()
        return self._transports[-1].rows.cpu()

    def rows_alone(self, row: Tensor) -> Tensor:
        """Send a row, and anything in place of partial sums; return the rows of all ranks. No sum is received."""
        self.send_rest([], row, blocking=True)
        for transport in self._transports:
            transport.wait()
        return self.rows()

    @torch.no_grad()
    def send_again(self) -> None:
        """Begin to send the first buckets again, because some rank has got further gradients since it sent them."""
        for number in range(self.plan.leave_early):
            self._transports[number].wait()
            self._transports[number] = self._transport(number)
            self._transports[number].fill(self._sums)
            self._transports[number].send(None, blocking=False)
            self._transports[number].settle()

    @torch.no_grad()
    def receive(self) -> list[tuple[int, Tensor]]:
        """Return the sums over all shares, with the numbers of their tensors; they belong to the caller."""
        for number in range(self.plan.leave_early):
            self._drop(number)
        for transport in self._transports:
            transport.wait()
            transport.gather()
        received: list[tuple[int, Tensor]] = []
        for bucket in self.plan.buckets:
            flat = self._transports.pop(0).result()
            received += zip((slot.index for slot in bucket.slots), bucket.views(flat), strict=True)
        return received

    def _transport(self, number: int) -> Transport:
        is_last = number + 1 == len(self.plan.buckets)
        row_bytes = self._row_bytes if is_last else 0
        return transport_of(self.plan.buckets[number], self.plan.layout, self._collectives, row_bytes, self._spare)

    def _settle(self) -> None:
        """Wait for the bucket sent last if it holds extra memory meanwhile: so there are never two of these."""
        if self._sent:
            self._transports[self._sent - 1].settle()

    def _drop(self, number: int) -> None:
        for terms in self._sums:
            for term in terms:
                for slot in self.plan.buckets[number].slots:
                    if not self.places:
                        self._spare.keep([term[slot.index]])
                    term[slot.index] = None
