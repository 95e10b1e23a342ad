"""Groups of the `shm` backend: sub-groups, ranks in any order, several at once, meshes, an end and a new beginning.

And what goes through the Gloo group beside it: send and receive, gather, scatter, all-to-all, objects, sparse tensors.
"""

from __future__ import annotations

import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lockstep.distributed import ProcessGroupShm, ShmOptions
from lockstep.errors import AgreementError, CommunicationError
from lockstep.shm import runtime
from lockstep.shm.constants import LIVENESS_SECONDS
from processes import on_processes, run_processes
from programs.ranks import on_ranks
from threaded import run_ranks

LARGE = 100_001  # elements: several times what goes at once


def on_shm(world, function, *args, **options):
    return run_processes(world, function, *args, backend="shm", **options)


def sums(group, mine, numel=3):
    """The all-reduced sum of what each rank calls its own, small and large, which must agree."""
    small, large = torch.full((numel,), float(mine)), torch.full((LARGE,), float(mine))
    dist.all_reduce(small, group=group)
    dist.all_reduce(large, group=group)
    assert large.eq(small[0]).all()
    return small[0].item()


# ------------------------------------------------------------------------------------------ sub-groups


def sub_groups(rank):
    own = rank.rank
    results = {}
    for members in ([0, 2], [3, 1], [2, 1, 0], [1], [3, 0, 2, 1]):
        group = dist.new_group(members)
        if own in members:
            assert dist.get_backend(group) == "shm"
            results[tuple(members)] = sums(group, 10**own), dist.get_process_group_ranks(group)
            source = dist.get_process_group_ranks(group)[-1]
            x = torch.full((2,), float(own))
            dist.broadcast(x, source, group=group)
            assert x.tolist() == [float(source)] * 2
            gathered = [torch.empty(1) for _ in members]
            dist.all_gather(gathered, torch.tensor([float(own)]), group=group)
            assert [int(part) for part in gathered] == dist.get_process_group_ranks(group)
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
    named = dist.new_group([0, 3], timeout=timedelta(seconds=7), group_desc="outer")
    if own in (0, 3):
        assert named.group_desc == "outer"
        results["outer"] = sums(named, 10**own)
    results["world"] = sums(None, 10**own)
    dist.destroy_process_group(named)
    results["after"] = sums(None, 10**own)
    return results


def test_groups_of_some_ranks():
    for rank, results in enumerate(on_shm(4, sub_groups)):
        for members, result in results.items():
            if isinstance(members, tuple):
                assert rank in members
                assert result == (sum(10**member for member in members), sorted(members))
        assert results.get("outer") == (1001 if rank in (0, 3) else None)
        assert results["world"] == results["after"] == 1111


