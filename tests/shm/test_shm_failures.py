"""Ranks of a `shm` group that differ, fail, stall, leave or are killed: every rank is told which one, and why."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.distributed.comm.group_state import state_of
from lockstep.errors import AgreementError, CommunicationError, OptionError
from lockstep.shm import gloo, rendezvous, works
from lockstep.shm import shared_memory as mapping
from lockstep.shm.arithmetic import TensorReduction
from lockstep.shm.inter_host import InterHost
from lockstep.shm.one_host import BLOCK_BYTES, OneHost
from processes import in_child, on_processes, run_processes
from programs.ranks import on_ranks
from shm.collectives import BIG, error_of, group_of, on_hosts, options, still_works
from small_modules import CallInBackward
from threaded import run_ranks

SOON = 15.0  # seconds: on no machine as long as the time-out of a minute that would end the wait else


def shared_memory():
    with open("/proc/self/maps") as maps:
        return sum("memfd:lockstep" in line for line in maps)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------------------- ranks that differ


def reduces(numel, dtype=torch.float32, op="SUM", tensors=1):
    def call(group):
        given = [torch.ones(numel, dtype=dtype) for _ in range(tensors)]
        return group.allreduce_coalesced(given, options(dist.AllreduceOptions, op))

    return call


def broadcasts(numel, root):
    return lambda group: group.broadcast([torch.ones(numel)], options(dist.BroadcastOptions, rootRank=root))


def reduces_to(numel, root):
    return lambda group: group.reduce([torch.ones(numel)], options(dist.ReduceOptions, rootRank=root))


def gathers(numel, tensors=1):
    def call(group):
        given = [torch.ones(numel) for _ in range(tensors)]
        return group.allgather_coalesced([[torch.ones(numel) for _ in given] for _ in range(group.size())], given)

    return call


def scatters(numel, op="SUM"):
    def call(group):
        parts = [torch.ones(numel) for _ in range(group.size())]
        return group.reduce_scatter([torch.ones(numel)], [parts], options(dist.ReduceScatterOptions, op))

    return call


def gathers_at(numel, root):
    def call(group):
        outputs = [[torch.empty(numel) for _ in range(group.size())]] if group.rank() == root else []
        return group.gather(outputs, [torch.ones(numel)], root=root)

    return call


def exchanges(numel):
    return lambda group: group.alltoall_base(torch.empty(numel), torch.ones(numel), [], [])


def waits(group):
    return group.barrier()


DIFFERENCES = {
    "size": (reduces(3), reduces(4), "all_reduce(3 elements, torch.float32, SUM)", "all_reduce(4 elements"),
    "size, one at once": (reduces(BIG), reduces(3), f"all_reduce({BIG} elements", "all_reduce(3 elements"),
    "empty": (reduces(0), reduces(1), "all_reduce(0 elements", "all_reduce(1 elements"),
    "dtype": (reduces(4), reduces(4, torch.bfloat16), "torch.float32, SUM", "torch.bfloat16, SUM"),
    "dtype of as many bytes": (
        reduces(4),
        reduces(2, torch.float64),
        "4 elements, torch.f",
        "2 elements, torch.float64",
    ),
    "operation": (reduces(4), reduces(4, op="MAX"), "torch.float32, SUM", "torch.float32, MAX"),
    "kind": (reduces(BIG), broadcasts(BIG, 0), "all_reduce(", "broadcast("),
    "a barrier": (waits, reduces(4), ": barrier", "all_reduce("),
    "root": (broadcasts(4, 0), broadcasts(4, 2), "from rank 0", "from rank 2"),
    "root of a reduce": (reduces_to(BIG, 0), reduces_to(BIG, 1), "to rank 0", "to rank 1"),
    "tensors": (reduces(4, tensors=3), reduces(6, tensors=2), "12 elements in 3 tensors", "12 elements in 2 tensors"),
    "tensors that are gathered": (gathers(4, 2), gathers(4, 3), "in 2 tensors", "in 3 tensors"),
    "size that is gathered": (gathers(BIG), gathers(4), f"all_gather({BIG} elements", "all_gather(4 elements"),
    "size that is scattered": (scatters(BIG), scatters(4), f"reduce_scatter({BIG} e", "reduce_scatter(4 elements"),
    "what goes through Gloo": (exchanges(12), gathers_at(12, 0), "all_to_all(torch.float32)", "gather(12 e"),
    "root of a gather": (gathers_at(12, 0), gathers_at(12, 2), "float32, to rank 0", "float32, to rank 2"),
    "operation of a scatter": (scatters(4), scatters(4, "MIN"), "SUM", "MIN"),
}


ODD = {"aaa": [(0,), (2,)], "aab": [(0,), (2,)], "aabb": [(1,), (0, 1), (3,), (2, 3), (0, 3)]}


def named(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@pytest.mark.parametrize("hosts", ODD)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_told_to_every_rank_and_the_group_goes_on(name, hosts):
    """Some ranks call something else, and then others do."""
    most, one, *words = DIFFERENCES[name]

    def call(rank):
        seen = []
        for odd in ODD[hosts]:
            raised = error_of(lambda odd=odd: (one if rank.rank in odd else most)(rank.group).wait())
            seen.append((raised[:2], still_works(rank)))
        return seen

    for odd, results in zip(ODD[hosts], zip(*run_ranks(len(hosts), call, hosts=hosts), strict=True), strict=True):
        (result,) = set(results)
        (kind, text), works = result
        assert (kind, works) == (AgreementError, True)
        said = dict(part.split(": ", 1) for part in text.split("moved: ")[1].split(". Every")[0].split("; "))
        others = [rank for rank in range(len(hosts)) if rank not in odd]
        for ranks, what in zip((others, odd), words, strict=True):
            assert what.removeprefix(": ") in said[named(ranks)], text


@pytest.mark.parametrize("hosts", ["aaaa", "aaaaaabbbbcc"])
def test_where_all_differ_each_is_named(hosts):
    def call(rank):
        return error_of(lambda: reduces(rank.rank + 1)(rank.group).wait())[:2], still_works(rank)

    (result,) = set(run_ranks(len(hosts), call, hosts=hosts))
    (kind, text), works = result
    assert (kind, works) == (AgreementError, True)
    for number in range(len(hosts)):
        assert f"rank {number}: all_reduce({number + 1} elements" in text


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
@on_ranks(3, "hosts")
def test_another_order_is_told_for_each_collective_that_differs(rank, hosts):
    """The same collectives in another order, begun at once."""
    expected = [AgreementError, None, AgreementError], True
    calls = [reduces(BIG), broadcasts(BIG, 1), waits]
    if rank.rank == 1:
        calls.reverse()
    works = [call(rank.group) for call in calls]
    assert ([error_of(work.wait)[0] for work in works], still_works(rank)) == expected


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_roots_in_messages_are_ranks_of_the_default_group(hosts):
    def call(rank, store):
        group = group_of(store, rank, host=hosts[rank], global_ranks=[4, 7])
        with pytest.raises(
            AgreementError, match=r"rank 4: broadcast\(.*from rank 4\); rank 7: broadcast\(.*from rank 7\)"
        ):
            dist.broadcast(torch.ones(3), group=group, group_src=rank)
        group.shutdown()

    assert together(2, call, dist.HashStore()) == [None, None]


# ----------------------------------------------------------------------------- failures of one rank


def fails_within(rank, numel):
    """Both calls raise: the one in which the failure was, and the next."""
    x = torch.ones(numel)
    first = error_of(lambda: dist.all_reduce(x, group=rank.group))
    return first[:2], error_of(lambda: dist.barrier(group=rank.group))[:2]


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
@pytest.mark.parametrize("numel", [10, BIG, 3_000_000])
def test_a_failure_within_a_collective_is_told_to_every_rank(numel, hosts, monkeypatch):
    reduce = TensorReduction.__call__

    def fails(reduction, sources, out):
        if threading.current_thread().name == "rank 2":
            raise MemoryError("not enough")
        reduce(reduction, sources, out)

    monkeypatch.setattr(TensorReduction, "__call__", fails)
    for number, raised in enumerate(run_ranks(3, fails_within, numel, hosts=hosts)):
        first, (kind, text) = raised
        if number == 2:
            found = first
            assert found == (CommunicationError, "a collective failed: MemoryError: not enough")
        elif numel > BIG or (numel > 10 and hosts[number] == hosts[2]):  # else it may be over: the next one tells
            assert first[0] is CommunicationError
            assert "rank 2 failed in a collective: MemoryError('not enough')" in first[1]
        assert kind is CommunicationError
        assert "rank 2 failed in a collective: MemoryError('not enough')" in text  # no time-out, so at once


def raises_before(rank):
    if rank.rank == 1:
        raise KeyError("this rank's own")
    dist.barrier()


def test_a_rank_that_raises_has_left():
    outcomes = run_processes(3, raises_before, backend="shm", errors=True)
    assert isinstance(outcomes[1].error, KeyError)
    for number in (0, 2):
        assert type(outcomes[number].error) is CommunicationError
        assert "rank 1 has " in str(outcomes[number].error)


@on_processes(2, backend="shm")
def test_an_interrupt_ends_the_wait_and_the_group(rank):
    """Ctrl-C at a rank that waits for another, which waits for it to be told."""
    store = dist.distributed_c10d._get_default_store()
    if rank.rank == 1:
        store.wait(["interrupted"], timedelta(seconds=10))
        dist.barrier()  # rank 0 has come to this one
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests began in the background

        def interrupt():
            while not rank.group._queue.is_waited_for():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            dist.barrier()
        store.set("interrupted", "")
    with pytest.raises(CommunicationError, match=r"rank 0 failed in a collective: KeyboardInterrupt\(\)"):
        dist.barrier()


# ------------------------------------------------------------------------------------------- stalls


WAIT = 0.5  # seconds in which other ranks answer where nothing runs beside these tests, which alone wait meanwhile


def never_calls(rank, ready, given_up, numel, victim):
    rank.group.barrier().wait()
    rank.group.set_timeout(timedelta(seconds=WAIT))  # later than the group's own, which is longer than the test's
    if rank.rank == victim:
        for _ in range(rank.world - 1):
            assert given_up.acquire(timeout=15)
    else:
        ready.wait(10)  # that one of them is late is no part of this
    first = error_of(lambda: dist.all_reduce(torch.ones(numel), group=rank.group))
    second = error_of(lambda: dist.barrier(group=rank.group))
    given_up.release()
    return first, second


NEVER = [("aaa", 1, 10), ("aab", 1, BIG), ("aabb", 3, 10), ("abc", 1, 10)]
NEVER_AROUND = [("aaa", 1, BIG), ("aba", 1, 10), ("aabb", 0, 10)]
NEVER_SOAK = [("aabb", 1, 10), ("aabb", 2, 10), ("aab", 2, 10), ("abc", 2, 10)]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("hosts", "victim", "numel"),
    [
        *NEVER,
        *(pytest.param(*case, marks=pytest.mark.around) for case in NEVER_AROUND),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in NEVER_SOAK),
    ],
)
def test_a_rank_that_never_calls_is_named_and_is_told_when_it_does(hosts, victim, numel):
    events = threading.Barrier(len(hosts) - 1), threading.Semaphore(0)
    results = run_ranks(len(hosts), never_calls, *events, numel, victim, hosts=hosts, group_timeout=60.0)
    has_mates = hosts.count(hosts[victim]) > 1
    for number, raised in enumerate(results):
        # A rank that comes to a small one gets what the others had left there, and is told at the next.
        for kind, text, _ in raised[number == victim and numel == 10 :]:
            assert kind is CommunicationError
            assert "the process group is aborted" in text or "another host is lost" in text
            assert f"rank {victim} did not answer within {WAIT} s" in text if has_mates else f"rank(s) {victim}" in text
        assert number == victim or raised[0][2] > 0.9 * WAIT


@pytest.mark.alone
@on_processes(3, backend="shm")
def test_a_rank_that_is_stopped_is_named_and_is_told_when_it_goes_on(rank, tmp_path):
    """Rank 1 stops; when the others have given up it goes on, and learns that."""
    if rank.rank == 1:
        (tmp_path / "pid").write_text(str(os.getpid()))
    dist.barrier()
    rank.group.set_timeout(timedelta(seconds=WAIT))
    dist.all_reduce(torch.ones(BIG))
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    raised = error_of(lambda: dist.all_reduce(torch.ones(BIG)))
    if rank.rank == 0:
        pid = (tmp_path / "pid").read_text()
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        os.kill(int(pid), signal.SIGCONT)
    assert raised[0] is CommunicationError
    assert f"rank 1 did not answer within {WAIT} s: stalled, or not in this collective" in raised[1]


@pytest.mark.alone
@pytest.mark.parametrize("numel", [4, BIG])
@on_ranks(2, hosts="aa", group_timeout=0.3)
def test_what_is_tried_again_after_a_timeout_does_not_reach_the_late_rank(rank, numel, events):
    """Rank 0 gives up, and tries once more; rank 1 is late, and reads what rank 0 had left for the first."""
    aborted = "the process group is aborted: rank 1 did not answer within 0.3 s: stalled, or not in this collective"
    late, x = events[0], torch.full((numel,), rank.rank + 1.0)
    if rank.rank == 1:
        assert late.wait(10)
    first = error_of(lambda: dist.all_reduce(x, group=rank.group))[:2]
    y = torch.full((numel,), 100.0)
    second = error_of(lambda: dist.barrier(group=rank.group) if rank.rank else dist.all_reduce(y, group=rank.group))[:2]
    late.set()
    assert second == (CommunicationError, aborted)
    assert first == second or (rank.rank == 1 and x.unique().tolist() == [3.0])


def is_late_in_place(rank, gone, blocks):
    """Rank 1 stalls in the middle of a reduction: what it has not written yet, it does not write any more."""
    x = rank.group.allocate(2_000_000).fill_(1.0)
    dist.all_reduce(x, group=rank.group)
    if rank.rank == 0:
        rank.group.set_timeout(timedelta(seconds=0.5))
        raised = error_of(lambda: dist.all_reduce(x, group=rank.group))
        x.fill_(7.0)
        gone.set()
        assert blocks.wait(10)
        written = x.ne(7.0).sum().item()
        return raised[:2], written
    stall = iter([None, None])

    def stalls(reduction, sources, out):
        original(reduction, sources, out)
        if threading.current_thread().name == "rank 1" and next(stall, 1) is None and next(stall, 1) is None:
            assert gone.wait(10)

    original = TensorReduction.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorReduction, "__call__", stalls)
        raised = error_of(lambda: dist.all_reduce(x, group=rank.group))
    blocks.set()
    return raised[:2]


@pytest.mark.alone
def test_a_late_rank_writes_no_further_to_one_that_has_given_up():
    (early, written), late = run_ranks(2, is_late_in_place, threading.Event(), threading.Event(), hosts="aa")
    assert early[0] is late[0] is CommunicationError
    assert "rank 1 did not answer within 0.5 s" in early[1]
    assert "rank 1 did not answer within 0.5 s" in late[1]
    assert written <= 2 * BLOCK_BYTES // 4


# -------------------------------------------------------------------------------- ranks that leave


@pytest.mark.parametrize("hosts", ["aaa", "aba", "aab"])
@on_ranks(3, "hosts")
def test_a_rank_that_leaves_is_named(rank, hosts):
    if rank.rank == 1:
        rank.group.shutdown()
    kind, text, _ = error_of(lambda: dist.barrier(group=rank.group))
    named = "destroyed" if rank.rank == 1 else "rank 1 has left the process group while others still use it"
    assert kind is CommunicationError
    assert named in text or (hosts == "aba" and "rank(s) 1" in text), text


@pytest.fixture
def events():
    """For ranks that are threads."""
    return threading.Event(), threading.Event()


@on_ranks(3, hosts="aaa")
def test_abort_ends_what_waits_here_and_on_the_others(rank, events):
    """Rank 0 aborts while another thread waits in a collective, to which rank 2 does not come before that."""
    waiting, aborted = events

    def twice():  # all three may have done their part in the first
        for _ in range(2):
            dist.barrier(group=rank.group)

    if rank.rank == 0:
        work = dist.barrier(group=rank.group, async_op=True)
        assert waiting.wait(10)
        rank.group.abort()
        aborted.set()
    elif rank.rank == 1:
        waiting.set()
    else:
        assert aborted.wait(10)
    kind, text, _ = error_of(work.wait if rank.rank == 0 else twice)
    assert kind is CommunicationError
    assert "rank 0 called abort()" in text or "this process has ended the process group" in text


@on_ranks(2, hosts="aa", group_timeout=60.0)
def test_destroying_a_group_ends_what_waits(rank):
    if rank.rank == 0:
        works = [dist.barrier(group=rank.group, async_op=True) for _ in range(3)]
        kind, _, seconds = error_of(rank.group.shutdown)
        assert kind is None
        assert seconds < SOON
        assert [error_of(work.wait)[0] for work in works] == [CommunicationError] * 3


def destroys_with_callbacks(rank, allowed, attached):
    """Rank 0 destroys the group while callbacks of futures do not return, each in a thread of its own."""
    begun = threading.Semaphore(0)

    def never_returns(_):
        begun.release()
        allowed.wait(60)

    for _ in range(6):
        if rank.rank == 1:
            assert attached.acquire(timeout=15)
            dist.barrier(group=rank.group)
        else:
            dist.barrier(group=rank.group, async_op=True).get_future().then(never_returns)
            attached.release()
            assert begun.acquire(timeout=15)
    raised = error_of(rank.group.shutdown)
    if rank.rank == 0:
        allowed.set()
    return raised


def test_destroying_a_group_waits_no_longer_for_many_callbacks_than_for_one(monkeypatch):
    monkeypatch.setattr(works, "CLOSE_SECONDS", 1.0)
    events = threading.Event(), threading.Semaphore(0)
    kind, _, seconds = run_ranks(2, destroys_with_callbacks, *events, hosts="aa")[0]
    assert kind is None
    assert seconds < 5  # for each by itself it would be 6


@on_ranks(2, hosts="aa")
def test_a_destroyed_group_says_so(rank):
    expected = (CommunicationError, "the process group has been destroyed")
    dist.barrier(group=rank.group)
    rank.group.shutdown()
    rank.group.shutdown()
    rank.group.abort()
    x = [torch.ones(1)]
    calls = (waits, lambda g: g.gather([], x), lambda g: g.send(x, 1 - rank.rank))
    assert [error_of(lambda call=call: call(rank.group))[:2] for call in calls] == [expected] * 3


# ----------------------------------------------------------------------------------- what is left


def together(world, function, *args):
    """Call a function in threads; what they return."""
    results = [None] * world

    def work(rank):
        try:
            results[rank] = function(rank, *args)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def cycle(rank, store, how):
    group = group_of(store, rank)
    x = group.allocate(BIG).fill_(1.0)
    unused = group.allocate(BIG)
    group.allreduce([x]).wait()
    assert x[0] == 2.0
    group.allreduce([torch.ones(700_000)]).wait()
    group.allreduce([group.allocate(10)]).wait()  # small enough to be kept for a while
    group.barrier().wait()
    if how == "destroyed":
        group.shutdown()
    del unused
    return group if how == "kept" else None


@pytest.mark.parametrize("how", ["destroyed", "dropped"])
def test_nothing_grows_over_many_groups(how):
    def one():
        together(2, cycle, dist.HashStore(), how)
        gc.collect()

    def there_is():
        return descriptors(), shared_memory(), {thread.name for thread in threading.enumerate()}

    gc.collect()
    none = shared_memory()
    one()
    before = there_is()
    for _ in range(5):
        one()
    until = time.monotonic() + 20  # Gloo's own connections end in the background
    while there_is() != before and time.monotonic() < until:
        time.sleep(0.01)
    assert there_is() == before
    assert shared_memory() == none


def test_a_destroyed_group_that_is_still_referred_to_keeps_no_memory():
    gc.collect()
    none = shared_memory()
    groups = together(2, cycle, dist.HashStore(), "kept")
    assert shared_memory() > none
    tensor = groups[0].allocate(10)
    for group in groups:
        group.shutdown()
    assert shared_memory() == none + 1  # the tensor's
    del tensor
    assert shared_memory() == none


@on_ranks(2, hosts="aa")
def test_memory_is_used_again_and_given_back_by_all_ranks(rank):
    """How many shared memories are mapped in this process, which both ranks are."""
    gc.collect()  # groups of other tests, which would go while memory is counted
    counts = []

    def count():
        dist.barrier(group=rank.group)
        counts.append(shared_memory())
        dist.barrier(group=rank.group)

    count()
    for numel in (BIG, BIG, BIG):  # the same memory, three times
        dist.all_reduce(rank.group.allocate(numel).fill_(1.0), group=rank.group)
        count()
    for numel in (2 * BIG, 3 * BIG, 4 * BIG):  # the memory of another size is given back
        dist.all_reduce(rank.group.allocate(numel).fill_(1.0), group=rank.group)
        count()
    many = [rank.group.allocate(BIG).fill_(1.0) for _ in range(300)]
    for each in many:
        dist.all_reduce(each, group=rank.group)
    del many, each
    if rank.rank == 1:
        time.sleep(0.1)  # the other one says that 300 have gone, and nobody reads it yet
    dist.all_reduce(rank.group.allocate(BIG + 5000).fill_(1.0), group=rank.group)
    count()
    first, *others = counts
    assert others == [first + 4] * 7  # of each rank, mapped by both


@pytest.mark.numpy
def test_a_process_ends_quietly_without_destroying_its_groups():
    program = """
import threading, torch, torch.distributed as dist, lockstep
from lockstep.distributed import ProcessGroupShm
store, groups = dist.HashStore(), [None, None]
def work(rank):
    groups[rank] = group = ProcessGroupShm(store, rank, 2)
    shared = group.allocate(100_000)
    group.allreduce([shared]).wait()
    futures = [group.allreduce([torch.ones(3)]).get_future() for _ in range(3)]
    futures[-1].wait()
threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
kept = groups[0].allocate(100)
waiting = groups[0].barrier()  # that the other one never comes to
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# ---------------------------------------------------------------------------------------- meeting


def test_a_rank_that_never_comes_is_named():
    store, ready = dist.HashStore(), threading.Barrier(2)

    def come(rank):
        ready.wait(10)
        return group_of(store, rank, world=4, timeout=1.0, global_ranks=[3, 5, 9, 11])

    for error in together(2, come):
        assert type(error) is CommunicationError
        assert str(error).startswith("rank(s) 9, 11 did not come to the shm process group within 1 s")


def test_a_rank_that_comes_and_does_not_connect_is_named():
    store, ready = dist.HashStore(), threading.Barrier(2)

    def come(rank):
        ready.wait(10)
        return group_of(store, rank, world=3, timeout=1.0)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0lockstep-test-" + os.urandom(8).hex())
        listener.listen(8)
        address = listener.getsockname()[1:].decode()
        said = f'{{"host": "a", "address": "{address}", "secret": "{"0" * 32}"}}'
        dist.PrefixStore("rendezvous", store).set("2", said)
        for error in together(2, come):
            assert type(error) is CommunicationError
            assert "rank(s) 2 did not connect to the shm process group in time" in str(error)


def test_strangers_are_turned_away(monkeypatch):
    """Some say nothing, some the wrong thing, one shows a wrong secret; they are there before the ranks."""
    store, strangers = dist.HashStore(), []
    addresses = rendezvous._addresses

    def disturb(*args):
        found = addresses(*args)
        for address in found:
            for hello in (b"", b"hello", rendezvous._HELLO.pack(1, b"0" * 32), b"x" * 4000):
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stranger.setblocking(False)
                with contextlib.suppress(OSError):  # it has met everybody, or has enough that wait
                    stranger.connect("\0" + address["address"])
                    if hello:
                        stranger.send(hello)
                strangers.append(stranger)
        return found

    monkeypatch.setattr(rendezvous, "_addresses", disturb)

    def meets(rank):
        group = group_of(store, rank, world=3)
        x = torch.ones(3)
        group.allreduce([x]).wait()
        return x.tolist()

    try:
        assert together(3, meets) == [[3.0] * 3] * 3  # and not the time-out
        assert strangers
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_is_told_to_use_gloo(platform, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(OptionError, match=rf'needs Linux .*; this is {platform}\. .*init_process_group\("gloo"\)'):
        group_of(dist.HashStore(), 0, 1)


# -------------------------------------------------------------------------- killed ranks, and more


def die(*_, **_given):
    os.kill(os.getpid(), signal.SIGKILL)


def backward(wrap, **options):
    """Of three layers, the gradients of two are on their way where the victim is killed."""

    def make(rank):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(3))
        model, x = wrap(nn.Sequential(*layers), bucket_cap_mb=0.1), torch.randn(4, 300)

        def be_killed_within():
            layers[0].register_forward_hook(lambda module, given, out: CallInBackward.apply(out, die))

        return lambda: model(x).sum().backward(), be_killed_within

    return make


