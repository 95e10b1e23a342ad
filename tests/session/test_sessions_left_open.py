"""A session or a watch that nobody closes: the end of the program does, and others are told of it as it is."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import AlreadyManagedError
from processes import be_launched, run_processes

UNCLOSED = "has ended its program without closing its session or watch, while others still needed it"
BEGUN = "batches begun are 3 on rank 1 and 4 on rank 0, in backward now"


def train(steps):
    model = lockstep.replicate(nn.Linear(2, 1))
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()


def leaves(rank, backend, port, code):
    """Rank 1 leaves after three steps; nobody closes its session."""
    if port:
        dist.destroy_process_group()
        be_launched(rank, port)
        lockstep.session(backend=backend, timeout=60.0).__enter__()
    else:
        lockstep.watch()
    train(3)
    if rank.rank == 1:
        sys.exit(code)
    train(1)


@pytest.mark.parametrize(("backend", "in_session"), [("shm", True), ("gloo", True), ("gloo", False)])
def test_a_rank_that_leaves_without_closing_its_session_has_left_in_good_order(backend, in_session):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if in_session else 0
    first, left = run_processes(2, leaves, backend, port, 0, backend=backend, errors=True)
    assert left.returncode == 0
    assert type(first.error) is lockstep.errors.PeerFailure
    known = sys.version_info < (3, 13)
    told = "has left the training in good order, while others still needed it" if known else UNCLOSED
    assert f"rank 1 {told}" in str(first.error)


def test_a_rank_that_leaves_with_a_status_has_failed():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, left = run_processes(2, leaves, "shm", store.port, 3, errors=True)
    assert left.returncode == 3
    known = sys.version_info < (3, 13)  # multiprocessing has forgotten the exception when it runs finalizers
    told = "failed in training: SystemExit: 3" if known else UNCLOSED
    assert f"rank 1 {told}" in str(first.error)


def trains_to_the_end(rank, port):
    dist.destroy_process_group()
    be_launched(rank, port)
    run = lockstep.session(timeout=60.0).__enter__()
    train(3)
    assert run.agree(True)
    sys.exit(0)  # so that the process ends before the others have


def test_ranks_that_all_leave_their_sessions_open():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = run_processes(2, trains_to_the_end, store.port, errors=True)
    assert [(each.returncode, each.stderr) for each in outcomes] == [(0, ""), (0, "")]


PROGRAM = """
import os, sys
import torch, lockstep
run = lockstep.session(timeout=60.0).__enter__()
model = lockstep.replicate(torch.nn.Linear(2, 1))
for x in run.batches([torch.ones(1, 2)] * 4):
    model(x).sum().backward()
    if run.step == 3 and run.rank == 1:
        {what}
"""


@pytest.mark.around
@pytest.mark.parametrize(
    ("what", "status", "told"),
    [
        ("raise ValueError('of rank 1')", 1, "rank 1 failed at step 3, in training: ValueError: of rank 1"),
        ("break", 0, f"rank 1 {UNCLOSED}, after step 3: {BEGUN}; it may have failed, which its own output tells"),
        ("sys.exit(3)", 3, f"rank 1 {UNCLOSED}, after step 3: {BEGUN}; it may have failed, which its own output tells"),
    ],
)
def test_a_program_that_ends_is_told_of_as_it_does(what, status, told):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fixed = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(what=what)],
            env=fixed | {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [each.communicate(timeout=100)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [1, status], errors
    assert f"PeerFailure: rank 0 stops, because {told}" in errors[0]
    assert ("ValueError: of rank 1" in errors[1]) == (status == 1)


def closes(rank, port):
    """Return what is left of a session that was closed, and in which a thread began that goes on."""
    dist.destroy_process_group()
    be_launched(rank, port)
    may_end = threading.Event()
    with lockstep.session(timeout=60.0) as run:
        thread = threading.Thread(target=may_end.wait, daemon=True)  # keeps the hook of the moment it was made
        thread.start()
        train(1)
        assert "end_with_the_program" in repr(sys.excepthook)
    kept = weakref.ref(run)
    del run
    gc.collect()
    is_gone = kept() is None
    may_end.set()
    thread.join()
    return is_gone and "end_with_the_program" not in repr(sys.excepthook)


def test_a_session_that_was_closed_leaves_nothing_for_the_end_of_the_program():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_processes(2, closes, store.port) == [True, True]


def replicated_again(rank, folder, shares):
    """The second and third time over a group that is new: the earlier one has been destroyed."""
    model, seen, x = nn.Linear(3, 2), [], torch.full((1, 3), rank.rank + 1.0)
    for turn in range(3):
        if turn:
            dist.destroy_process_group()
            store = dist.FileStore(f"{folder}/{turn}", rank.world)
            dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world)
        lockstep.replicate(model, shares=shares)
        with pytest.raises(AlreadyManagedError, match="can only be applied to a module once"):
            lockstep.replicate(model)
        optimizer = lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), 0.5))
        optimizer.zero_grad()
        if shares is None:
            model(x).sum().backward()
        else:
            for batch in lockstep.shares.GlobalBatches(torch.utils.data.TensorDataset(torch.ones(2, 3)), 2, shares):
                for _ in batch:
                    model(x).sum().backward()
        seen.append(model.weight.grad[0, 0].item())
        optimizer.step()
        lockstep.check_in_sync(model)
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    return seen


@pytest.mark.parametrize("shares", [None, 2])
def test_a_module_is_replicated_again_over_another_group(tmp_path, shares):
    assert run_processes(2, replicated_again, str(tmp_path), shares) == [[1.5] * 3] * 2
