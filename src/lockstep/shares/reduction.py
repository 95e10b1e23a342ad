"""The exchange of partial sums of a step: each rank adds its slice of the elements in the tree's order, and all get the
result.

Tensors are laid out in flat buckets (:mod:`lockstep.buckets`): the gradients, in the order in which backward gives
them, and the buffers that are averaged. Of a bucket a rank has one flat part for each of its partial sums; how these
travel is in :mod:`lockstep.shares.transport`. Buckets are sent in their order. Some may be sent while backward runs;
with the last one a row of bytes from each rank travels, its report.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from lockstep.buckets import Bucket, TensorSpec, plan_buckets
from lockstep.distributed.collectives import Collectives
from lockstep.shares.spare import SpareMemory
from lockstep.shares.transport import AllToAllTransport, Layout, SharedMemoryTransport, Terms, Transport

CAP_BYTES = 25 * 1024 * 1024
_ALIGNMENT = 16
"""Bytes of the largest element: rows are padded to a multiple, so that what follows can be seen in any dtype."""


class ExchangePlan:
    """Which tensors travel together in steps of ``shares`` shares: like ``gradients``, and behind them ``buffers``."""

    def __init__(
        self, gradients: Sequence[TensorSpec], buffers: Sequence[TensorSpec], shares: int, collectives: Collectives
    ) -> None:
        self.gradients = len(gradients)
        self.layout = Layout(shares, collectives.world)
        buckets = plan_buckets([*gradients, *buffers], CAP_BYTES).buckets
        self.buckets = buckets or (Bucket(torch.uint8, collectives.device, 0, ()),)  # for the row
        """In the order in which they are sent."""
        self.leave_early = 0
        """How many buckets may be sent while backward runs: they have gradients only, and there are others behind
        them. Where ranks share memory it is none: processors that add have no time for backward, and it would take more
        memory."""
        for bucket in self.buckets[:-1]:
            of_gradients = all(slot.index < self.gradients for slot in bucket.slots)
            if not of_gradients or collectives.can_add_in_order(bucket.device):
                break
            self.leave_early += 1


class Exchange:
    """Puts together the partial sums that all ranks have in one step. ``spare`` takes the memory of those sent."""

    def __init__(self, plan: ExchangePlan, collectives: Collectives, spare: SpareMemory) -> None:
        self.plan = plan
        self._collectives, self._spare = collectives, spare
        self._transports: list[Transport] = []
        self._sums: Sequence[Terms] = ()

    @property
    def sent(self) -> int:
        """How many buckets have been sent."""
        return len(self._transports)

    @torch.no_grad()
    def send_next(self, sums: Sequence[Terms]) -> None:
        """Begin with the next bucket, while backward runs. ``sums`` are this rank's partial sums, in the order of
        shares; they stay as they are, since the bucket may have to be sent again."""
        self._settle()
        self._transports.append(self._start(self.sent, sums, None, wait_follows=False))

    @torch.no_grad()
    def send_rest(self, sums: Sequence[Terms], row: Tensor, *, wait_follows: bool) -> None:
        """Begin with all buckets that have not been sent, and send a row of bytes, as long on every rank. ``sums`` is
        used up; it is empty if the step has failed: then anything is sent."""
        self._sums = sums
        padded = torch.nn.functional.pad(row, (0, -len(row) % _ALIGNMENT))
        for number in range(self.sent, len(self.plan.buckets)):
            self._settle()
            is_last = number + 1 == len(self.plan.buckets)
            transport = self._start(
                number, sums, padded if is_last else None, wait_follows=wait_follows and is_last, drops=True
            )
            self._transports.append(transport)

    def rows(self) -> Tensor:
        """The rows of all ranks, in their order, when they are there."""
        self._transports[-1].wait()
        return self._transports[-1].rows

    @torch.no_grad()
    def send_again(self, numbers: Collection[int]) -> None:
        """Begin anew with buckets of whose tensors some rank has got more since they were sent."""
        for number in numbers:
            self._settle()
            self._transports[number].wait()
            self._transports[number] = self._start(number, self._sums, None, wait_follows=False, drops=True)

    @torch.no_grad()
    def receive(self) -> Iterator[tuple[int, Tensor]]:
        """The sums over all shares, each with the number of its tensor; they are the caller's."""
        for number in range(self.plan.leave_early):
            self._drop(number, self._sums)
        for bucket, transport in zip(self.plan.buckets, self._transports, strict=True):
            transport.wait()
            self._spare.make_room(bucket.nbytes)
            transport.gather()
        for bucket in self.plan.buckets:
            flat = self._transports.pop(0).result()
            yield from zip((slot.index for slot in bucket.slots), bucket.views(flat), strict=True)

    def _settle(self) -> None:
        """Wait for the bucket that was sent last, if it holds more memory meanwhile: there are never two such."""
        if self._transports:
            self._transports[-1].settle()

    def _start(
        self, number: int, sums: Sequence[Terms], row: Tensor | None, *, wait_follows: bool, drops: bool = False
    ) -> Transport:
        bucket, collectives, layout = self.plan.buckets[number], self._collectives, self.plan.layout
        is_shared = collectives.can_add_in_order(bucket.device)
        kind = SharedMemoryTransport if is_shared else AllToAllTransport
        self._spare.make_room(bucket.nbytes)
        transport: Transport = kind(bucket, layout, collectives, 0 if row is None else len(row))
        transport.fill(sums)
        if drops:
            self._drop(number, sums)
        self._spare.make_room(bucket.nbytes)
        transport.send(row, wait_follows=wait_follows)
        return transport

    def _drop(self, number: int, sums: Sequence[Terms]) -> None:
        """Let go of the partial sums of a bucket."""
        for slot in self.plan.buckets[number].slots:
            for term in (term for terms in sums for term in terms):
                self._spare.keep([term[slot.index]])
                term[slot.index] = None
