"""Ranks that wait for each other in different collectives: every one of them says so, and nobody else does."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CommunicationError, PeerFailure
from lockstep.failures import inquiry
from lockstep.session.watch import _used
from processes import on_processes, run_processes
from programs.ranks import on_ranks
from threaded import run_ranks

CALLS = {
    "backward": lambda run: run.model(torch.ones(2, 4)).sum().backward(),
    "mean": lambda run: lockstep.mean(1.0, group=run.group),
    "check_in_sync": lambda run: lockstep.check_in_sync(run.model),
    "save": lambda run: lockstep.save(run.folder, group=run.group, model=run.model),
    "resume": lambda run: lockstep.resume(run.folder, group=run.group, model=run.model),
    "agree": lambda run: lockstep.loop.agree(False, run.group),
    "step": lambda run: run.sharded.step(),
    "accumulate": lambda run: accumulate(run.model),
    "all_reduce": lambda run: dist.all_reduce(torch.ones(3)),
    "barrier": lambda run: dist.barrier(),
    "the end": lambda run: None,
}
OF_THE_PROGRAM = ("all_reduce", "barrier", "the end")
OURS = [call for call in CALLS if call not in OF_THE_PROGRAM]
SAID = {
    "accumulate": "backward()",
    "backward": "backward()",
    "check_in_sync": "check_in_sync()",
    "step": "optimizer.step()",
}
"""What the message says of a call, if it is not its name."""


def accumulate(model):
    with lockstep.accumulate(model):
        model(torch.ones(2, 4)).sum().backward()


def make(group, folder):
    """A model and an optimizer, which have made a step."""
    run = SimpleNamespace(group=group, folder=folder)
    run.model = lockstep.replicate(nn.Linear(4, 2), process_group=group)
    run.sharded = lockstep.shard_optimizer(torch.optim.SGD(run.model.parameters(), 0.1))
    for call in ("backward", "step"):
        CALLS[call](run)
    return run


def differ(run, rank, first, second):
    """Rank 0 makes the first call, and the others the second; what the rank is told."""
    try:
        CALLS[first if rank.rank == 0 else second](run)
    except (CommunicationError, RuntimeError) as error:
        return str(error)
    return ""


def check(first, second, told):
    for text in filter(None, told):
        for call in {first, second} - {"the end"}:
            assert SAID.get(call, call) in text, text
        assert f"of {__file__}, in " in text
    return [bool(text) for text in told]


@pytest.fixture
def own_watches():
    """The watches of each rank are counted, and there were other ranks before."""
    _used.clear()


PAIRS = [pair for pair in itertools.combinations(OURS, 2) if pair != ("backward", "accumulate")]


@pytest.mark.parametrize(
    ("first", "second", "world"),
    [(*pair, 2) for pair in PAIRS]
    + [pytest.param(*p, 3, marks=pytest.mark.around if "mean" in p else pytest.mark.soak) for p in PAIRS],
)
def test_different_calls_over_one_group_are_named_at_once(first, second, world, tmp_path, store, own_watches):
    def train(rank):
        with lockstep.watch(rank.group, store):
            return differ(make(rank.group, tmp_path), rank, first, second)

    told = run_ranks(world, train, hosts="a" * world)
    assert check(first, second, told) == [True] * world
    texts = {text.partition("\n")[2] for text in told}
    assert len(texts) == 1
    assert "Call " in texts.pop()


def leave_early(run):
    for number, x in enumerate(lockstep.batches([torch.ones(2, 4)] * 6, run.model)):
        run.model(x).sum().backward()
        if run.leaves and number == 2:
            break
    lockstep.loop.agree(False, run.group)


def leave_out(run):
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for number in range(4):
        if run.leaves and number == 2:
            continue  # as after an exception that the program catches
        run.model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    lockstep.check_in_sync(run.model)


IN_SYNC, BACKWARD = CALLS["check_in_sync"], CALLS["backward"]
AGREEMENTS = {
    "two agreements": (
        IN_SYNC,
        lambda run: lockstep.replicate(nn.Linear(3, 3), process_group=run.group),
        ["rank 0 in check_in_sync(), called", "rank 1 in replicate(), called"],
    ),
    "the first backward": (IN_SYNC, BACKWARD, ["rank 0 in check_in_sync(), called", "rank 1 in backward(), called"]),
    "a loop that one rank has left": (
        leave_early,
        leave_early,
        [
            "rank 0 in backward(), in its loop over batches(), called",
            "rank 1 in agree(), after it has left its loop over batches() after 3 of 6 batches, called",
            "ask `if run.agree(flag): break` on every rank",
        ],
    ),
    "a batch that one rank leaves out": (
        leave_out,
        leave_out,
        [
            "rank 0 in backward(), after step 3, called",
            "rank 1 in check_in_sync(), after step 3, called",
            "put `lockstep.loop.skip_on(ValueError)` around the batch in place of `try`",
        ],
    ),
}


@pytest.mark.parametrize(("first", "second", "words"), AGREEMENTS.values(), ids=AGREEMENTS)
@on_ranks(2, hosts="aa")
def test_calls_are_named_as_users_write_them(rank, store, own_watches, first, second, words):
    run = SimpleNamespace(group=rank.group, leaves=rank.rank == 1)
    with lockstep.watch(rank.group, store):
        run.model = lockstep.replicate(nn.Linear(4, 2), process_group=rank.group)
        with pytest.raises(CommunicationError) as caught:
            (second if rank.rank else first)(run)
    assert all(each in str(caught.value) for each in words), caught.value


def wait_for_each_other(rank, folder, first, second, one_group=False):
    """Over one group the program's calls go over it, those of lockstep over its companion, and also gradients on
    accelerators over the group: two waits with one number are not one wait."""
    inquiry.WAIT_SECONDS = 0.2
    group = dist.group.WORLD if one_group else dist.new_group(backend="shm")
    run = None
    try:
        with lockstep.watch():
            run = make(group, folder)
            if not one_group:
                dist.all_reduce(torch.ones(3))
            CALLS[first if rank.rank == 0 else second](run)
    except PeerFailure as failure:
        return str(failure)
    return ""


QUICK = [("mean", "barrier", 2), ("backward", "all_reduce", 3), ("save", "the end", 2), ("all_reduce", "barrier", 2)]
ALL = [
    (first, second, world)
    for first, second in itertools.combinations(CALLS, 2)
    for world in (2, 3)
    if second in OF_THE_PROGRAM
]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(
    ("first", "second", "world"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.soak) for c in ALL]
)
def test_waits_in_different_groups_are_named(first, second, world, backend, tmp_path):
    if backend == "shm" and (first, second) not in QUICK[:2]:
        pytest.skip("on one shm group the messages of the ranks differ")
    told = run_processes(world, wait_for_each_other, tmp_path, first, second, backend=backend)
    waits = check(first, second, told)
    assert waits == [number != 1 or second != "the end" for number in range(world)]  # rank 1 is who has left
    for number, text in enumerate(told):
        if second != "the end":
            assert text.startswith(f"rank {number} stops, because ranks 0, ")  # the third may have come later
            assert "wait for each other in different collectives, and can never go on:" in text
            assert text.partition("\n")[2] == told[0].partition("\n")[2]
        elif number != 1:
            assert "rank 1 has left the training in good order" in text


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_call_of_the_program_and_one_of_lockstep_over_one_group_are_named(backend, tmp_path):
    told = run_processes(2, wait_for_each_other, tmp_path, "backward", "all_reduce", True, backend=backend)
    assert check("backward", "all_reduce", told) == [True, True]


@pytest.mark.parametrize("second", ["mean", "check_in_sync"])
def test_waits_of_accelerators_and_of_the_host_are_named(second, tmp_path):
    told = run_processes(2, wait_for_each_other, tmp_path, "backward", second, True, device="sim")
    assert check("backward", second, told) == [True] * 2
    assert all("(allreduce of accelerators, " in text for text in told)


# ------------------------------------------------------------------------------------------------ no false alarm


def soon():
    """Let ranks tell of their waits, and vote, much earlier than they do."""
    inquiry.WAIT_SECONDS, inquiry.LOOK_SECONDS = 0.05, 0.01


PAUSE = 0.15  # three times that after which a rank tells of its wait


def one_computes(rank, groups):
    if rank.rank == 1:
        time.sleep(PAUSE)
    dist.barrier()


def in_other_orders(rank, groups):
    """Each rank uses its two groups in an order of its own, one of them without waiting."""
    mine = [group for group in groups if group is not None]
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in mine]
    time.sleep(PAUSE * rank.rank / 2)
    dist.barrier()
    for work in works[:: -1 if rank.rank else 1]:
        work.wait()


def pipeline(rank, groups):
    """Each rank waits for the one before it, and the last one for all."""
    tensor = torch.ones(2)
    if rank.rank:
        dist.recv(tensor, rank.rank - 1)
    time.sleep(PAUSE)
    if rank.rank + 1 < rank.world:
        dist.send(tensor, rank.rank + 1)
    dist.barrier()


def waits_unseen(rank, groups):
    """Rank 0 waits for a work, which nobody sees, and the others for rank 0."""
    if rank.rank == 0:
        dist.all_reduce(torch.ones(2), group=groups[3], async_op=True).wait()
    else:
        time.sleep(PAUSE)
        dist.all_reduce(torch.ones(2), group=groups[3])
    dist.barrier()


def two_threads(rank, groups):
    """One thread of each rank waits in a group, the other one computes, and uses another group then."""

    def other():
        if rank.rank:
            time.sleep(PAUSE)
        dist.all_reduce(torch.ones(2), group=groups[3])

    thread = threading.Thread(target=other)
    thread.start()
    if rank.rank == 0:
        time.sleep(2 * PAUSE)
    dist.barrier()
    thread.join()


def threads_that_cross(rank, groups):
    """Rank 0 waits in one group and the others in another one, each of them with a thread that comes to it later."""
    first, second = (None, groups[3]) if rank.rank == 0 else (groups[3], None)

    def later():
        time.sleep(PAUSE)
        dist.barrier(group=second)

    thread = threading.Thread(target=later)
    thread.start()
    dist.barrier(group=first)
    thread.join()


def stopped(rank, groups):
    """Rank 0 is stopped for a while: another process continues it."""
    if rank.rank == 0:
        child = forked(lambda: (time.sleep(PAUSE), os.kill(os.getppid(), signal.SIGCONT)))
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)
    dist.barrier()


def forks(rank, groups):
    """A forked process lives on while its parent waits."""
    child = forked(lambda: time.sleep(PAUSE * rank.rank))
    if rank.rank:
        os.waitpid(child, 0)
    dist.barrier()
    if not rank.rank:
        os.waitpid(child, 0)


def forked(function):
    child = os.fork()
    if child == 0:
        function()
        os._exit(0)
    return child


GO_ON = [one_computes, in_other_orders, pipeline, waits_unseen, two_threads, threads_that_cross, stopped, forks]


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.around), "shm"])
@on_processes(3, "backend")
def test_waits_that_end_by_themselves_are_no_alarm(rank):
    soon()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2], [0, 1, 2])]
    groups = [group if group is not dist.GroupMember.NON_GROUP_MEMBER else None for group in groups]
    with lockstep.watch() as watch:
        model = lockstep.replicate(nn.Linear(4, 2))
        for each in GO_ON:
            each(rank, groups)
            if rank.rank == 2:
                time.sleep(PAUSE)
            model(torch.ones(2, 4)).sum().backward()
            assert watch.channel.failure is None, each.__name__
