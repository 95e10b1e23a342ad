"""The native collectives of a `shm` group on one host, in each of the three ways: values, layouts, dtypes, works.

References are computed here with the same arithmetic in rank order, and compared bit for bit.
"""

from __future__ import annotations

import functools
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from lockstep.distributed import ProcessGroupShm
from lockstep.errors import AgreementError, CommunicationError, LayoutError, OptionError
from lockstep.shm import one_host
from programs.ranks import on_ranks
from threaded import run_ranks

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FUNCTIONS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
HALF = (torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, *HALF)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128)
WHERE = ("private", "shared", "mixed")

ONE_EXCHANGE = one_host.ONE_EXCHANGE_BYTES // 4
CHUNK = one_host.CHUNK_BYTES // 4
SIZES = [0, 1, 17, ONE_EXCHANGE, ONE_EXCHANGE + 1, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 13]  # of float32


def combined(values, op="SUM"):
    """Return what becomes of the ranks' tensors, in rank order; half precision of more than two is rounded at the
    end."""
    dtype = values[0].dtype
    if op == "AVG" and dtype in INTEGERS:
        return torch.stack(values).long().sum(0).div_(len(values), rounding_mode="trunc").to(dtype)
    wide = dtype in HALF and len(values) > 2 and op in ("SUM", "AVG", "PRODUCT")
    first, *others = [value.float() for value in values] if wide else values
    result = functools.reduce(FUNCTIONS[op], others, first.clone())
    return (result.div_(len(values)) if op == "AVG" else result).to(dtype)


def drawn(rank, numel, dtype=torch.float32, seed=0):
    """A rank's values; any rank can have those of another."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(numel, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def same(got, wanted):
    """Asserts that two tensors are the same, bit for bit."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    bits = [tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for tensor in (got, wanted)]
    assert torch.equal(*bits), f"{got} instead of {wanted}"


def options(kind, op=None, **others):
    made = kind()
    if op is not None:
        made.reduceOp = getattr(ReduceOp, op)
    for name, value in others.items():
        setattr(made, name, value)
    return made


class Placed:
    """A copy of a tensor in private memory, or in the group's: then between a few elements of which none may change."""

    def __init__(self, rank, values, where):
        self.margin = 0
        if where == "private" or (where == "mixed" and rank.rank % 2):
            self.tensor = self.whole = values.clone()
            return
        self.margin = 1 + rank.rank
        self.whole = rank.group.allocate(values.numel() + 2 * self.margin, values.dtype).fill_(1)
        self.tensor = self.whole[self.margin : self.margin + values.numel()].copy_(values)

    def check(self, wanted):
        same(self.tensor, wanted)
        if self.margin:
            assert self.whole[: self.margin].eq(1).all()
            assert self.whole[self.margin + wanted.numel() :].eq(1).all()


def once(function):
    """The values of every size, drawn once for all ranks."""
    return functools.lru_cache(None)(function)


# ---------------------------------------------------------------------------------- every way, every size


def every_collective(rank, numel, dtype, op, where, root, drawn=drawn):
    """Runs each native collective once and checks what it gives."""
    world, group, own = rank.world, rank.group, rank.rank
    given = [drawn(each, numel, dtype) for each in range(world)]
    wanted = combined(given, op)
    reduce_op = getattr(ReduceOp, op)

    x = Placed(rank, given[own], where)
    group.allreduce([x.tensor], options(dist.AllreduceOptions, op)).wait()
    x.check(wanted)

    x = Placed(rank, given[own], where)
    group.reduce([x.tensor], options(dist.ReduceOptions, op, rootRank=root)).wait()
    x.check(wanted if own == root else given[own])

    x = Placed(rank, given[own], where)
    dist.broadcast(x.tensor, group=group, group_src=root)
    x.check(given[root])

    x = Placed(rank, given[own], where)
    outputs = [Placed(rank, each.new_zeros(numel), where) for each in given]
    group.allgather([[output.tensor for output in outputs]], [x.tensor]).wait()
    x.check(given[own])
    for output, each in zip(outputs, given, strict=True):
        output.check(each)

    whole = Placed(rank, given[0].new_zeros(world * numel), where)
    all_gather_single(whole.tensor, x.tensor, group=group)
    whole.check(torch.cat(given))

    # Every rank has for rank r what it had above, turned by r places.
    parts = [Placed(rank, given[(own + to) % world], where) for to in range(world)]
    wanted = combined([given[(source + own) % world] for source in range(world)], op)
    output = Placed(rank, given[0].new_zeros(numel), where)
    dist.reduce_scatter(output.tensor, [part.tensor for part in parts], reduce_op, group=group)
    output.check(wanted)

    whole = Placed(rank, torch.cat([part.tensor for part in parts]), where)
    output = Placed(rank, given[0].new_zeros(numel), where)
    reduce_scatter_single(output.tensor, whole.tensor, reduce_op, group=group)
    output.check(wanted)
    for to, part in enumerate(parts):
        part.check(given[(own + to) % world])


