"""The interface of the algorithms for collectives, which ``one_host.py`` and ``many_hosts.py`` implement."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lockstep.abilities import Addition
from lockstep.shm.messages import Descriptor, Op


class Algorithm(Protocol):
    """Runs collectives on plain tensors of one dimension without gaps; every rank calls the same ones.

    Each of its waits for other ranks ends after the time limit that the algorithm was made with. Ranks are those of
    the group, and ``tensors`` says how many tensors of the program the given one stands for.
    """

    def agree(self, descriptor: Descriptor) -> None:
        """Return when every rank is about to run the same; raises the same error on each if they are not."""

    def check_alive(self) -> None:
        """Raise if a rank has died, or the group has ended."""

    def barrier(self) -> None:
        """Return when every rank is here."""

    def all_reduce(self, x: Tensor, op: Op, tensors: int = 1, factor: float = 1.0) -> None:
        """Reduce the tensors of all ranks, each times its rank's ``factor``, in place."""

    def reduce(self, x: Tensor, op: Op, root: int) -> None:
        """Reduce the tensors of all ranks to that of ``root``; those of the others stay as they are."""

    def broadcast(self, x: Tensor, root: int, tensors: int = 1) -> None:
        """Give every rank the values of ``root``, in place."""

    def all_gather(self, outputs: Sequence[Tensor], x: Tensor, tensors: int = 1) -> None:
        """Give every rank the tensors of all, in rank order."""

    def add_in_order(self, x: Tensor, numel: int, additions: Sequence[Addition], gathered: int = 0) -> None:
        """Add parts of ``numel`` elements, with which the tensor of each rank begins, in the order given; the result
        is at the beginning of every rank's tensor then. At its end there are ``gathered`` elements for each rank: those
        of a rank are copied to all. Raises :class:`OptionError` where that cannot be done."""

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Op, tensors: int = 1) -> None:
        """Reduce the tensors that all ranks have for a rank, for every rank; one for each is in ``inputs``."""
