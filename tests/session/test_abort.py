"""The end of a session whose backend needs to be aborted after a failure, as NCCL does, and may not come back."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import PeerFailure
from lockstep.session import start
from lockstep.session.environment import Environment
from processes import be_launched, run_processes


def cannot_be_aborted(rank, port):
    """A rank fails in a session whose backend, which is said to be NCCL, never comes back from `abort()`."""
    dist.destroy_process_group()
    be_launched(rank, port)
    module = sys.modules["lockstep.session.watch"]
    module.backends_of = lambda group: "cpu:gloo,cuda:nccl"
    module.ABORT_SECONDS = 0.3
    aborted = []

    def abort(group):
        aborted.append(group)
        threading.Event().wait()

    dist.ProcessGroup.abort = abort
    group = None
    try:
        with lockstep.session(backend="gloo", timeout=60) as run:
            group, other = run.group, dist.new_group()
            lockstep.mean(torch.ones(()))
            if rank.rank == 1:
                raise ValueError("of rank 1")
            lockstep.mean(torch.ones(()))
    finally:
        assert {*aborted} == {group, other}, "each group is aborted, whatever becomes of the others"
        assert sys.getrefcount(group) > 2
        assert dist.is_initialized()


def test_a_group_that_cannot_be_aborted_keeps_no_rank_from_ending():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = run_processes(2, cannot_be_aborted, store.port, errors=True, group_timeout=60)
    assert isinstance(first.error, PeerFailure)
    assert "rank 1 failed in training: ValueError: of rank 1" in str(first.error)
    assert isinstance(second.error, ValueError)
    for each in (first, second):
        assert "has not aborted its communicator within 0.3 s" in each.stderr


def leaves_in_order(rank, port):
    """What ranks that leave in good order abort: nothing, as their last sums may still be on their way."""
    dist.destroy_process_group()
    be_launched(rank, port)
    sys.modules["lockstep.session.watch"].backends_of = lambda group: "cpu:gloo,cuda:nccl"
    aborted, plain = [], dist.ProcessGroup.abort
    dist.ProcessGroup.abort = lambda group: (aborted.append(group), plain(group))
    try:
        with lockstep.session(backend="gloo", timeout=60):
            lockstep.mean(torch.ones(()))
            if rank.rank == 1:
                sys.exit(0)
    except SystemExit:
        pass
    assert not dist.is_initialized()
    return len(aborted)


def test_ranks_that_leave_in_order_abort_nothing():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_processes(2, leaves_in_order, store.port, group_timeout=60) == [0, 0]


def destroyed_together(rank, port, folder):
    """Destroying a group ends once both ranks do it, and never if one has aborted, as NCCL's does."""
    dist.destroy_process_group()
    be_launched(rank, port)
    module = sys.modules["lockstep.session.watch"]
    module.backends_of = lambda group: "cpu:gloo,cuda:nccl"
    module.ABORT_SECONDS = 0.3
    aborted, abort, destroy = threading.Event(), dist.ProcessGroup.abort, dist.destroy_process_group
    arrive = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)

    def destroy_together():
        if not aborted.is_set():
            arrive.set(f"rank {rank.rank} destroys", "")
            arrive.wait([f"rank {1 - rank.rank} destroys"])
        destroy()

    dist.ProcessGroup.abort = lambda group: (aborted.set(), abort(group))
    dist.destroy_process_group = destroy_together
    with lockstep.session(backend="gloo", timeout=60):
        if not (folder and rank.rank == 1):
            lockstep.mean(torch.ones(()))
    return aborted.is_set()


def test_a_group_is_destroyed_once_all_ranks_are_done():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_processes(2, destroyed_together, store.port, False, group_timeout=60) == [False, False]


def test_a_rank_that_leaves_early_aborts_its_group_once_others_have_failed():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = run_processes(2, destroyed_together, store.port, True, errors=True, group_timeout=60)
    assert isinstance(first.error, PeerFailure)
    assert "rank 1 has left the training in good order" in str(first.error)
    assert second.result is True
    assert "has not been released" not in first.stderr + second.stderr


def never_released(rank):
    """A backend's release never comes back; neither does a thread that the interpreter waits for."""
    dist.destroy_process_group()
    sys.modules["lockstep.session.watch"].ABORT_SECONDS = 0.3
    with mock.patch.object(dist, "destroy_process_group", threading.Event().wait), lockstep.session(backend="gloo"):
        pass
    threading.Thread(target=threading.Event().wait).start()


def test_a_group_that_is_never_released_keeps_no_process_from_ending():
    (ended,) = run_processes(1, never_released, errors=True)
    assert "the process group has not been released within 0.6 s" in ended.stderr
    assert ended.returncode == -signal.SIGALRM


def test_nccl_ends_a_process_soon_after_its_time_out(monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    for backend, set_to in (("gloo", None), ("cpu:gloo,cuda:nccl", "1000")):
        with mock.patch.dict(os.environ):
            os.environ.pop("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", None)
            start._make_group(backend, None, Environment(), timedelta(seconds=1))
            assert os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC") == set_to