def calls(call, owner=None, name=""):
    """A call that all ranks repeat, and what the victim dies in when it comes there, if it does not die before."""
    return lambda rank: (lambda: call(rank), lambda: setattr(owner, name, die) if owner else die())


def all_reduce(rank):
    dist.all_reduce(torch.ones(300_000))


def sum_sparse(rank):
    dist.all_reduce(torch.sparse_coo_tensor([[rank.rank, 4]], [1.0, 10.0], (5,), check_invariants=False))


def gather(rank):
    dist.gather(torch.ones(BIG), [torch.empty(BIG)] * 3 if rank.rank == 0 else None, dst=0)


def scatter(rank):
    dist.scatter(torch.ones(BIG), [torch.ones(BIG)] * 3 if rank.rank == 1 else None, src=1)


def all_to_all(rank):
    dist.all_to_all_single(torch.empty(3 * BIG), torch.ones(3 * BIG))


KILLS = {  # hosts, the rank that is killed, and what it is killed in
    "backward of replicate": ("aaa", 1, backward(lockstep.replicate)),
    "backward of PyTorch's class": ("aaa", 1, backward(nn.parallel.DistributedDataParallel)),
    "before a sparse sum": ("aaa", 1, calls(sum_sparse)),
    "before a gather": ("aaa", 1, calls(gather)),
    "in a gather": ("aaa", 1, calls(gather, gloo, "wait_for")),
    "in a scatter": ("aaa", 1, calls(scatter, gloo, "wait_for")),
    "before an all-to-all": ("aaa", 1, calls(all_to_all)),
    "in an all-to-all": ("aaa", 1, calls(all_to_all, gloo, "wait_for")),
    "a leader, before": ("aabb", 0, calls(all_reduce)),
    "beside a leader, before": ("aabb", 1, calls(all_reduce)),
    "a leader, between hosts": ("aabb", 2, calls(all_reduce, InterHost, "all_reduce")),
    "on the last host, before": ("aabb", 3, calls(all_reduce)),
    "while its leader waits": ("aabb", 3, calls(all_reduce, OneHost, "broadcast")),
    "alone on its host, before": ("aab", 2, calls(all_reduce)),
    "alone on its host, between hosts": ("abc", 1, calls(all_reduce, InterHost, "all_reduce")),
}