def made_by_its_ranks_alone(rank):
    pair = dist.new_group([rank.rank // 2 * 2, rank.rank // 2 * 2 + 1], use_local_synchronization=True)
    return sums(pair, 10**rank.rank)


def test_a_group_can_be_made_by_its_ranks_alone():
    assert on_shm(4, made_by_its_ranks_alone) == [11, 11, 1100, 1100]


def ranks_as_given(rank):
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    gathered = [torch.empty(1) for _ in range(3)]
    dist.all_gather(gathered, torch.tensor([float(rank.rank)]), group=group)
    x = torch.full((LARGE,), float(rank.rank))
    dist.broadcast(x, 2, group=group)
    assert x.eq(2).all()
    try:
        dist.all_reduce(torch.zeros(3 + rank.rank // 2), group=group)
    except RuntimeError as error:
        message = str(error)
    return dist.get_group_rank(group, rank.rank), [int(part) for part in gathered], message, sums(group, 10**rank.rank)


@pytest.mark.skipif("sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="newer than PyTorch 2.11")
def test_ranks_may_have_any_order_in_a_group():
    for rank, (place, gathered, message, total) in enumerate(on_shm(3, ranks_as_given)):
        assert place == [1, 2, 0][rank]
        assert gathered == [2, 0, 1]
        assert "ranks 0, 1: all_reduce(3 elements" in message  # the ranks of the default group
        assert "rank 2: all_reduce(4 elements" in message
        assert total == 111


def interleaved(rank):
    """Works on several groups, begun in one order and waited for in another."""
    own = rank.rank
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    groups = [dist.group.WORLD]
    for split in (rows, columns):
        made = [dist.new_group(members) for members in split]
        groups.append(next(group for group, members in zip(made, split, strict=True) if own in members))
    works, tensors = [], []
    for step in range(12):
        for group in groups:
            tensors.append(torch.full((5 if step % 2 else LARGE,), float(10**own)))
            works.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
    for work in reversed(works):
        work.wait()
    return [{tensor.unique().item() for tensor in tensors[index::3]} for index in range(3)]


def test_several_groups_are_used_at_once():
    for rank, (world, row, column) in enumerate(on_shm(4, interleaved)):
        assert world == {1111.0}
        assert row == {11.0 if rank < 2 else 1100.0}
        assert column == {101.0 if rank % 2 == 0 else 1010.0}


def allocated_elsewhere(rank):
    pair = dist.new_group([0, 1])
    x = pair.allocate(LARGE).fill_(float(rank.rank + 1))
    dist.all_reduce(x)  # in memory of another group
    assert x.eq(3).all()
    dist.all_reduce(x, group=pair)
    assert x.eq(6).all()
    return True


def test_memory_of_one_group_can_be_given_to_another():
    assert on_shm(2, allocated_elsewhere) == [True] * 2


@pytest.mark.parametrize("hosts", ["aaaaa", "abbab"])
def test_a_group_can_be_split(hosts):
    def call(rank):
        own, group = rank.rank, rank.group
        low = group.split_group([2, 0, 1])
        high = group.split_group([4, 3], timeout=timedelta(seconds=5), group_desc="high")
        again = group.split_group([0, 1, 2])
        assert (low is None) == (own > 2)
        assert (high is None) == (own < 3)
        part = low if low is not None else high
        assert part.size() == (3 if own < 3 else 2)
        assert part.rank() == own % 3
        inner = part.split_group([1])  # of a part
        assert (inner is None) == (own not in (1, 4))
        if inner is not None:
            assert sums(inner, 10**own) == 10**own
        if again is not None:
            assert sums(again, 10**own) == 111
        if high is not None:
            assert high.group_desc == "high"
            with pytest.raises(RuntimeError, match=r"rank 3: .*rank 4: "):
                dist.all_reduce(torch.zeros(own), group=high)
        return sums(part, 10**own), sums(group, 10**own)

    results = run_ranks(5, call, hosts=hosts)
    assert results == [(111.0, 11111.0)] * 3 + [(11000.0, 11111.0)] * 2


def test_groups_of_every_size_come_and_go():
    def call(rank):
        for turn in range(3):
            for size in range(1, 9):
                part = rank.group.split_group(range(size))
                if part is not None:
                    assert sums(part, 1 + turn) == size * (1 + turn)
                    part.shutdown()
                    with pytest.raises(CommunicationError, match="destroyed"):
                        part.barrier()

    run_ranks(8, call, hosts="a" * 8)


@on_ranks(1, hosts="a")
def test_a_group_of_one_rank_does_everything(rank):
    group, x = rank.group, torch.arange(3.0)
    outputs = [torch.empty(3)]
    dist.gather(x, outputs, group=group, group_dst=0)
    assert torch.equal(outputs[0], x)
    y = torch.empty(3)
    dist.scatter(y, outputs, group=group, group_src=0)
    assert torch.equal(y, x)
    dist.all_to_all_single(y.zero_(), x, group=group)
    assert torch.equal(y, x)
    assert sums(group, 7) == 7
    dist.barrier(group=group)


# -------------------------------------------------------------------------------------------- meshes


def meshes(rank):
    own = rank.rank
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert dist.get_backend(line.get_group()) == dist.get_backend(square.get_group("inner")) == "shm"
    flat = square._flatten("flat")
    return {
        "all": sums(line.get_group(), 10**own),
        "outer": sums(square.get_group("outer"), 10**own),
        "inner": sums(square["inner"].get_group(), 10**own),
        "flat": sums(flat.get_group(), 10**own),
        "place": square.get_coordinate(),
    }


def test_meshes_of_one_and_two_dimensions():
    for rank, results in enumerate(on_shm(4, meshes)):
        assert results["all"] == results["flat"] == 1111
        assert results["outer"] == (101 if rank % 2 == 0 else 1010)
        assert results["inner"] == (11 if rank < 2 else 1100)
        assert list(results["place"]) == [rank // 2, rank % 2]


# --------------------------------------------------------------------------- an end, and a beginning


def again(rank, folder):
    totals = []
    for turn in range(3):
        totals.append(sums(None, 10**rank.rank))
        part = dist.new_group([0, 1])
        if rank.rank < 2:
            totals.append(sums(part, 1))
        dist.destroy_process_group()
        assert not dist.is_initialized()
        store = dist.FileStore(f"{folder}/{turn}", rank.world)
        # Once by its own name, and once by the device's.
        name = "shm" if turn else "cpu:shm"
        dist.init_process_group(name, store=store, rank=rank.rank, world_size=rank.world)
    with pytest.raises(CommunicationError, match="destroyed"):
        rank.group.barrier()
    totals.append(sums(None, 10**rank.rank))
    return totals


def test_a_process_group_can_be_destroyed_and_made_again(tmp_path):
    for rank, totals in enumerate(on_shm(3, again, str(tmp_path))):
        assert totals == ([111, 2] * 3 if rank < 2 else [111] * 3) + [111]


def beside_gloo(rank):
    gloo = dist.new_group([0, 1, 2], backend="gloo")
    both = sums(gloo, 10**rank.rank), sums(None, 10**rank.rank)
    dist.monitored_barrier(gloo)
    return both


def test_gloo_groups_live_beside_it():
    assert on_shm(3, beside_gloo) == [(111, 111)] * 3


@on_processes(3)
def test_it_can_be_the_backend_of_a_part_alone(rank):
    part = dist.new_group([0, 2], backend="shm")
    assert (sums(part, 10**rank.rank) if rank.rank != 1 else None) == [101, None, 101][rank.rank]


def with_options(rank, folder):
    dist.destroy_process_group()
    options = ShmOptions(host="ab"[rank.rank // 2])
    store = dist.FileStore(f"{folder}/store", rank.world)
    dist.init_process_group("shm", store=store, rank=rank.rank, world_size=rank.world, pg_options=options)
    assert dist.group.WORLD.options is options
    pair = dist.new_group([1, 2], pg_options=ShmOptions(host="c"))
    return sums(None, 10**rank.rank), sums(pair, 1) if rank.rank in (1, 2) else 2


def test_options_say_which_host_a_rank_is_on(tmp_path):
    assert on_shm(4, with_options, str(tmp_path)) == [(1111, 2)] * 4


# ----------------------------------------------------------------------------------- through Gloo


def objects(rank):
    own, world = rank.rank, rank.world
    gathered = [None] * world
    dist.all_gather_object(gathered, {"rank": own, "text": "x" * 10**own})
    assert [len(each["text"]) for each in gathered] == [10**each for each in range(world)]
    received = [own, "only"] if own == 1 else [None, None]
    dist.broadcast_object_list(received, 1)
    assert received == [1, "only"]
    parts = [None]
    dist.scatter_object_list(parts, [f"for {to}" for to in range(world)] if own == 2 else None, 2)
    assert parts == [f"for {own}"]
    everything = [None] * world if own == 0 else None
    dist.gather_object({own}, everything)
    assert everything == ([{each} for each in range(world)] if own == 0 else None)
    if own == 0:
        dist.send_object_list(["sent", 3], 2)
    if own == 2:
        got = [None, None]
        dist.recv_object_list(got, 0)
        assert got == ["sent", 3]
    part = dist.new_group([0, 2])
    if own != 1:
        pair = [None, None]
        dist.all_gather_object(pair, own, group=part)
        assert pair == [0, 2]
    return sums(None, 1)


@pytest.mark.numpy
def test_objects_are_exchanged():
    assert on_shm(3, objects) == [3.0] * 3


def point_to_point(rank, dtype=torch.float32):
    own, world = rank.rank, rank.world
    right, left = (own + 1) % world, (own - 1) % world
    x, y = torch.full((LARGE,), own, dtype=dtype), torch.empty(LARGE, dtype=dtype)
    sent = dist.isend(x, right)
    assert dist.irecv(y, left).wait()
    sent.wait()
    assert y.eq(left).all()

    operations = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y.zero_(), left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert y.eq(left).all()

    if own == 0:
        senders = set()
        for _ in range(world - 1):
            z = torch.empty(1, dtype=dtype)
            source = dist.recv(z, tag=5)
            assert source == z.item()
            senders.add(source)
        assert senders == set(range(1, world))
    else:
        dist.send(torch.full((1,), own, dtype=dtype), 0, tag=5)
    # Tags keep messages apart, and collectives may run in between.
    if own == 0:
        works = [dist.isend(torch.full((2,), tag, dtype=dtype), 1, tag=tag) for tag in (1, 2)]
    total = sums(None, 1)
    if own == 0:
        for work in works:
            work.wait()
    if own == 1:
        second, first = torch.empty(2, dtype=dtype), torch.empty(2, dtype=dtype)
        dist.recv(second, 0, tag=2)
        dist.recv(first, 0, tag=1)
        assert (second[0], first[0]) == (2, 1)
    pair = dist.new_group([2, 1])
    if own == 1:
        dist.send(x, 2, group=pair)
    if own == 2:
        dist.recv(y, 1, group=pair)
        assert y.eq(1).all()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_ranks_send_and_receive(dtype):
    assert on_shm(3, point_to_point, dtype) == [3.0] * 3


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
@on_ranks(3, "hosts")
def test_gather_scatter_and_all_to_all(rank):
    own, world, group = rank.rank, rank.world, rank.group
    for numel in (1, LARGE):
        x = torch.full((numel,), float(own))
        outputs = [torch.empty(numel) for _ in range(world)] if own == 1 else None
        dist.gather(x, outputs, group=group, group_dst=1)
        assert outputs is None or [each.unique().tolist() for each in outputs] == [[0.0], [1.0], [2.0]]
        given = [torch.full((numel,), 10.0 + to) for to in range(world)] if own == 2 else None
        dist.scatter(x, given, group=group, group_src=2)
        assert x.eq(10 + own).all()
        outputs = [torch.empty(numel) for _ in range(world)]
        dist.all_to_all(outputs, [torch.full((numel,), 10.0 * own + to) for to in range(world)], group=group)
        assert [each.unique().tolist() for each in outputs] == [[10.0 * of + own] for of in range(world)]
    # Rank r gives rank s r + s elements.
    sizes = [own + to for to in range(world)]
    output = torch.empty(sum(sizes))
    dist.all_to_all_single(output, torch.full((sum(sizes),), float(own)), sizes, sizes, group=group)
    assert output.tolist() == [float(of) for of in range(world) for _ in range(own + of)]
    works = [
        dist.all_to_all_single(torch.empty(3), torch.ones(3), group=group, async_op=True),
        dist.all_reduce(torch.ones(3), group=group, async_op=True),
    ]
    for work in reversed(works):
        work.wait()


ONES, WITH_TWO = [[1, 1, 1]] * 3, [[1, 1, 1], [1, 2, 1], [1, 1, 1]]
EXPECTED_TWO = [[1, 1, 1], [2, 2, 1], [1, 1, 1]]


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
@pytest.mark.parametrize(
    ("sent", "expected", "pairs"),
    [
        # In equal parts: rank 1 has six elements, the others have three.
        ([1, 2, 1], [1, 2, 1], r"rank 0 sends 1 to rank 1, which expects 2; rank 1 sends 2 to rank 0"),
        # Rank 0 sends too little, or too much: Gloo leaves what was in memory, or ends the process that receives.
        (WITH_TWO, EXPECTED_TWO, r"rank 0 sends 1 to rank 1, which expects 2\."),
        ([[1, 9, 1], *WITH_TWO[1:]], EXPECTED_TWO, r"rank 0 sends 9 to rank 1, which expects 2\."),
        # The sum over all ranks fits.
        ([[1, 2, 0], *ONES[1:]], ONES, r"rank 0 sends 2 to rank 1, which expects 1; rank 0 sends 0 to rank 2"),
        ([[2, 3, 2]] * 3, [[3, 2, 3]] * 3, r"rank 0 sends 2 to rank 0, which expects 3; .*; and 1 more\."),
    ],
)
def test_all_to_all_of_sizes_that_do_not_fit(hosts, sent, expected, pairs):
    def call(rank):
        given, taken = (sizes[rank.rank] for sizes in (sent, expected))
        in_parts = isinstance(given, list)
        x, output = (
            torch.ones(sum(given) if in_parts else 3 * given),
            torch.empty(sum(taken) if in_parts else 3 * taken),
        )
        output.fill_(7.0)
        texts = []
        with pytest.raises(AgreementError, match=pairs) as raised:
            dist.all_to_all_single(output, x, *((taken, given) if in_parts else ()), group=rank.group)
        texts.append(str(raised.value))
        if in_parts:
            with pytest.raises(AgreementError, match=pairs) as raised:
                dist.all_to_all(list(output.split(taken)), list(x.split(given)), group=rank.group)
            texts.append(str(raised.value))
        assert output.eq(7).all()
        assert sums(rank.group, 1.0) == 3
        return set(texts)

    (text,) = set().union(*run_ranks(3, call, hosts=hosts))
    assert "no data has been moved" in text


@pytest.mark.parametrize("hosts", ["aaa", "abb"])
@on_ranks(3, "hosts")
def test_sparse_tensors_are_summed(rank):
    x = torch.sparse_coo_tensor([[rank.rank, 4]], [1.0, 10.0 * rank.rank], (5,), check_invariants=False)
    dist.all_reduce(x, group=rank.group)
    assert x.to_dense().tolist() == [1.0, 1.0, 1.0, 0.0, 30.0]
    assert sums(rank.group, 1) == 3.0


@on_ranks(2, hosts="aa")
def test_a_time_limit_that_is_set_later_holds_for_everything(rank):
    outputs = [torch.empty(1), torch.empty(1)] if rank.rank == 0 else None
    dist.gather(torch.ones(1), outputs, group=rank.group, group_dst=0)  # connects
    rank.group.set_timeout(timedelta(seconds=0.2))
    if rank.rank == 0:
        with pytest.raises(CommunicationError, match=r"rank 1 did not answer within 0\.2 s"):
            dist.gather(torch.ones(1), outputs, group=rank.group, group_dst=0)
        with pytest.raises(CommunicationError, match=r"rank 1 did not answer within 0\.2 s"):
            dist.barrier(group=rank.group)


def test_ranks_may_be_on_any_host():
    def call(rank):
        outputs = [torch.empty(1) for _ in range(4)]
        dist.all_gather(outputs, torch.tensor([float(rank.rank)]), group=rank.group)
        return sums(rank.group, 10**rank.rank), [int(output) for output in outputs]

    for hosts in ("abab", "abba", "abcd", "abbb"):
        assert run_ranks(4, call, hosts=hosts) == [(1111.0, [0, 1, 2, 3])] * 4


def test_groups_that_are_forgotten_end():
    """The one that is still used tells whether the other ones' connections are gone."""

    def call(rank):
        kept = ProcessGroupShm(store, rank.rank, 2, timedelta(seconds=30), rank.group.options)
        for turn in range(5):
            group = rank.group.split_group([0, 1], group_name=f"{turn}")
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            if turn % 2:
                work.wait()
            del group
            work.wait()
            assert work.result()[0].eq(2).all()
        return sums(kept, 1)

    store = dist.HashStore()
    assert run_ranks(2, call, hosts="aa") == [2.0] * 2


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_a_rank_may_leave_as_soon_as_it_has_made_the_group(hosts, monkeypatch):
    """The others, which are still on their way, take no harm."""
    gone = threading.Event()
    make = runtime.make_gloo_group

    def slow(store, rank, *args, **kwargs):
        made = make(store, rank, *args, **kwargs)
        if rank == 1 and gone.wait(0.5):
            time.sleep(3 * LIVENESS_SECONDS)  # looks for ranks that have died
        return made

    def call(rank):
        group = ProcessGroupShm(store, rank.rank, 3, timedelta(seconds=30), ShmOptions(host=hosts[rank.rank]))
        group.shutdown()
        gone.set()
        return True

    store = dist.HashStore()
    monkeypatch.setattr(runtime, "make_gloo_group", slow)
    assert run_ranks(3, call, hosts="aaa") == [True] * 3


@pytest.mark.parametrize("between", [None, print])  # is not called on one host
def test_groups_may_meet_at_one_place_one_after_the_other(between):
    """As those of a program that destroys its group and makes another: under torchrun both have the same store."""
    store, limit = dist.HashStore(), timedelta(seconds=20)
    addresses = [b""]

    def make(rank):
        group = ProcessGroupShm(store, rank, 2, limit, ShmOptions(between=between))
        values = torch.full((3,), rank + 1.0)
        group.allreduce([values], dist.AllreduceOptions()).wait()
        sent = [torch.full((1,), rank + 1.0), torch.zeros(1)]
        group.alltoall_base(sent[1], sent[0], [rank, 1 - rank], [rank, 1 - rank], dist.AllToAllOptions()).wait()
        return group, values.tolist(), sent[1].item()

    def first_to_come():
        return make(1)

    def second_to_come():
        while not store.check(["rendezvous/1"]) or store.get("rendezvous/1") in addresses:
            time.sleep(0.01)
        addresses.append(store.get("rendezvous/1"))
        return make(0)

    kept = []
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(call) for call in (second_to_come, first_to_come)]
            kept += [future.result(30) for future in made]
    assert [(values, received) for _, values, received in kept] == [([3.0] * 3, 2.0), ([3.0] * 3, 1.0)] * 3
    for group, *_ in kept:
        group.shutdown()
