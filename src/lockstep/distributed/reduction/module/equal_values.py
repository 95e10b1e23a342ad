"""Compares the values of parameters and buffers between ranks."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lockstep._base.digests import Digests
from lockstep.distributed.comm.agreement import all_gather_object, first_differing
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import OutOfSyncError

SINCE_REPLICATED = "was changed after the module was replicated"
"""What has happened to a parameter whose values differ in the first round: ``replicate()`` had made them equal."""


def check_equal_values(
    named: Sequence[tuple[str, Tensor]],
    collectives: Collectives,
    kind: str = "parameter",
    what: str = "was put into the module after it was replicated",
    digests: Digests | None = None,
) -> None:
    """Raise :class:`OutOfSyncError`, on every rank, if a tensor differs between ranks: see :func:`find_difference`."""
    found = find_difference(named, collectives, digests)
    if found is not None:
        raise OutOfSyncError(
            f"{kind} {found.name} {what}, and has other values on rank {found.rank} than on rank "
            f"{collectives.global_ranks[0]}, so gradients are of different networks; no gradient has been handed out. "
            "Give every rank the same values (the same checkpoint, the same seed, "
            "torch.distributed.broadcast) before forward, or replicate when the module is complete. If forward chooses "
            "values by its first batch, run one forward on the same batch on every rank before"
        )


class Difference(NamedTuple):
    """The first tensor that differs between some rank and the group's first rank."""

    name: str
    rank: int
    """The rank that differs, as messages name it."""
    first: int
    """The group's first rank."""
    digests: tuple[str, str]
    """The digests of the values on the first rank and on the other one."""


def find_difference(
    named: Sequence[tuple[str, Tensor]], collectives: Collectives, digests: Digests | None = None
) -> Difference | None:
    """Return the first tensor whose bits differ on some rank from the group's first; the same on every rank.

    ``digests``: those of the tensors, if they are of an earlier moment.

    Communicates what :func:`all_gather_object` does, and once more if there is a difference.
    """
    if not named:
        return None
    digests = digests or Digests([tensor for _, tensor in named])
    whole = int(digests.digest(collectives.device))
    if first_differing(all_gather_object(whole, "digest of all values", collectives)) is None:
        return None
    rows = all_gather_object(digests.each(), "digests of values", collectives)
    for number, (name, _) in enumerate(named):
        for rank, row in zip(collectives.global_ranks, rows, strict=True):
            if row[number] != rows[0][number]:
                first, other = (f"{each[number] % 2**64:016x}" for each in (rows[0], row))
                return Difference(name, rank, collectives.global_ranks[0], (first, other))
    return None
