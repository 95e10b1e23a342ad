"""The collectives among the ranks of one host, on plain tensors of one dimension without gaps.

Three ways, by size and by where the tensors are:

- *at once*, up to ``AT_ONCE_BYTES``: everybody puts all of it on the table and reads everybody's; one exchange.
- *in place*, where the tensors of all ranks lie in memory from ``group.allocate``: every rank reduces its own share of
  the elements, in blocks that stay in the cache, and writes it to everybody; two exchanges and no copy.
- *in pieces*, else: tensors go over the table piece by piece; one exchange a piece.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lockstep.shm.arithmetic import Reduction
from lockstep.shm.descriptor import Descriptor, Kind, Op, factor_of
from lockstep.shm.table import PIECE_BYTES, Table, share

AT_ONCE_BYTES = 128 * 1024
BLOCK_BYTES = 256 * 1024
"""What is reduced at a time: it is still in the cache when it is written to the others."""


class OneHost:
    """Runs collectives over a :class:`~lockstep.shm.table.Table`; every rank calls the same ones."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.own, self.size = table.own, table.size

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.agree(Descriptor(Kind.BARRIER))

    def agree(self, descriptor: Descriptor) -> None:
        """Return when every rank is about to run the same; raises the same error on each if they are not."""
        self.table.agree(descriptor)

    def look(self) -> None:
        """Raise if a rank has died, or the group has ended."""
        self.table.peers.check_alive()

    # -------------------------------------------------------------------------------- all ranks

    def all_reduce(self, x: Tensor, op: Op, tensors: int = 1, factor: float = 1.0) -> None:
        """Put the tensors of all ranks, each times its rank's ``factor``, together, in place."""
        descriptor = Descriptor(Kind.ALL_REDUCE, x.dtype, x.numel(), op, tensors=tensors)
        self._reduce(x, descriptor, range(self.size), factor)

    def reduce(self, x: Tensor, op: Op, root: int) -> None:
        """The same, for one rank; the tensors of the others stay as they are."""
        descriptor = Descriptor(Kind.REDUCE, x.dtype, x.numel(), op, self.table.peers.ranks[root])
        self._reduce(x, descriptor, [root], 1.0)

    def _reduce(self, x: Tensor, descriptor: Descriptor, receivers: Sequence[int], factor: float) -> None:
        table, receives, n = self.table, self.own in receivers, x.numel()
        if self.size == 1:
            table.agree(descriptor)
            Reduction(descriptor.op, x.dtype)  # raises what any number of ranks would
            scale(x, factor)
        elif x.nbytes <= AT_ONCE_BYTES:
            copy_scaled(table.own_place(x.dtype)[:n], x, factor)
            turn, _ = table.agree(descriptor)
            reduction = Reduction(descriptor.op, x.dtype)
            if receives and n:
                reduction([table.place(rank, turn, x.dtype)[:n] for rank in range(self.size)], x)
        else:
            _, messages = table.agree(descriptor, x, factor)
            reduction = Reduction(descriptor.op, x.dtype)
            shared = table.shared(messages, x)
            if shared is not None:
                self._reduce_in_place(shared, reduction, receivers, [factor_of(message) for message in messages])
            elif self.size == 2:
                self._reduce_whole_pieces(x, reduction, receives, factor)
            else:
                self._reduce_in_pieces(x, reduction, receives, factor)

    def _reduce_in_place(
        self, tensors: Sequence[Tensor], reduction: Reduction, receivers: Sequence[int], factors: Sequence[float]
    ) -> None:
        first, like = receivers[0], tensors[0]
        for begin, end in blocks(*self._share(self.own, 0, like.numel(), like), like.itemsize):
            self.table.peers.check_alive()  # a rank that is late must not write to one that has given up
            parts = [tensor[begin:end] for tensor in tensors]
            for part, factor in zip(parts, factors, strict=True):
                scale(part, factor)
            reduction(parts, parts[first])
            for receiver in receivers[1:]:
                parts[receiver].copy_(parts[first])
        self.table.step()

    def _reduce_whole_pieces(self, x: Tensor, reduction: Reduction, receives: bool, factor: float) -> None:
        """Both of two ranks reduce all of each piece: less is copied than if each reduced its half."""
        table, dtype = self.table, x.dtype
        ranges = list(pieces(x.numel(), PIECE_BYTES // x.itemsize))

        def put(piece: int) -> None:
            begin, end = ranges[piece]
            copy_scaled(table.own_place(dtype)[: end - begin], x[begin:end], factor)

        def use(piece: int, turn: int) -> None:
            begin, end = ranges[piece]
            if receives:
                reduction([table.place(rank, turn, dtype)[: end - begin] for rank in range(2)], x[begin:end])

        table.in_pieces(len(ranges), put, use)

    def _reduce_in_pieces(self, x: Tensor, reduction: Reduction, receives: bool, factor: float) -> None:
        table, dtype = self.table, x.dtype
        ranges = list(pieces(x.numel(), PIECE_BYTES // x.itemsize))

        def shares(piece: int) -> list[tuple[int, int]]:
            begin, end = ranges[piece]
            return [self._share(rank, begin, end, x) for rank in range(self.size)]

        def put(piece: int) -> None:
            begin, end = ranges[piece]
            mine, to = shares(piece)[self.own], table.own_place(dtype)
            for a, b in ((begin, mine[0]), (mine[1], end)):
                if b > a:
                    copy_scaled(to[a - begin : b - begin], x[a:b], factor)

        def use(piece: int, turn: int) -> None:
            begin = ranges[piece][0]
            a, b = shares(piece)[self.own]
            if b > a:
                scale(x[a:b], factor)
                sources = [
                    x[a:b] if rank == self.own else table.place(rank, turn, dtype)[a - begin : b - begin]
                    for rank in range(self.size)
                ]
                result = table.result(self.own, turn, dtype)[: b - a]
                reduction(sources, result)
                if receives:
                    x[a:b].copy_(result)

        def take(piece: int, turn: int) -> None:
            for rank, (a, b) in enumerate(shares(piece)):
                if receives and rank != self.own and b > a:
                    x[a:b].copy_(table.result(rank, turn, dtype)[: b - a])

        table.in_pieces(len(ranges), put, use, take)

    def _share(self, rank: int, begin: int, end: int, like: Tensor) -> tuple[int, int]:
        each = share(end - begin, self.size, like.itemsize)
        return min(end, begin + rank * each), min(end, begin + (rank + 1) * each)

    # -------------------------------------------------------------------------------- broadcast

    def broadcast(self, x: Tensor, root: int, tensors: int = 1) -> None:
        """Give every rank the values of ``root``, in place."""
        table, n, dtype = self.table, x.numel(), x.dtype
        descriptor = Descriptor(Kind.BROADCAST, dtype, n, root=table.peers.ranks[root], tensors=tensors)
        sends = self.own == root
        if x.nbytes <= AT_ONCE_BYTES:
            if sends:
                table.own_place(dtype)[:n].copy_(x)
            turn, _ = table.agree(descriptor)
            if not sends:
                x.copy_(table.place(root, turn, dtype)[:n])
            return
        _, messages = table.agree(descriptor, x if sends else None)
        shared = table.shared_by(root, messages[root], x)
        if shared is not None:
            copy(x, shared)
            table.step()
            return
        ranges = list(pieces(n, PIECE_BYTES // x.itemsize))

        def put(piece: int) -> None:
            begin, end = ranges[piece]
            if sends:
                table.own_place(dtype)[: end - begin].copy_(x[begin:end])

        def use(piece: int, turn: int) -> None:
            begin, end = ranges[piece]
            if not sends:
                x[begin:end].copy_(table.place(root, turn, dtype)[: end - begin])

        table.in_pieces(len(ranges), put, use)

    # ----------------------------------------------------------------------------------- gather

    def all_gather(self, outputs: Sequence[Tensor], x: Tensor, tensors: int = 1) -> None:
        """Give every rank the tensors of all, in rank order."""
        table, n, dtype = self.table, x.numel(), x.dtype
        descriptor = Descriptor(Kind.ALL_GATHER, dtype, n, tensors=tensors)
        others = [rank for rank in range(self.size) if rank != self.own]
        if x.nbytes <= AT_ONCE_BYTES:
            table.own_place(dtype)[:n].copy_(x)
            turn, _ = table.agree(descriptor)
            for rank in others:
                outputs[rank].copy_(table.place(rank, turn, dtype)[:n])
            copy(outputs[self.own], x)
            return
        _, messages = table.agree(descriptor, x)
        shared = table.shared(messages, x)
        copy(outputs[self.own], x)
        if shared is not None:
            for rank in others:
                outputs[rank].copy_(shared[rank])
            table.step()
            return
        ranges = list(pieces(n, PIECE_BYTES // x.itemsize))

        def put(piece: int) -> None:
            begin, end = ranges[piece]
            table.own_place(dtype)[: end - begin].copy_(x[begin:end])

        def use(piece: int, turn: int) -> None:
            begin, end = ranges[piece]
            for rank in others:
                outputs[rank][begin:end].copy_(table.place(rank, turn, dtype)[: end - begin])

        table.in_pieces(len(ranges), put, use)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Op, tensors: int = 1) -> None:
        """Put the tensors that all ranks have for a rank together, for every rank; one for each is in ``inputs``."""
        table, n, dtype = self.table, output.numel(), output.dtype
        table.agree(Descriptor(Kind.REDUCE_SCATTER, dtype, n, op, tensors=tensors))
        reduction = Reduction(op, dtype)
        if self.size == 1:
            copy(output, inputs[0])
            return
        room = PIECE_BYTES // output.itemsize // self.size
        ranges = list(pieces(n, room))

        def put(piece: int) -> None:
            begin, end = ranges[piece]
            to = table.own_place(dtype)
            for rank, given in enumerate(inputs):
                if rank != self.own:
                    to[rank * room :][: end - begin].copy_(given[begin:end])

        def use(piece: int, turn: int) -> None:
            begin, end = ranges[piece]
            mine = slice(self.own * room, self.own * room + end - begin)
            sources = [
                inputs[rank][begin:end] if rank == self.own else table.place(rank, turn, dtype)[mine]
                for rank in range(self.size)
            ]
            reduction(sources, output[begin:end])

        table.in_pieces(len(ranges), put, use)


def copy(to: Tensor, source: Tensor) -> None:
    """Copy, unless both are the same memory."""
    if to.data_ptr() != source.data_ptr():
        to.copy_(source)


def scale(x: Tensor, factor: float) -> None:
    """Multiply in place."""
    if factor != 1:
        x.mul_(factor)


def copy_scaled(to: Tensor, source: Tensor, factor: float) -> None:
    """Copy, times a factor."""
    if factor != 1:
        torch.mul(source, factor, out=to)
    else:
        to.copy_(source)


def pieces(numel: int, largest: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most ``largest`` elements, one after the other."""
    for begin in range(0, numel, largest):
        yield begin, min(numel, begin + largest)


def blocks(begin: int, end: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """The ranges of a share that are reduced at a time."""
    for a, b in pieces(end - begin, BLOCK_BYTES // itemsize):
        yield begin + a, begin + b
