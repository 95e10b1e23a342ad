"""Values of parameters and buffers: sent by rank 0 to all ranks, and compared.

A :class:`ValueChecker` compares them in every N-th round; the digest of each rank rides in its report. Parameters are
read when backward has ended: the optimizer step that has made them is over on all ranks, and the next one has not
begun. Buffers that were alike on all ranks are read when forward begins, before it changes them. With shares a round is
a step: parameters are read at its end, buffers when it begins.
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
    """Give every rank the values that rank ``source`` has, in a few large broadcasts."""
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
    """Raise :class:`OutOfSyncError`, on every rank, if a tensor has other values on some rank; see
    :func:`find_difference`."""
    found = find_difference(named, collectives)
    if found is not None:
        raise OutOfSyncError(
            f"{kind} {found.name} {what}, and has other values on rank {found.rank} than on rank "
            f"{collectives.global_ranks[0]}, so gradients are of different networks; no gradient has been handed out. "
            "Give every rank the same values (the same checkpoint, the same seed, "
            "torch.distributed.broadcast) before forward, or replicate when the module is complete"
        )


class Difference(NamedTuple):
    """The first tensor that has other values on some rank than on the group's first rank."""

    name: str
    rank: int
    """That rank, as messages name it."""
    digests: tuple[str, str]
    """Of the values on the first rank, and on that one."""


def find_difference(named: Sequence[tuple[str, Tensor]], collectives: Collectives) -> Difference | None:
    """Return the first tensor whose bits are others on some rank than on the group's first; the same on every rank.

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
"""What a rank's digest is of: nothing on a rank that has not looked."""


class ValueChecker:
    """Looks at the values of one module."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._of_buffers: Digests | None = None
        self._of_parameters: Digests | None = None

    def is_due(self, number: int) -> bool:
        """Return True if values are compared in the round of that number."""
        return number % self.every == 0

    def digest_buffers(self, buffers: Sequence[Tensor | None]) -> None:
        """Look at buffers that all ranks have alike, as they are before the forward passes of the round; once."""
        if self._of_buffers is None:
            self._of_buffers = Digests([torch.empty(0) if tensor is None else tensor for tensor in buffers])

    def digest(self, parameters: Sequence[Tensor], device: torch.device) -> tuple[int, Tensor]:
        """Return what this rank tells the others: what its digest is of, and the digest, one number of eight bytes."""
        self._of_parameters = Digests(parameters)
        digest = self._of_parameters.digest(device)
        if self._of_buffers is None:
            return PARAMETERS, digest
        return PARAMETERS_AND_BUFFERS, digest + 5 * self._of_buffers.digest(device)

    def forget(self) -> None:
        """Note that the round is over."""
        self._of_buffers = self._of_parameters = None

    def check(
        self,
        told: Iterable[tuple[int, Hashable]],
        parameters: Sequence[str],
        buffers: Sequence[str],
        collectives: Collectives,
    ) -> None:
        """Raise :class:`OutOfSyncError`, on every rank, if ranks have ``told`` different digests.

        ``parameters`` and ``buffers`` are the names of what ranks look at, the same on all. Communicates what
        :func:`all_gather_object` does, of a digest for each of them, only if digests differ.
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
