"""Tensors of any layout, checked, flattened for a collective, and written to when it is over."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import DeviceError, LayoutError


def check_tensors(tensors: Sequence[Tensor], what: str) -> None:
    """Raise unless all are dense tensors of one dtype on the CPU, and there is one."""
    if not tensors:
        raise LayoutError(f"{what}: expected at least one tensor, got none")
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise DeviceError(
                f"{what}: the shm process group moves tensors on the CPU, got one on {tensor.device}; use a group of "
                'that device\'s backend, such as dist.new_group(backend="nccl")'
            )
        if tensor.layout != torch.strided:
            raise LayoutError(f"{what}: expected dense tensors, got one with layout {tensor.layout}")
        if tensor.dtype != tensors[0].dtype:
            raise LayoutError(f"{what}: expected tensors of one dtype, got {tensors[0].dtype} and {tensor.dtype}")


def check_numel(tensors: Sequence[Tensor], numel: int, what: str) -> None:
    """Raise unless every tensor has that many elements."""
    for i, tensor in enumerate(tensors):
        if tensor.numel() != numel:
            raise LayoutError(f"{what}: expected {numel} elements, got {tensor.numel()} in tensor {i}")


def check_writable(tensors: Sequence[Tensor], what: str) -> None:
    """Raise if elements of a tensor that is written to share memory, such as those of an expanded one."""
    for tensor in tensors:
        if not tensor.is_contiguous() and any(
            n > 1 and not by for n, by in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise LayoutError(
                f"{what}: a result cannot be written to an expanded tensor (shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}), whose elements share memory; give a tensor of its own, such as .contiguous()"
            )


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in one dimension: the tensor's own memory if it is one without gaps, else a copy."""
    if len(tensors) == 1 and _is_plain(tensors[0]):
        tensor = tensors[0]
        return _alias(tensor, (tensor.numel(),), (1,))
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write what :func:`flatten` returned, and a collective has changed, to the tensors, if it is a copy."""
    if len(tensors) == 1 and _is_plain(tensors[0]):
        return
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        if tensor.is_conj():
            part = part.conj()
        if tensor.is_neg():
            part = part.neg()
        _alias(tensor, tensor.shape, tensor.stride()).copy_(part.view(tensor.shape))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _alias(tensor: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the memory of a tensor as a plain tensor with a version counter of its own.

    Collectives write behind autograd's back, as PyTorch's do.
    """
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tuple(shape), tuple(stride))
