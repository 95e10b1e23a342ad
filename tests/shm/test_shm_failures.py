"""Ranks of a `shm` group that differ, fail, stall, leave or are killed: every rank is told which one, and why."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.distributed import ProcessGroupShm, ShmOptions
from lockstep.distributed.comm.group_state import state_of
from lockstep.errors import AgreementError, CommunicationError, DeviceError, LayoutError, OptionError
from lockstep.shm import gloo, rendezvous, works
from lockstep.shm import shared_memory as mapping
from lockstep.shm.arithmetic import TensorReduction
from lockstep.shm.messages import MessageKind
from lockstep.shm.one_host import BLOCK_BYTES
from lockstep.shm.peers import Peers
from processes import RankEndedError, on_processes, run_processes
from programs.ranks import on_ranks
from small_modules import CallInBackward
from threaded import run_ranks

STEP = MessageKind.STEP
BIG = 100_000  # elements of float32 that do not go at once
LEVELS = ["aaa", "aab"]
SOON = 15.0  # seconds: on no machine as long as the time-out of a minute that would end the wait else


def error_of(call):
    """Return what a call raises, as type and text, and the seconds that took."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error), str(error), time.monotonic() - begin
    return None, "", time.monotonic() - begin


def still_works(rank):
    x = torch.full((BIG,), rank.rank + 1.0)
    dist.all_reduce(x, group=rank.group)
    return x.unique().tolist() == [rank.world * (rank.world + 1) / 2]


def shared_memory():
    with open("/proc/self/maps") as maps:
        return sum("memfd:lockstep" in line for line in maps)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------------------- ranks that differ


def options(cls, **values):
    made = cls()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def reduces(numel, dtype=torch.float32, op=dist.ReduceOp.SUM, tensors=1):
    def call(group):
        given = [torch.ones(numel, dtype=dtype) for _ in range(tensors)]
        return group.allreduce_coalesced(given, options(dist.AllreduceOptions, reduceOp=op))

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


def scatters(numel, op=dist.ReduceOp.SUM):
    def call(group):
        parts = [torch.ones(numel) for _ in range(group.size())]
        return group.reduce_scatter([torch.ones(numel)], [parts], options(dist.ReduceScatterOptions, reduceOp=op))

    return call


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
    "operation": (reduces(4), reduces(4, op=dist.ReduceOp.MAX), "torch.float32, SUM", "torch.float32, MAX"),
    "kind": (reduces(BIG), broadcasts(BIG, 0), "all_reduce(", "broadcast("),
    "a barrier": (waits, reduces(4), ": barrier", "all_reduce("),
    "root": (broadcasts(4, 0), broadcasts(4, 2), "from rank 0", "from rank 2"),
    "root of a reduce": (reduces_to(BIG, 0), reduces_to(BIG, 1), "to rank 0", "to rank 1"),
    "tensors": (reduces(4, tensors=3), reduces(6, tensors=2), "12 elements in 3 tensors", "12 elements in 2 tensors"),
    "tensors that are gathered": (gathers(4, 2), gathers(4, 3), "in 2 tensors", "in 3 tensors"),
    "size that is gathered": (gathers(BIG), gathers(4), f"all_gather({BIG} elements", "all_gather(4 elements"),
    "size that is scattered": (scatters(BIG), scatters(4), f"reduce_scatter({BIG} e", "reduce_scatter(4 elements"),
    "operation of a scatter": (scatters(4), scatters(4, dist.ReduceOp.MIN), "SUM", "MIN"),
}


OTHERS = (0, 2)


def differ(rank, name):
    """One rank calls something else, and then another one does."""
    most, one, *_ = DIFFERENCES[name]
    seen = []
    for other in OTHERS:
        raised = error_of(lambda other=other: (one if rank.rank == other else most)(rank.group).wait())
        seen.append((raised[:2], still_works(rank)))
    return seen


