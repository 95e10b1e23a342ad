"""What holds for any nested value, any tensors and any device list, tried on random ones."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep._base.buckets import TensorSpec, plan_buckets
from lockstep._base.tree import Tree, tree_map
from lockstep.local import comm, gather, scatter
from lockstep.local.scatter_gather import split_sizes

CPU = torch.device("cpu")
Point = namedtuple("Point", "x y")
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.uint8, torch.bool),
]

examples = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
sizes = st.lists(st.integers(0, 4), max_size=4)
numbers = st.integers(0, 2**31)


@st.composite
def tensors(draw, shape=None, dtype=None):
    """A tensor of any dtype and memory format, perhaps without elements, with gaps or expanded."""
    shape = draw(sizes) if shape is None else shape
    dtype = dtype or draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(numbers))
    tensor = torch.randint(0, 100, shape, generator=generator).to(dtype)
    form = draw(st.sampled_from(["plain", "permuted", "channels last", "gaps", "expanded"]))
    if form == "permuted" and tensor.dim() > 1:
        order = draw(st.permutations(range(tensor.dim())))
        tensor = tensor.permute(order).contiguous().permute([order.index(i) for i in range(tensor.dim())])
    elif form == "channels last" and tensor.dim() == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    elif form == "gaps" and tensor.dim():
        tensor = torch.stack([tensor, tensor], -1)[..., 0]
    elif form == "expanded" and tensor.dim() and len(tensor):
        tensor = tensor[:1].expand_as(tensor)
    return tensor


def device_lists(kind):
    """Lists of one to four devices, with repeats; the host may be among accelerators."""
    names = ["cpu"] if kind == "cpu" else ["sim:0", "sim:1", "sim:2", "cpu"]
    return st.lists(st.sampled_from(names), min_size=1, max_size=4).map(lambda d: [torch.device(n) for n in d])


plain_leaves = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=2))


def nested(leaves):
    """Containers of leaves, in containers."""

    def extend(children):
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 3)), children, max_size=3),
            st.dictionaries(st.text(max_size=2), children, max_size=3).map(OrderedDict),
            st.tuples(children, children).map(lambda pair: Point(*pair)),
        )

    return st.recursive(leaves, extend, max_leaves=8)


def assert_same(one, other):
    """Two nested values are alike in structure, types and values, wherever their tensors lie."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.cpu(), other.cpu())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def assert_independent(made, given):
    """Writing to one of the tensors that were made counts for that one alone, and changes no other."""
    for tensor in made:
        if 0 in tensor.stride():  # some of its elements lie in one place
            continue
        others = [(t, t._version, t.clone()) for t in (*made, *given) if t is not tensor]
        version = tensor._version
        tensor.zero_()
        assert tensor._version == version + 1
        assert all(t._version == v and torch.equal(t, old) for t, v, old in others)


@examples
@given(st.integers(0, 200), st.integers(1, 12))
def test_even_splits_use_every_device_there_are_rows_for(rows, parts):
    split = split_sizes(rows, parts)
    assert sum(split) == rows
    assert len(split) == max(1, min(rows, parts))
    assert max(split) - min(split) <= 1
    assert split == sorted(split, reverse=True)


