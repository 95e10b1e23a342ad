"""Groups of the `shm` backend: sub-groups, ranks in any order, several at once, meshes, an end and a new beginning.

And what goes through the Gloo group beside it: send and receive, gather, scatter, all-to-all, objects, sparse tensors.
"""

from __future__ import annotations

import inspect
import re
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
from processes import on_processes
from programs.ranks import on_ranks
from shm.collectives import error_of, on_hosts, over_hosts
from threaded import run_ranks

LARGE = 100_001  # elements: several times what goes at once


def sums(group, mine, numel=3):
    """The all-reduced sum of what each rank calls its own, small and large, which must agree."""
    small, large = torch.full((numel,), float(mine)), torch.full((LARGE,), float(mine))
    dist.all_reduce(small, group=group)
    dist.all_reduce(large, group=group)
    assert large.eq(small[0]).all()
    return small[0].item()


# ------------------------------------------------------------------------------------------ sub-groups


def mesh(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[: len(sizes)])


GROUPS = {  # each of four ranks calls it; what the groups' ranks are. The first: it is named by how many a rank had.
    "made by its ranks alone": (
        lambda rank: dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True),
        [[0, 1], [2, 3]],
    ),
    "all": (lambda rank: dist.group.WORLD, [[0, 1, 2, 3]]),
    "two": (lambda rank: dist.new_group([0, 2]), [[0, 2]]),
    "two, named": (lambda rank: dist.new_group([0, 3], timeout=timedelta(seconds=7), group_desc="outer"), [[0, 3]]),
    "two, downwards": (lambda rank: dist.new_group([3, 1]), [[1, 3]]),
    "three": (lambda rank: dist.new_group([2, 1, 0]), [[0, 1, 2]]),
    "one": (lambda rank: dist.new_group([1]), [[1]]),
    "all again": (lambda rank: dist.new_group([3, 0, 2, 1]), [[0, 1, 2, 3]]),
    "a line": (lambda rank: mesh(4).get_group(), [[0, 1, 2, 3]]),
    "rows": (lambda rank: mesh(2, 2)["inner"].get_group(), [[0, 1], [2, 3]]),
    "columns": (lambda rank: mesh(2, 2).get_group("outer"), [[0, 2], [1, 3]]),
    "a square, flat": (lambda rank: mesh(2, 2)._flatten("flat").get_group(), [[0, 1, 2, 3]]),
}


@on_processes(4, backend="shm")
def test_groups_of_some_ranks(rank):
    own = rank.rank
    for name, (make, parts) in GROUPS.items():
        group = make(own)
        members = next((part for part in parts if own in part), None)
        if members is None:
            assert group is dist.GroupMember.NON_GROUP_MEMBER, name
            continue
        assert (dist.get_backend(group), dist.get_process_group_ranks(group)) == ("shm", members), name
        assert group.group_desc == "outer" or "named" not in name
        assert sums(group, 10**own) == sum(10**member for member in members), name
        x = torch.full((2,), float(own))
        dist.broadcast(x, members[-1], group=group)
        assert x.tolist() == [float(members[-1])] * 2, name
        gathered = [torch.empty(1) for _ in members]
        dist.all_gather(gathered, torch.tensor([float(own)]), group=group)
        assert [int(part) for part in gathered] == members, name
        if "named" in name:
            dist.destroy_process_group(group)
    assert sums(None, 10**own) == 1111


