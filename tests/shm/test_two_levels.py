"""Two levels: shared memory inside each host, Gloo between one rank of each. Most hosts here are pretended."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

import lockstep
from lockstep.distributed import ProcessGroupShm, ShmOptions
from lockstep.errors import AgreementError, CommunicationError, OptionError
from lockstep.shm import inter_host
from lockstep.shm.inter_host import InterHost
from lockstep.shm.messages import disagreement
from lockstep.shm.one_host import OneHost
from processes import run_processes
from programs.ranks import on_ranks, replicated
from threaded import run_ranks

LAYOUTS = ["aabb", "abab", "abb", "abc", "aaab"]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOAT = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*WHOLE, *FLOAT, *COMPLEX, torch.bool]
ONE_EXCHANGE, IN_CHUNKS = 1000, 600_001  # elements of float32
OPS = {
    dist.ReduceOp.SUM: sum,
    dist.ReduceOp.PRODUCT: lambda xs: torch.stack(xs).prod(0),
    dist.ReduceOp.MIN: lambda xs: torch.stack(xs).amin(0),
    dist.ReduceOp.MAX: lambda xs: torch.stack(xs).amax(0),
}


def values(rank, numel, dtype):
    """Small numbers: whatever the order, their sum and product are exact in every dtype."""
    x = torch.randint(0, 4, (numel,), generator=torch.Generator().manual_seed(100 * numel + rank))
    return x.to(dtype) * (1 + 1j) if dtype.is_complex else x.to(dtype)


def of_all(rank, numel, dtype):
    return [values(each, numel, dtype) for each in range(rank.world)]


def same(x, expected):
    assert x.dtype == expected.dtype
    assert torch.equal(x.nan_to_num(77), expected.nan_to_num(77))


def put_together(op, xs):
    """Return what an operation makes of the tensors of all ranks, by arithmetic that has no rounding here."""
    if xs[0].dtype == torch.bool:
        return torch.stack(xs).all(0) if op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN) else torch.stack(xs).any(0)
    return OPS[op](xs).to(xs[0].dtype)


def all_reduced(rank, x, op=dist.ReduceOp.SUM):
    options = dist.AllreduceOptions()
    options.reduceOp = op
    rank.group.allreduce([x], options).wait()  # dist.all_reduce moves complex numbers as pairs of real ones
    return x


def over_hosts(group):
    """Return True if the ranks of a group found themselves on several hosts."""
    return group._runtime.inter_host is not None


def with_root(options, root):
    options.rootRank = root
    return options


# ------------------------------------------------------------------------------------------- values


def every_collective(rank, dtype, numel, memory=torch.empty, all_ops=True):
    def mine(source, count=numel):
        return memory(count, dtype=dtype).copy_(source)

    group, xs = rank.group, of_all(rank, numel, dtype)
    own = xs[rank.rank]
    ops = [
        op
        for op in list(OPS)[: None if all_ops else 1]
        if not (dtype.is_complex and op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
    ]
    for op in ops:
        same(all_reduced(rank, mine(own), op), put_together(op, xs))
    for root in range(rank.world):
        x = mine(own)
        group.broadcast([x], with_root(dist.BroadcastOptions(), root)).wait()
        same(x, xs[root])
        x = mine(own)
        group.reduce([x], with_root(dist.ReduceOptions(), root)).wait()
        same(x, put_together(dist.ReduceOp.SUM, xs) if rank.rank == root else own)
    outputs = [memory(numel, dtype=dtype) for _ in xs]
    group.allgather([outputs], [mine(own)]).wait()
    whole = memory(numel * rank.world, dtype=dtype)
    group.all_gather_single(whole, mine(own)).wait()
    same(torch.cat(outputs), torch.cat(xs))
    same(whole, torch.cat(xs))
    for op in ops:
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        blocks = [of_all(rank, numel + 1, dtype)[(rank.rank + i) % rank.world][:numel] for i in range(rank.world)]
        theirs = [of_all(rank, numel + 1, dtype)[(r + rank.rank) % rank.world][:numel] for r in range(rank.world)]
        outputs = [memory(numel, dtype=dtype) for _ in range(2)]
        group.reduce_scatter(outputs[:1], [blocks], options).wait()
        group.reduce_scatter_single(outputs[1], mine(torch.cat(blocks), numel * rank.world), options).wait()
        for output in outputs:
            same(output, put_together(op, theirs))


@pytest.mark.parametrize(
    "hosts", [pytest.param(hosts, marks=pytest.mark.around if hosts in ("abb", "aaab") else ()) for hosts in LAYOUTS]
)
@on_ranks(None, "hosts")
def test_every_collective_of_every_dtype_gives_what_arithmetic_says(rank, hosts):
    few = [torch.int16, torch.bfloat16, torch.complex64, torch.bool]
    dtypes = DTYPES if hosts == "abb" else few
    for dtype in dtypes:
        every_collective(rank, dtype, 3)
    every_collective(rank, torch.float32, 0)
    every_collective(rank, torch.int16, 0)
    rank.group.barrier().wait()


@pytest.mark.parametrize("hosts", ["aab", pytest.param("abab", marks=pytest.mark.soak)])
@on_ranks(None, "hosts")
def test_every_size_moves_in_each_of_its_ways(rank):
    every_collective(rank, torch.float32, ONE_EXCHANGE, rank.group.allocate)
    every_collective(rank, torch.float32, IN_CHUNKS, all_ops=False)
    every_collective(rank, torch.float32, 100_001, rank.group.allocate)
    every_collective(rank, torch.complex64, 300_001, all_ops=False)  # a dtype that the leaders gather
    mixed = rank.group.allocate if rank.rank % 2 else torch.empty  # some tensors lie in shared memory, some do not
    every_collective(rank, torch.float32, 50_001, mixed, all_ops=False)


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
@on_ranks(None, "hosts")
def test_means_and_operations_on_bits_are_those_of_all_ranks(rank):
    for dtype in [*FLOAT, *COMPLEX]:
        xs = [values(each, 9, dtype) * rank.world for each in range(rank.world)]
        same(all_reduced(rank, xs[rank.rank].clone(), dist.ReduceOp.AVG), sum(xs) / rank.world)
        output = torch.empty(9, dtype=dtype)
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.AVG
        rank.group.reduce_scatter_single(output, xs[rank.rank].repeat(rank.world), options).wait()
        same(output, sum(xs) / rank.world)
    for op, expected in (("BAND", 0b1000), ("BOR", 0b1111), ("BXOR", 0b0111 if rank.world == 3 else 0b0)):
        bits = torch.full((3,), [0b1001, 0b1010, 0b1100, 0b1111][rank.rank], dtype=torch.int32)
        same(all_reduced(rank, bits, getattr(dist.ReduceOp, op)), torch.full((3,), expected or 0, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", range(4))
@on_ranks(4, hosts="aabb")
def test_a_nan_of_any_rank_reaches_all(rank, place, dtype):
    x = values(rank.rank, 8, dtype)
    if rank.rank == place:
        x[place] = torch.nan
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
        assert all_reduced(rank, x.clone(), op).isnan().nonzero().tolist() == [[place]]


def rough(rank):
    """Values whose sum depends on the order in which they are added."""
    results = []
    for dtype, numel in itertools.product([torch.float32, torch.bfloat16, torch.complex64], [999, 300_001]):
        x = torch.randn(numel, generator=rank.generator(), dtype=torch.complex64)
        x = x if dtype.is_complex else x.real.to(dtype).contiguous()
        everybody = sum(rank.gather(x.to(torch.complex128)))
        results.append(all_reduced(rank, x))
        rtol = 0.05 if dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(x.to(torch.complex128), everybody, rtol=rtol, atol=0.1 if rtol > 0.01 else 1e-4)
        assert rank.all_equal(x)
    return results


@pytest.mark.parametrize("hosts", ["aab", pytest.param("abab", marks=pytest.mark.soak)])
def test_sums_are_the_same_bits_on_every_rank_and_in_every_run(hosts):
    first, second = (run_ranks(len(hosts), rough, hosts=hosts)[0] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def asynchronous(rank):
    xs = [values(rank.rank, numel, torch.float32) for numel in (5, 0, 400_001, 7)]
    seen = []
    works = [dist.all_reduce(x, group=rank.group, async_op=True) for x in xs]
    works[2].get_future().then(lambda future: seen.append(future.value()[0].sum().item()))
    gathered = torch.empty(5 * rank.world)
    last = rank.group.all_gather_single(gathered, xs[0])
    last.wait()
    assert all(work.is_completed() for work in works)
    for x in xs:
        same(x, sum(of_all(rank, x.numel(), torch.float32)))
    same(gathered, xs[0].repeat(rank.world))
    coalesced = [values(rank.rank, numel, torch.float64).view(-1, 2).t() for numel in (6, 8)]  # with gaps
    rank.group.allreduce_coalesced(coalesced).wait()
    for x in coalesced:
        same(x, sum(of_all(rank, x.numel(), torch.float64)).view(-1, 2).t())
    rank.group.barrier().wait()
    return seen == [xs[2].sum().item()]


@pytest.mark.parametrize("hosts", ["aabb", "abc"])
def test_asynchronous_and_coalesced_collectives_keep_their_order(hosts):
    assert all(run_ranks(len(hosts), asynchronous, hosts=hosts))


def through_gloo(rank):
    next_one, before = (rank.rank + 1) % rank.world, (rank.rank - 1) % rank.world
    got = torch.empty(3)
    sent = rank.group.send([torch.full((3,), float(rank.rank))], next_one, 5)
    rank.group.recv([got], before, 5).wait()
    sent.wait()
    same(got, torch.full((3,), float(before)))
    output, x = torch.empty(rank.world), torch.arange(float(rank.world)) + 10 * rank.rank
    rank.group.all_to_all_single(output, x, [], []).wait()
    same(output, 10 * torch.arange(float(rank.world)) + rank.rank)


def test_what_is_not_native_reaches_ranks_of_other_hosts_through_gloo():
    run_ranks(4, through_gloo, hosts="abab")


@on_ranks(4, hosts="aabb")
def test_sub_groups_across_hosts_and_inside_one_live_side_by_side(rank):
    across = [each for each in range(rank.world) if each % 2 == rank.rank % 2]
    host = "aabb"[rank.rank]
    group = rank.group.split_group(across, opts=ShmOptions(host=host))
    other = rank.group.split_group([0, 1] if rank.rank < 2 else [2, 3], opts=ShmOptions(host=host))
    assert over_hosts(group)
    assert not over_hosts(other)
    x, y, z = (torch.tensor([1.0 + rank.rank]) for _ in range(3))
    works = [each.allreduce([t]) for each, t in ((group, x), (other, y), (rank.group, z))]
    for work in reversed(works):
        work.wait()
    assert (x.item(), y.item(), z.item()) == (1 + across[0] + 1 + across[1], 3.0 if rank.rank < 2 else 7.0, 10.0)


# -------------------------------------------------------------------------- what goes between hosts


class Counted:
    """A group between hosts that writes down what this one gives to the others."""

    def __init__(self, group):
        self.group, self.calls = group, []

    def allreduce(self, tensors, options):
        self.calls.append(("allreduce", sum(x.nbytes for x in tensors)))
        return self.group.allreduce(tensors, options)

    def allgather(self, outputs, inputs, options):
        self.calls.append(("allgather", sum(x.nbytes for x in inputs)))
        return self.group.allgather(outputs, inputs, options)

    def broadcast(self, tensors, options):
        self.calls.append((f"broadcast from {options.rootRank}", sum(x.nbytes for x in tensors)))
        return self.group.broadcast(tensors, options)

    def abort(self):
        self.group.abort()


def gloo_over_loopback(store, rank, size, timeout):
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def counting(rank, hosts):
    made = []

    def between(store, host, size, timeout):
        made.append((host, size, Counted(gloo_over_loopback(store, host, size, timeout))))
        return made[0][2]

    group = rank.group.split_group(range(rank.world), opts=ShmOptions(host=hosts[rank.rank], between=between))
    if made:
        made[0][2].calls.clear()  # those of the beginning
    n, world = 5000, rank.world
    x, shared = torch.ones(n), group.allocate(n)
    shared.fill_(1.0)
    said = []
    for begin in (
        lambda: group.allreduce([x.clone()]),
        lambda: group.allreduce([shared]),
        lambda: group.allreduce([x.to(torch.int16)]),
        lambda: group.allreduce_coalesced([x.clone(), x.clone()]),
        lambda: group.reduce([x.clone()], with_root(dist.ReduceOptions(), world - 1)),
        lambda: group.broadcast([x.clone()], with_root(dist.BroadcastOptions(), world - 1)),
        lambda: group.all_gather_single(torch.empty(n * world), x),
        lambda: group.reduce_scatter_single(torch.empty(n), torch.ones(n * world)),
        lambda: group.barrier(),
        lambda: group.allreduce([torch.empty(0)]),
    ):
        begin().wait()
        if made:
            agreed, *calls = made[0][2].calls
            assert agreed == ("allgather", 2048)  # what the ranks are about to run
            made[0][2].calls.clear()
            said.append(calls)
    assert bool(made) == (rank.rank == hosts.index(hosts[rank.rank]))
    return (made[0][:2], said) if made else None


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaab"])
def test_each_host_sends_once_what_its_ranks_have_and_only_its_first_rank_does(hosts):
    results = run_ranks(len(hosts), counting, hosts, hosts="a" * len(hosts))
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    n, world = 5000, len(hosts)
    largest = max(map(hosts.count, hosts))
    root = list(dict.fromkeys(hosts)).index(hosts[-1])
    expected = [
        [("allreduce", 4 * n)],
        [("allreduce", 4 * n)],
        [("allgather", 2 * n)],
        [("allreduce", 8 * n)],
        [("allreduce", 4 * n)],
        [(f"broadcast from {root}", 4 * n)],
        [("allgather", largest * 4 * n)],
        [("allreduce", world * 4 * n)],
        [],
        [],
    ]
    assert [rank for rank, result in enumerate(results) if result] == leaders
    for host, leader in enumerate(leaders):
        assert results[leader] == ((host, len(leaders)), expected)


@on_ranks(4, hosts="aaaa")
def test_another_group_can_run_between_the_hosts(rank):
    def between(store, host, size, timeout):
        return ProcessGroupShm(PrefixStore("another", store), host, size, timeout, ShmOptions(host="all"))

    options = ShmOptions(host="abab"[rank.rank], between=between)
    group = rank.group.split_group(range(rank.world), opts=options)
    rank = type(rank)(rank.rank, rank.world, group)
    for dtype in (torch.float32, torch.int16):
        every_collective(rank, dtype, 3)
    every_collective(rank, torch.float32, 50_001, group.allocate, all_ops=False)


def with_a_between_that_fails(rank, hosts):
    def between(store, host, size, timeout):
        raise ValueError("no network here")

    with pytest.raises(ValueError if rank.rank in (0, 2) else CommunicationError) as caught:
        group = rank.group.split_group(range(rank.world), opts=ShmOptions(host=hosts[rank.rank], between=between))
        group.barrier().wait()
    return str(caught.value)


def test_a_factory_that_fails_is_an_error_on_every_rank():
    texts = run_ranks(4, with_a_between_that_fails, "aabb", hosts="aaaa")
    assert texts[0] == texts[2] == "no network here"
    assert all(f"rank {rank - 1} failed: ValueError('no network here')" in texts[rank] for rank in (1, 3))


# ------------------------------------------------------------------------------------- disagreement


def disagree(rank, odd, run):
    """All ranks get one error, with every rank and what it sent; and the group goes on."""
    with pytest.raises(AgreementError) as caught:
        run(rank, rank.rank in odd)
    same(all_reduced(rank, values(rank.rank, 6, torch.float32)), sum(of_all(rank, 6, torch.float32)))
    return str(caught.value)


def other_size(rank, odd):
    all_reduced(rank, torch.ones(7 if odd else 5))


def other_dtype(rank, odd):
    all_reduced(rank, torch.ones(500_000, dtype=torch.float64 if odd else torch.float32))


def other_op(rank, odd):
    all_reduced(rank, torch.ones(5), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)


def other_kind(rank, odd):
    rank.group.barrier().wait() if odd else all_reduced(rank, torch.ones(5))


def other_root(rank, odd):
    rank.group.broadcast([torch.ones(5)], with_root(dist.BroadcastOptions(), int(odd))).wait()


@pytest.mark.parametrize("odd", [(1,), (0, 1), (3,), (2, 3), (0, 3)], ids=str)
@pytest.mark.parametrize(
    ("run", "usual", "unusual"),
    [
        (other_size, "all_reduce(5 elements, torch.float32, SUM)", "all_reduce(7 elements, torch.float32, SUM)"),
        (
            other_dtype,
            "all_reduce(500000 elements, torch.float32, SUM)",
            "all_reduce(500000 elements, torch.float64, SUM)",
        ),
        (other_op, "all_reduce(5 elements, torch.float32, SUM)", "all_reduce(5 elements, torch.float32, MAX)"),
        (other_kind, "all_reduce(5 elements, torch.float32, SUM)", "barrier"),
        (
            other_root,
            "broadcast(5 elements, torch.float32, from rank 0)",
            "broadcast(5 elements, torch.float32, from rank 1)",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_differ_across_hosts_or_inside_one_all_get_the_same_error(odd, run, usual, unusual):
    texts = run_ranks(4, disagree, odd, run, hosts="aabb")
    assert len(set(texts)) == 1
    for ranks, what in (([rank for rank in range(4) if rank not in odd], usual), (odd, unusual)):
        assert f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {what}" in texts[0]


def all_different(rank):
    def run(rank, _):
        all_reduced(rank, torch.ones(1 + rank.rank))

    return disagree(rank, (), run)


def test_twelve_ranks_that_all_differ_are_all_named():
    texts = run_ranks(12, all_different, hosts="aaaaaabbbbcc")
    assert len(set(texts)) == 1
    for rank in range(12):
        assert f"rank {rank}: all_reduce({1 + rank} elements, " in texts[0]


def test_a_list_of_differences_that_is_too_long_says_so():
    long = [{f"all_reduce({10**6 + rank} elements, torch.float32, SUM)": [rank]} for rank in range(80)]
    said = {what: ranks for each in long for what, ranks in each.items()}
    text = inter_host._shortened(said)
    assert len(text) <= inter_host.ROW_BYTES
    assert "80 different collectives" in next(iter(json.loads(text)))
    error = str(disagreement(json.loads(text)))
    assert "ranks 0 to " in error
    assert "rank :" not in error


def refuse(rank):
    def refused(begin):
        with pytest.raises(OptionError) as caught:
            begin().wait()
        return str(caught.value)

    avg, band = dist.AllreduceOptions(), dist.AllreduceOptions()
    avg.reduceOp, band.reduceOp = dist.ReduceOp.AVG, dist.ReduceOp.BAND
    low = with_root(dist.ReduceOptions(), 1)
    low.reduceOp = dist.ReduceOp.MIN
    texts = [
        refused(lambda: rank.group.allreduce([torch.ones(3, dtype=torch.bool)], avg)),
        refused(lambda: rank.group.allreduce([torch.ones(300_000)], band)),
        refused(lambda: rank.group.reduce([torch.ones(3, dtype=torch.complex64)], low)),
    ]
    same(all_reduced(rank, values(rank.rank, 6, torch.float32)), sum(of_all(rank, 6, torch.float32)))
    return texts


def test_an_operation_that_cannot_be_done_is_an_error_on_all_ranks_and_no_end():
    texts = run_ranks(4, refuse, hosts="abab")
    assert all(each == texts[0] for each in texts)
    found = [("bool with AVG" in a, "float32 with BAND" in b, "complex64 with MIN" in c) for a, b, c in texts[:1]]
    assert found == [(True, True, True)]


# ------------------------------------------------------------------------------------ lost and late


class Waits:
    """A barrier for the end of a test: a late rank returns when all others have seen that it is late."""

    def __init__(self, others):
        self.others, self.event = threading.Semaphore(0), threading.Event()
        self.count = others

    def done(self):
        self.others.release()

    def wait(self):
        for _ in range(self.count):
            assert self.others.acquire(timeout=15)


def late(rank, victim, waits, timeout):
    rank.group.barrier().wait()
    if rank.rank == victim:
        waits.wait()
        return None
    if timeout:
        rank.group.set_timeout(timedelta(seconds=timeout))
    try:
        with pytest.raises(CommunicationError) as caught:
            all_reduced(rank, torch.ones(10))
        with pytest.raises(CommunicationError):
            rank.group.barrier().wait()
    finally:
        waits.done()
    return str(caught.value)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("hosts", "victim"),
    [
        *[("aabb", 3), ("abc", 1)],
        pytest.param("aabb", 0, marks=pytest.mark.around),
        *[pytest.param(*case, marks=pytest.mark.soak) for case in [("aabb", 1), ("aabb", 2), ("aab", 2), ("abc", 2)]],
    ],
)
def test_a_rank_that_stalls_is_named_on_every_host(hosts, victim):
    waits = Waits(len(hosts) - 1)
    # The group's own timeout is longer than the test's: what counts is the one that is set later.
    texts = run_ranks(len(hosts), late, victim, waits, 1.0, hosts=hosts, group_timeout=60.0)
    for rank, text in enumerate(texts):
        if rank != victim:
            mates = hosts.count(hosts[victim]) > 1
            assert f"rank {victim} did not answer within 1 s" in text if mates else f"with rank(s) {victim}" in text


def abort_while_all_wait(rank, waits):
    rank.group.barrier().wait()
    if rank.rank == 3:
        waits.wait()
        return "3"
    work = rank.group.allreduce([torch.ones(10)])
    if rank.rank == 1:
        rank.group.abort()
    try:
        with pytest.raises(CommunicationError) as caught:
            work.wait()
    finally:
        waits.done()
    return str(caught.value)


def test_an_abort_on_one_host_ends_the_wait_for_a_rank_of_another():
    texts = run_ranks(4, abort_while_all_wait, Waits(3), hosts="aabb", group_timeout=60.0)
    assert all("rank 1 called abort()" in text for rank, text in enumerate(texts) if rank != 3)


def two_levels(rank, hosts, store, timeout=60.0, between=None):
    """The default group anew, over several hosts."""
    dist.destroy_process_group()
    dist.init_process_group(
        "shm",
        store=dist.FileStore(store, rank.world),
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=timeout),
        pg_options=ShmOptions(host=hosts[rank.rank], between=between),
    )
    return dist.group.WORLD


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank, hosts, victim, where, store):
    group = two_levels(rank, hosts, store)
    assert over_hosts(group)
    dist.all_reduce(torch.ones(3))
    begun = time.monotonic()
    if rank.rank == victim:
        if where == "between":
            InterHost.all_reduce = die
        elif where == "while its leader waits":
            OneHost.broadcast = die
        else:
            die()
    with pytest.raises(CommunicationError) as caught:
        for _ in range(2):  # what it has given before its end may be enough for the others to go on
            dist.all_reduce(torch.ones(300_000))
    return str(caught.value), time.monotonic() - begun


@pytest.mark.parametrize(
    ("hosts", "victim", "where"),
    [
        ("aabb", 0, "before"),
        ("aabb", 1, "before"),
        ("aabb", 2, "between"),
        ("aabb", 3, "before"),
        ("aabb", 3, "while its leader waits"),
        ("aab", 2, "before"),
        ("abc", 1, "between"),
    ],
)
def test_a_killed_rank_is_named_on_every_host_long_before_the_timeout(hosts, victim, where, tmp_path):
    outcomes = run_processes(
        len(hosts), killed, hosts, victim, where, str(tmp_path / "store"), backend="shm", errors=True
    )
    for outcome in outcomes:
        if outcome.rank == victim:
            assert outcome.returncode == -signal.SIGKILL
            continue
        assert outcome.error is None, outcome.stderr
        text, seconds = outcome.result
        mates = hosts.count(hosts[victim]) > 1
        assert (f"rank {victim} has died" if mates else f"with rank(s) {victim}") in text
        assert seconds < 10  # the timeout is a minute


def killed_while_its_leader_waits_for_others(rank, store):
    two_levels(rank, "aabb", store)
    dist.all_reduce(torch.ones(3))
    if rank.rank == 3:  # late: the leaders wait for it, or for its leader, when rank 1 dies
        with contextlib.suppress(CommunicationError):
            dist.group.WORLD._store.wait(["seen 0", "seen 2"], timedelta(seconds=20))
        return None
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if rank.rank == 1:
        time.sleep(0.3)  # for the leader to get to its wait; the other way round the test is easier, and passes, too
        die()
    with pytest.raises(CommunicationError) as caught:
        work.wait()
    dist.group.WORLD._store.set(f"seen {rank.rank}", "")
    return str(caught.value)


def test_a_death_is_noticed_by_a_leader_that_waits_for_another_host(tmp_path):
    outcomes = run_processes(
        4, killed_while_its_leader_waits_for_others, str(tmp_path / "store"), backend="shm", errors=True
    )
    assert [outcome.error for outcome in outcomes if outcome.rank != 1] == [None] * 3
    assert all("rank 1 has died" in outcomes[rank].result for rank in (0, 2))


# ------------------------------------------------------------------------------------------ training


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def train(rank):
    module = replicated(rank, network, bucket_cap_mb=0.001)
    reference = rank.make(network)
    rows = [torch.randn(4, 6, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(8)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (module, reference)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        module(rows[rank.rank]).square().mean().backward()
        (sum(reference(rows[r]).square().mean() for r in range(rank.world)) / rank.world).backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-13)
            assert rank.all_equal(p.grad)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("hosts", ["aabb", "abb"])
def test_replicate_over_two_levels_gives_the_gradients_of_one_process(hosts):
    run_ranks(len(hosts), train, hosts=hosts)


def by_options(rank, store):
    two_levels(rank, "abab", store)
    ddp = lockstep.DistributedDataParallel(copy.deepcopy(rank.make(network)))
    x = torch.randn(4, 6, generator=rank.generator(), dtype=torch.float64)
    ddp(x).square().mean().backward()
    reference = rank.make(network)
    reference(x).square().mean().backward()
    for p, q in zip(ddp.parameters(), reference.parameters(), strict=True):
        whole = [torch.empty_like(q) for _ in range(rank.world)]
        dist.all_gather(whole, q.grad)
        torch.testing.assert_close(p.grad, sum(whole) / rank.world)
    objects = [None] * rank.world
    dist.all_gather_object(objects, {"rank": rank.rank})
    return [each["rank"] for each in objects], over_hosts(dist.group.WORLD)


@pytest.mark.numpy
def test_a_default_group_of_processes_has_the_hosts_that_its_options_say(tmp_path):
    results = run_processes(4, by_options, str(tmp_path / "store"), backend="shm")
    assert results == [([0, 1, 2, 3], True)] * 4


# ---------------------------------------------------------------- two hosts, as network namespaces


def command(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=20)


@pytest.fixture
def wire():
    """Two network namespaces with a wire between them: their names, and those of the wire's ends."""
    names = [f"lockstep-{os.getpid()}-{i}" for i in range(2)]
    ends = [f"ls{os.getpid()}v{i}" for i in range(2)]
    steps = [("ip", "netns", "add", name) for name in names]
    steps.append(("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1]))
    for i, (name, end) in enumerate(zip(names, ends, strict=True)):
        steps.append(("ip", "-n", name, "addr", "add", f"10.203.77.{i + 1}/24", "dev", end))
        steps += [("ip", "-n", name, "link", "set", each, "up") for each in (end, "lo")]
    try:
        for step in steps:
            done = command(*step)
            if done.returncode:
                pytest.skip(f"no network namespaces: {' '.join(step)}: {done.stderr.strip()}")
        yield list(zip(names, ends, strict=True))
    except FileNotFoundError as error:
        pytest.skip(f"no network namespaces: {error}")
    finally:
        with contextlib.suppress(FileNotFoundError):
            for name in names:
                command("ip", "netns", "del", name)  # the wire goes with them


def on_own_host(rank, wire, store):
    """Two ranks move to each namespace, where they find out by themselves who shares memory."""
    dist.destroy_process_group()
    name, end = wire[rank.rank // 2]
    with open(f"/var/run/netns/{name}") as namespace:
        assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    os.environ["GLOO_SOCKET_IFNAME"] = end
    dist.init_process_group(
        "shm",
        store=dist.FileStore(store, rank.world),
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=60),
    )
    return type(rank)(rank.rank, rank.world, dist.group.WORLD), end


def sent_by(device):
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if f"{device}:" in line)
    return int(line.split(":")[1].split()[8])


def on_two_hosts(rank, wire, store):
    rank, end = on_own_host(rank, wire, store)
    runtime = rank.group._runtime
    assert runtime.inter_host.hosts == [[0, 1], [2, 3]]
    assert runtime.peers.global_ranks == [rank.rank // 2 * 2, rank.rank // 2 * 2 + 1]
    x = values(rank.rank, 2_000_000, torch.float32)
    dist.barrier()
    before = sent_by(end)
    dist.all_reduce(x)
    dist.barrier()
    sent = sent_by(end) - before
    same(x, sum(of_all(rank, 2_000_000, torch.float32)))
    every_collective(rank, torch.int16, 11)
    every_collective(rank, torch.float32, 40_001, rank.group.allocate)
    disagree(rank, (1, 2), other_size)
    train(rank)
    through_gloo(rank)
    objects = [None] * rank.world
    dist.all_gather_object(objects, rank.rank)
    assert objects == [0, 1, 2, 3]
    return sent / x.nbytes


@pytest.mark.numpy
def test_two_hosts_are_told_apart_and_send_their_sums_once(wire, tmp_path):
    for share in run_processes(4, on_two_hosts, wire, str(tmp_path / "store")):
        assert 0.9 < share < 1.3  # half of the sums, and half of the result; with Gloo alone it is 1.5 for each rank


def lost_on_two_hosts(rank, wire, store, victim):
    rank, _ = on_own_host(rank, wire, store)
    dist.all_reduce(torch.ones(3))
    if rank.rank == victim:
        die()
    with pytest.raises(CommunicationError) as caught:
        dist.all_reduce(torch.ones(3))
    return str(caught.value)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_killed_on_one_host_is_named_on_both(wire, tmp_path, victim):
    outcomes = run_processes(4, lost_on_two_hosts, wire, str(tmp_path / "store"), victim, errors=True)
    for outcome in outcomes:
        assert outcome.rank == victim or f"rank {victim} has died" in outcome.result, outcome.stderr
