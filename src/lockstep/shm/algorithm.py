"""The interface of the algorithms for collectives, which ``one_host.py`` and ``many_hosts.py`` implement."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lockstep.abilities import Addition, Chunks
from lockstep.shm.messages import Descriptor, Op


class Algorithm(Protocol):
    """Runs collectives on contiguous tensors of one dimension; every rank calls the same ones.

    Each wait for other ranks ends after the time limit that the algorithm was made with. Ranks are ranks of the group,
    and ``tensors`` is the number of the program's tensors that are flattened into the given one.
    """

    def agree(self, descriptor: Descriptor) -> None:
        """Return when every rank is about to run the same collective; else raise the same error on each."""

    def check_alive(self) -> None:
        """Raise if a rank has died, or the group has ended."""

    def barrier(self) -> None:
        """Return when every rank has come."""

    def all_reduce(
        self, x: Tensor, op: Op, tensors: int = 1, factor: float = 1.0, rounded_to: torch.dtype | None = None
    ) -> None:
        """Reduce the tensors of all ranks in place, each multiplied by its rank's ``factor``.

        ``rounded_to``: the dtype to which each rank's values, and the result, are rounded. Raises :class:`OptionError`
        where that is impossible.
        """

    def reduce(self, x: Tensor, op: Op, root: int) -> None:
        """Reduce the tensors of all ranks into the tensor of ``root``; the tensors of other ranks stay as they are."""

    def broadcast(self, x: Tensor, root: int, tensors: int = 1) -> None:
        """Give every rank the values of ``root``, in place."""

    def all_gather(self, outputs: Sequence[Tensor], x: Tensor, tensors: int = 1) -> None:
        """Give every rank the tensors of all ranks, in rank order."""

    def add_in_order(self, x: Tensor, numel: int, additions: Sequence[Addition], gathered: int = 0) -> None:
        """Add parts of ``numel`` elements, with which the tensor of each rank begins, in the given order, and write the
        result to the beginning of every rank's tensor. The end of the tensor has ``gathered`` elements for each rank;
        each rank's own are copied to all ranks. Raises :class:`OptionError` where that is impossible."""

    def gather_in_chunks(self, chunks: Chunks) -> None:
        """Let each rank put its chunks in shared memory, and all take those of all ranks from there. Raises
        :class:`OptionError` where that is impossible."""

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Op, tensors: int = 1) -> None:
        """Reduce ``inputs``, one tensor for each rank, over all ranks; each rank gets the result for itself."""
