"""The native collectives of a `shm` group in each of their ways: values, layouts, dtypes, works.

References are computed here with the same arithmetic in rank order, and compared bit for bit; or they are Gloo's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from lockstep.distributed import ProcessGroupShm
from lockstep.errors import AgreementError, CommunicationError, DeviceError, LayoutError, OptionError
from lockstep.shm import one_host
from programs.ranks import on_ranks
from shm.collectives import (
    CHUNK,
    COLLECTIVES,
    DTYPES,
    FLOATS,
    FUNCTIONS,
    ONE_EXCHANGE,
    WHERE,
    Placed,
    Run,
    all_gather_single,
    can_reduce,
    combined,
    drawn,
    error_of,
    every_collective,
    exact,
    finish,
    options,
    reduce_scatter_single,
    same,
    still_works,
)
from threaded import run_ranks


def once(function):
    """The values of every size, drawn once for all ranks."""
    return functools.lru_cache(None)(function)


# ---------------------------------------------------------------------------------- every way, every size


@dataclasses.dataclass
class Every:
    """Of which tensors every collective is run, by the ranks of which hosts."""

    hosts: str
    sizes: Any = (3,)  # or a function of the dtype
    dtypes: Any = (torch.float32,)
    ops: Any = ("SUM",)
    where: Any = WHERE
    drawn: Callable[..., Any] = exact
    small_chunks: bool = False


def chunk_ends(dtype):
    each = dtype.itemsize
    return {0, 1, 2, 3, 24 // each, 25 // each + 1, 64 // each, 320 // each, 320 // each + 1, 1001 // each}


def rows(rows, marks=()):
    return [pytest.param(row, id=name, marks=marks) for name, row in rows.items()]


SIZES = [0, 1, 17, ONE_EXCHANGE, ONE_EXCHANGE + 1, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 13]  # of float32
FEW = (torch.int16, torch.bfloat16, torch.complex64, torch.bool)
ORDERED = ("SUM", "PRODUCT", "MIN", "MAX")


def every_size(world):
    return Every("a" * world, SIZES, drawn=drawn)


def small_chunks(world, dtype):
    return Every("a" * world, chunk_ends, [dtype], drawn=drawn, small_chunks=True)


def two_levels(hosts, dtypes=FEW, ops=ORDERED):
    return Every(hosts, (0, 3), dtypes, ops, ["private"])


def sizes_on_two_levels(hosts):
    return {
        f"{hosts}, shared": Every(hosts, (1000, 100_001), ops=ORDERED, where=["shared"]),
        f"{hosts}, in chunks": Every(hosts, (600_001,), where=["private"]),
        f"{hosts}, a dtype that leaders gather": Every(hosts, (300_001,), [torch.complex64], where=["private"]),
        f"{hosts}, mixed": Every(hosts, (50_001,), where=["mixed"]),
    }


QUICK = {
    "small chunks of uint8 on 1": small_chunks(1, torch.uint8),
    "small chunks of bfloat16 on 2": small_chunks(2, torch.bfloat16),
    "small chunks of float64 on 4": small_chunks(4, torch.float64),
    "aabb": two_levels("aabb", ops=(*ORDERED, "AVG")),  # a mean of four is exact, too
    **{hosts: two_levels(hosts) for hosts in ("abab", "abc")},
    **{hosts: two_levels(hosts, [torch.float32]) for hosts in ("abba", "abcd", "abbb")},
    **sizes_on_two_levels("aab"),
}
AROUND = {
    "every size on 2": every_size(2),
    "every size on 3": every_size(3),
    "small chunks of uint8 on 7": small_chunks(7, torch.uint8),
    "16 ranks of which not all have a shard": Every("a" * 16, (0, 100, ONE_EXCHANGE + 3), drawn=drawn),
    "abb": two_levels("abb", DTYPES),
    "aaab": two_levels("aaab"),
}
SOAK = {
    "every size on 1": every_size(1),
    "small chunks of uint8 on 2": small_chunks(2, torch.uint8),
    "small chunks of bfloat16 on 5": small_chunks(5, torch.bfloat16),
    **sizes_on_two_levels("abab"),
}


@pytest.mark.parametrize("row", [*rows(QUICK), *rows(AROUND, pytest.mark.around), *rows(SOAK, pytest.mark.soak)])
def test_every_collective_gives_what_arithmetic_gives(row, monkeypatch):
    if row.small_chunks:
        for name, size in (("ONE_EXCHANGE_BYTES", 8 * 3), ("CHUNK_BYTES", 8 * 40), ("BLOCK_BYTES", 8 * 4)):
            monkeypatch.setattr(one_host, name, size)
    shared, world = once(row.drawn), len(row.hosts)

    def call(rank):
        for number, (dtype, op, where) in enumerate(itertools.product(row.dtypes, row.ops, row.where)):
            for numel in (row.sizes(dtype) if callable(row.sizes) else row.sizes) if can_reduce(dtype, op) else ():
                try:
                    every_collective(rank, numel, dtype, op, where, (number + numel) % world, shared)
                except BaseException as error:
                    error.add_note(f"with {numel} elements of {dtype}, {op}, in {where} memory")
                    raise

    run_ranks(world, call, hosts=row.hosts)


def test_output_and_input_may_be_the_same_memory():
    """As FSDP has it: what a rank gives is its part of what it gets."""

    def call(rank):
        world, own, group = rank.world, rank.rank, rank.group
        for where in WHERE:
            for numel in (5, ONE_EXCHANGE + 1, CHUNK + 1):
                given = [shared(each, numel) for each in range(world)]
                whole = Placed(rank, torch.zeros(world * numel), where)
                part = whole.tensor.view(world, numel)[own].copy_(given[own])
                all_gather_single(whole.tensor, part, group=group)
                whole.check(torch.cat(given))

                rows = [torch.stack([given[(own + to) % world] for to in range(world)]) for own in range(world)]
                whole = Placed(rank, rows[own].view(-1), where)
                part = whole.tensor.view(world, numel)[own]
                reduce_scatter_single(part, whole.tensor, group=group)
                wanted = rows[own].clone()
                wanted[own] = combined([row[own] for row in rows])
                whole.check(wanted.view(-1))

    shared = once(drawn)
    run_ranks(3, call, hosts="aaa")


# ------------------------------------------------------------------------------- operations and dtypes


def every_op(rank, large=False, drawn=drawn):
    """(dtype, op) -> the result of an all-reduce, or the error's type; of a small tensor or one of several chunks."""
    results = {}
    for dtype in DTYPES:
        x = drawn(rank.rank, 9, dtype)
        for op in FUNCTIONS:
            y = x.repeat(-(-one_host.ONE_EXCHANGE_BYTES // x.nbytes) + 1) if large else x.clone()
            try:
                rank.group.allreduce([y], options(dist.AllreduceOptions, op)).wait()
                results[dtype, op] = y[:9].clone()
            except RuntimeError as error:
                results[dtype, op] = type(error)
    return results


@pytest.fixture(scope="module")
def with_gloo():
    return {key: x for key, x in run_ranks(2, every_op)[0].items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("hosts", ["a", "aa", "aaa", "aba", "aabb"])
def test_every_dtype_and_operation_is_that_of_arithmetic_and_of_gloo_or_refused(hosts, large, with_gloo):
    world, of = len(hosts), exact if "b" in hosts else drawn
    for results in run_ranks(world, every_op, large, of, hosts=hosts):
        for (dtype, op), got in results.items():
            if not can_reduce(dtype, op):
                assert got is OptionError, (dtype, op, got)
                continue
            wanted = combined([of(rank, 9, dtype) for rank in range(world)], op)
            if op == "PRODUCT" and dtype.is_complex:  # the processor's vectors round them in another way
                torch.testing.assert_close(got, wanted)
            else:
                same(got, wanted)
        assert len(with_gloo) >= 4 * 8  # four operations, eight dtypes
        for key, wanted in with_gloo.items() if hosts == "aa" else ():
            same(results[key], wanted)


IMPOSSIBLE = {  # on every rank: a call with a tensor of so many elements, and words of its error
    "a mean of truth values": (lambda g, x: dist.all_reduce(x.bool(), ReduceOp.AVG, group=g), "torch.bool with AVG"),
    "at one rank": (
        lambda g, x: dist.reduce(x.bool(), group=g, group_dst=1, op=ReduceOp.AVG),
        "use another operation, or convert",
    ),
    "scattered": (
        lambda g, x: dist.reduce_scatter(x.bool(), [x.bool()] * g.size(), ReduceOp.AVG, group=g),
        "torch.bool with AVG",
    ),
    "bits of fractions": (lambda g, x: dist.all_reduce(x, ReduceOp.BAND, group=g), "torch.float32 with BAND"),
    "the least of complex numbers": (
        lambda g, x: g.reduce([x.to(torch.complex64)], options(dist.ReduceOptions, "MIN", rootRank=1)).wait(),
        "torch.complex64 with MIN",
    ),
    "what can be added, and not divided": (
        lambda g, x: g.allreduce([x.to(torch.complex32)], options(dist.AllreduceOptions, "AVG")).wait(),
        "torch.complex32 with AVG",
    ),
    "a factor of NCCL": (lambda g, x: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0), group=g), "PREMUL_SUM"),
}


@pytest.mark.parametrize("hosts", ["aa", "aaa", "aab", "abab"])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_reduced_is_told_to_every_rank_and_the_group_goes_on(name, hosts):
    call, words = IMPOSSIBLE[name]

    def refused(rank):
        errors = [error_of(lambda n=n: call(rank.group, torch.zeros(n)))[:2] for n in (0, 4, ONE_EXCHANGE + 1)]
        return *errors, still_works(rank)

    (results,) = set(run_ranks(len(hosts), refused, hosts=hosts))
    for kind, text in results[:-1]:
        assert kind is OptionError, text
        assert words in text
    assert results[-1]


MOVED = [*DTYPES, torch.complex32, torch.uint16, torch.uint32, torch.uint64]
MOVED += [each for name, each in sorted(vars(torch).items()) if name.startswith("float8")]
LAID_OUT = {  # rows of two elements
    "without gaps": lambda x: x,
    "with gaps": lambda x: x.new_empty(len(x), 2 * x.shape[1])[:, ::2].copy_(x),
    "transposed": lambda x: x.new_empty(x.shape[1], len(x)).t().copy_(x),
}


def moves(rank, dtypes, numel, layout="without gaps", as_bytes=False):
    """(collective, dtype) -> the bytes of the results, of each collective that moves values as they are."""
    group, own, world, results = as_group(rank.group), rank.rank, rank.world, {}
    at_one, from_zero = own == 1, own == 0
    for dtype in dtypes:

        def laid_out(x, dtype=dtype):
            return LAID_OUT[layout](x if as_bytes else x.view(dtype))

        def of(seed, numel=numel, dtype=dtype):
            """A rank's values, of any bits; of truth values, any truth."""
            generator = torch.Generator().manual_seed(seed)
            values = torch.randint(0, 256, (numel, 2 * dtype.itemsize), generator=generator)
            return laid_out((values % 2 if dtype is torch.bool else values).to(torch.uint8))

        def empty(numel=numel, dtype=dtype):
            return laid_out(torch.zeros(numel, 2 * dtype.itemsize, dtype=torch.uint8))

        def each_empty(empty=empty):
            return [empty() for _ in range(world)]

        x, outputs, whole = of(own), each_empty(), empty(numel * world)
        results["broadcast", dtype] = [x]
        group.broadcast([x], options(dist.BroadcastOptions, rootRank=1)).wait()
        results["all_gather", dtype] = outputs
        group.allgather([outputs], [of(own)]).wait()
        outputs = each_empty() if at_one else []
        results["gather", dtype] = outputs
        group.gather([outputs] if at_one else [], [of(own)], root(1)).wait()
        x = empty()
        results["scatter", dtype] = [x]
        group.scatter([x], [[of(10 + to) for to in range(world)]] if from_zero else [], root(0, True)).wait()
        results["all_to_all_single", dtype] = [whole]
        group.alltoall_base(whole, of(own, numel * world), [], []).wait()
        sizes = [own + to for to in range(world)]  # rank r gives rank s r + s rows
        uneven = empty(sum(sizes))
        results["all_to_all_single, uneven", dtype] = [uneven]
        group.alltoall_base(uneven, of(own, sum(sizes)), sizes, sizes).wait()
        outputs = each_empty()
        results["all_to_all", dtype] = outputs
        lists_exchanged(group, outputs, [of(10 * own + to) for to in range(world)])
        x = of(own).contiguous()  # as Gloo wants it
        results["send", dtype] = [x]
        (group.send([x], 1, 0) if from_zero else group.recv([x], 0, 0) if at_one else group.barrier()).wait()
        if own < 2:
            group.barrier().wait()
    plain = torch.contiguous_format
    return {
        key: [each.clone(memory_format=plain).view(torch.uint8).flatten().tolist() for each in given]
        for key, given in results.items()
    }


@pytest.mark.parametrize(
    ("hosts", "dtypes", "numel", "layout"),
    [
        *(("aa", MOVED, 3, layout) for layout in LAID_OUT),
        *(("ab", MOVED, 3, layout) for layout in LAID_OUT),
        *((hosts, [torch.float32], 50_000, "with gaps") for hosts in ("aaa", "aba")),
        *(("aa", [torch.int16], 0, layout) for layout in LAID_OUT),
        ("ab", [torch.int16], 0, "transposed"),
    ],
    ids=lambda value: f"{len(value)} dtypes" if isinstance(value, list) else None,
)
def test_every_collective_moves_what_gloo_moves(hosts, dtypes, numel, layout):
    """Values of any dtype and layout as Gloo moves their bytes."""
    assert torch.float8_e4m3fn in MOVED
    world = len(hosts)
    wanted = run_ranks(world, moves, dtypes, numel, "without gaps", True)
    for got, of_gloo in zip(run_ranks(world, moves, dtypes, numel, layout, hosts=hosts), wanted, strict=True):
        assert got.keys() == of_gloo.keys()
        assert [key for key in got if got[key] != of_gloo[key]] == []


@pytest.mark.parametrize("hosts", ["aaa", "aabb"])
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_what_is_not_finite_stays_visible_on_every_rank(op, hosts):
    inf, nan = float("inf"), float("nan")
    columns = torch.tensor([[nan, 1, 1, 2], [1, nan, 2, 1], [1, 2, nan, 1], [4, 2, 1, nan], [inf, -inf, 3, 1]])
    columns = torch.cat([columns, torch.tensor([[inf, 1, 1, 1], [-inf, 1, nan, 1], [0, inf, 5, 1]])])
    world = len(hosts)
    wanted = combined(list(columns.t()[:world]), op)
    assert wanted[:world].isnan().all()

    def call(rank):
        for dtype, repeat, where in itertools.product(FLOATS, (1, 12_000), WHERE):
            x = Placed(rank, columns[:, rank.rank].to(dtype).repeat(repeat), where)
            dist.all_reduce(x.tensor, getattr(ReduceOp, op), group=rank.group)
            near = {"rtol": 0, "atol": 2e-2, "equal_nan": True}
            torch.testing.assert_close(x.tensor, wanted.to(dtype).repeat(repeat), **near)
            assert rank.all_equal(x.tensor)

    run_ranks(world, call, hosts=hosts)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_programs_at_random(data, monkeypatch):
    """Collectives of every kind one after the other, waited for at once or at the end, on one host or two."""
    monkeypatch.setattr(one_host, "ONE_EXCHANGE_BYTES", 64)
    monkeypatch.setattr(one_host, "CHUNK_BYTES", 512)
    monkeypatch.setattr(one_host, "BLOCK_BYTES", 128)
    world = data.draw(st.integers(1, 5))
    hosts = data.draw(st.sampled_from(["a" * world, "a" * world, "abacb"[:world]]))
    step = st.tuples(
        st.sampled_from(COLLECTIVES),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.int16, torch.float64]),
        st.sampled_from(["SUM", "PRODUCT", "MIN", "MAX"]),
        st.integers(0, 300),
        st.sampled_from(WHERE),
        st.integers(0, world - 1),
        st.booleans(),
    )
    program = data.draw(st.lists(step, min_size=1, max_size=8))

    def call(rank):
        later = []
        for number, (name, dtype, op, numel, where, root, deferred) in enumerate(program):
            # Small whole numbers: their sums and products have no rounding.
            given = [exact(each, numel, dtype, number) % 2 + 1 for each in range(world)]
            later.append(getattr(Run(rank, given, op, where, root), name)())
            while later and not deferred:
                finish(*later.pop())
        while later:
            finish(*later.pop())

    run_ranks(world, call, hosts=hosts)


