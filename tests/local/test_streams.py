"""Streams that replicas and their sums use, and which wait for which, in the log of simulated accelerators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import lockstep
from lockstep._base.devices import on_streams
from lockstep.local import functions, scatter
from programs.networks import Applying


@contextmanager
def own_stream(device: torch.device) -> Iterator[torch.Stream]:
    """Within: a new stream is the current one of a device; the current device stays."""
    stream = torch.Stream(device=device)
    with on_streams([stream]):
        yield stream


def waits_for(log: list, stream: torch.Stream, other: torch.Stream) -> bool:
    """True if `stream` waits for an event of `other`."""
    place, place_of_other = [(str(s.device), s.stream_id) for s in (stream, other)]
    events = {line.event for line in log if line.action == "record" and (line.device, line.stream) == place_of_other}
    return any(line.event in events for line in log if line.action == "wait" and (line.device, line.stream) == place)


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_gradients_are_summed_on_the_stream_of_the_network(sim, replicas):
    home = torch.device("sim", 0)
    parallel = lockstep.DataParallel(nn.Linear(4, 4).to(home), list(range(replicas)))
    with own_stream(home) as mine:
        loss = parallel(torch.randn(2 * replicas, 4, device=home)).sum()
        sim.reset_stream_log()
        loss.backward()
    assert ("sim:0", 0) not in sim.launches()
    assert sim.launches()["sim:0", mine.stream_id] > 0


@pytest.fixture
def every_warning() -> Iterator[None]:
    """Warnings that PyTorch gives once in a process are given each time."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.parametrize("replicas", [2, 3])
def test_pytorch_does_not_warn_of_the_stream_of_a_gradient(sim, every_warning, replicas):
    home = torch.device("sim", 0)
    parallel = lockstep.DataParallel(nn.Linear(4, 4).to(home), list(range(replicas)))
    with own_stream(home):
        for _ in range(2):
            parallel(torch.randn(12, 4, device=home)).sum().backward()
            parallel.step(torch.sum, torch.randn(12, 4, device=home))


def test_gradients_are_packed_on_the_stream_on_which_the_replica_ran(sim):
    home, away = torch.device("sim", 0), torch.device("sim", 2)
    parallel = lockstep.DataParallel(nn.Linear(4, 4).to(home), [0, 1, 2])
    with own_stream(away) as theirs:
        loss = parallel(torch.randn(12, 4, device=home)).sum()
        sim.reset_stream_log()
        loss.backward()
    assert ("sim:2", 0) not in sim.launches()
    (packed,) = [line.stream for line in sim.stream_log() if line.action == "copy" and line.source == "sim:2"]
    assert packed == theirs.stream_id


def test_gradients_that_a_replica_computes_on_a_stream_of_its_own_are_waited_for(sim):
    aside = torch.Stream(device="sim:1")

    def forward(m, x):
        """Replica 1 computes on another stream than the one it begins with."""
        if x.device.index != 1:
            return m.linear(x)
        aside.wait_stream(torch.accelerator.current_stream(x.device))
        with on_streams([aside]):
            y = m.linear(x)
        torch.accelerator.current_stream(x.device).wait_stream(aside)
        return y

    parallel = lockstep.DataParallel(Applying(forward).to("sim:0"), [0, 1])
    loss = parallel(torch.randn(4, 3, device="sim:0")).sum()
    sim.reset_stream_log()
    loss.backward()
    network, packs = (torch.sim.default_stream(index) for index in (0, 1))
    assert waits_for(sim.stream_log(), network, aside)
    assert waits_for(sim.stream_log(), packs, network)


@pytest.mark.parametrize("devices", [[0, 0], [0, 1]])
@pytest.mark.parametrize("before", ["a step", "an evaluation"])
def test_a_change_of_stream_between_steps_is_followed(sim, every_warning, before, devices):
    home = torch.device("sim", 0)
    parallel = lockstep.DataParallel(nn.Linear(4, 4).to(home), devices)
    with torch.set_grad_enabled(before == "a step"):
        loss = parallel(torch.randn(12, 4, device=home)).sum()
    if loss.requires_grad:
        loss.backward()
    del loss
    with own_stream(home):
        x = torch.randn(12, 4, device=home)
        for _ in range(2):
            sim.reset_stream_log()
            parallel(x).sum().backward()
            assert ("sim:0", 0) not in sim.launches()


def test_inference_on_other_streams_leaves_the_parameters_as_they_are(sim):
    parallel = lockstep.DataParallel(nn.Linear(4, 4).to("sim:0"), [0, 0])
    x = torch.randn(12, 4, device="sim:0")
    parallel(x)
    before = [id(p) for replica in parallel.replicate(parallel.module, [0, 0]) for p in replica.parameters()]
    with own_stream(torch.device("sim", 0)), torch.no_grad():
        parallel(x)
        replicas = parallel.replicate(parallel.module, [0, 0])
    assert [id(p) for replica in replicas for p in replica.parameters()] == before


@pytest.mark.parametrize("function", ["Broadcast", "Scatter"])
def test_gradients_of_copies_come_together_on_the_streams_of_forward(sim, function):
    here, there = (torch.Stream(device=f"sim:{index}") for index in (0, 2))
    with on_streams([here, there]):
        x = torch.randn(3, 2, device="sim:0", requires_grad=True) + 0
        targets = sim.devices(3)[::-1]  # the first output is not on the device of the input
        made = functions.Broadcast.apply(targets, x) if function == "Broadcast" else ()
        made = made or functions.Scatter.apply(targets, [1, 1, 1], 0, x)
        sim.reset_stream_log()
        torch.autograd.backward(list(made), [torch.ones_like(each) for each in made])
    log = sim.stream_log()
    assert ("sim:0", 0) not in sim.launches()
    assert waits_for(log, here, there)
    assert waits_for(log, torch.sim.default_stream(1), there)


@pytest.mark.parametrize("error", [None, ValueError])
def test_streams_and_the_current_device_are_restored(sim, error):
    with own_stream(torch.device("sim", 1)) as mine, torch.accelerator.device_index(3):
        try:
            with on_streams([torch.Stream(device="sim:1"), torch.Stream(device="sim:2")]):
                assert torch.accelerator.current_device_index() == 3
                if error is not None:
                    raise error
        except ValueError:
            pass
        assert torch.accelerator.current_device_index() == 3
        assert torch.accelerator.current_stream(1) == mine
        assert torch.accelerator.current_stream(2) == torch.sim.default_stream(2)


def test_threads_that_scatter_at_once_keep_their_streams(sim):
    home, lost = torch.device("sim", 0), []

    def scatter_often() -> None:
        with own_stream(home) as mine:
            x = torch.randn(1024, 256)
            for _ in range(50):
                scatter(x, [home, home])
                if torch.accelerator.current_stream(home) != mine:
                    lost.append(threading.current_thread().name)
                    return

    threads = [threading.Thread(target=scatter_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost
