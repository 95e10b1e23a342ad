"""Optional abilities of process groups beyond PyTorch's, which the group itself provides."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class PlaceOfPart(NamedTuple):
    """The place of one part of a tensor: a rank, and a part's number."""

    rank: int
    part: int


class Addition(NamedTuple):
    """Add the part at ``place`` to the part at ``into``."""

    into: PlaceOfPart
    place: PlaceOfPart


class Chunks(Protocol):
    """What a rank gives to all ranks, and gets from them, chunk by chunk."""

    count: int
    """Number of chunks."""
    nbytes: int
    """Number of bytes of a chunk, at most 2 MiB."""

    def put(self, number: int, buffer: Tensor) -> None:
        """Write this rank's chunk to ``nbytes`` bytes of memory."""

    def take(self, number: int, buffers: Sequence[Tensor]) -> None:
        """Read the chunks of all ranks, in rank order; the memory is used again for other chunks."""


class Abilities(Protocol):
    """The interface of the object that a group has as ``_abilities``."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory on the CPU that collectives can use without a copy."""

    def _all_reduce(
        self, tensors: list[Tensor], opts: Any, factor: float = 1.0, rounded_to: torch.dtype | None = None
    ) -> Any:
        """Begin to sum tensors, each multiplied by its rank's ``factor`` during the reduction.

        ``rounded_to``: half precision to which each rank's values, and their mean, are rounded; only where ranks
        share memory.
        """

    @property
    def _shares_memory(self) -> bool:
        """True if all ranks have memory in common, as :meth:`_add_in_order` needs."""

    def _add_in_order(self, tensor: Tensor, numel: int, additions: Sequence[Addition], gathered: int, opts: Any) -> Any:
        """Begin to add parts of ``numel`` elements, with which every rank's tensor begins, in the given order.

        All ranks give the same additions. The result, which is in the part that the last addition adds to, is then at
        the beginning of every rank's tensor; the other parts are overwritten. The end of every tensor has ``gathered``
        elements for each rank, in rank order; each rank's own are copied to all. Tensors come from :meth:`allocate`,
        and only the result is copied.
        """

    def _gather_in_chunks(self, chunks: Chunks, opts: Any) -> Any:
        """Begin to gather chunks through shared memory, without other copies than those that ``chunks`` makes; only
        where ranks share memory. All ranks give chunks of the same number and size."""

    def _abort(self, reason: str) -> None:
        """End the group on every rank; the error that all raise from then on gives the reason."""


def abilities_of(group: Any) -> Abilities | None:
    """Return the abilities of a group; None for PyTorch's groups."""
    found: Abilities | None = getattr(group, "_abilities", None)
    return found