# --------------------------------------------------------------------------------------- layouts and modes

LAYOUTS = {
    "transposed": lambda x: x.view(4, -1).t(),
    "channels last": lambda x: x.view(2, 4, -1, 1).to(memory_format=torch.channels_last),
    "strided": lambda x: torch.cat([x, x])[::2].copy_(x),
    "columns": lambda x: torch.cat([x, x]).view(4, -1)[:, : x.numel() // 4].copy_(x.view(4, -1)),
    "not a dimension": lambda x: x[0].clone(),
    "conjugate": lambda x: torch.complex(x, 2 * x).conj(),
    "negative": lambda x: torch.complex(x, 2 * x).conj().imag,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("numel", [24, 8 * ONE_EXCHANGE])
def test_any_layout_is_written_where_it_lies(layout, numel):
    make = LAYOUTS[layout]

    def call(rank):
        own, group = rank.rank, rank.group
        given = [make(shared(each, numel)) for each in range(3)]
        plain = [each.resolve_conj().resolve_neg().contiguous() for each in given]
        fresh = lambda: make(shared(own, numel).clone())  # noqa: E731
        x = fresh()
        version = x._version
        group.allreduce([x]).wait()
        same(x, combined(plain))
        y = fresh()
        group.broadcast([y], options(dist.BroadcastOptions, rootRank=2)).wait()
        same(y, plain[2])
        r = fresh()
        group.reduce([r], options(dist.ReduceOptions, rootRank=1)).wait()
        same(r, combined(plain) if own == 1 else plain[own])
        outputs = [fresh() for _ in range(3)]
        group.allgather([outputs], [fresh()]).wait()
        for output, wanted in zip(outputs, plain, strict=True):
            same(output, wanted)
        z = fresh()
        group.reduce_scatter([z], [[fresh() for _ in range(3)]]).wait()
        same(z, combined(plain))
        assert x._version == version
        for got, made in ((x, given[0]), (y, given[0]), (z, given[0])):
            assert (got.stride(), got.is_conj(), got.is_neg()) == (made.stride(), made.is_conj(), made.is_neg())

    shared = once(drawn)
    run_ranks(3, call, hosts="aaa")


@on_ranks(2, hosts="aa")
def test_an_expanded_tensor_can_be_given(rank):
    group, own = rank.group, torch.full((1,), rank.rank + 1.0)
    wide = own.expand(6)
    outputs = [torch.empty(6), torch.empty(6)]
    dist.all_gather(outputs, wide, group=group)
    assert [output.tolist() for output in outputs] == [[1.0] * 6, [2.0] * 6]
    received = wide if rank.rank == 0 else torch.empty(6)
    dist.broadcast(received, group=group, group_src=0)
    assert received.tolist() == [1.0] * 6
    assert own.item() == rank.rank + 1


def with_gradients(rank):
    """How far each collective has moved the version counter, and what autograd then says of a value saved before it."""
    moved, group = {}, rank.group
    collectives = {
        "all_reduce": lambda x: dist.all_reduce(x, group=group),
        "reduce": lambda x: dist.reduce(x, group=group, group_dst=0),
        "broadcast": lambda x: dist.broadcast(x, group=group, group_src=1),
        "all_gather": lambda x: dist.all_gather([x, torch.zeros_like(x)], torch.ones_like(x), group=group),
    }
    for name, collective in collectives.items():
        for numel in (6, ONE_EXCHANGE + 2):
            x = torch.ones(numel)
            saved = torch.ones(numel, requires_grad=True)
            product = saved * x
            before = x._version
            collective(x)
            moved[name, numel] = x._version - before
            if moved[name, numel] == 0:
                product.sum().backward()
    return moved


def test_version_counters_move_no_further_than_with_gloo():
    wanted = run_ranks(2, with_gradients)[0]
    for moved in run_ranks(2, with_gradients, hosts="aa"):
        assert set(moved.values()) == {0}
        assert all(wanted[collective] >= by for collective, by in moved.items())  # Gloo's all_gather moves them


@pytest.mark.parametrize("shape", [(6,), (3, ONE_EXCHANGE)])
@on_ranks(2, hosts="aa")
def test_parameters_that_require_gradients_stay_what_they_are(rank, shape):
    values = drawn(rank.rank, torch.Size(shape).numel()).view(shape)
    weight = torch.nn.Parameter(values.clone())
    other = torch.nn.Parameter(values.clone().t())
    for parameter in (weight, other):
        dist.all_reduce(parameter, group=rank.group)
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.grad_fn is None
    wanted = combined([drawn(each, values.numel()).view(shape) for each in range(2)])
    same(weight.detach(), wanted)
    same(other.detach(), wanted.t())
    # A result that has a history keeps it.
    product = weight * 2
    dist.broadcast(product, group=rank.group, group_src=0)
    product.sum().backward()
    assert weight.grad.eq(2).all()


@pytest.mark.parametrize("numel", [8, 2 * ONE_EXCHANGE])
@on_ranks(2, hosts="aa")
def test_modes_of_the_thread_that_waits_make_no_difference(rank, numel):
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
    given = [drawn(each, numel) for each in range(2)]
    wanted = combined(given)
    for mode in (*modes, lambda: torch.device("meta")):
        with mode():
            own = torch.empty(numel, device="cpu").copy_(given[rank.rank])
            for values in (own, own.view(2, -1).t()):
                for asynchronous in (False, True):
                    allocated = rank.group.allocate(numel).copy_(own)
                    x = values.clone()
                    for tensor in (x, allocated):
                        work = dist.all_reduce(tensor, group=rank.group, async_op=asynchronous)
                        if work is not None:
                            work.wait()
                    same(allocated, wanted)
                    same(x.t().reshape(-1), wanted)
                    assert x.is_inference() == values.is_inference()


@on_ranks(3, hosts="aaa")
def test_several_tensors_are_moved_as_one(rank):
    own, world, group = rank.rank, rank.world, rank.group
    lengths = (3, 0, ONE_EXCHANGE + 5, 40)

    def tensors(of):
        return [drawn(of, length, seed=index) for index, length in enumerate(lengths)]

    wanted = [combined([drawn(each, n, seed=i) for each in range(world)]) for i, n in enumerate(lengths)]
    xs = tensors(own)
    group.allreduce_coalesced(xs, options(dist.AllreduceCoalescedOptions)).wait()
    ys = tensors(own)
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for y in ys:
            dist.all_reduce(y, group=group)
    manager.wait()
    for x, y, each in zip(xs, ys, wanted, strict=True):
        same(x, each)
        same(y, each)

    outputs = [torch.empty(world * n) for n in lengths]
    with dist._coalescing_manager(group):
        for output, x in zip(outputs, tensors(own), strict=True):
            all_gather_single(output, x, group=group)
    for index, output in enumerate(outputs):
        same(output, torch.cat([tensors(each)[index] for each in range(world)]))

    parts = [torch.empty(n) for n in lengths]
    with dist._coalescing_manager(group):
        for part, output in zip(parts, outputs, strict=True):
            reduce_scatter_single(part, output, ReduceOp.MAX, group=group)
    for part, x in zip(parts, tensors(own), strict=True):
        same(part, x)

    lists = [[torch.empty(n) for n in lengths] for _ in range(world)]
    group.allgather_coalesced(lists, tensors(own)).wait()
    for each, got in enumerate(lists):
        for x, y in zip(got, tensors(each), strict=True):
            same(x, y)


# ------------------------------------------------------------------------------------------- works


@on_ranks(2, hosts="aa")
def test_a_work_can_be_asked_and_waited_for_again_and_again(rank):
    x = torch.ones(5)
    work = dist.all_reduce(x, group=rank.group, async_op=True)
    assert work.wait()
    assert work.wait()
    assert work.wait(timedelta(seconds=5))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    assert work.get_future().wait()[0] is x
    work.synchronize()
    assert x.tolist() == [2.0] * 5


@on_ranks(2, hosts="aa")
def test_the_future_of_a_broadcast_and_a_gather_has_the_outputs(rank):
    x, outputs, single = torch.full((3,), float(rank.rank)), [torch.empty(3), torch.empty(3)], torch.empty(6)
    futures = [
        dist.all_gather(outputs, x, group=rank.group, async_op=True).get_future(),
        all_gather_single(single, x, group=rank.group, async_op=True).get_future(),
        dist.broadcast(x, group=rank.group, group_src=1, async_op=True).get_future(),
    ]
    gathered, one, received = torch.futures.wait_all(futures)
    assert [part.tolist() for part in gathered] == [[0.0] * 3, [1.0] * 3]
    assert one[0].tolist() == [0.0] * 3 + [1.0] * 3
    assert received[0].tolist() == [1.0] * 3


@pytest.mark.parametrize("depth", [1, 2, 6])
@pytest.mark.parametrize("buckets", [1, 5])
@on_ranks(2, hosts="aa")
def test_callbacks_of_futures_may_run_collectives_and_wait_for_them(rank, depth, buckets):
    """As PyTorch's PowerSGD hook: each bucket is reduced, and then what follows from that, and so on."""

    def further(left, future):
        (x,) = future.value()
        if left == 0:
            return x
        y = x / 2
        dist.all_reduce(y, group=rank.group)  # waited for inside a callback
        z = y / 2
        inner = dist.all_reduce(z, group=rank.group, async_op=True).get_future()
        return inner.then(lambda f: further(left - 1, f)).wait()

    for bucket in range(1, buckets + 1):  # one after the other: callbacks of several have no order among ranks
        future = dist.all_reduce(torch.full((4,), float(bucket)), group=rank.group, async_op=True).get_future()
        assert future.then(lambda f: further(depth, f)).wait().tolist() == [2.0 * bucket] * 4


@on_ranks(2, hosts="aa")
def test_callbacks_run_while_the_program_goes_on_with_another_group(rank, store):
    """The callbacks' collectives go to a second group, whose order nobody else disturbs."""
    other = type(rank.group)(store, rank.rank, rank.world, timedelta(seconds=10), rank.group.options)
    futures = []
    for number in range(10):

        def then(future, number=number):
            y = future.value()[0] + number
            if number == 0:
                return dist.all_reduce(y, group=other) or y
            return y

        work = dist.all_reduce(torch.full((3,), float(number)), group=rank.group, async_op=True)
        futures.append(work.get_future().then(then))
    assert [value.tolist() for value in torch.futures.wait_all(futures)] == [[3.0 * n] * 3 for n in range(10)]


@on_ranks(2, hosts="aa")
def test_threads_of_a_rank_use_a_group_in_an_order_of_their_own_making(rank):
    turn, next_turn, failed = threading.Condition(), [0], []

    def work(number):
        try:
            for step in range(5):
                with turn:
                    turn.wait_for(lambda: next_turn[0] == 3 * step + number, 10)  # noqa: B023
                    x = torch.full((ONE_EXCHANGE + step,), float(number))
                    begun = dist.all_reduce(x, group=rank.group, async_op=True)
                    next_turn[0] += 1
                    turn.notify_all()
                begun.wait()
                assert x.eq(2 * number).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@on_ranks(2, hosts="aa")
def test_works_outlive_the_names_of_their_tensors(rank):
    works = []
    for _ in range(10):
        x = rank.group.allocate(ONE_EXCHANGE + 1).fill_(1.0)
        works.append(dist.all_reduce(x, group=rank.group, async_op=True))
        del x
    for work in works:
        work.wait()
        assert work.result()[0].eq(2).all()


def test_hundreds_of_tensors_may_be_dropped_at_once():
    """While the other rank does not look: its messages must not pile up."""
    dropped = threading.Event()

    def call(rank):
        tensors = [rank.group.allocate(ONE_EXCHANGE + 1).fill_(1.0) for _ in range(300)]
        works = [dist.all_reduce(tensor, group=rank.group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        del works, work, tensors
        x = rank.group.allocate(2 * ONE_EXCHANGE).fill_(1.0)  # of another size: what is idle goes
        if rank.rank == 1:
            assert dropped.wait(10)
        work = dist.all_reduce(x, group=rank.group, async_op=True)
        if rank.rank == 0:
            with pytest.raises(CommunicationError, match="it goes on"):
                work.wait(timedelta(seconds=0.05))
            dropped.set()
        work.wait()
        assert x.eq(2).all()

    run_ranks(2, call, hosts="aa")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("hosts", ["aa", "aaa", "aab"])
@pytest.mark.parametrize("numel", [10, ONE_EXCHANGE + 3, 3 * ONE_EXCHANGE * 16 + 1])
def test_tensors_are_multiplied_on_the_way_each_by_its_ranks_factor(numel, hosts, where):
    """Bitwise what multiplying them before would give."""
    factors = [0.3, 1.0, -0.7]

    def call(rank):
        given = [drawn(each, numel, torch.float32) for each in range(rank.world)]
        before = Placed(rank, given[rank.rank] * factors[rank.rank], where)
        rank.group.allreduce(before.tensor).wait()
        x = Placed(rank, given[rank.rank], where)
        rank.group.allreduce(x.tensor, factor=factors[rank.rank]).wait()
        x.check(before.tensor)
        return x.tensor.clone()

    results = run_ranks(len(hosts), call, hosts=hosts)
    for other in results[1:]:
        same(other, results[0])


# --------------------------------------------------------------------------------- forms of arguments

SOON = timedelta(seconds=5)
MAX = ReduceOp.MAX
FORMS = {
    "a list and an operation": lambda g, x, o: g.allreduce([x], MAX),
    "a tensor and an operation": lambda g, x, o: g.allreduce(x, MAX),
    "a tensor, an operation, a time": lambda g, x, o: g.allreduce(x, MAX, SOON),
    "a list, and all by name": lambda g, x, o: g.allreduce(tensors=[x], op=MAX, timeout=SOON),
    "a tensor by name": lambda g, x, o: g.allreduce(tensor=x),
    "options by name": lambda g, x, o: g.allreduce([x], opts=options(dist.AllreduceOptions, "MAX")),
    "a root by place": lambda g, x, o: g.broadcast(x, 1),
    "a root by name": lambda g, x, o: g.broadcast(x, root=1, timeout=SOON),
    "a root and an operation": lambda g, x, o: g.reduce(x, 1, MAX),
    "a root and an operation by name": lambda g, x, o: g.reduce(tensor=x, op=MAX, root=1),
    "outputs and a tensor": lambda g, x, o: g.allgather(o, x),
    "outputs and a tensor by name": lambda g, x, o: g.allgather(output_tensors=o, input_tensor=x, timeout=SOON),
    "lists of both": lambda g, x, o: g.allgather([o], [x]),
    "a gather": lambda g, x, o: (
        g.gather(o if g.rank() == 1 else [], x, root=1) if g.rank() == 1 else g.gather([], [x], root(1))
    ),
    "a scatter": lambda g, x, o: (
        g.scatter(x, [t + 3 for t in o], 0) if g.rank() == 0 else g.scatter([x], [], root(0, True))
    ),
    "a sum scattered": lambda g, x, o: g.reduce_scatter(o[0], [x, x * 2], MAX),
    "a sum scattered by name": lambda g, x, o: g.reduce_scatter(output=o[0], input=[x, x * 2], op=MAX),
    "one tensor of both": lambda g, x, o: g._allgather_base(output=torch.empty(8), input=x),
    "one exchanged": lambda g, x, o: g.alltoall_base(o[0], x, [2, 2], [2, 2]),
    "one exchanged by name": lambda g, x, o: g.alltoall_base(
        output=o[0], input=x, output_split_sizes=[], input_split_sizes=[], timeout=SOON
    ),
    "lists exchanged": lambda g, x, o: lists_exchanged(g, o, [x, x * 2]),
    "a barrier with a time": lambda g, x, o: g.barrier(timeout=SOON),
    "a barrier with a time by place": lambda g, x, o: g.barrier(SOON),
    "a monitored barrier": lambda g, x, o: g.monitored_barrier(SOON, True),
}


def lists_exchanged(group, outputs, inputs):
    try:
        return group.alltoall(output_tensors=outputs, input_tensors=inputs)
    except RuntimeError as error:
        if "Backend gloo does not support alltoall" not in str(error):  # Gloo of PyTorch 2.11 exchanges single tensors
            raise
    sent = [each.contiguous().reshape(-1).view(torch.uint8) for each in inputs]
    sizes = [each.nbytes for each in outputs]
    together = torch.empty(sum(sizes), dtype=torch.uint8)
    group.alltoall_base(together, torch.cat(sent), sizes, list(map(len, sent))).wait()
    for output, part in zip(outputs, together.split(sizes), strict=True):
        output.copy_(part.clone().view(output.dtype).view(output.shape))
    return None


def root(rank, scatter=False):
    made = dist.ScatterOptions() if scatter else dist.GatherOptions()
    made.rootRank = rank
    return made


def as_group(backend):
    """A process group as `init_process_group` makes it; a bare backend takes fewer forms."""
    if isinstance(backend, ProcessGroupShm):
        return backend
    group = dist.ProcessGroup(dist.HashStore(), backend.rank(), backend.size())
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def every_form(rank):
    results, group = {}, as_group(rank.group)
    for name, call in FORMS.items():
        x, outputs = drawn(rank.rank, 4), [torch.zeros(4), torch.zeros(4)]
        work = call(group, x, outputs)
        if work is not None:
            work.wait()
        if "a root and an operation" in name and rank.rank == 0:
            x.zero_()  # Gloo uses the tensors of the others
        results[name] = [x, *outputs]
    return results


def test_arguments_may_have_every_form_that_groups_of_torch_take():
    ours, gloo = run_ranks(2, every_form, hosts="aa"), run_ranks(2, every_form)
    for got, wanted in zip(ours, gloo, strict=True):
        for name in FORMS:
            for a, b in zip(got[name], wanted[name], strict=True):
                assert torch.equal(a, b), name


# A call with four ones, which is to raise on its rank alone, before anything begins; the error, and its words.
WRONG = {
    # forms
    "too many": (lambda g, x: g.allreduce(x, MAX, SOON, 2.0), TypeError, "takes the tensors and op, timeout; .* 3"),
    "an operation twice": (lambda g, x: g.allreduce(x, MAX, op=MAX), TypeError, "was given op twice"),
    "misspelt": (lambda g, x: g.broadcast(x, rot=1), TypeError, "no argument 'rot'; .* it takes root, timeout"),
    "options and an operation": (
        lambda g, x: g.allreduce([x], options(dist.AllreduceOptions, "MAX"), op=MAX),
        TypeError,
        "it was given both",
    ),
    "nothing": (lambda g, x: g.allreduce(), TypeError, "needs tensors or tensor"),
    "two to reduce": (lambda g, x: g.allreduce([x, x]), ValueError, "expected one tensor, got 2"),
    "two to broadcast": (lambda g, x: g.broadcast([x, x]), ValueError, "expected one tensor, got 2"),
    "two to reduce to one": (lambda g, x: g.reduce([x, x], root=0), ValueError, "expected one tensor, got 2"),
    # devices and layouts
    "device": (lambda g, x: g.allreduce([x.to("meta")]), DeviceError, "one on meta"),
    "device of an output": (lambda g, x: g.allgather([[x, x.to("meta")]], [x]), DeviceError, "one on meta"),
    "sparse": (lambda g, x: g.broadcast([x.to_sparse()]), LayoutError, r"layout torch\.sparse_coo"),
    "sparse to gather": (lambda g, x: g.gather([], [x.to_sparse()], root=0), LayoutError, "dense"),
    "the most of sparse ones": (lambda g, x: g.allreduce([x.to_sparse()], MAX), OptionError, "summed only, got MAX"),
    "sent with gaps": (
        lambda g, x: g.send([x[::2]], 1, 0),
        LayoutError,
        r"^send from rank \d to rank 1: expected contiguous tensors, got one of shape \(2,\) with strides \(2,\)",
    ),
    "received with gaps": (lambda g, x: g.recv([x[::2]], 1, 0), LayoutError, "^receive on rank .* contiguous tensors"),
    "from any, with gaps": (lambda g, x: g.recv_anysource([x[::2]]), LayoutError, "from any rank: expected contiguous"),
    "expanded": (lambda g, x: g.allreduce([x[:1].expand(4)]), LayoutError, "all_reduce: .* expanded tensor"),
    "expanded output": (lambda g, x: g.allgather([[x[:1].expand(4), x]], [x]), LayoutError, "all_gather: .* expanded"),
    "expanded sum": (lambda g, x: g.reduce_scatter([x[:1].expand(4)], [[x, x]]), LayoutError, "reduce_scatter: .* exp"),
    "expanded part": (
        lambda g, x: g.scatter([x[:1].expand(4)], [[x] * 2], root(g.rank(), True)),
        LayoutError,
        "scatter: a result cannot be written to an expanded tensor",
    ),
    # numbers of tensors and elements, dtypes
    "no tensors": (lambda g, x: g.allreduce([]), LayoutError, "at least one tensor"),
    "dtypes": (lambda g, x: g.allreduce_coalesced([x, x.double()]), LayoutError, "one dtype.*float32 and .*float64"),
    "dtypes of outputs": (lambda g, x: g.allgather([[x, x.half()]], [x]), LayoutError, "one dtype"),
    "dtype of one output": (lambda g, x: g.all_gather_single(x.repeat(2).double(), x), LayoutError, "one dtype"),
    "dtype of one input": (lambda g, x: g.reduce_scatter_single(x, x.repeat(2).double()), LayoutError, "one dtype"),
    "too few outputs": (lambda g, x: g.allgather([[x]], [x]), LayoutError, "2 tensors, one for each rank, got 1"),
    "too many outputs": (lambda g, x: g.allgather([[x] * 3], [x]), LayoutError, "2 tensors, one for each rank, got 3"),
    "too few inputs": (lambda g, x: g.reduce_scatter([x], [[x]]), LayoutError, "expected 2 tensors.*got 1"),
    "too short lists of outputs": (lambda g, x: g.allgather_coalesced([[x], [x]], [x, x]), LayoutError, "coalesced"),
    "size of an output": (lambda g, x: g.allgather([[x, x[1:]]], [x]), LayoutError, "4 elements, got 3 in tensor 1"),
    "size of an input": (
        lambda g, x: g.reduce_scatter([x], [[x, x[1:]]]),
        LayoutError,
        "4 elements, got 3 in tensor 1",
    ),
    "size of one output": (
        lambda g, x: g.all_gather_single(torch.ones(7), x),
        LayoutError,
        "expected 8 elements, got 7",
    ),
    "size of one input": (lambda g, x: g.reduce_scatter_single(x, torch.ones(7)), LayoutError, "8 elements, got 7"),
    "size to gather": (
        lambda g, x: g.gather([[x[1:], x[1:]]], [x], root(g.rank())),
        LayoutError,
        "gather: expected 4 elements, got 3 in tensor 0",
    ),
    # PyTorch's Gloo exchanges parts of elements.
    "parts of elements": (lambda g, x: g.alltoall_base(x[1:], x[1:], [], []), LayoutError, "a multiple of 2 .*, got 3"),
    "no dimension": (
        lambda g, x: g.alltoall_base(x[0], x[0], [], []),
        LayoutError,
        "a multiple of 2 elements.*, got 1",
    ),
    "sum of inputs": (
        lambda g, x: g.alltoall_base(x, x, [2, 2], [3, 3]),
        LayoutError,
        r"of the input.*dimension 0, 4, got \[3, 3\]",
    ),
    "negative": (
        lambda g, x: g.alltoall_base(x, x, [5, -1], [2, 2]),
        LayoutError,
        r"of the output.*dimension 0, 4, got \[5, -1\]",
    ),
    "exchanged lists": (lambda g, x: g.alltoall([x] * 3, [x] * 2), LayoutError, "expected 2 tensors.*got 3"),
    # roots and factors
    "root": (lambda g, x: g.broadcast(x, 2), OptionError, "2"),
    "root of a reduce": (lambda g, x: g.reduce(x, -1), OptionError, "-1"),
    "factor": (lambda g, x: g.allreduce(x.long(), factor=0.5), OptionError, r"floating-point .*, got torch\.int64"),
}


@pytest.mark.parametrize("name", WRONG)
@on_ranks(2, hosts="aa")
def test_a_wrong_argument_is_refused_before_anything_begins(rank, name):
    call, error, words = WRONG[name]
    if rank.rank == 1:
        with pytest.raises(error, match=words):
            call(rank.group, torch.ones(4)).wait()
    assert still_works(rank)


# --------------------------------------------------------------------------------------------- sparse


def sparse(number, sizes=(6, 2), dense=True):
    """Entries of one rank, some twice; with a dense dimension behind, or without."""
    places = torch.tensor([[number, 4, 4]]) if dense else torch.tensor([[number, 4, 4], [0, 1, 1]])
    entries = drawn(number, 6).view(3, 2) if dense else drawn(number, 3)
    return torch.sparse_coo_tensor(places, entries, sizes, check_invariants=False)


def sums_sparse(rank):
    results = []
    for dense in (True, False):
        x = sparse(rank.rank, dense=dense)
        dist.all_reduce(x, group=rank.group)
        results.append(x)
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), [], (3,), check_invariants=False)
    dist.all_reduce(empty, group=rank.group)
    return [*results, empty]


@pytest.mark.parametrize("hosts", ["a", "aaa", "aba"])
def test_sparse_sums_are_those_of_gloo(hosts):
    for got, wanted in zip(
        run_ranks(len(hosts), sums_sparse, hosts=hosts), run_ranks(len(hosts), sums_sparse), strict=True
    ):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.coalesce().to_dense(), b.coalesce().to_dense())


@on_ranks(2, hosts="aa")
def test_sparse_tensors_that_differ_are_told_to_every_rank(rank):
    x = sparse(rank.rank, sizes=(6 + rank.rank, 2))
    before = x.to_dense()
    with pytest.raises(AgreementError, match=r"rank 0: \(6, 2\) with 1 sparse dimensions; rank 1: \(7, 2\)"):
        dist.all_reduce(x, group=rank.group)
    assert torch.equal(x.to_dense(), before)
    dist.barrier(group=rank.group)
