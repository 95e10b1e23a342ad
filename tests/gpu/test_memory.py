"""What training leaves and holds in a GPU's memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep

MIB = 1 << 20


def allocated(device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def peak_of(call, device: torch.device) -> int:
    """Bytes at most allocated during a call, beyond those before it."""
    before = allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def wide(device: torch.device) -> nn.Module:
    """Little in, 64 MiB out for 16 rows."""
    return nn.Linear(8, MIB).to(device)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_step_does_not_gather(gpu):
    network = wide(gpu)
    parallel = lockstep.DataParallel(network, [gpu, gpu])
    x = torch.randn(16, 8, device=gpu)

    def gathered() -> None:
        mean_square(parallel(x)).backward()

    def stepped() -> None:
        parallel.step(mean_square, x)

    for call in (gathered, stepped):
        call()
    network.zero_grad()
    peaks = {}
    for call in (gathered, stepped):
        peaks[call.__name__] = peak_of(call, gpu)
        network.zero_grad()
    assert peaks["stepped"] <= peaks["gathered"] - 48 * MIB, peaks  # the gathered output alone has 64 MiB


def test_step_needs_what_one_device_needs(gpu):
    network = wide(gpu)
    parallel = lockstep.DataParallel(network, [gpu, gpu])
    x = torch.randn(16, 8, device=gpu)
    calls = [lambda: mean_square(network(x)).backward(), lambda: parallel.step(mean_square, x)]
    for call in calls:
        call()
        network.zero_grad()
    peaks = []
    for call in calls:
        peaks.append(peak_of(call, gpu))
        network.zero_grad()
    gradients = sum(p.nbytes for p in network.parameters())
    assert peaks[1] <= peaks[0] + gradients + 8 * MIB, peaks


def test_outputs_stay_where_they_are(gpus):
    network = wide(gpus[0])
    parallel = lockstep.DataParallel(network, gpus)
    x = torch.randn(16, 8, device=gpus[0])
    parallel.step(mean_square, x)
    network.zero_grad()
    peaks = [torch.cuda.memory_allocated(device) for device in gpus]
    for device in gpus:
        torch.cuda.reset_peak_memory_stats(device)
    parallel.step(mean_square, x)
    for device in gpus:
        torch.cuda.synchronize(device)
    peaks = [torch.cuda.max_memory_allocated(d) - was for d, was in zip(gpus, peaks, strict=True)]
    gradients = sum(p.nbytes for p in network.parameters())
    assert peaks[0] <= max(peaks[1:]) + 2 * gradients + 8 * MIB, peaks


@pytest.mark.parametrize("stepping", [False, True], ids=["gathered", "step"])
def test_no_growth(gpu, stepping):
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 144, 4)
    ).to(gpu)
    parallel = lockstep.DataParallel(network, [gpu, gpu])
    optimizer = torch.optim.Adam(network.parameters())
    x, y = torch.randn(12, 3, 16, 16, device=gpu), torch.randn(12, 4, device=gpu)
    after = []
    for number in range(50):
        optimizer.zero_grad()
        if stepping:
            parallel.step(functional.mse_loss, x, y)
        else:
            functional.mse_loss(parallel(x), y).backward()
        optimizer.step()
        if number % 10 == 9:
            with torch.no_grad():
                parallel(x)
        if number in (9, 49):
            optimizer.zero_grad()
            after.append(allocated(gpu))
    assert after[1] <= after[0], after


def test_a_network_that_is_gone_leaves_nothing(gpu):
    def use() -> None:
        network = wide(gpu)
        parallel = lockstep.DataParallel(network, [gpu, gpu])
        parallel.step(mean_square, torch.randn(4, 8, device=gpu))
        lockstep.local.data_parallel(network, torch.randn(4, 8, device=gpu), [gpu, gpu]).sum().backward()

    use()  # libraries allocate workspaces of their own at their first call
    before = allocated(gpu)
    use()
    assert allocated(gpu) <= before