@pytest.mark.parametrize("hosts", LEVELS)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_told_to_every_rank_and_the_group_goes_on(name, hosts):
    by_rank = run_ranks(3, differ, name, hosts=hosts)
    for other, results in zip(OTHERS, zip(*by_rank, strict=True), strict=True):
        (_, text), works = results[0]
        assert list(results) == [((AgreementError, text), True)] * 3
        assert works
        most, one = DIFFERENCES[name][2:]
        said = dict(part.split(": ", 1) for part in text.split("moved: ")[1].split(". Every")[0].split("; "))
        assert one.removeprefix(": ") in said[f"rank {other}"]
        assert most.removeprefix(": ") in said["ranks " + ", ".join(str(r) for r in range(3) if r != other)]


def all_differ(rank):
    return error_of(lambda: reduces(rank.rank + 1)(rank.group).wait())[:2], still_works(rank)


def test_where_all_differ_each_is_named():
    results = run_ranks(4, all_differ, hosts="aaaa")
    assert len(set(results)) == 1
    for number in range(4):
        assert f"rank {number}: all_reduce({number + 1} elements" in results[0][0][1]


@pytest.mark.parametrize("hosts", LEVELS)
@on_ranks(3, "hosts")
def test_another_order_is_told_for_each_collective_that_differs(rank, hosts):
    """The same collectives in another order, begun at once."""
    expected = [AgreementError, None, AgreementError], True
    calls = [reduces(BIG), broadcasts(BIG, 1), waits]
    if rank.rank == 1:
        calls.reverse()
    works = [call(rank.group) for call in calls]
    assert ([error_of(work.wait)[0] for work in works], still_works(rank)) == expected


def a_subgroup_differs(rank):
    """Ranks in messages are those of the default group."""
    group = dist.new_group([3, 1])
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    return error_of(lambda: dist.all_reduce(torch.ones(rank.rank), group=group))[:2]


def test_ranks_in_messages_are_those_of_the_default_group():
    _, one, _, other = run_processes(4, a_subgroup_differs, backend="shm")
    assert one == other
    assert "rank 1: all_reduce(1 elements" in one[1]
    assert "rank 3: all_reduce(3 elements" in one[1]


# ------------------------------------------------------------------------------------- bad arguments


def ones(*shape, **kwargs):
    return torch.ones(*shape, **kwargs)


BAD = {
    "device": (DeviceError, lambda g: g.allreduce([ones(3, device="meta")])),
    "device of an output": (DeviceError, lambda g: g.allgather([[ones(3), ones(3, device="meta")]], [ones(3)])),
    "no tensors": (LayoutError, lambda g: g.allreduce([])),
    "dtypes": (LayoutError, lambda g: g.allreduce_coalesced([ones(3), ones(3).double()])),
    "dtypes of outputs": (LayoutError, lambda g: g.allgather([[ones(3), ones(3).half()]], [ones(3)])),
    "sparse": (LayoutError, lambda g: g.broadcast([ones(3).to_sparse()])),
    "too few outputs": (LayoutError, lambda g: g.allgather([[ones(3)]], [ones(3)])),
    "too many outputs": (LayoutError, lambda g: g.allgather([[ones(3)] * 3], [ones(3)])),
    "size of an output": (LayoutError, lambda g: g.allgather([[ones(3), ones(4)]], [ones(3)])),
    "size of one output": (LayoutError, lambda g: g.all_gather_single(ones(5), ones(3))),
    "too few inputs": (LayoutError, lambda g: g.reduce_scatter([ones(3)], [[ones(3)]])),
    "size of one input": (LayoutError, lambda g: g.reduce_scatter_single(ones(3), ones(5))),
    "expanded": (LayoutError, lambda g: g.allreduce([ones(1).expand(3)])),
    "root": (OptionError, broadcasts(3, 2)),
    "root of a reduce": (OptionError, reduces_to(3, -1)),
}


@pytest.mark.parametrize("name", BAD)
@on_ranks(2, hosts="aa")
def test_a_bad_argument_is_raised_before_anything_is_communicated(rank, name):
    raised = error_of(lambda: BAD[name][1](rank.group).wait())[0] if rank.rank == 1 else None
    assert (raised, still_works(rank)) == [(None, True), (BAD[name][0], True)][rank.rank]


