"""The mean of a tensor over the ranks that travels in half precision: summed in float32, and rounded once.

A backend's own all-reduce adds half precision in half precision, in a ring: it rounds at every rank, so that the error
grows with their number. Here every rank's values are rounded to half precision, added in float32 in the order of the
ranks, divided by their number, and the mean is rounded to half precision. So the bits of the result depend only on the
values of the ranks: they are the same on every rank and every backend, however the tensor is split. Nothing is divided
before it is rounded. So a value that float16 can represent does not underflow, and neither a sum nor a mean overflows.

There are three ways to do it:

- :class:`_InSharedMemory`: the ranks read each other's float32, and round it while they add. Nothing travels.
- :class:`_AllGathered`, up to two ranks: each gets the whole tensor of the other, in all-gathers. That is no more bytes
  than with slices, in one step instead of two.
- :class:`_ReduceScattered`: rank ``r`` gets slice ``r`` of all ranks in an all-to-all, and adds it. The means are
  gathered in a second step, which has to be asked for (:meth:`MeanInHalf.gather`), on all ranks or on none.

Bytes are sent, not numbers: backends do not know every dtype.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep._base.inner_tensors import as_bytes
from lockstep.distributed.comm.collectives import Collectives, Pending, plain_memory
from lockstep.distributed.comm.rows import SumOfRows

HALF_PRECISION = (torch.bfloat16, torch.float16)
"""The dtypes of ``reduce_dtype``."""
_PIECE = 512 * 1024
"""Number of elements that :class:`_AllGathered` sends at a time on the CPU.

Gloo sends when the other side has said that it is ready. Over one connection that message comes behind the data that
the other side sends itself. So with large messages the ranks take turns (``benchmarks/bench_reduce_dtype.py``).
"""
_BLOCK = 64 * 1024
"""Number of elements added at a time on the CPU: they stay in the cache."""
_LARGE_BLOCK = 16 * 1024 * 1024
"""The same on an accelerator, where tensors in another dtype than float32 need memory of this size for the sum."""


class MeanInHalf(ABC):
    """The mean of one flat tensor over the ranks, under way: :meth:`wait`, :meth:`gather` and :meth:`finish` follow.

    A subclass begins the collective that exchanges the values to be added.
    """

    def __init__(self, collectives: Collectives, half: torch.dtype, tensor: Tensor, what: str, factor: float) -> None:
        self._collectives = collectives
        self._half = half
        self._tensor = tensor
        self._what = what
        self._factor = factor
        self._block = _BLOCK if tensor.is_cpu else _LARGE_BLOCK
        self._scratch: Tensor | None = None  # made now, since a failure later would be on this rank alone
        if tensor.dtype is not torch.float32:
            self._scratch = torch.empty_like(tensor[: self._block], dtype=torch.float32)

    @abstractmethod
    def wait(self) -> None:
        """Return when the values of the other ranks have arrived and are added."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if :meth:`wait` does not have to wait for another rank."""

    def gather(self) -> None:  # noqa: B027, most have nothing to do
        """Start to exchange means, if ranks have only slices of them. All ranks do it in the same order, or none."""

    def _add(self, rows: Tensor, tensor: Tensor) -> None:
        """Write the mean of the rows, one from each rank, to the first of them; overwrites ``tensor``, which has no
        more elements than a row."""
        for begin in range(0, len(tensor), self._block):
            block = slice(begin, min(len(tensor), begin + self._block))
            total = tensor[block] if self._scratch is None else self._scratch[: block.stop - begin]
            total.copy_(rows[0][block])
            for row in rows[1:]:
                total.add_(row[block])
            rows[0][block].copy_(total.div_(len(rows)))

    def finish(self) -> None:
        """Return when the tensor has the mean, times the factor."""
        if self._factor != 1:
            self._tensor.mul_(self._factor)


