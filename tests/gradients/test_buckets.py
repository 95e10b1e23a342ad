"""Plans of which tensors travel together: pure, so a table tests them."""

from __future__ import annotations

import pytest
import torch

from lockstep._base.buckets import (
    ALIGNMENT,
    DEFAULT_CAP_BYTES,
    TensorSpec,
    contiguous_stride,
    dense_stride,
    plan_buckets,
)
from lockstep.errors import LayoutError

CPU = torch.device("cpu")
KiB = 1 << 10
F32, F64, I64, BF16, BOOL, C128 = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.bfloat16,
    torch.bool,
    torch.complex128,
)


def spec(shape, dtype=F32, device=CPU, name=""):
    shape = (shape,) if isinstance(shape, int) else shape
    return TensorSpec(name, shape, contiguous_stride(shape), dtype, torch.device(device))


def indices(plan):
    return [[slot.index for slot in bucket.slots] for bucket in plan.buckets]


# ------------------------------------------------------------------------------------ which bucket


@pytest.mark.parametrize(
    ("kibibytes", "cap", "expected"),
    [
        ([1, 1, 1, 1], 4, [[0, 1, 2, 3]]),
        ([1, 1, 1, 1], 2, [[0, 1], [2, 3]]),
        ([1, 1, 1, 1], 3, [[0, 1, 2], [3]]),
        ([3, 2, 1], 4, [[0], [1, 2]]),
        ([1, 9, 1], 4, [[0], [1], [2]]),
        ([9, 1], 4, [[0], [1]]),
        ([1], 4, [[0]]),
        ([], 4, []),
    ],
)
def test_tensors_fill_buckets_up_to_the_cap_in_the_order_given(kibibytes, cap, expected):
    plan = plan_buckets([spec(n * KiB // 4) for n in kibibytes], cap * KiB)
    assert indices(plan) == expected


def test_one_byte_over_the_cap_is_too_much():
    specs = [spec(256), spec(256)]
    assert indices(plan_buckets(specs, 2 * KiB)) == [[0, 1]]
    assert indices(plan_buckets(specs, 2 * KiB - 1)) == [[0], [1]]


def test_the_default_cap_is_ten_mebibytes():
    assert 10 * 1024 * KiB == DEFAULT_CAP_BYTES
    five = [spec(5 * 1024 * KiB // 4)] * 3
    assert indices(plan_buckets(five)) == [[0, 1], [2]]


def test_dtypes_and_devices_travel_apart_and_buckets_come_in_the_order_of_their_first_tensor():
    specs = [spec(1), spec(1, I64), spec(1), spec(1, device="meta"), spec(1, I64), spec(1, device="meta")]
    plan = plan_buckets(specs)
    assert indices(plan) == [[0, 2], [1, 4], [3, 5]]
    assert [(b.dtype, b.device.type) for b in plan.buckets] == [(F32, "cpu"), (I64, "cpu"), (F32, "meta")]


def test_a_full_bucket_is_not_opened_again():
    specs = [spec(128), spec(200), spec(16)]  # the last would fit into the first bucket
    assert indices(plan_buckets(specs, KiB)) == [[0], [1, 2]]


@pytest.mark.parametrize("cap", [0, -5])
def test_a_cap_below_one_byte_is_refused(cap):
    with pytest.raises(LayoutError, match=f"at least one byte, got {cap}"):
        plan_buckets([], cap)


# ------------------------------------------------------------------------------- where in a bucket


@pytest.mark.parametrize("dtype", [F32, F64, I64, BF16, BOOL, C128, torch.uint8])
def test_every_tensor_starts_at_a_multiple_of_the_alignment(dtype):
    plan = plan_buckets([spec(n, dtype) for n in (1, 3, 0, 17, 64, 65)])
    (bucket,) = plan.buckets
    step = ALIGNMENT // dtype.itemsize
    assert [slot.offset % step for slot in bucket.slots] == [0] * 6
    assert bucket.nbytes % ALIGNMENT == 0
    assert bucket.nbytes == bucket.numel * dtype.itemsize
    ends = [slot.offset + torch.Size(slot.shape).numel() for slot in bucket.slots]
    starts = [slot.offset for slot in bucket.slots[1:]] + [bucket.numel]
    assert all(0 <= start - end < step for end, start in zip(ends, starts, strict=True))


def test_padding_counts_towards_the_cap():
    specs = [spec(1), spec(1), spec(1)]  # 64 bytes each, with padding
    assert indices(plan_buckets(specs, 191)) == [[0, 1], [2]]
    assert indices(plan_buckets(specs, 192)) == [[0, 1, 2]]


def test_views_lie_where_the_plan_says_and_keep_shapes_and_strides():
    tensors = [
        torch.randn(3, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.tensor(1.0),
        torch.empty(0, 3),
    ]
    (bucket,) = plan_buckets([TensorSpec.of(t) for t in tensors]).buckets
    flat = torch.zeros(bucket.numel + 5)[5:]  # a flat tensor may itself be a view
    views = bucket.views(flat)
    for view, tensor, slot in zip(views, tensors, bucket.slots, strict=True):
        assert (view.shape, view.stride()) == (tensor.shape, tensor.stride())
        assert view.storage_offset() == 5 + slot.offset
        view.copy_(tensor)
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, tensor)  # no view overlaps another
    assert flat.count_nonzero() == sum(t.count_nonzero() for t in tensors)


def test_take_picks_the_tensors_of_a_bucket_by_their_place_in_the_plan():
    plan = plan_buckets([spec(1), spec(1, I64), spec(1)])
    assert [bucket.take(["a", "b", "c"]) for bucket in plan.buckets] == [["a", "c"], ["b"]]


# --------------------------------------------------------------------------------- strides and specs


@pytest.mark.parametrize(
    ("tensor", "kept"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(2, 3, 4).permute(1, 2, 0), True),
        (torch.empty(3, 1, 4).expand(3, 1, 4), True),
        (torch.empty(()), True),
        (torch.empty(4, 6)[:, ::2], False),
        (torch.empty(4, 6)[:, :3], False),
        (torch.empty(3, 1).expand(3, 4), False),
        (torch.empty(1).expand(3), False),
    ],
)
def test_strides_without_gaps_or_overlaps_are_kept_and_others_made_contiguous(tensor, kept):
    made = TensorSpec.of(tensor, "name")
    assert (made.name, made.shape, made.dtype) == ("name", tuple(tensor.shape), F32)
    assert made.stride == (tensor.stride() if kept else torch.empty(tensor.shape).stride())
    assert dense_stride(tensor.shape, tensor.stride()) == made.stride


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (1, 1), (0,), (0, 3), (3, 0), (2, 0, 3)])
def test_contiguous_strides_are_those_of_torch(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_a_spec_knows_its_size():
    assert (spec((2, 3), F64).numel, spec((2, 3), F64).nbytes) == (6, 48)
    assert (spec(()).numel, spec((0, 3)).numel) == (1, 0)
