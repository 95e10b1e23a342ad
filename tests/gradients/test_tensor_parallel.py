"""One dimension of a mesh replicates what another one shards: two replicas of two tensor-parallel ranks each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import OutOfSyncError
from processes import on_processes, run_processes


class Block(nn.Module):
    """Two layers to shard, a norm, and a layer that only `extra` uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.extra = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)

    def forward(self, x, extra=False):
        normal = self.norm(x)
        hidden = self.up(normal).relu()
        return x + self.down(hidden + self.extra(normal) if extra else hidden)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("offset", torch.tensor(2.0))

    def forward(self, x, extra=False):
        for block in self.blocks:
            x = block(x, extra)
        return self.head(x) * self.scale + self.offset


def sharded(mesh, seed: int) -> nn.Module:
    """The network on this rank; seeds may differ among replicas, not among those that share one."""
    torch.manual_seed(seed)
    network = Network().double()
    for block in network.blocks:
        # The norm has its part of the sequence: its weights are whole on both ranks, their gradients parts of sums.
        parallelize_module(
            block.norm, mesh["tp"], PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
        )
        parallelize_module(
            block,
            mesh["tp"],
            {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "extra": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(),
            },
        )
    parallelize_module(network.head, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))  # in parts of 2 and 1
    return network


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(got: Any, wanted: Any, what: str) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 2, 8, dtype=torch.double, generator=torch.Generator().manual_seed(step))


WAYS = {
    "replicate": lambda module, **options: lockstep.replicate(module, **options),
    "wrapper": lambda module, **options: lockstep.DistributedDataParallel(module, **options),
}