@pytest.mark.skipif("sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="newer than PyTorch 2.11")
@on_processes(3, backend="shm")
def test_ranks_may_have_any_order_in_a_group(rank):
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    gathered = [torch.empty(1) for _ in range(3)]
    dist.all_gather(gathered, torch.tensor([float(rank.rank)]), group=group)
    assert [int(part) for part in gathered] == [2, 0, 1]
    assert dist.get_group_rank(group, rank.rank) == [1, 2, 0][rank.rank]
    x = torch.full((LARGE,), float(rank.rank))
    dist.broadcast(x, 2, group=group)
    assert x.eq(2).all()
    with pytest.raises(AgreementError, match=r"rank 2: all_reduce\(4 el.*ranks 0, 1: all_reduce\(3 el"):
        dist.all_reduce(torch.zeros(3 + rank.rank // 2), group=group)
    assert sums(group, 10**rank.rank) == 111


@on_processes(4, backend="shm")
def test_several_groups_are_used_at_once(rank):
    """Works on several groups, begun in one order and waited for in another."""
    own = rank.rank
    groups = [dist.group.WORLD]
    for split in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        made = [dist.new_group(members) for members in split]
        groups.append(next(group for group, members in zip(made, split, strict=True) if own in members))
    works, tensors = [], []
    for step in range(12):
        for group in groups:
            tensors.append(torch.full((5 if step % 2 else LARGE,), float(10**own)))
            works.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
    for work in reversed(works):
        work.wait()
    seen = [{tensor.unique().item() for tensor in tensors[index::3]} for index in range(3)]
    assert seen == [{1111.0}, {11.0 if own < 2 else 1100.0}, {101.0 if own % 2 == 0 else 1010.0}]


@on_processes(2, backend="shm")
def test_memory_of_one_group_can_be_given_to_another(rank):
    pair = dist.new_group([0, 1])
    x = pair.allocate(LARGE).fill_(float(rank.rank + 1))
    dist.all_reduce(x)
    assert x.eq(3).all()
    dist.all_reduce(x, group=pair)
    assert x.eq(6).all()


@pytest.mark.parametrize("hosts", ["aaaaa", "abbab"])
@on_ranks(5, "hosts")
def test_a_group_can_be_split(rank):
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
    assert (sums(part, 10**own), sums(group, 10**own)) == (111.0 if own < 3 else 11000.0, 11111.0)


@on_ranks(8, hosts="a" * 8)
def test_groups_of_every_size_come_and_go(rank):
    for turn in range(3):
        for size in range(1, 9):
            part = rank.group.split_group(range(size))
            if part is not None:
                assert sums(part, 1 + turn) == size * (1 + turn)
                part.shutdown()
                with pytest.raises(CommunicationError, match="destroyed"):
                    part.barrier()


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


# --------------------------------------------------------------------------- an end, and a beginning


@on_processes(3, backend="shm")
def test_a_process_group_can_be_destroyed_and_made_again(rank, tmp_path):
    totals = []
    for turn in range(3):
        totals.append(sums(None, 10**rank.rank))
        part = dist.new_group([0, 1])
        if rank.rank < 2:
            totals.append(sums(part, 1))
        dist.destroy_process_group()
        assert not dist.is_initialized()
        store = dist.FileStore(f"{tmp_path}/{turn}", rank.world)
        # Once by its own name, and once by the device's.
        name = "shm" if turn else "cpu:shm"
        dist.init_process_group(name, store=store, rank=rank.rank, world_size=rank.world)
    with pytest.raises(CommunicationError, match="destroyed"):
        rank.group.barrier()
    assert [*totals, sums(None, 10**rank.rank)] == ([111, 2] * 3 if rank.rank < 2 else [111] * 3) + [111]


@on_processes(3, backend="shm")
def test_gloo_groups_live_beside_it(rank):
    gloo = dist.new_group([0, 1, 2], backend="gloo")
    assert (sums(gloo, 10**rank.rank), sums(None, 10**rank.rank)) == (111, 111)
    dist.monitored_barrier(gloo)


@on_processes(3)
def test_it_can_be_the_backend_of_a_part_alone(rank):
    part = dist.new_group([0, 2], backend="shm")
    assert (sums(part, 10**rank.rank) if rank.rank != 1 else None) == [101, None, 101][rank.rank]


@on_processes(4, backend="shm")
def test_options_say_which_host_a_rank_is_on(rank, tmp_path):
    group = on_hosts(rank, "aabb", f"{tmp_path}/store")
    assert (group.options.host, over_hosts(group)) == ("aabb"[rank.rank], True)
    pair = dist.new_group([1, 2], pg_options=ShmOptions(host="c"))
    assert sums(None, 10**rank.rank) == 1111
    assert rank.rank in (0, 3) or (sums(pair, 1), over_hosts(pair)) == (2, False)


# ----------------------------------------------------------------------------------- through Gloo


@pytest.mark.numpy
@on_processes(3, backend="shm")
def test_objects_are_exchanged(rank):
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
    assert sums(None, 1) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@on_processes(3, backend="shm")
def test_ranks_send_and_receive(rank, dtype):
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
    assert total == 3
    works = [
        dist.all_to_all_single(torch.empty(3), torch.ones(3), async_op=True),
        dist.all_reduce(torch.ones(3), async_op=True),
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
        x, output = (torch.ones(sum(sizes) if in_parts else 3 * sizes) for sizes in (given, taken))
        calls = [lambda: dist.all_to_all_single(output, x, *((taken, given) if in_parts else ()), group=rank.group)]
        if in_parts:
            calls.append(lambda: dist.all_to_all([*output.split(taken)], [*x.split(given)], group=rank.group))
        output.fill_(7.0)
        errors = {error_of(each)[:2] for each in calls}
        assert output.eq(7).all()
        assert sums(rank.group, 1.0) == 3
        return errors

    ((kind, text),) = set().union(*run_ranks(3, call, hosts=hosts))
    assert kind is AgreementError
    assert re.search(pairs, text), text
    assert "no data has been moved" in text


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


@on_ranks(2, hosts="aa")
def test_groups_that_are_forgotten_end(rank, store):
    """The one that is still used tells whether the other ones' connections are gone."""
    kept = ProcessGroupShm(store, rank.rank, 2, timedelta(seconds=30), rank.group.options)
    for turn in range(5):
        group = rank.group.split_group([0, 1], group_name=f"{turn}")
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        if turn % 2:
            work.wait()
        del group
        work.wait()
        assert work.result()[0].eq(2).all()
    assert sums(kept, 1) == 2.0


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
