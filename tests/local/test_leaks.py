"""A hundred forwards, errors and deleted wrappers, or a thousand, leave everything as it was."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch
from torch import nn

from lockstep import DataParallel
from lockstep.local import data_parallel, replicate
from programs.networks import Applying


def counts():
    """Threads, live tensors and open files."""
    gc.collect()
    tensors = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
    return threading.active_count(), tensors, len(os.listdir("/proc/self/fd"))


@pytest.fixture
def parallel(devices, first):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    return DataParallel(net.to(first), devices(3))


def train(parallel, x):
    parallel.zero_grad()
    parallel(x).sum().backward()


def step(parallel, x):
    parallel.zero_grad()
    parallel.step(lambda output, y: (output - y).square().mean(), x, x[:, :1])


def evaluate(parallel, x):
    with torch.no_grad():
        parallel(x)


def change_buffers(parallel, x):
    parallel(x)
    parallel.module[1].running_mean = parallel.module[1].running_mean.clone()


def function(parallel, x):
    data_parallel(parallel.module, x, parallel.device_ids)


def fail(parallel, x):
    with pytest.raises(RuntimeError, match="replica 0"):
        parallel(x[:, :1])
    with pytest.raises(ValueError, match="replica 0"):
        parallel.step(lambda output: int("x"), x)
    with pytest.raises(ValueError, match="cannot split the inputs"):
        parallel(x, x[:1])


def rebuild(parallel, x):
    parallel.module[2] = nn.Linear(2, 1).to(x.device)
    parallel(x).sum().backward()


def wrap_anew(parallel, x):
    DataParallel(parallel.module, parallel.device_ids)(x).sum().backward()


ACTIONS = [train, step, evaluate, change_buffers, function, fail, rebuild, wrap_anew]


@pytest.mark.parametrize("times", [25, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_left(parallel, first, action, times):
    x = torch.randn(6, 2).to(first)
    for _ in range(3):
        action(parallel, x)
    before = counts()
    for _ in range(times):
        action(parallel, x)
    assert counts() == before


@pytest.mark.parametrize("use", [train, step, evaluate, fail])
def test_a_deleted_wrapper_frees_its_replicas(devices, first, use):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).to(first)
    x = torch.randn(6, 2).to(first)
    before = counts()[1]
    parallel = DataParallel(net, devices(3))
    use(parallel, x)
    net.zero_grad()
    replicas = [weakref.ref(m) for replica in parallel.replicate(net, devices(3))[1:] for m in replica.modules()]
    assert len(replicas) == 8
    del parallel
    gc.collect()
    assert [replica() for replica in replicas] == [None] * 8
    assert counts()[1] == before


@pytest.mark.parametrize("call", [replicate, lambda net, ids: data_parallel(net, torch.ones(3, 2), ids)])
def test_a_deleted_network_frees_its_replicas(devices, first, call):
    before = counts()[1]
    net = nn.Linear(2, 2).to(first)
    call(net, devices(3))
    assert counts()[1] > before + 2
    del net
    assert counts()[1] == before


def test_outputs_that_live_on_do_not_keep_earlier_graphs(parallel, first):
    """The nodes that link replicas to the network are made once, and serve every backward."""
    x = torch.randn(6, 2).to(first)
    outputs = [parallel(x) for _ in range(10)]
    graphs = [weakref.ref(output.grad_fn) for output in outputs]
    del outputs
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 10


@pytest.mark.parametrize("use_step", [False, True])
def test_a_failure_frees_its_tensors_with_the_exception(devices, first, use_step):
    """Not when the cycle collector runs: a retry with a smaller batch needs the memory."""
    found = []

    def forward(m, x):
        large = torch.zeros(1000, device=x.device)
        found.append(weakref.ref(large))
        raise ValueError("no more memory")

    parallel, x = DataParallel(Applying(forward).to(first), devices(3)), torch.randn(6, 2).to(first)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no more memory") as caught:
            parallel.step(lambda output: output.mean(), x) if use_step else parallel(x)
        del caught
        assert [large() for large in found] == [None] * 3
    finally:
        gc.enable()


def test_replicas_for_other_devices_are_not_kept_for_ever(sim):
    net = nn.Linear(1024, 1024).to("sim:0")
    gc.collect()
    before = [torch.sim.memory_allocated(i) for i in range(1, 8)]  # of other tests
    for count in range(2, 9):
        replicate(net, sim.devices(count))
    gc.collect()
    kept = [(torch.sim.memory_allocated(i) - was) >> 20 for i, was in enumerate(before, 1)]
    assert kept == [8] * 6 + [4]
    first, last = replicate(net, sim.devices(7)), replicate(net, sim.devices(8))
    assert [a is b for a, b in zip(replicate(net, sim.devices(7)), first, strict=True)] == [True] * 7
    assert [a is b for a, b in zip(replicate(net, sim.devices(8)), last, strict=True)] == [True] * 8


def test_moving_the_wrapper_frees_the_replicas(sim):
    gc.collect()
    before = [torch.sim.memory_allocated(i) >> 20 for i in range(3)]  # of other tests
    parallel = DataParallel(nn.Linear(1024, 1024).to("sim:0"), sim.devices(3))
    parallel(torch.ones(3, 1024, device="sim:0"))
    parallel.cpu()
    gc.collect()
    assert [torch.sim.memory_allocated(i) >> 20 for i in range(3)] == before


def test_data_that_is_replaced_is_freed(sim):
    net = nn.Linear(1024, 1024).to("sim:0")
    parallel, x = DataParallel(net, sim.devices(2)), torch.ones(3, 1024, device="sim:0")
    with torch.no_grad():
        parallel(x)
    before = torch.sim.memory_allocated(0)
    net.weight.data = torch.zeros(1024, 1024, device="sim:0")
    assert torch.sim.memory_allocated(0) == before
    assert not parallel(x).detach().sub(net.bias).any()
