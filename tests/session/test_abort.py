"""The end of a session whose backend needs to be aborted after a failure, as NCCL does, and may not come back."""

from __future__ import annotations

import contextlib
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
from lockstep.session import start, watch
from lockstep.session.environment import Environment
from processes import on_processes, run_processes


def like_nccl():
    """Sessions of this process take their groups for NCCL's."""
    watch.backends_of = lambda group: "cpu:gloo,cuda:nccl"
    watch.ABORT_SECONDS = 0.3


def cannot_be_aborted(rank):
    """A rank fails in a session whose backend never comes back from `abort()`."""
    like_nccl()
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
    first, second = run_processes(2, cannot_be_aborted, errors=True, launched=True)
    assert isinstance(first.error, PeerFailure)
    assert "rank 1 failed in training: ValueError: of rank 1" in str(first.error)
    assert isinstance(second.error, ValueError)
    for each in (first, second):
        assert "has not aborted its communicator within 0.3 s" in each.stderr


@on_processes(2, launched=True)
def test_ranks_that_leave_in_order_abort_nothing(rank):
    """Their last sums may still be on their way."""
    like_nccl()
    aborted, plain = [], dist.ProcessGroup.abort
    dist.ProcessGroup.abort = lambda group: (aborted.append(group), plain(group))
    with contextlib.suppress(SystemExit), lockstep.session(backend="gloo", timeout=60):
        lockstep.mean(torch.ones(()))
        if rank.rank == 1:
            sys.exit(0)
    assert not dist.is_initialized()
    assert not aborted


def destroyed_together(rank, leaves_early):
    """Destroying a group ends once both ranks do it, and never if one has aborted, as NCCL's does."""
    like_nccl()
    aborted, abort, destroy = threading.Event(), dist.ProcessGroup.abort, dist.destroy_process_group
    arrive = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)

    def destroy_together():
        if not aborted.is_set():
            arrive.set(f"rank {rank.rank} destroys", "")
            arrive.wait([f"rank {1 - rank.rank} destroys"])
        destroy()

    dist.ProcessGroup.abort = lambda group: (aborted.set(), abort(group))
    dist.destroy_process_group = destroy_together
    with lockstep.session(backend="gloo", timeout=60):
        if not (leaves_early and rank.rank == 1):
            lockstep.mean(torch.ones(()))
    return aborted.is_set()


def test_a_group_is_destroyed_once_all_ranks_are_done():
    assert run_processes(2, destroyed_together, False, launched=True) == [False, False]


def test_a_rank_that_leaves_early_aborts_its_group_once_others_have_failed():
    first, second = run_processes(2, destroyed_together, True, errors=True, launched=True)
    assert isinstance(first.error, PeerFailure)
    assert "rank 1 has left the training in good order" in str(first.error)
    assert second.result is True
    assert "has not been released" not in first.stderr + second.stderr


def never_released(rank):
    """A backend's release never comes back; neither does a thread that the interpreter waits for."""
    watch.ABORT_SECONDS = 0.3
    with mock.patch.object(dist, "destroy_process_group", threading.Event().wait), lockstep.session(backend="gloo"):
        pass
    threading.Thread(target=threading.Event().wait).start()


def test_a_group_that_is_never_released_keeps_no_process_from_ending():
    (ended,) = run_processes(1, never_released, errors=True, launched=True)
    assert "the process group has not been released within 0.6 s" in ended.stderr
    assert ended.returncode == -signal.SIGALRM


def test_nccl_ends_a_process_soon_after_its_time_out(monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    for backend, set_to in (("gloo", None), ("cpu:gloo,cuda:nccl", "1000")):
        with mock.patch.dict(os.environ):
            os.environ.pop("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", None)
            start._make_group(backend, None, Environment(), timedelta(seconds=1))
            assert os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC") == set_to
