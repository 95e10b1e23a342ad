"""Values of parameters and buffers: broadcast from rank 0, and compared between ranks.

A :class:`ValueChecker` compares them in every N-th round; each rank's report carries its digest. Parameters are read
after backward, between the optimizer steps of all ranks. Buffers that were equal on all ranks are read before forward
changes them. With shares a round is a step: parameters are read at its end, buffers at its start.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.digests import Digests
from lockstep.distributed.comm.agreement import all_gather_object, first_differing
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.buffers import Buffer
from lockstep.dtensors import local_part
from lockstep.errors import OutOfSyncError


@torch.no_grad()
def broadcast_values(
    parameters: Sequence[Tensor], buffers: Sequence[Buffer], collectives: Collectives, source: int = 0
) -> None:
    """Broadcast the values of rank ``source`` in a few large tensors."""
    present = [(buffer, tensor) for buffer in buffers if (tensor := buffer.current()) is not None]
    targets = [local_part(parameter) for parameter in parameters]
    tensors = [*targets, *(tensor for _, tensor in present)]
    for number, value in collectives.broadcast_coalesced(tensors, "initial values", source):
        if collectives.rank == source:
            continue
        if number < len(targets):
            targets[number].copy_(value)
        else:
            present[number - len(targets)][0].assign(value)


def check_equal_values(
    named: Sequence[tuple[str, Tensor]],
    collectives: Collectives,
    kind: str = "parameter",
    what: str = "was put into the module after it was replicated",
) -> None:
    """Raise :class:`OutOfSyncError`, on every rank, if a tensor differs between ranks: see :func:`find_difference`."""
    found = find_difference(named, collectives)
    if found is not None:
        raise OutOfSyncError(
            f"{kind} {found.name} {what}, and has other values on rank {found.rank} than on rank "
            f"{collectives.global_ranks[0]}, so gradients are of different networks; no gradient has been handed out. "
            "Give every rank the same values (the same checkpoint, the same seed, "
            "torch.distributed.broadcast) before forward, or replicate when the module is complete"
        )


class Difference(NamedTuple):
    """The first tensor that differs between some rank and the group's first rank."""

    name: str
    rank: int
    """The rank that differs, as messages name it."""
    digests: tuple[str, str]
    """The digests of the values on the first rank and on the other one."""


def find_difference(named: Sequence[tuple[str, Tensor]], collectives: Collectives) -> Difference | None:
    """Return the first tensor whose bits differ on some rank from the group's first; the same on every rank.

    Communicates what :func:`all_gather_object` does, and once more if there is a difference.
    """
    if not named:
        return None
    digests = Digests([tensor for _, tensor in named])
    whole = int(digests.digest(collectives.device))
    if first_differing(all_gather_object(whole, "digest of all values", collectives)) is None:
        return None
    rows = all_gather_object(digests.each(), "digests of values", collectives)
    for number, (name, _) in enumerate(named):
        for rank, row in zip(collectives.global_ranks, rows, strict=True):
            if row[number] != rows[0][number]:
                first, other = (f"{each[number] % 2**64:016x}" for each in (rows[0], row))
                return Difference(name, rank, (first, other))
    return None


NOTHING, PARAMETERS, PARAMETERS_AND_BUFFERS = 0, 1, 2
"""The tensors in a rank's digest; nothing on a rank that has not read its values."""


class ValueChecker:
    """Compares the values of one module between ranks."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._of_buffers: Digests | None = None
        self._of_parameters: Digests | None = None

    def is_due(self, number: int) -> bool:
        """Return True if values are compared in round ``number``."""
        return number % self.every == 0

    def digest_buffers(self, buffers: Sequence[Tensor | None]) -> None:
        """Read buffers that are equal on all ranks, once, before the forward passes of a round."""
        if self._of_buffers is None:
            self._of_buffers = Digests([torch.empty(0) if tensor is None else tensor for tensor in buffers])

    def digest(self, parameters: Sequence[Tensor], device: torch.device) -> tuple[int, Tensor]:
        """Return this rank's digest of eight bytes, and before it the kind of tensors that it is of."""
        self._of_parameters = Digests(parameters)
        digest = self._of_parameters.digest(device)
        if self._of_buffers is None:
            return PARAMETERS, digest
        return PARAMETERS_AND_BUFFERS, digest + 5 * self._of_buffers.digest(device)

    def forget(self) -> None:
        """Drop the digests: the round is over."""
        self._of_buffers = self._of_parameters = None

    def check(
        self,
        told: Iterable[tuple[int, Hashable]],
        parameters: Sequence[str],
        buffers: Sequence[str],
        collectives: Collectives,
    ) -> None:
        """Raise :class:`OutOfSyncError`, on every rank, if digests differ between ranks.

        ``told``: kind and digest of each rank; ``parameters`` and ``buffers``: names of the tensors read, the same on
        all ranks. Communicates only if digests differ: what :func:`all_gather_object` does, for a digest of each
        tensor.
        """
        kinds: dict[int, set[Hashable]] = {}
        for kind, digest in told:
            kinds.setdefault(kind, set()).add(digest)
        kinds.pop(NOTHING, None)
        if any(len(different) > 1 for different in kinds.values()):
            raise OutOfSyncError(self._difference(parameters, buffers, collectives))

    def _difference(self, parameters: Sequence[str], buffers: Sequence[str], collectives: Collectives) -> str:
        of_parameters, of_buffers = self._of_parameters, self._of_buffers
        own = [0] * len(parameters) if of_parameters is None else of_parameters.each()
        own += [0] * len(buffers) if of_buffers is None else of_buffers.each()
        row = [of_parameters is not None, of_buffers is not None, *own]
        rows = all_gather_object(row, "digests of values", collectives)
        names = [*(f"parameter {name}" for name in parameters), *(f"buffer {name}" for name in buffers)]
        for place, name in enumerate(names):
            ranks: dict[int, list[int]] = {}
            for rank, (sees, sees_buffers, *digests) in zip(collectives.global_ranks, rows, strict=True):
                if sees and (place < len(parameters) or sees_buffers):
                    ranks.setdefault(digests[place], []).append(rank)
            if len(ranks) > 1:
                sides = sorted(ranks.values(), key=len, reverse=True)
                return (
                    f"rank {collectives.global_rank}: {name} is out of sync: "
                    f"{', '.join(_named(side) for side in sides[:-1])} {'has' if len(sides[0]) == 1 else 'have'} other "
                    f"values than {_named(sides[-1])}. Something changed it on one rank only: memory that is broken, "
                    "an optimizer step on gradients that were not synchronised, a learning rate or a random number "
                    "that differs by rank. No gradient has been handed out; load a checkpoint from before"
                )
        return (
            f"rank {collectives.global_rank}: ranks have given different digests of their values, and equal ones of "
            "each parameter and buffer: values were changed while they were looked at, or what computes digests is "
            "broken on a rank"
        )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
