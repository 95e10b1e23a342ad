"""How often the host waits for a GPU in what a program calls beside backward: means, saves, sharded steps, shares.

PyTorch warns of each wait; ranks are processes of their own (`processes.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

import lockstep
from lockstep.checkpoints.state import HostCopies, Parts, entries_of, read
from lockstep.sharding import shard_optimizer
from one_gpu import CYCLES, LIMIT, LONG, NCCL, allows_several_ranks, place_of
from processes import on_processes


def waits_in(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a call returns, and how often the host has waited for the GPU in it."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    texts = [str(each.message) for each in seen if "prototype" not in str(each.message)]
    return result, sum("synchroniz" in text for text in texts)


@pytest.mark.usefixtures("gpu")
@on_processes(2, timeout=LIMIT)
def test_values_of_a_mean_are_read_with_one_copy(rank):
    device = torch.device("cuda", 0)
    values = {f"loss {i}": torch.tensor(float(i + rank.rank), device=device) for i in range(10)} | {"number": 2.0}
    weight = torch.tensor(3, device=device)
    lockstep.mean(values, weight=weight)
    found, waits = waits_in(lambda: lockstep.mean(values, weight=weight))
    assert found["loss 1"].device == device
    assert found["loss 1"].item() == 1.5
    assert waits <= 2, "one copy to the host, and one back"


@pytest.mark.usefixtures("gpu")
@on_processes(1, timeout=LIMIT)
def test_state_is_copied_to_the_host_with_one_wait(rank):
    device = torch.device("cuda", 0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64, device=device)).sum().backward()
    optimizer.step()
    parts = {entry.name: read(entry) for entry in entries_of({"model": model, "optimizer": optimizer})}
    copies = HostCopies()
    copies.of(parts)
    found, waits = waits_in(lambda: copies.of(parts))
    for name, tensor in found["model"].shared.items():
        assert tensor.is_pinned()
        assert torch.equal(tensor, model.state_dict()[name].cpu())
    assert waits <= 1


@pytest.mark.usefixtures("gpu")
@on_processes(1, timeout=LIMIT, backend=NCCL)
def test_tensors_of_other_classes_are_copied_to_the_host(rank):
    """A DTensor and a parameter are copied to the host, on a stream that is busy."""
    place_of(rank)
    mesh = dist.init_device_mesh("cuda", (1,))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        whole = torch.arange(6.0, device="cuda")
        kept = {"sharded": distribute_tensor(whole, mesh, [Replicate()]), "parameter": nn.Parameter(whole * 2)}
        found = HostCopies().of({"kept": Parts(kept, {})})["kept"].shared
        values = found["sharded"].to_local(), found["parameter"].detach()
        assert {each.device.type for each in values} == {"cpu"}
        assert [each.tolist() for each in values] == [[0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10]]


@pytest.fixture
def many_ranks(gpu):
    """Skips where several ranks cannot have one GPU."""
    if not allows_several_ranks():
        pytest.skip("NCCL allows several ranks on one GPU from 2.30 on")


@pytest.mark.usefixtures("many_ranks")
@on_processes(2, timeout=LIMIT, backend=NCCL)
def test_a_sharded_step_does_not_wait_for_the_gpu(rank):
    """While the GPU is busy with what came before, a whole sharded step is given to it."""
    device = place_of(rank)
    model = lockstep.replicate(rank.make(lambda: nn.Linear(256, 256)).to(device))
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()))
    for step in range(6):
        optimizer.zero_grad()
        model(torch.full((2, 256), step + 1.0, device=device)).square().mean().backward()
        if step == 5:
            torch.cuda.synchronize()
            torch.cuda._sleep(LONG)
        optimizer.step()
    assert not torch.cuda.current_stream().query(), "the host has waited for the GPU in step()"
    torch.cuda.synchronize()
    lockstep.check_in_sync(model)


@pytest.mark.usefixtures("many_ranks")
@on_processes(2, timeout=LIMIT, backend=NCCL)
def test_a_step_of_shares_does_not_wait_for_the_gpu(rank):
    """While the GPU is busy with what came before, a whole step of shares is given to it."""
    device = place_of(rank)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4)).to(device)
    model = lockstep.replicate(model, shares=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
    rows = torch.utils.data.TensorDataset(torch.randn(48, 16, generator=torch.Generator().manual_seed(0)))
    for number, batch in enumerate(lockstep.shares.GlobalBatches(rows, 8, 4)):
        optimizer.zero_grad()
        if number == 5:
            torch.cuda.synchronize()
            torch.cuda._sleep(LONG)
        for (x,) in batch:
            model(x.pin_memory().to(device, non_blocking=True)).square().sum().backward()
        optimizer.step()
    assert not torch.cuda.current_stream().query(), "the host has waited for the GPU in a step of shares"
    torch.cuda.synchronize()
    lockstep.check_in_sync(model)
