"""Optional abilities of process groups, beyond PyTorch's: asked of the group itself, not of its class."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where a part of a tensor is."""

    rank: int
    part: int


class Addition(NamedTuple):
    """The part at ``place`` is added to the one at ``into``."""

    into: Place
    place: Place


class Abilities(Protocol):
    """The object that a group has as ``_abilities``."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory on the CPU, on which collectives need no copy."""

    def allreduce(self, tensors: list[Tensor], opts: Any, *, factor: float) -> Any:
        """Sum tensors times each rank's ``factor``: multiply on the way."""

    @property
    def _shares_memory(self) -> bool:
        """Whether all ranks have memory in common, as :meth:`_add_in_order` needs."""

    def _add_in_order(self, tensor: Tensor, numel: int, additions: Sequence[Addition], gathered: int, opts: Any) -> Any:
        """Begin to add parts of ``numel`` elements, with which every rank's tensor begins, in the order given.

        All give the same additions. The result, which is in the part that the last addition adds to, is at the
        beginning of every rank's tensor then; what else is in the parts is used up. The end of every tensor has
        ``gathered`` elements for each rank, in their order; each rank's own are copied to all. Tensors come from
        :meth:`allocate`, and nothing is copied but the result.
        """

    def _abort(self, reason: str) -> None:
        """End the group on every rank; the error that all raise from then on gives the reason."""


def abilities_of(group: Any) -> Abilities | None:
    """Return what a group can do; None for those of PyTorch."""
    found: Abilities | None = getattr(group, "_abilities", None)
    return found
