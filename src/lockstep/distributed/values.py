"""The beginning: rank 0's values for everybody."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.buckets import TensorSpec, contiguous_stride, plan_buckets
from lockstep.distributed.buffers import Buffer
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.dtensors import local_part
from lockstep.errors import OutOfSyncError


@torch.no_grad()
def broadcast_values(
    parameters: Sequence[Tensor], buffers: Sequence[Buffer], collectives: Collectives, source: int = 0
) -> None:
    """Give every rank the values that rank ``source`` has, in a few large broadcasts."""
    held = [buffer.current() for buffer in buffers]
    tensors = [*(local_part(p) for p in parameters), *(tensor for tensor in held if tensor is not None)]
    plan = plan_buckets([_in_logical_order(tensor) for tensor in tensors])
    received: list[Tensor] = list(tensors)
    for bucket in plan.buckets:
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        views = bucket.views(flat)
        torch._foreach_copy_(views, [tensor.detach() for tensor in bucket.take(tensors)])
        collectives.broadcast(flat, "initial values", source).wait()
        for slot, view in zip(bucket.slots, views, strict=True):
            received[slot.index] = view
    if collectives.rank == source:
        return
    count = len(parameters)
    for parameter, value in zip(tensors[:count], received[:count], strict=True):
        parameter.copy_(value)
    present = [buffer for buffer, tensor in zip(buffers, held, strict=True) if tensor is not None]
    for buffer, value in zip(present, received[count:], strict=True):
        buffer.assign(value)


def _in_logical_order(tensor: Tensor) -> TensorSpec:
    """Laid out contiguously, whatever the strides on this rank."""
    shape = tuple(tensor.shape)
    return TensorSpec("", shape, contiguous_stride(shape), tensor.dtype, tensor.device)


def check_equal_values(named: Sequence[tuple[str, Tensor]], collectives: Collectives) -> None:
    """Raise :class:`OutOfSyncError`, on every rank, if a parameter has other values on some rank; see
    :func:`find_difference`."""
    found = find_difference(named, collectives)
    if found is not None:
        name, rank = found
        raise OutOfSyncError(
            f"parameter {name} was put into the module after it was replicated, and has other values on rank "
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
    for bucket in plan_buckets([_in_logical_order(tensor) for tensor in tensors]).buckets:
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        views = bucket.views(flat)
        own = bucket.take(tensors)
        torch._foreach_copy_(views, own)
        collectives.broadcast(flat, "values to compare").wait()
        for slot, view, tensor in zip(bucket.slots, views, own, strict=True):
            differs[slot.index] = not torch.equal(_bits(view), _bits(tensor))
    rows = [row.tolist() for row in collectives.all_gather(differs.to(collectives.device), "which of them differ")]
    for number, (name, _) in enumerate(named):
        for rank, row in zip(collectives.global_ranks, rows, strict=True):
            if row[number]:
                return name, rank
    return None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