@examples
@given(st.integers(0, 200), st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_weighted_splits_follow_the_weights(rows, weights):
    split = split_sizes(rows, len(weights), weights)
    assert sum(split) == rows
    assert len(split) == max(1, min(rows, len(weights)))
    assert min(split) >= 1 or rows == 0
    ideal = [rows * weight / sum(weights) for weight in weights]
    if min(ideal) >= 1:
        assert all(abs(size - share) < 1 + 1e-9 for size, share in zip(split, ideal, strict=True))


@st.composite
def batches(draw):
    """Nested inputs whose tensors agree in their size along a dimension, and that dimension."""
    dim, rows = draw(st.integers(0, 1)), draw(st.integers(0, 7))
    shapes = st.lists(st.integers(0, 3), min_size=1, max_size=2).map(lambda s: [*s[:dim], rows, *s[dim:]])
    return draw(nested(st.one_of(plain_leaves, shapes.flatmap(tensors)))), dim, rows


@pytest.mark.parametrize("kind", ["cpu", "sim"], indirect=True)
def test_gather_undoes_scatter(kind):
    @examples
    @given(batches(), device_lists(kind))
    def check(batch, places):
        value, dim, rows = batch
        shares = scatter(value, places, dim)
        has_tensors = any(isinstance(leaf.value, torch.Tensor) for leaf in Tree(value, "v").leaves)
        assert len(shares) == (max(1, min(rows, len(places))) if has_tensors else len(places))
        for share, place in zip(shares, places, strict=False):
            for leaf in Tree(share, "v").leaves:
                assert not isinstance(leaf.value, torch.Tensor) or leaf.value.device == place
        back = gather(shares, places[0], dim)
        assert_same(back, value)
        tree_map(lambda leaf: not isinstance(leaf, torch.Tensor) or leaf.device == places[0] or 1 / 0, back)

    check()


@examples
@given(st.lists(tensors(), max_size=12), st.integers(1, 2000))
def test_a_plan_covers_every_tensor_once_in_order_and_within_the_cap(some, cap):
    plan = plan_buckets([TensorSpec.of(t, str(i)) for i, t in enumerate(some)], cap)
    placed = [slot.index for bucket in plan.buckets for slot in bucket.slots]
    assert sorted(placed) == list(range(len(some)))
    assert [b.slots[0].index for b in plan.buckets] == sorted(b.slots[0].index for b in plan.buckets)
    for bucket in plan.buckets:
        members = [slot.index for slot in bucket.slots]
        assert members == sorted(members)
        assert {some[i].dtype for i in members} == {bucket.dtype}
        assert len(members) == 1 or bucket.nbytes <= cap


@pytest.mark.parametrize("kind", ["cpu", "sim"], indirect=True)
def test_broadcast_coalesced_is_broadcast_of_each(kind):
    @examples
    @given(st.lists(tensors(), max_size=8), device_lists(kind), st.one_of(st.integers(1, 2000), st.just(10 << 20)))
    def check(some, places, cap):
        some = [t.to(places[0]) for t in some]
        rows = comm.broadcast_coalesced(some, places[::-1], cap)
        columns = [comm.broadcast(t, places[::-1]) for t in some]
        assert len(rows) == len(places)
        for i, (row, place) in enumerate(zip(rows, places[::-1], strict=True)):
            assert_same(row, [column[i] for column in columns])
            assert_same(row, some)
            assert all(t.device == place for t in row)
            assert [copy is tensor for copy, tensor in zip(row, some, strict=True)] == [place == places[0]] * len(some)
        for tensor, column in zip(some, columns, strict=True):
            assert type(column) is tuple
            assert [copy is tensor for copy in column] == [place == places[0] for place in places[::-1]]
            sizes = tensor.shape[::-1]
            out = [torch.empty(sizes, dtype=tensor.dtype, device=p).permute([*range(len(sizes))][::-1]) for p in places]
            filled = comm.broadcast(tensor, out=[*out, tensor])
            assert type(filled) is tuple
            assert all(one is other for one, other in zip(filled, [*out, tensor], strict=True))
            assert_same(list(filled), [tensor] * len(filled))
        assert_independent([copy for row in rows for copy in row if copy.device != places[0]], some)

    check()


@st.composite
def summands(draw, count):
    """For each of `count` devices tensors of the same shapes and dtypes, each in a memory format of its own."""
    layouts = draw(st.lists(st.tuples(sizes, st.sampled_from(DTYPES)), max_size=6))
    return [[draw(tensors(shape, dtype)) for shape, dtype in layouts] for _ in range(count)]


@pytest.mark.parametrize("kind", ["cpu", "sim"], indirect=True)
def test_reduce_add_coalesced_is_the_sum_of_each_in_order(kind):
    @examples
    @given(st.data(), device_lists(kind), st.integers(1, 2000))
    def check(data, places, cap):
        rows = [[t.to(p) for t in row] for row, p in zip(data.draw(summands(len(places))), places, strict=True)]
        target = data.draw(st.sampled_from([*places, CPU]))
        before = [(t, t.clone(), t._version) for row in rows for t in row]
        expected = []
        for column in zip(*rows, strict=True):
            total = column[0].cpu()
            for term in column[1:]:
                total = total + term.cpu()
            expected.append(total)
        found = comm.reduce_add_coalesced(rows, target, cap)
        assert type(found) is tuple
        for total, plain, column in zip(found, expected, zip(*rows, strict=True), strict=True):
            assert total.device == target
            assert_same(total, plain)
            assert_same(comm.reduce_add(column, target), plain)
        assert all(torch.equal(t, old) and t._version == version for t, old, version in before)
        assert_independent(found, [t for row in rows for t in row])

    check()


@pytest.mark.parametrize("kind", ["cpu", "sim"], indirect=True)
def test_comm_gather_undoes_comm_scatter(kind):
    @examples
    @given(st.data(), device_lists(kind))
    def check(data, places):
        tensor = data.draw(tensors(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))))
        dim = data.draw(st.integers(-tensor.dim(), tensor.dim() - 1))
        cuts = sorted(
            data.draw(st.lists(st.integers(0, tensor.shape[dim]), min_size=len(places) - 1, max_size=len(places) - 1))
        )
        chunk_sizes = [b - a for a, b in zip([0, *cuts], [*cuts, tensor.shape[dim]], strict=True)]
        tensor, expected = tensor.to(data.draw(st.sampled_from([*places, CPU]))), tensor.split(chunk_sizes, dim)
        target = data.draw(st.sampled_from([*places, CPU]))
        out = [torch.empty(part.shape, dtype=part.dtype, device=p) for part, p in zip(expected, places, strict=True)]
        filled, whole = comm.scatter(tensor, dim=dim, out=out), torch.empty_like(tensor, device=target)
        assert all(one is other for one, other in zip(filled, out, strict=True))
        for chunks in (comm.scatter(tensor, places, chunk_sizes, dim), filled):
            assert type(chunks) is tuple
            assert [chunk.device for chunk in chunks] == places
            assert_same(chunks, expected)
            for back in (comm.gather(chunks, dim, target), comm.gather(chunks, dim, out=whole)):
                assert back.device == target
                assert_same(back, tensor)
            assert back is whole

    check()
