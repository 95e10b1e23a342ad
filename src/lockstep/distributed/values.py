"""Values of parameters and buffers: rank 0's for everybody, and whether they are equal on all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

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
        name, rank = found
        raise OutOfSyncError(
            f"{kind} {name} {what}, and has other values on rank "
            f"{rank} than on rank {collectives.global_ranks[0]}, so gradients are of different networks; no gradient "
            "has been handed out. Give every rank the same values (the same checkpoint, the same seed, "
            "torch.distributed.broadcast) before forward, or replicate when the module is complete"
        )


@torch.no_grad()
def find_difference(named: Sequence[tuple[str, Tensor]], collectives: Collectives) -> tuple[str, int] | None:
    """The first parameter that has other values on some rank than on the group's first, bit by bit, and that rank.

    Every rank returns the same.

    Communicates a few large broadcasts of rank 0's values, and one all-gather of a number for each parameter.
    """
    if not named:
        return None
    tensors = [local_part(tensor).detach() for _, tensor in named]
    differs = torch.zeros(len(tensors), dtype=torch.int64)
    for number, value in collectives.broadcast_coalesced(tensors, "values to compare"):
        differs[number] = not torch.equal(_bits(value), _bits(tensors[number]))
    rows = [row.tolist() for row in collectives.all_gather(differs.to(collectives.device), "which of them differ")]
    for number, (name, _) in enumerate(named):
        for rank, row in zip(collectives.global_ranks, rows, strict=True):
            if row[number]:
                return name, rank
    return None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
