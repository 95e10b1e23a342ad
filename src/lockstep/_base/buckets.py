"""PURE: packs tensors into flat buckets, and makes views of buckets. Nothing is copied or sent here.

A plan puts tensors of one dtype and one device, in the order given, into flat buckets of at most ``cap_bytes``; a
larger tensor travels alone. Inside a bucket each tensor keeps its strides (channels-last stays so) and starts at a
multiple of :data:`ALIGNMENT` bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

import torch

from lockstep.errors import LayoutError

ALIGNMENT = 64
DEFAULT_CAP_BYTES = 10 * 1024 * 1024


@dataclass(frozen=True)
class TensorSpec:
    """The properties of one tensor that a plan depends on."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str = "") -> "TensorSpec":
        """Return the spec of a strided tensor; one with gaps or overlaps is laid out contiguously instead."""
        shape = tuple(tensor.shape)
        return cls(name, shape, dense_stride(shape, tensor.stride()), tensor.dtype, tensor.device)

    def contiguous(self) -> "TensorSpec":
        """Return the same spec with the strides of a contiguous tensor."""
        return replace(self, stride=contiguous_stride(self.shape))

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class BucketSlot:
    """The place of a tensor in its bucket: its index in the plan's list, and its offset in elements."""

    index: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class FlatBucket:
    """Tensors that travel as one flat tensor of ``numel`` elements."""

    dtype: torch.dtype
    device: torch.device
    numel: int
    slots: tuple[BucketSlot, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the flat tensor, with padding."""
        return self.numel * self.dtype.itemsize

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors inside ``flat``, a 1-D tensor of ``numel`` elements, in the order of the slots."""
        start = flat.storage_offset()
        return [flat.as_strided(slot.shape, slot.stride, start + slot.offset) for slot in self.slots]

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of the plan that lie in this bucket."""
        return [tensors[slot.index] for slot in self.slots]


@dataclass(frozen=True)
class BucketPlan:
    """The specs of all tensors, and their buckets."""

    specs: tuple[TensorSpec, ...]
    buckets: tuple[FlatBucket, ...]


def plan_buckets(specs: Iterable[TensorSpec], cap_bytes: int = DEFAULT_CAP_BYTES) -> BucketPlan:
    """Put tensors into buckets of at most ``cap_bytes`` bytes, in order; buckets are ordered by their first tensors.

    Raises :class:`LayoutError` if ``cap_bytes`` is not positive.
    """
    if cap_bytes <= 0:
        raise LayoutError(f"expected a bucket size of at least one byte, got {cap_bytes}")
    listed = tuple(specs)
    groups: list[list[int]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, spec in enumerate(listed):
        size = _padded(spec) * spec.dtype.itemsize
        group, used = open_groups.get((spec.dtype, spec.device), ([], 0))
        if not group or used + size > cap_bytes:
            group, used = [], 0
            groups.append(group)
        group.append(index)
        open_groups[spec.dtype, spec.device] = (group, used + size)
    return BucketPlan(listed, tuple(pack_bucket(listed, group) for group in groups))


def pack_bucket(specs: Sequence[TensorSpec], indices: Sequence[int], alignment: int = ALIGNMENT) -> FlatBucket:
    """Return the bucket of the tensors at ``indices``, all of one dtype and device, in that order."""
    members = [specs[i] for i in indices]
    offsets = list(accumulate((_padded(spec, alignment) for spec in members), initial=0))
    slots = tuple(
        BucketSlot(index, offset, spec.shape, spec.stride)
        for index, spec, offset in zip(indices, members, offsets, strict=False)
    )
    return FlatBucket(members[0].dtype, members[0].device, offsets[-1], slots)


def _padded(spec: TensorSpec, alignment: int = ALIGNMENT) -> int:
    step = max(1, alignment // spec.dtype.itemsize)
    return -(-spec.numel // step) * step


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return ``stride`` if it lays ``shape`` out without gaps or overlaps, else the stride of a contiguous tensor."""
    expected = 1
    for step, size in sorted((st, sz) for st, sz in zip(stride, shape, strict=True) if sz != 1):
        if step != expected:
            return contiguous_stride(shape)
        expected *= size
    return tuple(stride)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    steps = accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1)
    return tuple(reversed(list(steps))) if shape else ()
