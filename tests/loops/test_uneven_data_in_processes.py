"""Uneven data, batches that are left out and values that are compared, where ranks are processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import lockstep
from processes import run_processes
from training_loops import WHERE, Plan, alone, train

PLANS = {
    "streams": Plan((3, 1), known=False, wrapped=True),
    "left out": Plan((3, 2), window=2, weighted=True, bad=((0, 1, 0, WHERE[0]), (0, 0, 2, WHERE[2]))),
    "left out by hand": Plan((2, 2), modules=2, context=False, bad=((0, 1, 0, WHERE[2]), (1, 0, 1, WHERE[1]))),
}


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("name", PLANS)
def test_processes_train_as_one_would(name, backend):
    wanted = alone(PLANS[name])
    for found in run_processes(2, train, PLANS[name], None, backend=backend):
        assert found["steps"] == wanted["steps"]
        torch.testing.assert_close(found["values"], wanted["values"], rtol=1e-9, atol=1e-12)


def joins(rank):
    """A rank that has run out in `join` has not looked at buffers: it is not compared with those that have."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model = lockstep.DistributedDataParallel(net, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lockstep.check_in_sync(model, every=1)
    with Join([model]):
        for _ in range(2 + 2 * rank.rank):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
    optimizer.zero_grad()
    model(torch.randn(4, 2)).sum().backward()
    return True


def test_values_that_join_makes_equal_at_its_end_only():
    assert run_processes(2, joins) == [True, True]


def drifts_beside_a_rank_without_batches(rank):
    """Rank 1 never has looked at a value when ranks compare them one by one."""
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    lockstep.check_in_sync(model, every=1)
    with torch.no_grad():
        model.module[0].weight += rank.rank
    with pytest.raises(lockstep.errors.OutOfSyncError) as raised, Join([model]):
        for _ in range(0 if rank.rank == 1 else 2):
            model(torch.randn(4, 2)).sum().backward()
    return str(raised.value)


def test_a_rank_that_has_no_batch_in_join_hears_what_drifts_on_the_others():
    for rank, text in enumerate(run_processes(3, drifts_beside_a_rank_without_batches)):
        assert text.startswith(f"rank {rank}: parameter 0.weight is out of sync: rank 0 has other values than rank 2.")
