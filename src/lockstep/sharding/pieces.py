"""Pieces of parameters, of their gradients and of their state, as flat tensors in the order of memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep._base.buckets import dense_stride
from lockstep._base.dtensors import local_part, matching_gradient
from lockstep.errors import LayoutError, ShardingError


def flat(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor without gaps, in the order in which they lie in memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def plain(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a tensor of no other class; a view, which autograd does not know."""
    local = local_part(tensor).detach()
    if type(local) is Tensor:
        return local
    with torch._C.DisableTorchFunctionSubclass():
        return local.as_subclass(Tensor)


def check_dense(parameter: Tensor, name: str) -> None:
    """Raise :class:`LayoutError` if the elements of a parameter have gaps between them, or lie on one another."""
    local = plain(parameter)
    if local.layout != torch.strided or not _is_dense(local):
        raise LayoutError(
            f"parameter {name} has strides {local.stride()} for shape {tuple(local.shape)}: a sharded optimizer needs "
            "parameters whose elements lie side by side in memory; make it contiguous before shard_optimizer()"
        )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or dense_stride(tuple(tensor.shape), tensor.stride()) == tensor.stride()


def flat_gradient(parameter: Tensor, name: str) -> Tensor:
    """Return the gradient of a parameter in the memory order of the parameter; a view where that is possible."""
    local, own = gradient_of(parameter), plain(parameter)
    if local.is_sparse:
        raise ShardingError(
            f"parameter {name} has a sparse gradient, of which no slices can be taken; give it an optimizer of its "
            'own, that is not sharded, or with granularity="tensor"'
        )
    if local.stride() != own.stride() and not (local.is_contiguous() and own.is_contiguous()):
        local = torch.empty_like(own, dtype=local.dtype).copy_(local)
    return flat(local)


def is_like(gradient: Tensor, tensor: Tensor) -> bool:
    """Return True if a gradient has the layout of a dense tensor, and is no tensor of another class."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and gradient.shape == tensor.shape
        and gradient.stride() == tensor.stride()
    )


def gradient_of(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient of a parameter, in its shape."""
    assert parameter.grad is not None
    return matching_gradient(parameter.grad, parameter)


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a dense tensor in the order in which its memory goes through them, the slowest
    first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))


def is_same_order(one: Sequence[int], other: Sequence[int], shape: Sequence[int]) -> bool:
    """Return True if two orders of dimensions are the same for the elements of a tensor of this shape."""
    return [dim for dim in one if shape[dim] > 1] == [dim for dim in other if shape[dim] > 1]


def in_order(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the values in another order."""
    return tuple(values[dim] for dim in order)


def in_former_order(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Undo :func:`in_order`."""
    return tuple(values[order.index(dim)] for dim in range(len(order)))
