"""Moves pieces of tensors between ranks: each rank sends its pieces end to end, and every rank copies what it needs.

One all-gather moves a chunk of each rank's stream. The next all-gather is under way while the data of the last one are
copied to their places, so memory is bounded by two chunks of every rank.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lockstep.distributed.comm.collectives import Collectives, Pending

CHUNK_BYTES = 2 * 1024 * 1024
"""Number of bytes that each rank sends at a time."""
HEAD_BYTES = 8
"""Number of bytes in front of each rank's stream; the first one is a mark."""


class Moves:
    """The copies between places in tensors and one stream, chunk by chunk."""

    def __init__(self, places: Sequence[Tensor], chunk: int, offset: int = 0) -> None:
        """``places`` are flat tensors of bytes, which follow each other in the stream from byte ``offset`` on."""
        self.chunks: dict[int, tuple[list[Tensor], list[slice]]] = {}
        for place in places:
            for number, here, there in _parts(offset, place.numel(), chunk):
                tensors, slices = self.chunks.setdefault(number, ([], []))
                tensors.append(place[here])
                slices.append(there)
            offset += place.numel()

    def copy_in(self, number: int, buffer: Tensor) -> None:
        """Copy from the places into the buffer of a chunk."""
        tensors, slices = self.chunks.get(number, ([], []))
        if tensors:
            torch._foreach_copy_([buffer[each] for each in slices], tensors)

    def copy_out(self, number: int, buffer: Tensor) -> None:
        """Copy from the buffer of a chunk to the places."""
        tensors, slices = self.chunks.get(number, ([], []))
        if tensors:
            torch._foreach_copy_(tensors, [buffer[each] for each in slices])


def _parts(offset: int, nbytes: int, chunk: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield for each chunk that holds some of ``nbytes`` bytes from ``offset`` on its number, which of the bytes it
    holds, and where they are in it."""
    begin = 0
    while begin < nbytes:
        number, within = divmod(offset + begin, chunk)
        end = min(nbytes, begin + chunk - within)
        yield number, slice(begin, end), slice(within, within + end - begin)
        begin = end


class Streams:
    """A stream of each rank, gathered by all."""

    def __init__(self, lengths: Sequence[int], collectives: Collectives, device: torch.device) -> None:
        """``lengths`` are the numbers of bytes of each rank's stream, without its head."""
        self._collectives = collectives
        self._device = device
        self.chunk = min(CHUNK_BYTES, _rounded(HEAD_BYTES + max(lengths)))
        """Number of bytes of a chunk."""
        self.count = -(-(HEAD_BYTES + max(lengths)) // self.chunk)
        """Number of chunks."""

    def moves(self, places: Sequence[Tensor]) -> Moves:
        """Return the copies between a stream and flat tensors of bytes."""
        return Moves(places, self.chunk, HEAD_BYTES)

    def gather(self, own: Moves, targets: Sequence[Moves | None], what: str, mark: int = 0) -> list[int]:
        """Send this rank's stream, copy the streams of all ranks to ``targets``, by rank, and return every rank's mark.

        If any mark is not zero, nothing is copied. Communicates one all-gather for each chunk.
        """
        buffers = [self._buffers(), self._buffers() if self.count > 1 else None]
        pending: tuple[int, Pending] | None = None
        marks: list[int] = []
        for number in range(self.count + 1):
            begun = None
            if number < self.count and not any(marks):
                sent, received = buffers[number % 2] or self._buffers()
                if number == 0:
                    sent[:HEAD_BYTES] = mark
                own.copy_in(number, sent)
                begun = number, self._collectives.all_gather_flat(received, sent, f"{what}, chunk {number + 1}")
                if number == 0:
                    begun[1].wait()
                    marks = received[:: self.chunk].tolist()
            if pending is not None and not any(marks):
                self._take(*pending, targets, buffers)
            pending = begun
        return marks

    def _take(
        self,
        number: int,
        pending: Pending,
        targets: Sequence[Moves | None],
        buffers: Sequence[tuple[Tensor, Tensor] | None],
    ) -> None:
        if number:
            pending.wait()
        given = buffers[number % 2]
        assert given is not None
        for rank, target in enumerate(targets):
            if target is not None:
                target.copy_out(number, given[1][rank * self.chunk : (rank + 1) * self.chunk])

    def _buffers(self) -> tuple[Tensor, Tensor]:
        sent = self._collectives.empty(self.chunk, torch.uint8, self._device)
        return sent, torch.empty(self.chunk * self._collectives.world, dtype=torch.uint8, device=self._device)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