def is_killed(rank, name, store):
    hosts, victim, make = KILLS[name]
    if "b" in hosts:
        on_hosts(rank, hosts, store)
    call, be_killed = make(rank)
    call()
    if rank.rank == victim:
        be_killed()
    raised = error_of(lambda: [call() for _ in range(3)])  # what it has given before may be enough to go on with
    return raised, error_of(dist.destroy_process_group)[2]


@pytest.mark.parametrize("name", KILLS)
def test_a_rank_that_is_killed_is_named_at_once(name, tmp_path):
    hosts, victim, _ = KILLS[name]
    outcomes = run_processes(
        len(hosts), is_killed, name, str(tmp_path / "store"), backend="shm", group_timeout=60, errors=True
    )
    assert outcomes.pop(victim).returncode == -signal.SIGKILL
    for outcome in outcomes:
        assert outcome.error is None, outcome.stderr
        (kind, text, seconds), ending = outcome.result
        assert issubclass(kind, RuntimeError if "PyTorch" in name else CommunicationError)
        has_mates = hosts.count(hosts[victim]) > 1
        assert (f"rank {victim} has died" if has_mates else f"with rank(s) {victim}") in text
        assert text.startswith(f"rank {outcome.rank} of 3: backward() failed") or "replicate" not in name
        assert max(seconds, ending) < SOON