@pytest.mark.parametrize(
    "world",
    [pytest.param(1, marks=pytest.mark.soak), *(pytest.param(world, marks=pytest.mark.around) for world in (2, 3))],
)
def test_every_size_goes_every_way(world):
    shared = once(drawn)

    def call(rank):
        for numel in SIZES:
            for where in WHERE:
                every_collective(rank, numel, torch.float32, "SUM", where, world - 1, shared)

    run_ranks(world, call, hosts="a" * world)


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        (1, torch.uint8),
        (2, torch.bfloat16),
        (4, torch.float64),
        pytest.param(7, torch.uint8, marks=pytest.mark.around),
        pytest.param(2, torch.uint8, marks=pytest.mark.soak),
        pytest.param(5, torch.bfloat16, marks=pytest.mark.soak),
    ],
)
def test_small_chunks_of_every_length(world, dtype, monkeypatch):
    monkeypatch.setattr(one_host, "ONE_EXCHANGE_BYTES", 8 * 3)
    monkeypatch.setattr(one_host, "CHUNK_BYTES", 8 * 40)
    monkeypatch.setattr(one_host, "BLOCK_BYTES", 8 * 4)
    each = dtype.itemsize

    def call(rank):
        for numel in {0, 1, 2, 3, 24 // each, 25 // each + 1, 64 // each, 320 // each, 320 // each + 1, 1001 // each}:
            for where in WHERE:
                every_collective(rank, numel, dtype, "SUM", where, numel % world)

    run_ranks(world, call, hosts="a" * world)


@pytest.mark.around
def test_sixteen_ranks_of_which_not_all_have_a_shard():
    def call(rank):
        for numel, where in (
            (0, "shared"),
            (100, "mixed"),
            (ONE_EXCHANGE + 3, "private"),
            (ONE_EXCHANGE + 3, "shared"),
        ):
            every_collective(rank, numel, torch.float32, "SUM", where, 11, shared)

    shared = once(drawn)
    run_ranks(16, call, hosts="a" * 16)


@on_ranks(3, hosts="aaa")
def test_memory_that_is_viewed_as_another_dtype_is_found(rank):
    pool = rank.group.allocate(1 << 20, torch.uint8)
    halves = pool[64 * rank.rank :].view(torch.bfloat16)[: 1 << 18].copy_(drawn(rank.rank, 1 << 18, torch.bfloat16))
    square = halves.view(512, 512)
    dist.all_reduce(square, group=rank.group)
    same(halves, combined([drawn(each, 1 << 18, torch.bfloat16) for each in range(3)]))


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


def every_op(rank, large):
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
    x = drawn(rank.rank, 5)
    dist.all_reduce(x, group=rank.group)  # whatever was refused
    same(x, combined([drawn(each, 5) for each in range(rank.world)]))
    return results


@pytest.fixture(scope="module")
def with_gloo():
    return run_ranks(2, every_op, False)[0]


@pytest.mark.parametrize("large", [False, True])
def test_every_dtype_and_operation_of_gloo_gives_the_same(large, with_gloo):
    compared = 0
    for results in run_ranks(2, every_op, large, hosts="aa"):
        for (dtype, op), wanted in with_gloo.items():
            got = results[dtype, op]
            if isinstance(wanted, torch.Tensor):
                assert isinstance(got, torch.Tensor), (dtype, op, got)
                same(got, wanted)
                compared += 1
            else:
                assert isinstance(got, torch.Tensor) or got is OptionError, (dtype, op, got)
    assert compared >= 2 * 4 * 8  # four operations and eight dtypes on two ranks


@pytest.mark.parametrize("world", [1, 3])
def test_every_dtype_and_operation_is_taken_or_refused_by_all(world):
    refused = {(dtype, op) for dtype in FLOATS for op in ("BAND", "BOR", "BXOR")}
    refused.add((torch.bool, "AVG"))
    refused |= {(d, op) for d in DTYPES if d.is_complex for op in ("MIN", "MAX", "BAND", "BOR", "BXOR")}
    for large in (False, True):
        for results in run_ranks(world, every_op, large, hosts="a" * world):
            assert {key for key, result in results.items() if result is OptionError} == refused
            for (dtype, op), got in results.items():
                if (dtype, op) not in refused:
                    wanted = combined([drawn(rank, 9, dtype) for rank in range(world)], op)
                    if op == "PRODUCT" and dtype.is_complex:  # the processor's vectors round them in another way
                        torch.testing.assert_close(got, wanted)
                    else:
                        same(got, wanted)


@on_ranks(2, hosts="aa")
def test_an_operation_that_is_refused_is_refused_in_every_collective(rank):
    group, x = rank.group, torch.zeros(4, dtype=torch.complex32)
    for numel in (0, 4, ONE_EXCHANGE + 1):
        y = torch.zeros(numel, dtype=torch.bool)
        with pytest.raises(OptionError, match=r"cannot reduce torch\.bool with AVG"):
            dist.all_reduce(y, ReduceOp.AVG, group=group)
        with pytest.raises(OptionError, match="use another operation, or convert"):
            dist.reduce(y, group=group, group_dst=1, op=ReduceOp.AVG)
        with pytest.raises(OptionError):
            dist.reduce_scatter(y, [y.clone(), y.clone()], ReduceOp.AVG, group=group)
    with pytest.raises(OptionError):  # it can be added, and not divided
        group.allreduce([x], options(dist.AllreduceOptions, "AVG")).wait()
    with pytest.raises(OptionError, match="PREMUL_SUM"):
        dist.all_reduce(y, dist._make_nccl_premul_sum(2.0), group=group)
    y = torch.ones(3)
    dist.all_reduce(y, group=group)
    assert y.eq(2).all()


MOVED = [*DTYPES, torch.complex32, torch.uint16, torch.uint32, torch.uint64]
MOVED += [each for name, each in sorted(vars(torch).items()) if name.startswith("float8")]
OF_GLOO = [torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
OF_GLOO += [torch.int8, torch.uint8]


def bits(rank, dtype, numel=6):
    """A rank's values, of any bits; of truth values, any truth."""
    values = torch.randint(0, 256, (numel * dtype.itemsize,), generator=torch.Generator().manual_seed(rank))
    return (values % 2 if dtype is torch.bool else values).to(torch.uint8).view(dtype)


def moves(rank, dtypes):
    """(collective, dtype) -> the bytes of the results, of each collective that moves values as they are."""
    group, own, results = rank.group, rank.rank, {}
    at_one, from_zero = own == 1, own == 0
    for dtype in dtypes:

        def of(each, numel=6, dtype=dtype):
            return bits(each, dtype, numel)

        def zeros(numel=6, dtype=dtype):
            return torch.zeros(numel * dtype.itemsize, dtype=torch.uint8).view(dtype)

        def each_zeros(zeros=zeros):
            return [zeros() for _ in range(rank.world)]

        x, outputs, whole = of(own), each_zeros(), zeros(6 * rank.world)
        results["broadcast", dtype] = [x]
        group.broadcast([x], options(dist.BroadcastOptions, rootRank=1)).wait()
        results["all_gather", dtype] = outputs
        group.allgather([outputs], [of(own)]).wait()
        outputs = each_zeros() if at_one else []
        results["gather", dtype] = outputs
        group.gather([outputs] if at_one else [], [of(own)], root(1)).wait()
        x = zeros()
        results["scatter", dtype] = [x]
        group.scatter([x], [[of(10 + to) for to in range(rank.world)]] if from_zero else [], root(0, True)).wait()
        results["all_to_all_single", dtype] = [whole]
        group.alltoall_base(whole, of(own, 6 * rank.world), [], []).wait()
        if isinstance(group, ProcessGroupShm):  # Gloo of PyTorch 2.11 exchanges single tensors
            outputs = each_zeros()
            results["all_to_all", dtype] = outputs
            group.alltoall(outputs, [of(10 * own + to) for to in range(rank.world)]).wait()
        x = of(own)
        results["send", dtype] = [x]
        (group.send([x], 1, 0) if from_zero else group.recv([x], 0, 0)).wait()
    return {key: [each.view(torch.uint8).tolist() for each in given] for key, given in results.items()}


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_every_collective_moves_what_gloo_moves(hosts):
    for got, wanted in zip(run_ranks(2, moves, OF_GLOO, hosts=hosts), run_ranks(2, moves, OF_GLOO), strict=True):
        assert len(wanted) == 6 * len(OF_GLOO)
        assert {key: got[key] for key in wanted} == wanted


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_every_collective_moves_every_dtype(hosts):
    zero, one = run_ranks(2, moves, MOVED, hosts=hosts)
    assert torch.float8_e4m3fn in MOVED
    for dtype in MOVED:

        def of(rank, numel=6, dtype=dtype):
            return bits(rank, dtype, numel).view(torch.uint8).tolist()

        first, second = ([of(rank, 12)[: len(of(0))], of(rank, 12)[len(of(0)) :]] for rank in range(2))
        wanted = {
            "broadcast": ([of(1)], [of(1)]),
            "all_gather": ([of(0), of(1)], [of(0), of(1)]),
            "gather": ([], [of(0), of(1)]),
            "scatter": ([of(10)], [of(11)]),
            "all_to_all_single": ([first[0] + second[0]], [first[1] + second[1]]),
            "all_to_all": ([of(0), of(10)], [of(1), of(11)]),
            "send": ([of(0)], [of(0)]),
        }
        for name, each in wanted.items():
            assert (zero[name, dtype], one[name, dtype]) == each, (name, dtype)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@on_ranks(2, "hosts")
def test_any_layout_goes_through_gloo(rank):
    """Rows, no elements, layouts with gaps; what is gathered into an expanded tensor is refused."""
    group, own, world = rank.group, rank.rank, rank.world
    x = torch.arange(24.0).view(6, 4)[:, ::2] + 100 * own
    outputs = [torch.empty(4, 6).t()[:, ::2] for _ in range(world)] if own == 0 else []
    group.gather([outputs] if own == 0 else [], [x], root(0)).wait()
    for source, each in enumerate(outputs):
        assert torch.equal(each, torch.arange(24.0).view(6, 4)[:, ::2] + 100 * source)
    y = torch.empty(4, 6).t()[:, ::2]
    group.scatter([y], [[x + to for to in range(world)]] if own == 0 else [], root(0, True)).wait()
    assert torch.equal(y, torch.arange(24.0).view(6, 4)[:, ::2] + own)
    z = torch.empty(4, 6).t()[:, ::2]
    sizes = [4, 2] if own == 0 else [2, 4]
    group.alltoall_base(z, x, [4, 2] if own == 0 else [2, 4], sizes).wait()
    given = [torch.arange(24.0).view(6, 4)[:, ::2] + 100 * source for source in range(world)]
    assert torch.equal(z, torch.cat([given[0][:4], given[1][:2]] if own == 0 else [given[0][4:], given[1][2:]]))
    outputs = [torch.empty(4, 6).t()[:, ::2] for _ in range(world)]
    group.alltoall(outputs, [x + to for to in range(world)]).wait()
    for source, each in enumerate(outputs):
        assert torch.equal(each, given[source] + own)
    for shape in ((0,), (0, 3), (2, 0)):
        empty = torch.empty(shape)
        group.alltoall_base(torch.empty(shape), empty, [], []).wait()
        group.gather([[empty.clone() for _ in range(world)]] if own == 0 else [], [empty], root(0)).wait()
    with pytest.raises(LayoutError, match="gather: expected 12 elements, got 6 in tensor 0"):
        group.gather([[torch.empty(6), torch.empty(6)]], [x], root(own))
    with pytest.raises(LayoutError, match="scatter: a result cannot be written to an expanded tensor"):
        group.scatter([torch.empty(1).expand(12)], [[torch.empty(12)] * world], root(own, True))


@pytest.mark.parametrize("repeat", [1, 80_000])
@on_ranks(5, hosts="aaaaa")
def test_half_precision_is_rounded_once(rank, repeat):
    """One after the other the small ones would be lost, and the sum of a mean would be infinite."""

    def check(rank, where):
        for dtype, big in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
            x = Placed(rank, torch.full((repeat,), big if rank.rank == 0 else 1.0, dtype=dtype), where)
            dist.all_reduce(x.tensor, group=rank.group)
            x.check(torch.full((repeat,), big + 4, dtype=dtype))
        x = Placed(rank, torch.full((repeat,), 60000.0, dtype=torch.float16), where)
        dist.all_reduce(x.tensor, ReduceOp.AVG, group=rank.group)
        x.check(torch.full((repeat,), 60000.0, dtype=torch.float16))

    for where in WHERE:
        check(rank, where)


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_what_is_not_finite_stays_visible_on_every_rank(op):
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor(
        [[1.0, nan, inf, inf, -inf, 0.0], [nan, 1.0, inf, -inf, 1.0, inf], [1.0, 2.0, 3.0, 4.0, nan, 5]]
    )
    wanted = combined(list(rows), op)
    assert wanted[:2].isnan().all()

    def call(rank):
        for dtype in FLOATS:
            for repeat in (1, 12_000):
                for where in WHERE:
                    x = Placed(rank, rows[rank.rank].to(dtype).repeat(repeat), where)
                    dist.all_reduce(x.tensor, getattr(ReduceOp, op), group=rank.group)
                    near = {"rtol": 0, "atol": 1e-2, "equal_nan": True}
                    torch.testing.assert_close(x.tensor, wanted.to(dtype).repeat(repeat), **near)
                    assert rank.all_equal(x.tensor)

    run_ranks(3, call, hosts="aaa")


def test_the_sum_is_that_in_rank_order_in_every_way_and_run():
    """Of values whose sum depends on the order; all ranks, all ways and all runs have the same bits."""

    def call(rank):
        results = []
        for numel in (ONE_EXCHANGE, ONE_EXCHANGE + 64, 2 * CHUNK):
            values = drawn(rank.rank, numel).exp2_().mul_(torch.tensor([1.0, 1e7, -1e7, 1e-7])[rank.rank])
            for where in WHERE * 2:
                x = Placed(rank, values, where)
                dist.all_reduce(x.tensor, group=rank.group)
                results.append(x.tensor[:ONE_EXCHANGE].clone())
        return results

    first, *others = [result for results in run_ranks(4, call, hosts="aaaa") for result in results[:6]]
    for other in others:
        same(other, first)


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
        st.sampled_from(["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.int16, torch.float64]),
        st.sampled_from(["SUM", "PRODUCT", "MIN", "MAX"]),
        st.integers(0, 300),
        st.sampled_from(WHERE),
        st.integers(0, world - 1),
        st.booleans(),
    )
    program = data.draw(st.lists(step, min_size=1, max_size=8))

    def values(rank, numel, dtype, seed):  # small whole numbers: their sums and products have no rounding
        return torch.randint(1, 3, (numel,), generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)

    def call(rank):
        later = []
        for number, (kind, dtype, op, numel, where, root, deferred) in enumerate(program):
            given = [values(each, numel, dtype, number) for each in range(world)]
            own = rank.rank
            x = Placed(rank, given[own], where)
            reduce_op = getattr(ReduceOp, op)
            rest = {"group": rank.group, "async_op": True}
            checks = [(x, given[own])]
            if kind == "all_reduce":
                work = dist.all_reduce(x.tensor, reduce_op, **rest)
                checks = [(x, combined(given, op))]
            elif kind == "reduce":
                work = dist.reduce(x.tensor, group_dst=root, op=reduce_op, **rest)
                checks = [(x, combined(given, op) if own == root else given[own])]
            elif kind == "broadcast":
                work = dist.broadcast(x.tensor, group_src=root, **rest)
                checks = [(x, given[root])]
            elif kind == "all_gather":
                outputs = [Placed(rank, torch.zeros_like(x.tensor), where) for _ in given]
                work = dist.all_gather([output.tensor for output in outputs], x.tensor, **rest)
                checks += zip(outputs, given, strict=True)
            elif kind == "reduce_scatter":
                output = Placed(rank, torch.zeros_like(x.tensor), where)
                work = dist.reduce_scatter(output.tensor, [x.tensor] * world, reduce_op, **rest)
                checks.append((output, combined(given, op)))
            else:
                work = dist.barrier(**rest)
            later.append((work, checks))
            if not deferred:
                finish(later)
        finish(later)

    def finish(later):
        while later:
            work, checks = later.pop()
            work.wait()
            for placed, wanted in checks:
                placed.check(wanted)

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
def test_an_expanded_tensor_can_be_given_and_not_be_written(rank):
    group, own = rank.group, torch.full((1,), rank.rank + 1.0)
    wide = own.expand(6)
    with pytest.raises(LayoutError, match=r"all_reduce: .* expanded tensor"):
        dist.all_reduce(wide, group=group)
    with pytest.raises(LayoutError, match="all_gather"):
        dist.all_gather([wide, torch.empty(6)], wide, group=group)
    with pytest.raises(LayoutError, match="reduce_scatter"):
        dist.reduce_scatter(wide, [wide, wide], group=group)
    outputs = [torch.empty(6), torch.empty(6)]
    dist.all_gather(outputs, wide, group=group)
    assert [output.tolist() for output in outputs] == [[1.0] * 6, [2.0] * 6]
    received = wide if rank.rank == 0 else torch.empty(6)
    dist.broadcast(received, group=group, group_src=0)
    assert received.tolist() == [1.0] * 6
    assert own.item() == rank.rank + 1


@on_ranks(2, hosts="aa")
def test_wrong_tensors_are_refused_before_anything_begins(rank):
    group, x = rank.group, torch.zeros(4)
    for wrong, message in [
        (lambda: dist.all_gather([x, x, x], x, group=group), "expected 2 tensors, one for each rank, got 3"),
        (lambda: dist.all_gather([x, x[1:].clone()], x, group=group), "expected 4 elements, got 3 in tensor 1"),
        (lambda: dist.reduce_scatter(x, [x, x[1:].clone()], group=group), "expected 4 elements, got 3 in tensor 1"),
        (lambda: all_gather_single(torch.zeros(7), x, group=group), "expected 8 elements, got 7"),
        (lambda: reduce_scatter_single(x, torch.zeros(7), group=group), "expected 8 elements, got 7"),
        (lambda: reduce_scatter_single(x, torch.zeros(8).double(), group=group), "one dtype"),
        # PyTorch's Gloo exchanges parts of elements.
        (
            lambda: dist.all_to_all_single(x[:3].clone(), x[:3], group=group),
            "a multiple of 2 elements.*, got 3",
        ),
        (lambda: dist.all_to_all_single(x[0].clone(), x[0], group=group), "a multiple of 2 elements.*, got 1"),
        (
            lambda: dist.all_to_all_single(x.clone(), x, [2, 2], [3, 3], group=group),
            r"of the input.*dimension 0, 4, got \[3, 3\]",
        ),
        (
            lambda: dist.all_to_all_single(x.clone(), x, [5, -1], [2, 2], group=group),
            r"of the output.*dimension 0, 4, got \[5, -1\]",
        ),
        (lambda: dist.all_to_all([x.clone()] * 3, [x] * 2, group=group), "expected 2 tensors.*got 3"),
        (lambda: group.allreduce([]).wait(), "at least one tensor"),
        (lambda: group.allreduce_coalesced([x, x.double()]).wait(), "one dtype"),
        (lambda: all_gather_single(torch.zeros(8).double(), x, group=group), "one dtype"),
        (lambda: dist.broadcast(x.to_sparse(), group=group, group_src=0), "dense"),
    ]:
        with pytest.raises((LayoutError, ValueError, TypeError), match=message):
            wrong()
    dist.barrier(group=group)


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
def test_a_work_that_nobody_waits_for_is_done_in_the_background(rank):
    x, done = torch.ones(5), threading.Event()
    work = dist.all_reduce(x, group=rank.group, async_op=True)
    work.get_future().then(lambda _: done.set())
    assert done.wait(10)
    assert work.is_completed()
    assert x.tolist() == [2.0] * 5


def test_waiting_can_be_given_up_and_the_collective_goes_on():
    late = threading.Event()

    def call(rank):
        x = torch.ones(5)
        if rank.rank == 1:
            assert late.wait(10)
        work = dist.all_reduce(x, group=rank.group, async_op=True)
        if rank.rank == 0:
            with pytest.raises(CommunicationError, match=r"not over after 0\.05 s; it goes on"):
                work.wait(timedelta(seconds=0.05))
            assert not work.is_completed()
            late.set()
        assert work.wait()
        assert x.tolist() == [2.0] * 5

    run_ranks(2, call, hosts="aa")


@on_ranks(2, hosts="aa")
def test_an_error_is_raised_at_each_wait_and_by_the_future(rank):
    work = dist.all_reduce(torch.ones(5, dtype=torch.bool), ReduceOp.AVG, group=rank.group, async_op=True)
    future = work.get_future()
    for wait, kind in ((work.wait, OptionError), (work.wait, OptionError), (future.wait, RuntimeError)):
        with pytest.raises(kind, match=r"cannot reduce torch\.bool with AVG"):
            wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), OptionError)


@pytest.mark.parametrize("world", [1, 3])
def test_many_works_are_begun_and_waited_for_backwards(world):
    def call(rank):
        tensors = [drawn(rank.rank, 1 + 997 * index % 50_000, seed=index) for index in range(60)]
        works = [dist.all_reduce(tensor, group=rank.group, async_op=True) for tensor in tensors]
        for index in reversed(range(60)):
            works[index].wait()
            same(tensors[index], combined([drawn(r, 1 + 997 * index % 50_000, seed=index) for r in range(world)]))

    run_ranks(world, call, hosts="a" * world)


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
def test_callbacks_of_futures_may_run_collectives_and_wait_for_them(depth, buckets):
    """As PyTorch's PowerSGD hook: each bucket is reduced, and then what follows from that, and so on."""

    def call(rank):
        group = rank.group

        def further(left, future):
            (x,) = future.value()
            if left == 0:
                return x
            y = x / 2
            dist.all_reduce(y, group=group)  # waited for inside a callback
            z = y / 2
            inner = dist.all_reduce(z, group=group, async_op=True).get_future()
            return inner.then(lambda f: further(left - 1, f)).wait()

        results = []
        for bucket in range(buckets):  # one after the other: callbacks of several buckets have no order among ranks
            x = torch.full((4,), float(bucket + 1))
            future = dist.all_reduce(x, group=group, async_op=True).get_future()
            results.append(future.then(lambda f: further(depth, f)).wait())
        return [result.tolist() for result in results]

    for results in run_ranks(2, call, hosts="aa"):
        assert results == [[2.0 * (bucket + 1)] * 4 for bucket in range(buckets)]


def test_callbacks_run_while_the_program_goes_on_with_another_group():
    """The callbacks' collectives go to a second group, whose order nobody else disturbs."""
    store = dist.HashStore()

    def call(rank):
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
        return [value.tolist() for value in torch.futures.wait_all(futures)]

    for results in run_ranks(2, call, hosts="aa"):
        assert results == [[3.0 * number] * 3 for number in range(10)]


@on_ranks(2, hosts="aa")
def test_threads_of_a_rank_wait_for_works_of_one_another(rank):
    tensors = [drawn(rank.rank, 3000 + index, seed=index) for index in range(24)]
    works = [dist.all_reduce(tensor, group=rank.group, async_op=True) for tensor in tensors]
    failed = []

    def wait(mine):
        try:
            for work in mine:
                work.wait(timedelta(seconds=10))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=wait, args=(works[n::4] if n % 2 else works[n::4][::-1],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for index, tensor in enumerate(tensors):
        same(tensor, combined([drawn(each, 3000 + index, seed=index) for each in range(2)]))


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


@on_ranks(2, hosts="aa")
def test_a_factor_needs_numbers_with_fractions(rank):
    with pytest.raises(OptionError, match=r"a factor needs a floating-point or complex tensor, got torch\.int64"):
        rank.group.allreduce(torch.ones(3, dtype=torch.int64), factor=0.5)


@pytest.mark.parametrize("hosts", ["a", "aaa", "aba"])
@pytest.mark.parametrize("numel", [3, 2 * ONE_EXCHANGE])
def test_a_mean_of_whole_numbers_is_that_of_their_exact_sum(numel, hosts):
    """Its fraction is cut off, as NCCL does; the sum may be larger than the dtype can say."""

    def call(rank):
        results = []
        for dtype, value in ((torch.uint8, 250), (torch.int8, -127), (torch.int64, -(rank.rank + 3)), (torch.int32, 7)):
            x = torch.full((numel,), value, dtype=dtype)
            dist.all_reduce(x, ReduceOp.AVG, group=rank.group)
            results.append(x.unique().tolist())
        return results

    world = len(hosts)
    expected = [[250], [-127], [-int(sum(range(3, 3 + world)) / world)], [7]]
    assert run_ranks(world, call, hosts=hosts) == [expected] * world


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
    together = torch.empty(sum(map(len, outputs)))
    group.alltoall_base(together, torch.cat(inputs), [], []).wait()
    for output, part in zip(outputs, together.chunk(len(outputs)), strict=True):
        output.copy_(part)
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


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda g, x: g.allreduce(x, MAX, SOON, 2.0), TypeError, "takes the tensors and op, timeout; it was given 3"),
        (lambda g, x: g.allreduce(x, MAX, op=MAX), TypeError, "was given op twice"),
        (
            lambda g, x: g.broadcast(x, rot=1),
            TypeError,
            "no argument 'rot'; next to the tensors it takes root, timeout",
        ),
        (lambda g, x: g.allreduce([x], options(dist.AllreduceOptions, "MAX"), op=MAX), TypeError, "it was given both"),
        (lambda g, x: g.allreduce(), TypeError, "needs tensors or tensor"),
        (lambda g, x: g.allreduce([x, x]), ValueError, "expected one tensor, got 2"),
        (lambda g, x: g.broadcast([x, x]), ValueError, "expected one tensor, got 2"),
        (lambda g, x: g.reduce([x, x], root=0), ValueError, "expected one tensor, got 2"),
    ],
)
@on_ranks(2, hosts="aa")
def test_forms_that_are_none_are_refused_before_anything_begins(rank, call, error, text):
    x = torch.ones(3)
    if rank.rank == 0:
        with pytest.raises(error, match=text):
            call(rank.group, x)
    dist.all_reduce(x, group=rank.group)
    assert x.tolist() == [2.0, 2.0, 2.0]


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
    with pytest.raises(OptionError, match="sparse tensors can be summed only, got MAX"):
        rank.group.allreduce([x], MAX)
    dist.barrier(group=rank.group)