def no_such_mean(rank):
    return error_of(lambda: reduces(BIG, torch.bool, dist.ReduceOp.AVG)(rank.group).wait())[:2], still_works(rank)


@pytest.mark.parametrize("hosts", LEVELS)
def test_what_cannot_be_reduced_is_told_to_every_rank_and_the_group_goes_on(hosts):
    results = run_ranks(3, no_such_mean, hosts=hosts)
    assert len(set(results)) == 1
    (kind, text), works = results[0]
    assert kind is OptionError
    assert "cannot reduce torch.bool with AVG" in text
    assert works


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_roots_in_messages_are_ranks_of_the_default_group(hosts):
    def call(rank, store):
        options = ShmOptions(host=hosts[rank])
        group = ProcessGroupShm(store, rank, 2, timedelta(seconds=10), options, global_ranks=[4, 7])
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


def interrupted(rank):
    """Ctrl-C at a rank that waits for another, which waits for it to be told."""
    store = dist.distributed_c10d._get_default_store()
    if rank.rank == 1:
        store.wait(["interrupted"], timedelta(seconds=10))
        dist.barrier()  # rank 0 has come to this one
        return error_of(dist.barrier)[:2]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests were started in the background

    def interrupt():
        while not rank.group._queue.is_waited_for():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        dist.barrier()
    store.set("interrupted", "")
    return error_of(dist.barrier)[:2]


def test_an_interrupt_ends_the_wait_and_the_group():
    for kind, text in run_processes(2, interrupted, backend="shm"):
        assert kind is CommunicationError
        assert "rank 0 failed in a collective: KeyboardInterrupt()" in text


# ------------------------------------------------------------------------------------------- stalls


def never_calls(rank, ready, given_up, numel):
    if rank.rank == 1:
        for _ in range(2):
            assert given_up.acquire(timeout=15)
    else:
        ready.wait(10)  # that one of them is late is no part of this
    first = error_of(lambda: dist.all_reduce(torch.ones(numel), group=rank.group))
    second = error_of(lambda: dist.barrier(group=rank.group))
    given_up.release()
    return first, second


@pytest.mark.alone
@pytest.mark.parametrize(
    ("numel", "hosts"),
    [
        *[(10, "aaa"), (BIG, "aab")],
        *(pytest.param(*case, marks=pytest.mark.around) for case in [(BIG, "aaa"), (10, "aba")]),
    ],
)
def test_a_rank_that_never_calls_is_named_and_is_told_when_it_does(numel, hosts):
    events = threading.Barrier(2), threading.Semaphore(0)
    results = run_ranks(3, never_calls, *events, numel, hosts=hosts, group_timeout=1.0)
    for number, raised in enumerate(results):
        # A rank that comes to a small one gets what the others had left there, and is told at the next.
        for kind, text, _ in raised[number == 1 and numel == 10 :]:
            assert kind is CommunicationError
            assert "the process group is aborted" in text or "another host is lost" in text
            assert "rank 1 did not answer within" in text or "rank(s) 1" in text, text
    assert all(results[number][0][2] > 0.9 for number in (0, 2))


def is_stopped(rank, folder):
    """Rank 1 stops; when the others have given up it goes on, and learns that."""
    if rank.rank == 1:
        Path(folder, "pid").write_text(str(os.getpid()))
    dist.barrier()
    rank.group.set_timeout(timedelta(seconds=1))
    dist.all_reduce(torch.ones(BIG))
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    raised = error_of(lambda: dist.all_reduce(torch.ones(BIG)))
    if rank.rank == 0:
        pid = Path(folder, "pid").read_text()
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        os.kill(int(pid), signal.SIGCONT)
    return raised[:2]


@pytest.mark.alone
def test_a_rank_that_is_stopped_is_named_and_is_told_when_it_goes_on(tmp_path):
    for kind, text in run_processes(3, is_stopped, str(tmp_path), backend="shm"):
        assert kind is CommunicationError
        assert "rank 1 did not answer within 1 s: stalled, or not in this collective" in text


