"""The host never waits for an accelerator because replicas are watched."""

from collections import Counter

import pytest
import torch
from torch import nn

import lockstep
import sim
from lockstep.distributed.replication.replication import find_replication
from processes import on_processes

SETTLED, STEPS = 24, 21
"""Digests are told a round or more later until all ranks have them in time; the slices of a small module take turns of
seven steps."""


def waits_of(train, steps):
    """Return how often the host has waited in some steps, by what it has waited for."""
    torch.accelerator.synchronize()
    sim.reset_stream_log()
    for _ in range(steps):
        train()
    return Counter(line.action for line in sim.stream_log() if line.action.startswith("sync"))


def settled(rank, wrap, tensor_as_rate):
    """Return the waits of settled steps, watched and not, and how many digests were told in them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model = wrap(net, process_group=rank.group)
    rate = torch.tensor(0.01) if tensor_as_rate else 0.01
    optimizers = [
        torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": rate}], lr=rate),
        torch.optim.SGD(net[2].parameters(), 0.01, momentum=0.9),
    ]
    told = 0

    def train():
        nonlocal told
        for each in optimizers:
            each.zero_grad()
        model(torch.ones(4, 8) * (1 + torch.arange(4.0)[:, None])).square().sum().backward()
        told += watch._told.values > 0
        for each in optimizers:
            each.step()

    watch = find_replication(model).drift
    waits_of(train, SETTLED)
    told = 0
    watched, told_watched = waits_of(train, STEPS), told
    watch.stop()
    waits_of(train, 3)  # what was under way
    told = 0
    return watched, waits_of(train, STEPS), told_watched, told


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("tensor_as_rate", [False, True])
@on_processes(2, device="sim")
def test_the_watch_of_drift_adds_no_wait(rank, tensor_as_rate):
    for wrap in (lockstep.replicate, lockstep.DistributedDataParallel):
        watched, unwatched, told_watched, told = settled(rank, wrap, tensor_as_rate)
        assert told_watched >= STEPS // 7, wrap
        assert told == 0, wrap
        assert watched == unwatched, wrap
