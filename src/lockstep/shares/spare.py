"""Memory of gradients that nobody needs any more, used again for the gradients of the next share.

Partial sums are dropped many at a time. The C library gives such blocks back to the system, which clears their pages
when the next share takes them again: for large parameters that takes longer than adding them. So each is kept until
another gradient has come, whose own successor takes its place, or until memory is allocated to exchange partial sums.
There is never more in memory than at the peak.
"""

from collections.abc import Iterable

from torch import Tensor

MOST_BYTES = 256 * 1024 * 1024
"""How much is kept at most; it is kept between steps, too."""


class SpareMemory:
    """Tensors in the memory of the host that are kept for their memory alone."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._bytes = 0

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep what is dropped otherwise; accelerators keep memory by themselves."""
        for tensor in tensors:
            if tensor is not None and tensor.device.type == "cpu" and self._bytes + tensor.nbytes <= MOST_BYTES:
                self._tensors.append(tensor)
                self._bytes += tensor.nbytes

    def give_back(self, nbytes: int) -> None:
        """Drop so much, or more, as far as there is any: a gradient has come, or something else is to be allocated."""
        least = self._bytes - nbytes
        while self._tensors and self._bytes > least:
            self._bytes -= self._tensors.pop().nbytes
