"""Moves pieces of tensors between ranks: each rank sends its pieces end to end, and every rank copies what it needs.

Chunks of all ranks' streams are gathered at once. Ranks that share memory copy them to their places from there, so each
element is copied twice: by the rank that has it, and by each that needs it. Otherwise one all-gather moves a chunk of
each rank, and the next one is under way while the chunks of the last one are copied to their places, so memory is
bounded by two chunks of every rank.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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

    def parts(self, number: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the parts of the places in a chunk, each with the byte of the chunk where it begins."""
        begin, tensors = self._chunks.get(number, (0, []))
        for tensor in tensors:
            yield begin, tensor
            begin += tensor.numel()

    def _of_chunk(self, number: int, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parts of the places in a chunk, and the parts of its buffer that belong to them."""
        begin, tensors = self._chunks.get(number, (0, []))
        sizes = [tensor.numel() for tensor in tensors]
        return tensors, list(buffer[begin : begin + sum(sizes)].split_with_sizes(sizes))


class _Run(NamedTuple):
    """Parts of the same size, of ranks that follow each other, at equal distances in one memory: one copy."""

    first: int
    """The first of the ranks."""
    begin: int
    """The byte of each rank's chunk where its part begins."""
    parts: list[Tensor]

    def continues(self, rank: int, part: Tensor) -> bool:
        """Return True if ``part``, of that rank, is the next one of the run."""
        last = self.parts[-1]
        if (
            rank != self.first + len(self.parts)
            or part.untyped_storage().data_ptr() != last.untyped_storage().data_ptr()
        ):
            return False
        distance = part.data_ptr() - last.data_ptr()
        if len(self.parts) == 1:
            return distance >= last.numel()
        return distance == last.data_ptr() - self.parts[-2].data_ptr()

    def source(self) -> tuple[slice, slice]:
        """Return the ranks, and the bytes of their chunks."""
        return slice(self.first, self.first + len(self.parts)), slice(self.begin, self.begin + self.parts[0].numel())

    def place(self) -> Tensor:
        """Return all parts as one tensor, a row for each rank."""
        first = self.parts[0]
        distance = self.parts[1].data_ptr() - first.data_ptr() if len(self.parts) > 1 else first.numel()
        return first.as_strided((len(self.parts), first.numel()), (distance, 1))


class Targets:
    """The places to which the streams of all ranks are copied; None for a rank of which nothing is copied."""

    def __init__(self, moves: Sequence[Moves | None]) -> None:
        self.moves = moves
        self._runs: dict[int, tuple[list[Tensor], list[tuple[slice, slice]]]] = {}
        self._views: dict[int, list[Tensor]] = {}

    def copy_out(self, number: int, chunks: Tensor, is_kept: bool) -> None:
        """Copy from the chunks of that number: a row for each rank; ``is_kept``: they are in the same memory in each
        step."""
        if number not in self._runs:
            runs = self._find_runs(number)
            self._runs[number] = [run.place() for run in runs], [run.source() for run in runs]
        places, sources = self._runs[number]
        views = self._views.get(number) or [chunks[source] for source in sources]
        if is_kept:
            self._views[number] = views
        if places:
            torch._foreach_copy_(places, views)

    def _find_runs(self, number: int) -> list[_Run]:
        runs: list[_Run] = []
        last: dict[tuple[int, int], _Run] = {}
        for rank, moves in enumerate(self.moves):
            for begin, part in moves.parts(number) if moves is not None else ():
                run = last.get((begin, part.numel()))
                if run is not None and run.continues(rank, part):
                    run.parts.append(part)
                else:
                    runs.append(_Run(rank, begin, [part]))
                    last[begin, part.numel()] = runs[-1]
        return runs


class GatheredStreams:
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
        self.keeps = device.type == "cpu" and not self._gathers_in_chunks
        self._kept = self._make_buffers() if self.keeps else []

    def _make_buffers(self) -> list[Tensor]:
        size = self.chunk * self._collectives.world
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(min(2, self.count))]

    def moves(self, places: Sequence[Tensor]) -> Moves:
        """Return the copies between a stream and flat tensors of bytes."""
        return Moves(places, self.chunk)

    def gather(self, own: Moves, targets: Targets, what: str, mark: int = 0) -> bool:
        """Send this rank's stream, and copy the streams of all ranks to ``targets``.

        Returns True if any mark is not zero; then nothing is copied. Communicates one all-gather for each chunk, or one
        for all where ranks share memory. On accelerators the marks are compared by a small collective of their own,
        before anything else: to read one from a chunk, the host would wait for the device.
        """
        chunks = _GatheredChunks(self, own, targets, mark)
        if self._device.type != "cpu":
            chunks.refused = any(all_gather_object(mark, f"marks of {what}", self._collectives))
            if chunks.refused:
                return True
        if self._gathers_in_chunks:
            self._collectives.gather_in_chunks(chunks, what).wait()
        else:
            self._gather_one_by_one(chunks, what)
        return bool(chunks.refused)

    def _gather_one_by_one(self, chunks: "_GatheredChunks", what: str) -> None:
        """Copy a chunk while the next one is under way; but nothing before all marks are known."""
        rank, both = self._collectives.rank, self._kept or self._make_buffers()
        buffers = [each.view(-1, self.chunk) for each in both]

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
            # No weight may change before it is known that no rank has failed: the marks come with the first chunks.
            if number == 0 and chunks.is_refused(buffers[0][:, 0]):
                return
            if has_next:
                pending = begin(number + 1)
            chunks.take_all(number, buffers[number % 2])


class _GatheredChunks:
    """The chunks of one gather: see :class:`~lockstep._base.abilities.Chunks`."""

    def __init__(self, streams: GatheredStreams, own: Moves, targets: Targets, mark: int) -> None:
        self.count = streams.count
        self.nbytes = streams.chunk
        self.refused: bool | None = None
        """True if the mark of some rank is not zero; None until marks are known, when the first chunks have come."""
        self._own = own
        self._targets = targets
        self._is_kept = streams.keeps
        self._mark = mark

    def put(self, number: int, buffer: Tensor) -> None:
        """Copy this rank's chunk to a buffer, the first one with its mark."""
        if number == 0:
            buffer[:HEAD_BYTES] = self._mark
        self._own.copy_in(number, buffer)

    def is_refused(self, marks: Tensor) -> bool:
        """Read the marks of the first chunks, unless they are known; return True if any is not zero."""
        if self.refused is None:
            self.refused = bool(marks.any())
        return self.refused

    def take(self, number: int, buffers: Sequence[Tensor]) -> None:
        """Copy the chunks of all ranks to their places, unless a mark is not zero."""
        if self.refused or (number == 0 and self.is_refused(torch.stack([buffer[0] for buffer in buffers]))):
            return
        for target, buffer in zip(self._targets.moves, buffers, strict=True):
            if target is not None:
                target.copy_out(number, buffer)

    def take_all(self, number: int, chunks: Tensor) -> None:
        """Copy the chunks of all ranks, a row for each, to their places."""
        self._targets.copy_out(number, chunks, self._is_kept)


def chunk_bytes(longest: int, world: int) -> int:
    """Return the number of bytes of a chunk, for streams of which the longest has so many bytes.

    Example:
        >>> [chunk_bytes(each, world=2) for each in (100, 10**9)], chunk_bytes(10**9, world=64)
        ([128, 2097152], 262144)
    """
    return min(CHUNK_BYTES, _rounded(GATHERED_BYTES // world), _rounded(longest))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
