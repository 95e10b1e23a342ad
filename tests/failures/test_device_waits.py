"""Ranks that wait for each other on their accelerators, as with NCCL, whose collectives nobody waits for on the host.

Simulated: the group is Gloo's, nobody waits for what it does with tensors of the accelerator, and an accelerator that
waits for other ranks always has work to do. The thread that trains waits for it in `wait_for_device`.
"""

from __future__ import annotations

import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.distributed.comm import collectives
from lockstep.errors import PeerFailure
from lockstep.failures import inquiry
from lockstep.session import waits_of_rank, watch
from processes import on_processes, run_processes

wait_on_host = collectives.Pending.wait


def wait(pending):
    if not pending.call.kind.endswith("of accelerators"):
        wait_on_host(pending)


def wait_for_device():
    threading.Event().wait()


def like_nccl():
    for module in (watch, waits_of_rank):
        module.backends_of = lambda group: "cpu:gloo,cuda:nccl"
        module.has_work = lambda device: True
    watch.ABORT_SECONDS = waits_of_rank.DEVICE_SECONDS = 0.5
    inquiry.WAIT_SECONDS = 0.2
    collectives.Pending.wait = wait


def one_collective_more(rank, waits):
    """Rank 1 makes a collective of its own, and waits for it, or goes on to backward."""
    with lockstep.session(backend="gloo", device=f"sim:{rank.rank}", timeout=60) as run:
        model = lockstep.replicate(nn.Linear(4, 2).to(run.device))
        ones = torch.ones(2, 4, device=run.device)
        model(ones).sum().backward()
        dist.all_reduce(ones, group=run.group)
        like_nccl()
        if rank.rank == 1:
            dist.all_reduce(torch.ones(10, device=run.device), group=run.group, async_op=True)  # as long as a bucket
            if waits:
                wait_for_device()
        model(ones).sum().backward()
        wait_for_device()


@pytest.mark.parametrize("waits", [True, False], ids=["then waits", "then goes on"])
def test_a_collective_that_one_rank_makes_is_named_on_all(waits):
    ended = run_processes(2, one_collective_more, waits, errors=True, device="sim", launched=True)
    texts = [each.stderr for each in ended]
    if waits:
        assert isinstance(ended[0].error, PeerFailure)
        texts[0] = str(ended[0].error)
    for text in texts:
        assert "ranks 0, 1 wait for each other in different collectives" in text
        assert "rank 1 has waited for" in text
        assert "in wait_for_device" in text
        assert "backward()" in text
    for each in ended[1:] if waits else ended:
        assert each.returncode == -signal.SIGALRM
        assert f"rank {each.rank} still waits for its accelerator after 1 s" in each.stderr


@on_processes(2, device="sim", launched=True)
def test_a_long_kernel_on_one_rank_is_no_failure(rank):
    """Rank 0 waits for its accelerator for longer than the limit, and the other one for rank 0."""
    with lockstep.session(backend="gloo", device=f"sim:{rank.rank}", timeout=60) as run:
        like_nccl()
        waits_of_rank.DEVICE_SECONDS = 0.1
        dist.all_reduce(torch.ones(3, device=run.device), group=run.group)
        if rank.rank == 0:
            threading.Event().wait(1.0)
        assert lockstep.mean(torch.ones(())) == 1.0
