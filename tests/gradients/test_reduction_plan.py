"""Plans of which gradients travel together and in which order: pure, so tables and random cases test them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep._base.buckets import TensorSpec, contiguous_stride
from lockstep.distributed.reduction.buckets.plan import (
    DEFAULT_CAP_BYTES,
    FIRST_CAP_BYTES,
    MIB,
    SINGLE_BYTES,
    BucketKind,
    ReductionPlan,
    plan_reduction,
)
from lockstep.errors import LayoutError

CPU = torch.device("cpu")
F16, BF16, F32, F64, C64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64
F8 = torch.float8_e4m3fn
FLAT, SINGLE, SPARSE = BucketKind.FLAT, BucketKind.SINGLE, BucketKind.SPARSE


def spec(nbytes, dtype=F32, name="", device=CPU):
    shape = (nbytes // dtype.itemsize,)
    return TensorSpec(name, shape, contiguous_stride(shape), dtype, torch.device(device))


def specs(*sizes, dtype=F32):
    return [spec(size, dtype, f"p{i}") for i, size in enumerate(sizes)]


def indices(plan):
    return [list(bucket.indices) for bucket in plan.buckets]


def kinds(plan):
    return [bucket.kind for bucket in plan.buckets]


# ------------------------------------------------------------------------------------ which bucket


@pytest.mark.parametrize(
    ("sizes", "caps", "expected"),
    [
        ([4, 4, 4, 4], [16], [[0, 1, 2, 3]]),
        ([4, 4, 4, 4], [8], [[0, 1], [2, 3]]),
        ([4, 4, 4, 4], [15], [[0, 1, 2], [3]]),
        ([4, 4, 4, 4, 4], [4, 8], [[0], [1, 2], [3, 4]]),  # the last cap holds for all further ones
        ([4, 4, 4, 4, 4, 4], [4, 8, 4], [[0], [1, 2], [3], [4], [5]]),
        ([8, 4], [4, 4], [[0], [1]]),  # larger than its cap, but not large enough to travel alone
        ([4, 8, 4], [4], [[0], [1], [2]]),
        ([0, 4, 0], [4], [[0, 1, 2]]),
        ([4], [1], [[0]]),
        ([], [4], []),
    ],
)
def test_gradients_fill_buckets_of_successive_sizes(sizes, caps, expected):
    plan = plan_reduction(specs(*sizes), range(len(sizes)), caps)
    assert indices(plan) == expected
    assert kinds(plan) == [FLAT] * len(expected)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_the_order_given_is_the_order_in_buckets_and_of_buckets(order):
    assert indices(plan_reduction(specs(4, 4, 4, 4, 4), order, [8])) == [order[:2], order[2:4], order[4:]]


def test_only_what_is_listed_has_a_place():
    plan = plan_reduction(specs(4, 4, 4, 4), [3, 1], [8])
    assert indices(plan) == [[3, 1]]
    assert plan.members == {1, 3}
    assert len(plan.specs) == 4


def test_by_default_the_first_bucket_is_small_and_large_gradients_travel_alone():
    half = MIB // 2
    plan = plan_reduction(specs(*[half] * 60, SINGLE_BYTES, SINGLE_BYTES - 4), range(62))
    assert (FIRST_CAP_BYTES, DEFAULT_CAP_BYTES, SINGLE_BYTES) == (MIB, 25 * MIB, 4 * MIB)
    # The bucket with the 4 MiB less a little leaves last: it has the last gradient.
    assert indices(plan) == [[0, 1], list(range(2, 52)), [60], [*range(52, 60), 61]]
    assert kinds(plan) == [FLAT, FLAT, SINGLE, FLAT]


@pytest.mark.parametrize("size", [60, 64, 68])
def test_from_some_size_on_a_gradient_travels_alone_whatever_the_cap(size):
    plan = plan_reduction(specs(4, size, 4), range(3), [MIB], single_bytes=64)
    assert indices(plan) == ([[1], [0, 2]] if size >= 64 else [[0, 1, 2]])
    assert kinds(plan) == ([SINGLE, FLAT] if size >= 64 else [FLAT])


def test_dtypes_and_devices_do_not_mix_and_a_bucket_comes_when_its_last_gradient_does():
    mixed = [spec(8, dtype, str(i)) for i, dtype in enumerate([F32, F64, BF16, F64, F32, BF16, F32])]
    mixed[4] = spec(8, F32, "4", "meta")
    plan = plan_reduction(mixed, range(7), [MIB])
    assert indices(plan) == [[1, 3], [4], [2, 5], [0, 6]]
    for bucket in plan.buckets:
        assert {(mixed[i].dtype, mixed[i].device) for i in bucket.indices} == {
            (bucket.layout.dtype, bucket.layout.device)
        }


def test_each_dtype_has_its_own_succession_of_caps():
    mixed = [spec(8, dtype, str(i)) for i, dtype in enumerate([F32, F64] * 4)]
    assert indices(plan_reduction(mixed, range(8), [8, 16])) == [[0], [1], [2, 4], [3, 5], [6], [7]]


def test_sparse_gradients_have_a_bucket_each_at_the_end_but_for_the_carrier():
    plan = plan_reduction(specs(4, 4, 4, 4, 4), [1, 0, 2, 3, 4], [8], sparse={1, 3})
    assert indices(plan) == [[0, 2], [1], [3], [4]]
    assert kinds(plan) == [FLAT, SPARSE, SPARSE, FLAT]
    assert indices(plan_reduction(specs(4, 4), range(2), sparse={0, 1}, single_bytes=4)) == [[0], [1]]


# ------------------------------------------------------------------------------------ the carrier


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([F32, F64], [[0], [1]]),
        ([F64, F32], [[0], [1]]),
        ([F32, C64], [[1], [0]]),  # a report cannot ride behind complex numbers
        ([BF16, F8, C64], [[1], [2], [0]]),  # nor behind eight bits
        ([F16, F8], [[1], [0]]),
        ([C64, F8], [[0], [1]]),
    ],
)
def test_the_last_bucket_that_can_hold_a_report_is_moved_to_the_end(dtypes, expected):
    mixed = [spec(8, dtype, str(i)) for i, dtype in enumerate(dtypes)]
    plan = plan_reduction(mixed, range(len(mixed)), [MIB])
    assert indices(plan) == expected
    assert plan.buckets[-1].can_hold_report == any(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes)


def test_neither_large_nor_sparse_gradients_carry():
    large = plan_reduction(specs(64, 4), [1, 0], single_bytes=64)
    assert indices(large) == [[0], [1]]
    assert [bucket.can_hold_report for bucket in large.buckets] == [False, True]

    for alone, sparse in [(4, ()), (MIB, (0,))]:
        (only,) = plan_reduction(specs(4), [0], sparse=sparse, single_bytes=alone).buckets
        assert not only.can_hold_report


def test_on_an_accelerator_only_gradients_of_a_buckets_size_travel_alone():
    sizes = [24 * MIB, 25 * MIB, 8 * MIB, 8 * MIB, 8 * MIB]
    on_gpu = [spec(size, name=f"p{i}", device="cuda:0") for i, size in enumerate(sizes)]
    for caps, wanted in [({}, [FLAT, SINGLE, FLAT]), ({"caps": [30 * MIB]}, [FLAT] * 3)]:
        plan = plan_reduction(on_gpu, range(5), **caps)
        assert indices(plan) == [[0], [1], [2, 3, 4]]
        assert kinds(plan) == wanted


# ------------------------------------------------------------------------------------ the layout


def test_gradients_lie_one_after_the_other_without_padding():
    # Hooks such as PowerSGD cut the buffer by the gradients' sizes.
    odd = [TensorSpec(str(i), shape, contiguous_stride(shape), F32, CPU) for i, shape in enumerate([(3,), (), (5, 1)])]
    (bucket,) = plan_reduction(odd, [2, 0, 1]).buckets
    assert [(slot.index, slot.offset) for slot in bucket.layout.slots] == [(2, 0), (0, 5), (1, 8)]
    assert bucket.layout.numel == 9


def test_gradients_keep_the_strides_of_their_parameters():
    weight = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    listed = [TensorSpec.of(torch.empty(7), "a"), TensorSpec.of(weight, "w")]
    (bucket,) = plan_reduction(listed, range(2)).buckets
    flat = torch.arange(float(bucket.layout.numel))
    _, view = bucket.layout.views(flat)
    assert view.stride() == weight.stride()
    assert view.shape == weight.shape
    assert torch.equal(view.permute(0, 2, 3, 1).flatten(), flat[7:])


# ------------------------------------------------------------------------------------ as text


def test_a_plan_goes_to_json_and_back():
    listed = [*specs(4, 64, 4, 4), spec(8, BF16, "half"), spec(8, C64, "complex")]
    plan = plan_reduction(listed, [5, 4, 3, 2, 1, 0], [4], sparse={2}, single_bytes=64)
    assert json.loads(plan.to_json()) == [
        ["shared", ["complex"]],
        ["shared", ["half"]],
        ["shared", ["p3"]],
        ["alone", ["p1"]],
        ["sparse", ["p2"]],
        ["shared", ["p0"]],
    ]
    assert ReductionPlan.from_json(plan.to_json(), listed) == plan


def test_a_plan_is_read_by_name_wherever_the_parameters_stand_now():
    listed = specs(4, 8, 12)
    text = plan_reduction(listed, [2, 1, 0], [20]).to_json()
    read = ReductionPlan.from_json(text, [listed[1], listed[2], listed[0], spec(4, name="new")])
    assert indices(read) == [[1, 0], [2]]
    assert read.members == {0, 1, 2}
    assert read.to_json() == text


def test_a_plan_of_another_module_is_refused_by_name():
    text = plan_reduction(specs(4, 4), range(2)).to_json()
    with pytest.raises(LayoutError, match="the plan is of another module: it has a parameter 'p1', this one has not"):
        ReductionPlan.from_json(text, specs(4))
    with pytest.raises(LayoutError, match=r"'p0' and 'p1' are in one bucket, but here they are torch\.float32 on cpu"):
        ReductionPlan.from_json(text, [spec(4, F32, "p0"), spec(4, BF16, "p1")])
    alike = [spec(8, BF16, "p0"), spec(4, BF16, "p1")]
    assert indices(ReductionPlan.from_json(text, alike)) == [[0, 1]]


@pytest.mark.parametrize("caps", [[], [0], [4, -1], (8, 0, 8)])
def test_caps_must_be_positive(caps):
    with pytest.raises(LayoutError, match="expected bucket sizes of at least one byte, got "):
        plan_reduction(specs(4), [0], caps)


# ------------------------------------------------------------------------------------ anything


@st.composite
def cases(draw):
    count = draw(st.integers(0, 12))
    listed = [
        spec(8 * draw(st.integers(0, 6)), draw(st.sampled_from([F16, BF16, F32, F64, C64, F8])), f"p{i}")
        for i in range(count)
    ]
    order = draw(st.permutations(range(count)))[: draw(st.integers(0, count))]
    caps = draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    sparse = frozenset(draw(st.sets(st.integers(0, 11), max_size=3)))
    return listed, order, caps, sparse, draw(st.integers(8, 64))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_plan_has_each_gradient_once_and_keeps_the_promises_above(case):
    listed, order, caps, sparse, alone = case
    plan = plan_reduction(listed, order, caps, sparse, alone)
    assert sorted(i for bucket in plan.buckets for i in bucket.indices) == sorted(order)
    for bucket in plan.buckets:
        members = [listed[i] for i in bucket.indices]
        assert members
        assert {(m.dtype, m.device) for m in members} == {(bucket.layout.dtype, bucket.layout.device)}
        assert bucket.layout.numel == sum(m.numel for m in members)
        assert list(bucket.indices) == sorted(bucket.indices, key=order.index)
        if len(members) > 1:
            assert sum(m.nbytes for m in members) <= max(caps)
        if bucket.kind is not FLAT:
            assert len(members) == 1
        assert (bucket.kind is SPARSE) == (bucket.indices[0] in sparse)
        if bucket.kind is not SPARSE:
            assert (bucket.kind is SINGLE) == (members[0].nbytes >= alone)
    able = [bucket.can_hold_report for bucket in plan.buckets]
    assert not any(able) or able[-1]
    without_report = plan.buckets[: -1 if any(able) else None]
    dense = [order.index(bucket.indices[-1]) for bucket in without_report if bucket.kind is not SPARSE]
    assert dense == sorted(dense)
    assert plan == plan_reduction(listed, order, caps, sparse, alone)
    assert ReductionPlan.from_json(plan.to_json(), listed) == plan
