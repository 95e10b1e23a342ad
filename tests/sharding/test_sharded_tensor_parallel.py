"""Parameters that are DTensors, sharded over another dimension of the mesh: each rank steps on pieces of its part."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lockstep
from lockstep._base.dtensors import local_part
from lockstep.sharding import full_state_dict
from processes import run_processes
from sharded_runs import adamw, equal, made


def trained(rank, sharded):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    model = rank.make(lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    parallelize_module(model, mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = lockstep.replicate(model, device_mesh=mesh["replicas"])
    optimizer = made(lambda p: adamw(p, foreach=False), model, sharded)
    for step in range(3):
        seed = step + 10 * mesh["replicas"].get_local_rank()
        optimizer.zero_grad()
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
    state = full_state_dict(optimizer, all_ranks=True)["state"]
    weights = [local_part(each.detach()).clone() for each in model.parameters()]
    return weights, [local_part(value).clone() for each in state.values() for value in each.values()]


def test_parts_of_parameters_are_stepped_as_without_sharding():
    assert equal(run_processes(4, trained, False), run_processes(4, trained, True))