def begin_mean(
    collectives: Collectives,
    half: torch.dtype,
    tensor: Tensor,
    what: str,
    factor: float = 1.0,
    *,
    blocking: bool = False,
) -> MeanInHalf:
    """Start to replace the values of a flat tensor by the mean over the ranks, which travels in half precision.

    ``factor``: the mean is multiplied by it at the end, in the dtype of the tensor; ``blocking``: the caller waits for
    it next, so no other thread has to make it progress.
    """
    if tensor.is_cpu and collectives.shares_memory:
        return _InSharedMemory(collectives, half, tensor, what, factor, blocking)
    kind = _AllGathered if collectives.world <= 2 else _ReduceScattered
    return kind(collectives, half, tensor, what, factor)


def gather_all(means: Sequence[MeanInHalf | SumOfRows]) -> None:
    """Complete what takes a second step, which all ranks have in the same order."""
    for mean in means:
        mean.gather()
    for mean in means:
        mean.finish()


class _InSharedMemory(MeanInHalf):
    def __init__(
        self, collectives: Collectives, half: torch.dtype, tensor: Tensor, what: str, factor: float, blocking: bool
    ) -> None:
        super().__init__(collectives, half, tensor, what, factor)
        self._pending = collectives.mean_rounded_to(half, tensor, what, blocking=blocking)

    def wait(self) -> None:
        self._pending.wait()

    def done(self) -> bool:
        return self._pending.done()


class _AllGathered(MeanInHalf):
    def __init__(self, collectives: Collectives, half: torch.dtype, tensor: Tensor, what: str, factor: float) -> None:
        super().__init__(collectives, half, tensor, what, factor)
        ranks = collectives.world
        memory = plain_memory(ranks * len(tensor), half, tensor.device)
        step = _PIECE if tensor.is_cpu else max(1, len(tensor))
        self._pieces = [slice(at, min(len(tensor), at + step)) for at in range(0, len(tensor), step)]
        self._rows = [memory[ranks * piece.start : ranks * piece.stop].view(ranks, -1) for piece in self._pieces]
        self._pending = [self._send(*each) for each in zip(self._pieces, self._rows, strict=True)]

    def _send(self, piece: slice, rows: Tensor) -> Pending:
        ranks = self._collectives
        own = rows[ranks.rank].copy_(self._tensor[piece])
        ranks.comm_stats.bytes_reduced += own.nbytes
        return ranks.all_gather_flat(as_bytes(rows), as_bytes(own), self._what)

    def wait(self) -> None:
        for piece, rows, pending in zip(self._pieces, self._rows, self._pending, strict=True):
            pending.wait()
            self._add(rows, self._tensor[piece])
            self._tensor[piece].copy_(rows[0])
        self._rows.clear()

    def done(self) -> bool:
        return all(pending.done() for pending in self._pending)


class _ReduceScattered(MeanInHalf):
    def __init__(self, collectives: Collectives, half: torch.dtype, tensor: Tensor, what: str, factor: float) -> None:
        super().__init__(collectives, half, tensor, what, factor)
        ranks = collectives.world
        self._slice = -(-len(tensor) // ranks)
        memory = ranks * self._slice, half, tensor.device
        self._sent = plain_memory(*memory)
        self._rows = plain_memory(*memory).view(ranks, -1)
        self._sent[: len(tensor)].copy_(tensor)
        collectives.comm_stats.bytes_reduced += self._sent.nbytes
        sizes = [self._slice * half.itemsize] * ranks
        self._pending = collectives.all_to_all(as_bytes(self._rows), as_bytes(self._sent), sizes, sizes, what)
        self._gathering: list[Pending] = []

    def wait(self) -> None:
        self._pending.wait()
        begin = self._collectives.rank * self._slice
        self._add(self._rows, self._tensor[begin : begin + self._slice])  # less than a slice, or nothing, at the end

    def done(self) -> bool:
        return self._pending.done()

    def gather(self) -> None:
        means, whole = as_bytes(self._rows[0]), as_bytes(self._sent)  # where it was sent from
        self._gathering.append(self._collectives.all_gather_flat(whole, means, f"means, {self._what}"))

    def finish(self) -> None:
        for pending in self._gathering:
            pending.wait()
        self._tensor.copy_(self._sent[: len(self._tensor)])
        super().finish()