def train_beside(rank, way: str, folder: str) -> None:
    """Trains one process's network and the sharded, replicated one, with all that a step may be."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()
    local = rank.make(Network).double()
    model = WAYS[way](sharded(mesh, seed=replica), device_mesh=mesh["dp"])
    updates = [torch.optim.Adam(module.parameters(), 0.01) for module in (local, model)]

    def step(number: int, synchronise: bool = True, **kwargs) -> None:
        local(inputs(number), **kwargs).square().mean().backward()
        model.set_requires_gradient_sync(synchronise)
        model(inputs(number).chunk(2)[replica], **kwargs).square().mean().backward()

    def compare(what: str) -> None:
        for (name, wanted), got in zip(local.named_parameters(), model.parameters(), strict=True):
            assert_same(whole(got.grad), wanted.grad, f"{what}, gradient of {name}")
            assert_same(whole(got.detach()), wanted.detach(), f"{what}, {name}")
            assert got.grad is None or isinstance(got.grad, DTensor) == isinstance(got, DTensor)

    for number in range(6):
        step(number)
        compare(f"step {number}")
        for update in updates:
            update.step()
            update.zero_grad(set_to_none=number % 2 == 0)
    for number in range(6, 8):  # a layer that was never used is, for once
        step(number, extra=number == 6)
        compare(f"step {number}")
    for update in updates:
        update.zero_grad()
    step(8, synchronise=False)
    step(9, synchronise=False, extra=True)
    step(10)
    compare("accumulated")
    blocks = local.blocks, getattr(model, "module", model).blocks  # PyTorch clips tensors of one kind at a time
    norms = [nn.utils.clip_grad_norm_(part.parameters(), 0.01) for part in blocks]
    assert_same(whole(norms[1]), norms[0], "norm")
    for update in updates:
        update.step()
    compare("clipped")
    lockstep.check_in_sync(model)
    save_and_load(mesh, way, model, updates[1], folder)
    drift(mesh, model)


def save_and_load(mesh, way: str, model: nn.Module, update: Any, folder: str) -> None:
    state = model.state_dict()
    kinds = {key.removeprefix("module."): type(value) for key, value in state.items()}
    assert kinds["blocks.0.up.weight"] is kinds["blocks.1.down.weight"] is kinds["blocks.0.norm.weight"] is DTensor
    assert kinds["scale"] is kinds["offset"] is torch.Tensor
    # Everything by PyTorch's functions, into a fresh network that is replicated, too.
    weights, moments = get_state_dict(model, update)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    fresh = WAYS[way](sharded(mesh, seed=7), device_mesh=mesh["dp"])
    other = torch.optim.Adam(fresh.parameters(), 0.01)
    read = dict(zip(("model", "optimizer"), get_state_dict(fresh, other), strict=True))
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(fresh, other, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    assert [type(value) for value in fresh.state_dict().values()] == [type(value) for value in state.values()]
    for module, optimizer in ((model, update), (fresh, other)):
        for number in (20, 21):
            optimizer.zero_grad()
            module(inputs(number).chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
            optimizer.step()
    for got, wanted in zip(fresh.parameters(), model.parameters(), strict=True):
        assert_same(whole(got.detach()), whole(wanted.detach()), "after loading")
    # The weights alone, into one process's network without any parallelism.
    dcp.save({"model": (model.module if way == "wrapper" else model).state_dict()}, checkpoint_id=f"{folder}-weights")
    plain = Network().double()
    read = {"model": plain.state_dict()}
    dcp.load(read, checkpoint_id=f"{folder}-weights")
    for got, wanted in zip(plain.parameters(), model.parameters(), strict=True):
        assert_same(got.detach(), whole(wanted.detach()), "in one process")


def drift(mesh, model: nn.Module) -> None:
    """One shard changes in one replica: the ranks that hold copies of it learn, the others have nothing to tell."""
    weight = next(p for name, p in model.named_parameters() if name.endswith("blocks.1.down.weight"))
    if (mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()) == (1, 0):
        with torch.no_grad():
            weight.to_local().add_(1.0)
    if mesh["tp"].get_local_rank() == 0:
        with pytest.raises(OutOfSyncError, match=r"blocks\.1\.down\.weight is out of sync"):
            lockstep.check_in_sync(model)
    else:
        lockstep.check_in_sync(model)


@pytest.mark.parametrize("way", WAYS)
def test_replicas_of_tensor_parallel_networks_train_as_one_process(way, tmp_path):
    run_processes(4, train_beside, way, str(tmp_path / "checkpoint"))


# ------------------------------------------------------------------------------------------- shares


def train_with_shares(rank, replicas: int) -> str:
    """The fingerprint of this rank's part, after steps over so many replicas of two ranks; audited, clipped."""
    mesh = dist.init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("dp", "tp"))
    local = rank.make(Network).double()
    model = lockstep.replicate(sharded(mesh, seed=0), device_mesh=mesh["dp"], shares=4)
    local.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    lockstep.shares.audit(model, every=2)
    rows = torch.randn(24, 2, 8, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    data = lockstep.shares.GlobalBatches(TensorDataset(rows), 8, 4, shuffle=False, process_group=mesh["dp"].get_group())
    update = torch.optim.AdamW(model.parameters(), 0.01)
    for batch in data:
        update.zero_grad()
        for (x,) in batch:
            model(x, extra=batch.number == 1).square().sum().backward()
            if batch.number == 1:
                model(x).square().sum().backward()  # a second backward, after buckets have left
        if batch.number == 0:
            (local(rows[:8]).square().sum() / 8).backward()
            for (name, wanted), got in zip(local.named_parameters(), model.parameters(), strict=True):
                assert_same(whole(got.grad), wanted.grad, f"gradient of {name}")
                assert got.grad is None or isinstance(got.grad, DTensor) == isinstance(got, DTensor)
        for block in model.blocks:
            nn.utils.clip_grad_norm_(block.parameters(), 0.1)
        update.step()
    lockstep.check_in_sync(model)
    return lockstep.shares.fingerprint(model, update)


def test_with_shares_the_number_of_replicas_changes_no_bit():
    alone = run_processes(2, train_with_shares, 1)
    assert alone[0] != alone[1]
    assert run_processes(4, train_with_shares, 2) == alone * 2


# -------------------------------------------------------------------------------------- fully_shard


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2)
    ).double()


@on_processes(2)
def test_what_is_sharded_is_refused_as_a_whole_and_skipped_as_a_part(rank):
    mesh = dist.init_device_mesh("cpu", (rank.world,))
    local = rank.make(network)
    model = copy.deepcopy(local)
    fully_shard(model[2], mesh=mesh)
    for refuse in (lockstep.replicate, lockstep.DistributedDataParallel):
        with pytest.raises(RuntimeError, match=r"replicate\(\)` on a Module already managed by `fully_shard`"):
            refuse(model[2])
    lockstep.replicate(model)
    assert lockstep.replicate.state(model)._param_names == ["0.weight", "0.bias", "3.weight", "3.bias"]
    for step in range(3):
        x = torch.randn(2 * rank.world, 4, dtype=torch.double, generator=torch.Generator().manual_seed(step))
        for module, part in ((local, x), (model, x.chunk(rank.world)[rank.rank])):
            module.zero_grad()
            module(part).square().mean().backward()
        for (name, wanted), got in zip(local.named_parameters(), model.parameters(), strict=True):
            assert_same(whole(got.grad), wanted.grad, f"step {step}, {name}")
        with torch.no_grad():
            for parameter in (*local.parameters(), *model.parameters()):
                parameter -= parameter.grad
    root = network()
    fully_shard(root, mesh=mesh)
    with pytest.raises(RuntimeError, match="Cannot apply `replicate"):
        lockstep.replicate(root)
