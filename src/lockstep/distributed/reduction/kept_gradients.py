"""Gradients that the program keeps: it reads their memory itself, so they get their means in that memory.

Some programs give every parameter a ``.grad`` that is a view of one flat tensor, and their optimizers read that tensor;
others keep the tensors that ``.grad`` was once. PyTorch's DistributedDataParallel writes the mean into the ``.grad``
from before the pass. Here the mean is made in a bucket or a new tensor, and :func:`write_back` copies it.

A gradient from before the pass counts as kept if anything but ``.grad`` refers to the tensor or its memory, or if
PyTorch has not allocated the memory (``torch.from_numpy``). If nothing does, as after ``no_sync()``, nobody can tell
that a bucket's tensor takes its place. Gradients that share memory with each other alone are not kept: autograd makes
such, even some that overlap.
"""

import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from lockstep.distributed.reduction.gradients import GradientSnapshot, bucket_memory, references, users_of
from lockstep.dtensors import is_dtensor, local_part


class KeptGradient(NamedTuple):
    """A gradient that the program keeps."""

    position: int
    """The position of its parameter in the snapshot."""
    parameter: Parameter
    grad: Tensor


def find_kept(before: GradientSnapshot, positions: Iterable[int], given: Container[int]) -> list[KeptGradient]:
    """Return the gradients, of those ``before`` the pass, that the program keeps; nothing may have been copied out yet.

    ``positions``: of the parameters to look at; ``given``: the numbers of storages in which buckets still refer to the
    gradients that they have given. If another object of the library refers to a gradient, it counts as kept, which
    costs a copy.
    """
    if before.is_empty:
        return []
    every = before.grads
    positions = [position for position in positions if every[position] is not None]
    counts = references([every[position] for position in positions])
    storages = _storages([cast("Tensor", every[position]) for position in positions])
    keys = [0 if storage is None else storage._cdata for storage in storages]
    sharing = Counter(keys)
    kept = {
        key
        for key, storage in zip(keys, storages, strict=True)
        if storage is not None
        and (users_of(storage) > sharing[key] or not storage.resizable())
        and not (key in bucket_memory or key in given)
    }
    found = [
        position
        for position, key, count in zip(positions, keys, counts, strict=True)
        if key in kept or count > _UNKEPT + (key in given)
    ]
    return [KeptGradient(each, before.parameters[each], cast("Tensor", every[each])) for each in found]


def _storages(grads: Sequence[Tensor]) -> list[UntypedStorage | None]:
    """Return the storages of gradients; None for those that are not strided."""
    local = grads if set(map(type, grads)) <= {Tensor} else list(map(local_part, grads))
    try:
        return list(map(Tensor.untyped_storage, local))
    except NotImplementedError:
        return [each.untyped_storage() if each.layout == torch.strided else None for each in local]


def _references_of_unkept() -> int:
    parameter = Parameter(torch.empty(0, device="cpu"))
    parameter.grad = torch.empty(0, device="cpu")
    grads = [parameter.grad]
    return references([grads[0]])[0]


_UNKEPT = _references_of_unkept()
"""The reference count of a gradient in two lists that nothing else in Python refers to."""


def write_back(kept: Sequence[KeptGradient]) -> None:
    """Copy the gradients that the parameters have now into those that the program keeps, and let these be ``.grad``."""
    found = [
        (parameter, grad, reduced)
        for _, parameter, grad in kept
        if (reduced := parameter.grad) is not None and reduced is not grad and _can_hold(grad, reduced)
    ]
    if found:
        values = [new.to_dense() if new.is_sparse and not grad.is_sparse else new for _, grad, new in found]
        torch._foreach_copy_([local_part(grad) for _, grad, _ in found], list(map(local_part, values)))
        for parameter, grad, _ in found:
            parameter.grad = grad


def _can_hold(grad: Tensor, reduced: Tensor) -> bool:
    """Return False for gradients that autograd would not have added to in place either."""
    if is_dtensor(reduced):
        return is_dtensor(grad) and grad.placements == reduced.placements  # type: ignore[attr-defined]
    return reduced.is_sparse or not grad.is_sparse


def give_up(kept: Sequence[KeptGradient]) -> None:
    """Zero the memory of gradients that the program keeps, and that are dropped; log that ``.grad`` is None now."""
    if kept:
        for each in kept:
            local_part(each.grad).zero_()
        logging.getLogger("lockstep").warning(
            "%d gradients were dropped, whose memory the program keeps: that memory is zero now, and .grad is None. A "
            "program that reads that memory has to set .grad again before the next backward",
            len(kept),
        )
