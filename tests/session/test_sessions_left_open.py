"""A session or a watch that nobody closes: the end of the program does, and others are told of it as it is."""

from __future__ import annotations

import gc
import os
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
from processes import on_processes, run_processes

UNCLOSED = "has ended its program without closing its session or watch, while others still needed it"
BEGUN = "batches begun are 3 on rank 1 and 4 on rank 0, in backward now"


def train(steps):
    model = lockstep.replicate(nn.Linear(2, 1))
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()


def leaves(rank, backend, code):
    """Rank 1 leaves after three steps; nobody closes its session, or its watch if there is a group."""
    if dist.is_initialized():
        lockstep.watch()
    else:
        lockstep.session(backend=backend, timeout=60.0).__enter__()
    train(3)
    if rank.rank == 1:
        sys.exit(code)
    train(1)


# From Python 3.13 on, multiprocessing has forgotten the exception when it runs finalizers.
LEFT = "has left the training in good order, while others still needed it"
FAILED = "failed in training: SystemExit: 3"


@pytest.mark.parametrize(
    ("backend", "in_session", "code", "told"),
    [("shm", True, 0, LEFT), ("gloo", True, 0, LEFT), ("gloo", False, 0, LEFT), ("shm", True, 3, FAILED)],
)
def test_a_rank_that_leaves_without_closing_its_session_is_told_of(backend, in_session, code, told):
    first, left = run_processes(2, leaves, backend, code, backend=backend, errors=True, launched=in_session)
    assert left.returncode == code
    assert type(first.error) is lockstep.errors.PeerFailure
    assert f"rank 1 {told if sys.version_info < (3, 13) else UNCLOSED}" in str(first.error)


def in_a_generator():
    with lockstep.session(timeout=60.0) as run:
        model = lockstep.replicate(nn.Linear(2, 1))
        while True:
            model(torch.ones(1, 2)).sum().backward()
            yield run.rank


def closes_its_generator(rank):
    for step, _ in enumerate(in_a_generator()):
        if step == 2 and rank.rank == 1:
            break


def test_a_rank_whose_generator_is_closed_has_left_in_good_order():
    first, left = run_processes(2, closes_its_generator, errors=True, launched=True)
    assert (left.error, left.returncode) == (None, 0)
    assert f"rank 1 {LEFT}" in str(first.error)


def trains_to_the_end(rank):
    run = lockstep.session(timeout=60.0).__enter__()
    train(3)
    assert run.agree(True)
    sys.exit(0)  # so that the process ends before the others have


def test_ranks_that_all_leave_their_sessions_open():
    outcomes = run_processes(2, trains_to_the_end, errors=True, launched=True)
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


LEFT_OPEN = f"rank 1 {UNCLOSED}, after step 3: {BEGUN}; it may have failed, which its own output tells"


@pytest.mark.around
@pytest.mark.parametrize(
    ("what", "status", "told"),
    [
        ("raise ValueError('of rank 1')", 1, "rank 1 failed at step 3, in training: ValueError: of rank 1"),
        ("break", 0, LEFT_OPEN),
        ("sys.exit(3)", 3, LEFT_OPEN),
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


@on_processes(2, launched=True)
def test_a_session_that_was_closed_leaves_nothing_for_the_end_of_the_program(rank):
    """In it a thread begins that goes on."""
    may_end = threading.Event()
    with lockstep.session(timeout=60.0) as run:
        thread = threading.Thread(target=may_end.wait, daemon=True)  # keeps the hook of the moment it was made
        thread.start()
        train(1)
        assert "end_with_the_program" in repr(sys.excepthook)
    kept = weakref.ref(run)
    del run
    gc.collect()
    assert kept() is None
    may_end.set()
    thread.join()
    assert "end_with_the_program" not in repr(sys.excepthook)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.around)])
@on_processes(2, launched=True)
def test_a_session_that_ends_ends_its_threads_and_connections(rank, backend):
    """All but that to the store, which all sessions of the process share; none is left to the garbage collector."""

    def open_files_and_threads():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def train_in_session():
        with lockstep.session(device="cpu", backend=backend, timeout=60.0) as run:
            train(1)
            return weakref.ref(run.group)

    train_in_session()
    gc.collect()
    before = open_files_and_threads()
    gc.disable()
    groups = [train_in_session() for _ in range(3)]
    assert [group() for group in groups] == [None] * 3
    assert open_files_and_threads() == before


@pytest.mark.parametrize("shares", [None, 2])
@on_processes(2)
def test_a_module_is_replicated_again_over_another_group(rank, tmp_path, shares):
    """The second and third time over a group that is new: the earlier one has been destroyed."""
    model, x = nn.Linear(3, 2), torch.full((1, 3), rank.rank + 1.0)
    for turn in range(3):
        if turn:
            dist.destroy_process_group()
            store = dist.FileStore(f"{tmp_path}/{turn}", rank.world)
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
        assert model.weight.grad[0, 0] == 1.5
        optimizer.step()
        lockstep.check_in_sync(model)
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
