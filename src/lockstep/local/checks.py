"""Checks on the shapes, dtypes and devices of tensors that are moved or summed together, or belong to a module."""

from collections.abc import Sequence

import torch
from torch.nn import Module

from lockstep._base.devices import CPU
from lockstep.errors import DeviceError, LayoutError


def common_device(tensors: Sequence[torch.Tensor], call: str) -> torch.device:
    """Return the one device that all tensors are on; raise :class:`DeviceError` naming the first that is elsewhere."""
    for index, tensor in enumerate(tensors):
        if tensor.device != tensors[0].device:
            raise DeviceError(
                f"{call} expects all tensors on one device: tensor 0 is on {tensors[0].device}, tensor {index} on "
                f"{tensor.device}"
            )
    return tensors[0].device if tensors else CPU


def require_on(network: Module, device: torch.device) -> None:
    """Raise :class:`~lockstep.errors.DeviceError` naming the first parameter or buffer that is not on ``device``."""
    for kind, named in (("parameter", network.named_parameters()), ("buffer", network.named_buffers())):
        for name, tensor in named:
            if tensor.device != device:
                raise DeviceError(
                    f"module must have its parameters and buffers on device {device} (device_ids[0]) but found one of "
                    f"them on device: {tensor.device} ({kind} {name}). Move it there with module.to('{device}')."
                )


def check_same_layout(tensors: Sequence[torch.Tensor], call: str) -> None:
    """Raise :class:`LayoutError` if tensors to be summed differ in shape, dtype or sparsity."""
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.shape != first.shape:
            raise LayoutError(
                f"{call}: input {index} has invalid size: got {tuple(tensor.shape)}, but expected "
                f"{tuple(first.shape)}, the size of input 0"
            )
        if tensor.dtype != first.dtype or tensor.layout != first.layout:
            raise LayoutError(
                f"{call}: input {index} has invalid type: got {tensor.dtype} ({tensor.layout}), but expected "
                f"{first.dtype} ({first.layout}), the type of input 0"
            )


def check_dtype(kind: str, index: int, tensor: torch.Tensor, other: torch.Tensor, which: str) -> None:
    """Raise :class:`LayoutError` if a tensor has another dtype than ``other``."""
    if tensor.dtype != other.dtype:
        raise LayoutError(
            f"{kind.capitalize()} tensor at index {index} has dtype {tensor.dtype}, but {which} has {other.dtype}"
        )


def checked_dim(tensor: torch.Tensor, dim: int) -> int:
    """Return ``dim`` counted from the front; raise :class:`LayoutError` if the tensor has no such dimension."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise LayoutError(
            f"dim {dim} is out of range for a tensor of shape {tuple(tensor.shape)}, with {tensor.dim()} dimensions"
        )
    return dim % tensor.dim()


def without(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Return the shape of a tensor without one dimension."""
    return tuple(size for i, size in enumerate(tensor.shape) if i != dim)


def gatherable(tensors: list[torch.Tensor], dim: int) -> tuple[list[torch.Tensor], int]:
    """Return tensors that were checked, scalars as vectors of one, and the dimension along which to concatenate."""
    if all(t.dim() == 0 for t in tensors):
        tensors, dim = [t.reshape(1) for t in tensors], 0
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.dim() != first.dim():
            raise LayoutError(
                "Expected all input tensors to have the same number of dimensions, but input tensor at index "
                f"{index} has {tensor.dim()} and the first has {first.dim()}"
            )
    dim = checked_dim(first, dim)
    for index, tensor in enumerate(tensors):
        if tensor.shape != first.shape and without(tensor, dim) != without(first, dim):
            raise LayoutError(
                f"Input tensor at index {index} has invalid shape {tuple(tensor.shape)}: expected "
                f"{tuple(first.shape)} but for dim {dim}"
            )
        check_dtype("input", index, tensor, first, "the first input")
    return tensors, dim