def tries_again(rank, hosts_value, late):
    """Rank 0 gives up, and tries once more; rank 1 is late, and reads what rank 0 had left for the first."""
    x = torch.full((hosts_value,), rank.rank + 1.0)
    if rank.rank == 0:
        first = error_of(lambda: dist.all_reduce(x, group=rank.group))
        second = error_of(lambda: dist.all_reduce(torch.full((hosts_value,), 100.0), group=rank.group))
        late.set()
        return first[:2], second[:2]
    assert late.wait(10)
    raised = error_of(lambda: dist.all_reduce(x, group=rank.group))
    return raised[:2], error_of(lambda: dist.barrier(group=rank.group))[:2], x.unique().tolist()


@pytest.mark.alone
@pytest.mark.parametrize("numel", [4, BIG])
def test_what_is_tried_again_after_a_timeout_does_not_reach_the_late_rank(numel):
    early, (raised, following, result) = run_ranks(
        2, tries_again, numel, threading.Event(), hosts="aa", group_timeout=0.3
    )
    aborted = "the process group is aborted: rank 1 did not answer within 0.3 s: stalled, or not in this collective"
    assert early == ((CommunicationError, aborted),) * 2
    assert following == (CommunicationError, aborted)
    assert raised == (CommunicationError, aborted) or result == [3.0]


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


def waits_with_a_limit(rank, asked):
    """Waiting gives up, the collective does not."""
    if rank.rank == 0:
        work = dist.barrier(group=rank.group, async_op=True)
        raised = error_of(lambda: work.wait(timedelta(seconds=0.05)))
        asked.set()
        return raised[:2], work.wait(), still_works(rank)
    assert asked.wait(10)
    dist.barrier(group=rank.group)
    return still_works(rank)


def test_a_limit_on_waiting_leaves_the_collective_running():
    (raised, waited, works), other = run_ranks(2, waits_with_a_limit, threading.Event(), hosts="aa")
    assert raised == (CommunicationError, "the collective was not over after 0.05 s; it goes on")
    assert waited
    assert works
    assert other


# -------------------------------------------------------------------------------- ranks that leave


def leaves(rank):
    if rank.rank == 1:
        rank.group.shutdown()
        return error_of(lambda: dist.barrier(group=rank.group))[:2]
    return error_of(lambda: dist.barrier(group=rank.group))[:2]


@pytest.mark.parametrize("hosts", ["aaa", "aba", "aab"])
def test_a_rank_that_leaves_is_named(hosts):
    results = run_ranks(3, leaves, hosts=hosts)
    assert results[1] == (CommunicationError, "the process group has been destroyed")
    for kind, text in (results[0], results[2]):
        assert kind is CommunicationError
        named = "rank 1 has left the process group while others still use it" in text
        assert named or (hosts == "aba" and "rank(s) 1" in text), text


@pytest.fixture
def peers():
    """Three ranks of one host, connected, with the names 4, 5, and 6."""
    ends = {}
    for i, j in ((0, 1), (0, 2), (1, 2)):
        ends[i, j], ends[j, i] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = [Peers([4, 5, 6], i, {j: ends[i, j] for j in range(3) if j != i}) for i in range(3)]
    yield made
    for each in made:
        each.close()


def test_a_rank_that_has_done_its_part_and_left_has_not_died(peers):
    """One of the others sees it leave while it waits for a third one."""
    first, second, third = peers
    second.send(STEP)
    second.leave()
    second.close()
    sending = threading.Timer(0.1, third.send, [STEP])
    sending.start()
    assert first.exchange(STEP, 5) == [STEP] * 3
    sending.join()
    with pytest.raises(CommunicationError, match="rank 5 has left the process group"):
        first.exchange(STEP, 5)


def test_a_rank_that_is_told_of_an_end_tells_the_others_before_it_goes(peers):
    """Another one may see it go before it hears from the rank that found out."""
    first, second, third = peers
    third._sockets[0].send(MessageKind.ABORT + b"rank 9 has died")
    for each in (first, second):
        with pytest.raises(CommunicationError, match=r"^rank 9 has died$"):
            each.exchange(STEP, 5)


