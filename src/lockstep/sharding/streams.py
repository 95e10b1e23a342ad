"""Moves pieces of tensors between ranks: each rank sends its pieces end to end, and every rank copies what it needs.

Chunks of all ranks' streams are gathered at once. Ranks that share memory copy them to their places from there, so each
element is copied twice: by the rank that has it, and by each that needs it. Otherwise one all-gather moves a chunk of
each rank, and the next one is under way while the chunks of the last one are copied to their places, so memory is
bounded by two chunks of every rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.distributed.comm.agreement import all_gather_object
from lockstep.distributed.comm.collectives import Collectives, Pending

CHUNK_BYTES = 2 * 1024 * 1024
"""Number of bytes that each rank sends at a time, at most."""
GATHERED_BYTES = 8 * CHUNK_BYTES
"""Number of bytes that all ranks together send at a time, at most."""
HEAD_BYTES = 8
"""Number of bytes in front of each rank's stream; the first one is a mark."""


class Moves:
    """The copies between places in tensors and one stream, chunk by chunk."""

    def __init__(self, places: Sequence[Tensor], chunk: int) -> None:
        """``places`` are flat tensors of bytes, which follow each other in the stream, behind its head."""
        self._chunks: dict[int, tuple[int, list[Tensor]]] = {}
        """Parts of the places, by the number of their chunk, with the byte of it where the first one begins."""
        offset = HEAD_BYTES
        for place in places:
            begin = 0
            while begin < place.numel():
                number, within = divmod(offset + begin, chunk)
                end = min(place.numel(), begin + chunk - within)
                self._chunks.setdefault(number, (within, []))[1].append(place[begin:end])
                begin = end
            offset += place.numel()

    def copy_in(self, number: int, buffer: Tensor) -> None:
        """Copy from the places into the buffer of a chunk."""
        tensors, views = self._of_chunk(number, buffer)
        if tensors:
            torch._foreach_copy_(views, tensors)

    def copy_out(self, number: int, buffer: Tensor) -> None:
        """Copy from the buffer of a chunk to the places."""
        tensors, views = self._of_chunk(number, buffer)
        if tensors:
            torch._foreach_copy_(tensors, views)

    def _of_chunk(self, number: int, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parts of the places in a chunk, and the parts of its buffer that belong to them."""
        begin, tensors = self._chunks.get(number, (0, []))
        sizes = [tensor.numel() for tensor in tensors]
        return tensors, list(buffer[begin : begin + sum(sizes)].split_with_sizes(sizes))


class Streams:
    """A stream of each rank, gathered by all."""

    def __init__(self, lengths: Sequence[int], collectives: Collectives, device: torch.device) -> None:
        """``lengths`` are the numbers of bytes of each rank's stream, without its head."""
        self._collectives = collectives
        self._device = device
        self.chunk = chunk_bytes(HEAD_BYTES + max(lengths), collectives.world)
        """Number of bytes of a chunk."""
        self.count = -(-(HEAD_BYTES + max(lengths)) // self.chunk)
        """Number of chunks."""
        self._gathers_in_chunks = device.type == "cpu" and collectives.shares_memory
        # Memory that is freed in each step goes back to the system, with some of the next forward's.
        keeps = device.type == "cpu" and not self._gathers_in_chunks
        self._kept = self._make_buffers() if keeps else []

    def _make_buffers(self) -> list[Tensor]:
        size = self.chunk * self._collectives.world
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(min(2, self.count))]

    def moves(self, places: Sequence[Tensor]) -> Moves:
        """Return the copies between a stream and flat tensors of bytes."""
        return Moves(places, self.chunk)

    def gather(self, own: Moves, targets: Sequence[Moves | None], what: str, mark: int = 0) -> list[int]:
        """Send this rank's stream, copy the streams of all ranks to ``targets``, by rank, and return every rank's mark.

        If any mark is not zero, nothing is copied. Communicates one all-gather for each chunk, or one for all where
        ranks share memory. On accelerators marks take a small all-gather of their own, before anything else: to read
        one from a chunk, the host would wait for the device.
        """
        chunks = _Chunks(self, own, targets, mark)
        if self._device.type != "cpu":
            chunks.marks = all_gather_object(mark, f"marks of {what}", self._collectives)
            if any(chunks.marks):
                return chunks.marks
        if self._gathers_in_chunks:
            self._collectives.gather_in_chunks(chunks, what).wait()
        else:
            self._gather_one_by_one(chunks, what)
        return chunks.marks

    def _gather_one_by_one(self, chunks: "_Chunks", what: str) -> None:
        """Copy a chunk while the next one is under way; but nothing before all marks are known."""
        rank, both = self._collectives.rank, self._kept or self._make_buffers()
        buffers = [each.view(-1, self.chunk).unbind() for each in both]

        def begin(number: int) -> Pending:
            of_all, own = both[number % 2], buffers[number % 2][rank]
            return self._collectives.all_gather_flat(of_all, own, f"{what}, chunk {number + 1}")

        chunks.put(0, buffers[0][rank])
        pending = begin(0)
        for number in range(self.count):
            has_next = number + 1 < self.count
            if has_next:
                chunks.put(number + 1, buffers[(number + 1) % 2][rank])
            pending.wait()
            if number == 0 and chunks.is_refused(buffers[0]):
                return
            if has_next:
                pending = begin(number + 1)
            chunks.take(number, buffers[number % 2])


class _Chunks:
    """The chunks of one gather: see :class:`~lockstep._base.abilities.Chunks`."""

    def __init__(self, streams: Streams, own: Moves, targets: Sequence[Moves | None], mark: int) -> None:
        self.count = streams.count
        self.nbytes = streams.chunk
        self.marks: list[int] = []
        """The mark of each rank, once they are known: at the latest when the first chunks have come."""
        self._own = own
        self._targets = targets
        self._mark = mark

    def put(self, number: int, buffer: Tensor) -> None:
        """Copy this rank's chunk to a buffer, the first one with its mark."""
        if number == 0:
            buffer[:HEAD_BYTES] = self._mark
        self._own.copy_in(number, buffer)

    def is_refused(self, buffers: Sequence[Tensor]) -> bool:
        """Read the marks in the first chunks, unless they are known; return True if any is not zero."""
        self.marks = self.marks or torch.stack([buffer[0] for buffer in buffers]).tolist()
        return any(self.marks)

    def take(self, number: int, buffers: Sequence[Tensor]) -> None:
        """Copy the chunks of all ranks to their places, unless a mark is not zero."""
        if any(self.marks) or (number == 0 and self.is_refused(buffers)):
            return
        for target, buffer in zip(self._targets, buffers, strict=True):
            if target is not None:
                target.copy_out(number, buffer)


def chunk_bytes(longest: int, world: int) -> int:
    """Return the number of bytes of a chunk, for streams of which the longest has so many bytes.

    Example:
        >>> [chunk_bytes(each, world=2) for each in (100, 10**9)], chunk_bytes(10**9, world=64)
        ([128, 2097152], 262144)
    """
    return min(CHUNK_BYTES, _rounded(GATHERED_BYTES // world), _rounded(longest))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
