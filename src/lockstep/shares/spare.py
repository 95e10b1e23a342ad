"""Keeps the memory of old gradients for the gradients of the next share.

Partial sums are dropped many at a time. The C library returns such blocks to the system, which clears their pages when
the next share takes them again: for large parameters that takes longer than adding them. So each block is kept until
another gradient has come, whose own successor takes its place, or until memory is allocated to exchange partial sums.
The peak of memory does not grow.
"""

from collections.abc import Iterable

from torch import Tensor

MOST_BYTES = 256 * 1024 * 1024
"""Limit of the bytes that are kept, also between steps."""


class SpareMemory:
    """Tensors on the CPU that are kept for their memory alone."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._bytes = 0

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep tensors that would be dropped, up to the limit; accelerators keep memory by themselves."""
        for tensor in tensors:
            if tensor is not None and tensor.device.type == "cpu" and self._bytes + tensor.nbytes <= MOST_BYTES:
                self._tensors.append(tensor)
                self._bytes += tensor.nbytes

    def give_back(self, nbytes: int) -> None:
        """Drop at least ``nbytes``, if there are as many: a gradient has come, or other memory is to be allocated."""
        least = self._bytes - nbytes
        while self._tensors and self._bytes > least:
            self._bytes -= self._tensors.pop().nbytes
