"""Values of parameters and buffers: sent by rank 0 to all, and compared across ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.digests import Digests
from lockstep.distributed.agreement import all_gather_object, first_differing
from lockstep.distributed.buffers import Buffer
from lockstep.distributed.collectives import Collectives
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
