"""A module that is replicated over a group of one rank, where there are more: probably a mistake."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lockstep
from processes import on_processes

GROUPS = {
    "own": lambda rank: [dist.new_group([each]) for each in range(rank.world)][rank.rank],
    "bare": lambda rank: dist.ProcessGroupGloo(dist.HashStore(), 0, 1),
    "all": lambda rank: None,
}


def told(rank, how):
    """What is told of two modules."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if how == "mesh":
                mesh = init_device_mesh("cpu", (1, rank.world), mesh_dim_names=("data", "model"))
                lockstep.replicate(nn.Linear(1, 1), device_mesh=mesh["data"])
            else:
                model = lockstep.replicate(nn.Linear(1, 1), process_group=GROUPS[how](rank))
                model(torch.ones(1, 1)).sum().backward()
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


@pytest.mark.parametrize("how", ["own", "bare"])
@on_processes(3)
def test_it_is_told_once_with_the_ranks(rank, how):
    assert told(rank, how) == [
        f"a module is replicated over a process group of rank {rank.rank} alone, while the default group has ranks 0 "
        "to 2: its gradients are those of this rank. Leave process_group out to train with all of them"
    ]


@pytest.mark.parametrize(("how", "world"), [("all", 2), ("mesh", 2), ("own", 1)])
@on_processes(None, "world")
def test_what_is_no_mistake_is_not_told(rank, how):
    assert told(rank, how) == []
