"""Training on one GPU given several times, and on several, gives what training on one device gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep

ROWS = 11  # on two and three replicas: shares of different sizes


def twins(network, device, dtype=torch.float64):
    one = network.to(device, dtype)
    return one, copy.deepcopy(one)


def batches(shape, device, count=3, dtype=torch.float64):
    return [
        (torch.randn(ROWS, *shape, dtype=dtype, device=device), torch.randn(ROWS, 3, dtype=dtype, device=device))
        for _ in range(count)
    ]


def assert_same(one: nn.Module, many: nn.Module, **tolerance) -> None:
    for (name, p), q in zip(one.named_parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(q, p, msg=lambda m, name=name: f"{name}: {m}", **tolerance)
        if p.grad is not None or q.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, msg=lambda m, name=name: f"{name}.grad: {m}", **tolerance)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("stepping", [False, True], ids=["gathered", "step"])
def test_training(network, places, optimizer, stepping):
    module, shape = network
    one, many = twins(module, places[0])
    parallel = lockstep.DataParallel(many, places)
    optimizers = [optimizer(m.parameters(), lr=0.05) for m in (one, many)]
    for x, y in batches(shape, places[0]):
        for o in optimizers:
            o.zero_grad()
        expected = functional.mse_loss(one(x), y)
        expected.backward()
        if stepping:
            loss = parallel.step(functional.mse_loss, x, y)
        else:
            loss = functional.mse_loss(parallel(x), y)
            loss.backward()
        torch.testing.assert_close(loss.detach(), expected.detach())
        assert_same(one, many)
        for o in optimizers:
            o.step()
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), one(x))


def test_inputs_from_the_host(network, places):
    module, shape = network
    one, many = twins(module, places[0])
    parallel = lockstep.DataParallel(many, places)
    for x, y in batches(shape, torch.device("cpu")):
        x, y = (x.pin_memory(), y.pin_memory()) if places[0].type == "cuda" else (x, y)
        functional.mse_loss(one(x.to(places[0])), y.to(places[0])).backward()
        parallel.step(functional.mse_loss, x, y)
    assert_same(one, many)


def test_backward_from_the_host(network, places):
    # The graph crosses from the caller's thread to those of the devices and back.
    module, shape = network
    one, many = twins(module, places[0])
    parallel = lockstep.DataParallel(many, places, output_device="cpu")
    ((x, y),) = batches(shape, places[0], 1)
    functional.mse_loss(one(x), y).backward()
    output = parallel(x)
    assert output.device.type == "cpu"
    functional.mse_loss(output, y.cpu()).backward()
    assert_same(one, many)


def test_gradients_of_the_inputs_and_of_second_order(places, network):
    module, shape = network
    if shape == (5, 16):
        pytest.skip("fused attention has no second derivative")
    one, many = twins(module, places[0])
    parallel = lockstep.DataParallel(many, places)
    ((x, _),) = batches(shape, places[0], 1)
    found = []
    for call, own in ((one, one), (parallel, many)):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
        slope.square().sum().backward()
        found.append((slope.detach(), leaf.grad, [p.grad for p in own.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[1], found[0])


def test_the_function(network, places):
    module, shape = network
    one, many = twins(module, places[0])
    ((x, y),) = batches(shape, places[0], 1)
    functional.mse_loss(one(x), y).backward()
    for _ in range(2):
        many.zero_grad()
        functional.mse_loss(lockstep.local.data_parallel(many, x, places), y).backward()
    assert_same(one, many)


def test_a_deep_copy_is_independent(network, places):
    module, shape = network
    parallel = lockstep.DataParallel(module.to(places[0], torch.float64), places)
    ((x, y),) = batches(shape, places[0], 1)
    parallel.step(functional.mse_loss, x, y)
    twin = copy.deepcopy(parallel)
    before = [p.detach().clone() for p in parallel.parameters()]
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    twin.zero_grad()
    twin.step(functional.mse_loss, x, y)
    optimizer.step()
    torch.testing.assert_close([p.detach() for p in parallel.parameters()], before)
    with torch.no_grad():
        torch.testing.assert_close(twin(x), twin.module(x))
        torch.testing.assert_close(parallel(x), parallel.module(x))


def test_batch_norm_of_the_first_replica_stays(places):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3))
    network.to(places[0]).double()
    x, y = torch.randn(ROWS, 3, 6, 6, device=places[0]).double(), torch.randn(ROWS, 3, device=places[0]).double()
    with torch.no_grad():
        network.eval()(x)
    network.train()
    alone = copy.deepcopy(network)
    parallel = lockstep.DataParallel(network, places)
    parallel.step(functional.mse_loss, x, y)
    with torch.no_grad():
        alone(x[: -(-ROWS // len(places))])
    torch.testing.assert_close(network[1].running_mean, alone[1].running_mean)
    assert network[1].num_batches_tracked == 1


def test_channels_last_stays(home, exact):
    class Watched(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            for tensor in (x, self.weight, y):
                assert tensor.is_contiguous(memory_format=torch.channels_last), tensor.stride()
            return y

    one = nn.Sequential(Watched(4, 8, 3), nn.ReLU(), Watched(8, 4, 3)).to(home, memory_format=torch.channels_last)
    many = copy.deepcopy(one)
    x = torch.randn(ROWS, 4, 10, 10, device=home).to(memory_format=torch.channels_last)
    places = [home] * 2
    if torch.cuda.device_count() > 1:
        places = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    parallel = lockstep.DataParallel(many, places)
    output = parallel(x)
    assert output.is_contiguous(memory_format=torch.channels_last)
    output.square().mean().backward()
    one(x).square().mean().backward()
    assert_same(one, many, rtol=1e-4, atol=1e-5)
    for p in many.parameters():
        assert p.dim() < 4 or p.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("stepping", [False, True], ids=["gathered", "step"])
def test_autocast_with_a_scaler(network, places, dtype, stepping, exact):
    kind = places[0].type
    if kind == "cpu" and dtype == torch.float16:
        pytest.skip("half precision is for GPUs")
    module, shape = network
    one, many = twins(module, places[0], torch.float32)
    parallel = lockstep.DataParallel(many, places)
    scalers = [torch.amp.GradScaler(kind, init_scale=1024.0, enabled=dtype == torch.float16) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (one, many)]
    seen = []
    many.register_forward_hook(
        lambda *_: seen.append(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
    )
    for x, y in batches(shape, places[0], dtype=torch.float32):
        with torch.autocast(kind, dtype):
            expected = functional.mse_loss(one(x).float(), y)
        scalers[0].scale(expected).backward()
        if stepping:
            with torch.autocast(kind, dtype):
                parallel.step(lambda out, target: scalers[1].scale(functional.mse_loss(out.float(), target)), x, y)
        else:
            with torch.autocast(kind, dtype):
                loss = functional.mse_loss(parallel(x).float(), y)
            scalers[1].scale(loss).backward()
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
        assert_same(one, many, rtol=0.05, atol=0.02)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert set(seen) == {dtype}
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_what_forward_computes_in_full_precision_backward_does_too(places, exact):
    class Island(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(x.device.type, enabled=False):
                return super().forward(x)

    one, many = Island(64, 64).to(places[0]), Island(64, 64).to(places[0])
    many.load_state_dict(one.state_dict())
    x, y = (torch.randn(12, 64, device=places[0]) for _ in range(2))
    functional.mse_loss(one(x), y).backward()
    with torch.autocast(places[0].type, torch.bfloat16):
        lockstep.DataParallel(many, places).step(functional.mse_loss, x, y)
    assert_same(one, many, rtol=1e-4, atol=1e-6)


def test_an_overflow_in_one_replica_skips_the_step(gpu):
    network = nn.Linear(4, 4).to(gpu)
    parallel = lockstep.DataParallel(network, [gpu, gpu])
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    before = network.weight.detach().clone()
    x = torch.zeros(4, 4, device=gpu)
    x[3] = float("inf")  # a row of the second replica
    scaler.scale(parallel(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(network.weight.detach(), before)
    assert scaler.get_scale() == 512.0