def is_killed_before_a_message(rank, call):
    """Rank 1 is killed where rank 0 sends to it, or waits for what it sends."""
    x = torch.ones(BIG)
    dist.send(x, 1) if rank.rank == 0 else dist.recv(x, 0)
    if rank.rank == 1:
        die()
    return error_of(lambda: [call(x, 1) for _ in range(100)])


@pytest.mark.parametrize("call", [dist.send, dist.recv])
def test_a_rank_that_is_killed_is_named_by_who_sends_to_it_or_receives(call):
    outcomes = run_processes(2, is_killed_before_a_message, call, backend="shm", group_timeout=6, errors=True)
    kind, text, _ = outcomes[0].result
    assert kind is CommunicationError
    assert "rank 0" in text
    assert ("to rank 1: " if call is dist.send else "from rank 1: ") in text


@on_processes(2, backend="shm")
def test_a_child_cannot_use_the_group_and_does_not_disturb_it(rank):
    """A child cannot use the group, and its end is not the end of the group."""
    dist.barrier()
    pending = dist.barrier(async_op=True) if rank.rank else None
    parent = os.getpid()
    calls = [
        dist.barrier,
        lambda: dist.all_reduce(torch.ones(BIG)),
        lambda: dist.gather(torch.ones(1), None if rank.rank else [torch.ones(1)] * 2, dst=0),
        lambda: dist.send(torch.ones(1), 1 - rank.rank),
    ]

    def child():
        errors = [error_of(call) for call in calls]
        told = f"process {os.getpid()} cannot use the shm process group: it was forked from process {parent}, which is"
        dist.destroy_process_group()  # and waits for no thread of the parent's
        return 3 if all(kind is CommunicationError and told in text for kind, text, _ in errors) else 4

    code = in_child(child)
    if pending is None:
        dist.barrier()
    else:
        pending.wait()
    assert (code, still_works(rank)) == (3, True)


