"""A step that is cut into shares, in a session: a rank that fails in one of its shares is named on the others."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from processes import RankEndedError, be_launched, run_processes


def trains(rank, backend, port, comes_to_grief):
    dist.destroy_process_group()
    be_launched(rank, port)
    with lockstep.session(backend=backend, timeout=60.0) as run:
        model = lockstep.replicate(nn.Linear(2, 1), shares=4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = lockstep.shares.GlobalBatches([torch.ones(2)] * 32, batch_size=8, shares=4, seed=0)
        for step, batch in enumerate(run.batches(data)):
            optimizer.zero_grad()
            for number, x in enumerate(batch):
                output = model(x)
                if (rank.rank, step, number) == (1, 2, 1):
                    comes_to_grief()
                output.sum().backward()
            optimizer.step()


def fail():
    raise ValueError("of rank 1")


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("backend", "comes_to_grief", "reason"), [("shm", fail, "ValueError: of rank 1"), ("gloo", be_killed, "has ended")]
)
def test_a_rank_that_fails_in_one_of_its_shares_is_named(backend, comes_to_grief, reason):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, failed = run_processes(2, trains, backend, store.port, comes_to_grief, errors=True)
    assert type(failed.error) is (ValueError if comes_to_grief is fail else RankEndedError)
    assert type(first.error) is lockstep.errors.PeerFailure
    assert (first.error.rank, first.error.step) == (1, 3)
    assert reason in str(first.error)