def aborts(rank, waiting, aborted):
    """Abort while another thread waits in a collective, to which rank 2 does not come before that."""

    def twice():  # all three may have done their part in the first
        for _ in range(2):
            dist.barrier(group=rank.group)

    if rank.rank == 0:
        work = dist.barrier(group=rank.group, async_op=True)
        assert waiting.wait(10)
        rank.group.abort()
        aborted.set()
        return error_of(work.wait)[:2]
    if rank.rank == 1:
        waiting.set()
        return error_of(twice)[:2]
    assert aborted.wait(10)
    return error_of(twice)[:2]


def test_abort_ends_what_waits_here_and_on_the_others():
    for kind, text in run_ranks(3, aborts, threading.Event(), threading.Event(), hosts="aaa"):
        assert kind is CommunicationError
        assert "rank 0 called abort()" in text or "this process has ended the process group" in text


def destroys(rank, hosts):
    """Destroy the group while collectives wait."""
    if rank.rank == 0:
        works = [dist.barrier(group=rank.group, async_op=True) for _ in range(3)]
        took = error_of(rank.group.shutdown)
        return [error_of(work.wait)[:2] for work in works], took
    return None


def test_destroying_a_group_ends_what_waits():
    raised, (kind, _, seconds) = run_ranks(2, destroys, "aa", hosts="aa", group_timeout=60.0)[0]
    assert kind is None
    assert seconds < 15  # far from the time-out
    assert [kind for kind, _ in raised] == [CommunicationError] * 3


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


def test_a_rank_that_cannot_say_that_it_leaves_stops_waiting_all_the_same(peers, monkeypatch):
    def send(_peers, _message):
        raise OSError(105, "No buffer space available")

    first = peers[0]
    waiting = []
    thread = threading.Thread(target=lambda: waiting.append(error_of(lambda: first.exchange(STEP, 20))))
    thread.start()
    for other in peers[1:]:  # it has sent, and waits
        assert select.select([other._sockets[0]], [], [], 10)[0]
    monkeypatch.setattr(Peers, "send", send)
    first.leave()
    thread.join(10)
    assert [kind for kind, _, _ in waiting] == [CommunicationError]


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


def group_of(store, rank, world=2, timeout=10.0, host="a"):
    return ProcessGroupShm(store, rank, world, timedelta(seconds=timeout), ShmOptions(host=host))


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


def memory_goes_round(rank):
    """How many shared memories are mapped in this process, which both ranks are."""
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
    if rank.rank == 0:
        dist.all_reduce(rank.group.allocate(BIG + 5000).fill_(1.0), group=rank.group)  # says that 300 have gone
    else:
        time.sleep(0.1)  # and nobody reads it yet
        dist.all_reduce(rank.group.allocate(BIG + 5000).fill_(1.0), group=rank.group)
    count()
    return counts