@on_processes(2, backend="shm")
def test_a_child_writes_to_gradients_of_its_own(rank):
    """A child sees the gradients as they were, and what it writes stays its own."""
    model = lockstep.replicate(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 200_000)))
    model(torch.ones(2, 3)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    raw = rank.group.allocate(BIG).fill_(rank.rank)
    pool = state_of(dist.group.WORLD).companion._runtime.staging.pool
    inside = [p.grad.untyped_storage().data_ptr() in pool._in_use for p in model.parameters()]

    def child():
        same = all(torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), before, strict=True))
        model.zero_grad(set_to_none=False)
        raw.fill_(5)
        if in_child(lambda: raw.eq(5).logical_not().any().item()):  # a child of its own
            return 5
        with model.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        return 3 if same and raw.eq(5).all() and model[0].bias.grad.isfinite().all() else 4

    code = in_child(child)
    same = all(torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), before, strict=True))
    dist.all_reduce(raw)
    assert (all(inside), code, same, raw.unique().tolist(), still_works(rank)) == (True, 3, True, [1.0], True)


@on_processes(2, backend="shm")
def test_children_of_two_threads_have_copies_of_their_own(rank):
    """One thread forks while another copies what its own child is to have."""
    raw = rank.group.allocate(BIG).fill_(7)
    codes = []

    def copy_and_fork_elsewhere(*args):
        patch.undo()
        ctypes.memmove(*args)
        other = threading.Thread(target=lambda: codes.append(in_child(lambda: int(raw.eq(7).all()))))
        other.start()
        other.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapping.ctypes, "memmove", copy_and_fork_elsewhere)
        codes.append(in_child(lambda: int(raw.eq(7).all())))
    assert (codes, still_works(rank)) == ([1, 1], True)


real_map = mapping._map


@on_processes(2, backend="shm")
def test_a_child_that_has_no_copy_does_not_go_on(rank):
    """What cannot be copied for a child is nothing that it could read wrong values from."""
    raw = rank.group.allocate(BIG).fill_(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapping, "_map", lambda where, *args: None if where is None else real_map(where, *args))
        code = in_child(lambda: int(raw.sum()) and 0)
    assert (code, raw.sum().item(), still_works(rank)) == (-signal.SIGSEGV, BIG, True)
