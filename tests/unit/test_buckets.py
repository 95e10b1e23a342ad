"""Plans of which tensors travel together: pure, so a table tests them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from lockstep.buckets import (
    ALIGNMENT,
    DEFAULT_CAP_BYTES,
    BucketPlan,
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


# --------------------------------------------------------------------------- fingerprint and JSON

SPECS = [spec((2, 3), name="weight"), spec(3, name="bias"), spec(4, I64, name="count")]


def changed(index, **values):
    specs = list(SPECS)
    specs[index] = dataclasses.replace(specs[index], **values)
    return specs


def test_plans_of_the_same_specs_have_the_same_fingerprint():
    one, other = plan_buckets(SPECS), plan_buckets(list(SPECS))
    assert one == other
    assert one.fingerprint() == other.fingerprint()
    assert int(one.fingerprint(), 16) > 0


def test_devices_do_not_count_in_a_fingerprint():
    elsewhere = [dataclasses.replace(s, device=torch.device("meta")) for s in SPECS]
    assert plan_buckets(elsewhere).fingerprint() == plan_buckets(SPECS).fingerprint()


@pytest.mark.parametrize(
    ("specs", "cap"),
    [
        (changed(0, name="Weight"), DEFAULT_CAP_BYTES),
        (changed(0, shape=(3, 2), stride=(2, 1)), DEFAULT_CAP_BYTES),
        (changed(0, stride=(1, 2)), DEFAULT_CAP_BYTES),
        (changed(0, dtype=F64), DEFAULT_CAP_BYTES),
        (SPECS[::-1], DEFAULT_CAP_BYTES),
        (SPECS[:2], DEFAULT_CAP_BYTES),
        (SPECS, 1),
    ],
    ids=["name", "shape", "stride", "dtype", "order", "missing", "buckets"],
)
def test_any_other_difference_changes_the_fingerprint(specs, cap):
    assert plan_buckets(specs, cap).fingerprint() != plan_buckets(SPECS).fingerprint()


@pytest.mark.parametrize("cap", [1, 100, DEFAULT_CAP_BYTES])
def test_a_plan_goes_to_json_and_back(cap):
    specs = [*SPECS, spec(2, BF16, "meta", "half"), spec((), C128), spec((0, 2), BOOL)]
    plan = plan_buckets(specs, cap)
    again = BucketPlan.from_json(plan.to_json())
    assert again == plan
    assert again.fingerprint() == plan.fingerprint()
    assert again.to_json() == plan.to_json()


def test_a_plan_with_a_dtype_that_does_not_exist_is_refused():
    data = json.loads(plan_buckets(SPECS).to_json())
    data["tensors"][0][3] = "torch.nothing"
    with pytest.raises(LayoutError, match=r"name of a dtype such as torch.float32, got 'torch.nothing'"):
        BucketPlan.from_json(json.dumps(data))