def test_memory_is_used_again_and_given_back_by_all_ranks():
    gc.collect()  # groups of other tests, which would go while memory is counted
    for first, *counts in run_ranks(2, memory_goes_round, hosts="aa"):
        assert counts == [first + 4] * 7  # of each rank, mapped by both


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
        return group_of(store, rank, world=4, timeout=1.0)

    for error in together(2, come):
        assert type(error) is CommunicationError
        assert str(error).startswith("rank(s) 2, 3 did not come to the shm process group within 1 s")


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


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_backward(rank, wrapper):
    """Of three layers, the gradients of two are on their way."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(3))
    model = nn.Sequential(*layers)
    if wrapper == "replicate":
        model = lockstep.replicate(model, bucket_cap_mb=0.1)
    else:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
    x = torch.randn(4, 300)
    model(x).sum().backward()
    if rank.rank == 1:
        layers[0].register_forward_hook(lambda module, given, out: CallInBackward.apply(out, be_killed))
    return error_of(lambda: model(x).sum().backward())


@pytest.mark.parametrize("wrapper", ["replicate", "ddp"])
def test_a_rank_that_is_killed_in_backward_is_named(wrapper):
    outcomes = run_processes(3, killed_in_backward, wrapper, backend="shm", group_timeout=60, errors=True)
    assert isinstance(outcomes[1].error, RankEndedError)
    for number in (0, 2):
        kind, text, seconds = outcomes[number].result
        assert issubclass(kind, RuntimeError)
        assert "rank 1 has died" in text
        assert seconds < SOON
        if wrapper == "replicate":
            assert kind is CommunicationError
            assert text.startswith(f"rank {number} of 3: backward() failed")


def moves_otherwise(rank):
    """Rank 1 gathers what the others send to each other."""
    x, outputs = torch.ones(6), [torch.empty(6) for _ in range(3)]
    if rank.rank == 1:
        raised = error_of(lambda: dist.gather(x, None, group=rank.group, group_dst=0))
    else:
        raised = error_of(lambda: dist.all_to_all_single(torch.empty(6), x, group=rank.group))
    other = error_of(lambda: dist.gather(x, outputs if rank.rank == 2 else None, group=rank.group, group_dst=2))
    refused = error_of(lambda: rank.group.gather([], [x.to_sparse()], root=1))
    return raised[:2], other[0], refused[0], still_works(rank)


@pytest.mark.parametrize("hosts", LEVELS)
def test_what_goes_through_gloo_is_compared_too(hosts):
    results = run_ranks(3, moves_otherwise, hosts=hosts)
    assert len(set(results)) == 1
    (kind, text), other, refused, works = results[0]
    assert kind is AgreementError
    assert "rank 1: gather(6 elements, torch.float32, to rank 0)" in text
    assert "ranks 0, 2: all_to_all(torch.float32)" in text
    assert (other, refused, works) == (None, LayoutError, True)


def sum_sparse(rank):
    dist.all_reduce(torch.sparse_coo_tensor([[rank.rank, 4]], [1.0, 10.0], (5,), check_invariants=False))


def gather(rank):
    dist.gather(torch.ones(BIG), [torch.empty(BIG)] * 3 if rank.rank == 0 else None, dst=0)


def scatter(rank):
    dist.scatter(torch.ones(BIG), [torch.ones(BIG)] * 3 if rank.rank == 1 else None, src=1)


def all_to_all(rank):
    dist.all_to_all_single(torch.empty(3 * BIG), torch.ones(3 * BIG))


def is_killed_in(rank, call, inside):
    """Rank 1 is killed between two of them, or within the second."""
    call(rank)
    if rank.rank == 1 and inside:
        gloo.wait_for = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raised = error_of(lambda: [call(rank) for _ in range(3)])
    begin = time.monotonic()
    dist.destroy_process_group()
    return raised, time.monotonic() - begin


@pytest.mark.parametrize(
    ("call", "inside"),
    [(sum_sparse, False), (gather, False), (gather, True), (scatter, True), (all_to_all, False), (all_to_all, True)],
)
def test_a_rank_that_is_killed_in_what_goes_another_way_is_named_at_once(call, inside):
    outcomes = run_processes(3, is_killed_in, call, inside, backend="shm", group_timeout=60, errors=True)
    for number in (0, 2):
        (kind, text, seconds), ending = outcomes[number].result
        assert kind is CommunicationError
        assert "rank 1 has died" in text
        assert seconds < SOON
        assert ending < SOON


def is_killed_before_a_message(rank, call):
    """Rank 1 is killed where rank 0 sends to it, or waits for what it sends."""
    x = torch.ones(BIG)
    dist.send(x, 1) if rank.rank == 0 else dist.recv(x, 0)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: [call(x, 1) for _ in range(100)])


@pytest.mark.parametrize("call", [dist.send, dist.recv])
def test_a_rank_that_is_killed_is_named_by_who_sends_to_it_or_receives(call):
    outcomes = run_processes(2, is_killed_before_a_message, call, backend="shm", group_timeout=6, errors=True)
    kind, text, _ = outcomes[0].result
    assert kind is CommunicationError
    assert "rank 0" in text
    assert ("to rank 1: " if call is dist.send else "from rank 1: ") in text


def in_child(function):
    """Run it in a forked process, whose exit code is what it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads
        pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


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
