"""Collectives among the ranks of one host.

There are three ways, chosen by size and by where the tensors lie:

- *in one exchange*, up to ``ONE_EXCHANGE_BYTES``: every rank puts all of its tensor in its staging buffer, and reads
  the buffers of all after the exchange that compares descriptors.
- *in place*, if the tensors of all ranks lie in memory from ``group.allocate``: every rank reduces its own shard of
  the elements, in blocks that stay in the cache, and writes it to all tensors; two exchanges and no copy.
- *in chunks*, otherwise: tensors go through the staging buffers chunk by chunk, with one exchange per chunk.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lockstep._base.abilities import Addition, Chunks, PlaceOfPart
from lockstep.errors import LayoutError
from lockstep.shm.arithmetic import TensorReduction, reduction_of
from lockstep.shm.messages import CollectiveKind, Descriptor, Op, factor_of
from lockstep.shm.staging import CHUNK_BYTES, Staging, shard_numel

ONE_EXCHANGE_BYTES = 128 * 1024
BLOCK_BYTES = 256 * 1024
"""Number of bytes reduced at a time: a block is still in the cache when it is copied to the others."""


class OneHost:
    """Runs collectives on contiguous tensors of one dimension; every rank calls the same ones.

    Each exchange may take ``timeout`` seconds. Ranks are ranks of the group, and ``tensors`` is the number of the
    program's tensors that are flattened into the given one.
    """

    def __init__(self, staging: Staging, timeout: float) -> None:
        self.staging = staging
        self.timeout = timeout
        self.rank = staging.local_rank
        self.size = staging.size

    def barrier(self) -> None:
        """Return when every rank has come."""
        self.agree(Descriptor(CollectiveKind.BARRIER))

    def agree(self, descriptor: Descriptor) -> None:
        """Return when every rank is about to run the same collective; else raise the same error on each."""
        self.staging.agree(descriptor, self.timeout)

    def check_alive(self) -> None:
        """Raise if a rank has died, or the group has ended."""
        self.staging.peers.check_alive()

    # -------------------------------------------------------------------------------- all ranks

    def all_reduce(
        self, x: Tensor, op: Op, tensors: int = 1, factor: float = 1.0, rounded_to: torch.dtype | None = None
    ) -> None:
        """Reduce the tensors of all ranks in place, each multiplied by its rank's ``factor``.

        ``rounded_to``: the dtype to which each rank's values are rounded where they are read, and the result.
        """
        descriptor = Descriptor(
            CollectiveKind.ALL_REDUCE, x.dtype, x.numel(), op, tensors=tensors, rounded_to=rounded_to
        )
        self._reduce(x, descriptor, range(self.size), factor)

    def reduce(self, x: Tensor, op: Op, root: int) -> None:
        """Reduce the tensors of all ranks into the tensor of ``root``; the tensors of other ranks stay as they are."""
        descriptor = Descriptor(CollectiveKind.REDUCE, x.dtype, x.numel(), op, self.staging.peers.global_ranks[root])
        self._reduce(x, descriptor, [root], 1.0)

    def _reduce(self, x: Tensor, descriptor: Descriptor, receivers: Sequence[int], factor: float) -> None:
        staging, receives, n = self.staging, self.rank in receivers, x.numel()
        if self.size == 1:
            staging.agree(descriptor, self.timeout)
            # A program finds out with one rank what cannot be reduced: this raises as it would on more.
            reduction = reduction_of(descriptor.op, x.dtype, descriptor.rounded_to)
            scale(x, factor)
            if descriptor.rounded_to is not None:
                reduction([x], x)
        elif x.nbytes <= ONE_EXCHANGE_BYTES:
            # Small tensors: write first and agree afterwards, so that one exchange does both.
            copy_scaled(staging.own_data(x.dtype)[:n], x, factor)
            half, _ = staging.agree(descriptor, self.timeout)
            reduction = reduction_of(descriptor.op, x.dtype, descriptor.rounded_to)
            if receives and n:
                reduction([staging.data(rank, half, x.dtype)[:n] for rank in range(self.size)], x)
        else:
            _, messages = staging.agree(descriptor, self.timeout, x, factor)
            reduction = reduction_of(descriptor.op, x.dtype, descriptor.rounded_to)
            allocated = staging.allocated_tensors(messages, x)
            if allocated is not None:  # every rank's tensor is in shared memory: nothing is copied in or out
                self._reduce_in_place(allocated, reduction, receivers, [factor_of(message) for message in messages])
            elif self.size == 2:
                self._reduce_whole_chunks(x, reduction, receives, factor)
            else:
                self._reduce_in_chunks(x, reduction, receives, factor)

    def _reduce_in_place(
        self, tensors: Sequence[Tensor], reduction: TensorReduction, receivers: Sequence[int], factors: Sequence[float]
    ) -> None:
        first, like = receivers[0], tensors[0]
        for begin, end in blocks(*self._shard(self.rank, 0, like.numel(), like), like.itemsize):
            # A late rank must not write to the tensor of a rank that has given up
            # (test_a_late_rank_writes_no_further_to_one_that_has_given_up).
            self.staging.peers.check_alive()
            parts = [tensor[begin:end] for tensor in tensors]
            for part, factor in zip(parts, factors, strict=True):
                scale(part, factor)
            reduction(parts, parts[first])
            for receiver in receivers[1:]:
                parts[receiver].copy_(parts[first])
        self.staging.step(self.timeout)

    def _reduce_whole_chunks(self, x: Tensor, reduction: TensorReduction, receives: bool, factor: float) -> None:
        """Let both of two ranks reduce each whole chunk: that copies less than if each reduced a half."""
        staging, dtype = self.staging, x.dtype
        ranges = list(chunks(x.numel(), CHUNK_BYTES // x.itemsize))

        def put(chunk: int) -> None:
            begin, end = ranges[chunk]
            copy_scaled(staging.own_data(dtype)[: end - begin], x[begin:end], factor)

        def use(chunk: int, half: int) -> None:
            begin, end = ranges[chunk]
            if receives:
                reduction([staging.data(rank, half, dtype)[: end - begin] for rank in range(2)], x[begin:end])

        staging.move_chunks(len(ranges), self.timeout, put, use)

    def _reduce_in_chunks(self, x: Tensor, reduction: TensorReduction, receives: bool, factor: float) -> None:
        """Let each rank reduce its shard of each chunk, and give the others the result."""
        staging, dtype = self.staging, x.dtype
        ranges = list(chunks(x.numel(), CHUNK_BYTES // x.itemsize))

        def shards(chunk: int) -> list[tuple[int, int]]:
            begin, end = ranges[chunk]
            return [self._shard(rank, begin, end, x) for rank in range(self.size)]

        def put(chunk: int) -> None:
            begin, end = ranges[chunk]
            mine, to = shards(chunk)[self.rank], staging.own_data(dtype)
            for a, b in ((begin, mine[0]), (mine[1], end)):
                if b > a:
                    copy_scaled(to[a - begin : b - begin], x[a:b], factor)

        def use(chunk: int, half: int) -> None:
            begin = ranges[chunk][0]
            a, b = shards(chunk)[self.rank]
            if b > a:
                scale(x[a:b], factor)
                sources = [
                    x[a:b] if rank == self.rank else staging.data(rank, half, dtype)[a - begin : b - begin]
                    for rank in range(self.size)
                ]
                result = staging.result(self.rank, half, dtype)[: b - a]
                reduction(sources, result)
                if receives:
                    x[a:b].copy_(result)

        def take(chunk: int, half: int) -> None:
            for rank, (a, b) in enumerate(shards(chunk)):
                if receives and rank != self.rank and b > a:
                    x[a:b].copy_(staging.result(rank, half, dtype)[: b - a])

        staging.move_chunks(len(ranges), self.timeout, put, use, take)

    def _shard(self, rank: int, begin: int, end: int, like: Tensor) -> tuple[int, int]:
        shard = shard_numel(end - begin, self.size, like.itemsize)
        return min(end, begin + rank * shard), min(end, begin + (rank + 1) * shard)

    # -------------------------------------------------------------------------------- broadcast

    def broadcast(self, x: Tensor, root: int) -> None:
        """Give every rank the values of ``root``, in place."""
        staging, n, dtype = self.staging, x.numel(), x.dtype
        descriptor = Descriptor(CollectiveKind.BROADCAST, dtype, n, root=staging.peers.global_ranks[root])
        sends = self.rank == root
        if x.nbytes <= ONE_EXCHANGE_BYTES:
            if sends:
                staging.own_data(dtype)[:n].copy_(x)
            half, _ = staging.agree(descriptor, self.timeout)
            if not sends:
                x.copy_(staging.data(root, half, dtype)[:n])
            return
        _, messages = staging.agree(descriptor, self.timeout, x if sends else None)
        allocated = staging.allocated_tensor(root, messages[root], x)
        if allocated is not None:
            copy(x, allocated)
            staging.step(self.timeout)
            return
        ranges = list(chunks(n, CHUNK_BYTES // x.itemsize))

        def put(chunk: int) -> None:
            begin, end = ranges[chunk]
            if sends:
                staging.own_data(dtype)[: end - begin].copy_(x[begin:end])

        def use(chunk: int, half: int) -> None:
            begin, end = ranges[chunk]
            if not sends:
                x[begin:end].copy_(staging.data(root, half, dtype)[: end - begin])

        staging.move_chunks(len(ranges), self.timeout, put, use)

    # ------------------------------------------------------------------------------ partial sums

    def add_in_order(self, x: Tensor, numel: int, additions: Sequence[Addition], gathered: int = 0) -> None:
        """Add parts of ``numel`` elements, with which the tensor of each rank begins, in the given order, and write the
        result to the beginning of every rank's tensor.

        The end of the tensor has ``gathered`` elements for each rank; each rank's own are copied to all ranks. ``x`` is
        from ``group.allocate``. Each rank adds its shard of the elements.
        """
        descriptor = Descriptor(CollectiveKind.ADD_IN_ORDER, x.dtype, x.numel(), tensors=len(additions))
        _, messages = self.staging.agree(descriptor, self.timeout, x)
        tensors = self.staging.allocated_tensors(messages, x)
        if tensors is None:
            raise LayoutError("add_in_order: expected tensors in memory from group.allocate on every rank")
        first = additions[-1].into if additions else PlaceOfPart(0, 0)
        for begin, end in blocks(*self._shard(self.rank, 0, numel, x), x.itemsize):
            self.staging.peers.check_alive()  # as in _reduce_in_place
            for into, place in additions:
                _block(tensors, into, numel, begin, end).add_(_block(tensors, place, numel, begin, end))
            result = _block(tensors, first, numel, begin, end)
            for tensor in tensors:
                copy(tensor[begin:end], result)
        if gathered:
            self.staging.peers.check_alive()
            begin = x.numel() - (self.size - self.rank) * gathered
            for tensor in tensors:
                copy(tensor[begin : begin + gathered], x[begin : begin + gathered])
        self.staging.step(self.timeout)

    # ----------------------------------------------------------------------------------- gather

    def all_gather(self, outputs: Sequence[Tensor], x: Tensor, tensors: int = 1) -> None:
        """Give every rank the tensors of all ranks, in rank order."""
        staging, n, dtype = self.staging, x.numel(), x.dtype
        descriptor = Descriptor(CollectiveKind.ALL_GATHER, dtype, n, tensors=tensors)
        others = [rank for rank in range(self.size) if rank != self.rank]
        if x.nbytes <= ONE_EXCHANGE_BYTES:
            staging.own_data(dtype)[:n].copy_(x)
            half, _ = staging.agree(descriptor, self.timeout)
            for rank in others:
                outputs[rank].copy_(staging.data(rank, half, dtype)[:n])
            copy(outputs[self.rank], x)
            return
        _, messages = staging.agree(descriptor, self.timeout, x)
        allocated = staging.allocated_tensors(messages, x)
        copy(outputs[self.rank], x)
        if allocated is not None:
            for rank in others:
                outputs[rank].copy_(allocated[rank])
            staging.step(self.timeout)
            return
        ranges = list(chunks(n, CHUNK_BYTES // x.itemsize))

        def put(chunk: int) -> None:
            begin, end = ranges[chunk]
            staging.own_data(dtype)[: end - begin].copy_(x[begin:end])

        def use(chunk: int, half: int) -> None:
            begin, end = ranges[chunk]
            for rank in others:
                outputs[rank][begin:end].copy_(staging.data(rank, half, dtype)[: end - begin])

        staging.move_chunks(len(ranges), self.timeout, put, use)

    def gather_in_chunks(self, chunks: Chunks) -> None:
        """Let each rank put its chunks in shared memory, and all take those of all ranks from there."""
        staging, dtype, nbytes = self.staging, torch.uint8, chunks.nbytes
        staging.agree(
            Descriptor(CollectiveKind.ALL_GATHER, dtype, chunks.count * nbytes, tensors=chunks.count), self.timeout
        )

        def put(number: int) -> None:
            chunks.put(number, staging.own_data(dtype)[:nbytes])

        def use(number: int, half: int) -> None:
            chunks.take(number, [staging.data(rank, half, dtype)[:nbytes] for rank in range(self.size)])

        staging.move_chunks(chunks.count, self.timeout, put, use)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Op, tensors: int = 1) -> None:
        """Reduce ``inputs``, one tensor for each rank, over all ranks; each rank gets the result for itself."""
        staging, n, dtype = self.staging, output.numel(), output.dtype
        staging.agree(Descriptor(CollectiveKind.REDUCE_SCATTER, dtype, n, op, tensors=tensors), self.timeout)
        reduction = reduction_of(op, dtype)
        if self.size == 1:
            copy(output, inputs[0])
            return
        piece = CHUNK_BYTES // output.itemsize // self.size
        ranges = list(chunks(n, piece))

        def put(chunk: int) -> None:
            begin, end = ranges[chunk]
            to = staging.own_data(dtype)
            for rank, given in enumerate(inputs):
                if rank != self.rank:
                    to[rank * piece :][: end - begin].copy_(given[begin:end])

        def use(chunk: int, half: int) -> None:
            begin, end = ranges[chunk]
            mine = slice(self.rank * piece, self.rank * piece + end - begin)
            sources = [
                inputs[rank][begin:end] if rank == self.rank else staging.data(rank, half, dtype)[mine]
                for rank in range(self.size)
            ]
            reduction(sources, output[begin:end])

        staging.move_chunks(len(ranges), self.timeout, put, use)


def _block(tensors: Sequence[Tensor], place: PlaceOfPart, numel: int, begin: int, end: int) -> Tensor:
    start = place.part * numel
    return tensors[place.rank][start + begin : start + end]


def copy(to: Tensor, source: Tensor) -> None:
    """Copy a tensor, unless both are in the same memory."""
    if to.data_ptr() != source.data_ptr():
        to.copy_(source)


def scale(x: Tensor, factor: float) -> None:
    """Multiply a tensor in place, unless the factor is 1."""
    if factor != 1:
        x.mul_(factor)


def copy_scaled(to: Tensor, source: Tensor, factor: float) -> None:
    """Copy a tensor multiplied by a factor."""
    if factor != 1:
        torch.mul(source, factor, out=to)
    else:
        to.copy_(source)


def chunks(numel: int, largest: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges of at most ``largest`` elements."""
    for begin in range(0, numel, largest):
        yield begin, min(numel, begin + largest)


def blocks(begin: int, end: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a shard that are reduced one at a time."""
    for a, b in chunks(end - begin, BLOCK_BYTES // itemsize):
        yield begin + a, begin + b
