"""Gradients are copied into their bucket part by part while backward runs, and leave their own memory then."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.reduction import flat_bucket
from threaded import run_ranks

WIDTH = 192  # one weight's gradient is a part


class Layers(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x, without=()):
        for number, layer in enumerate(self.layers):
            if number not in without:
                x = torch.tanh(layer(x))
        return x


def test_gradients_leave_their_memory_while_backward_runs():
    def call(rank):
        torch.manual_seed(0)
        net = lockstep.replicate(Layers(), process_group=rank.group)
        x = torch.randn(2, WIDTH)
        net(x).sum().backward()
        net.zero_grad()
        left: list[bool] = []
        net.layers[0].weight.register_hook(
            lambda grad: left.extend(layer.weight.grad is None for layer in net.layers[1:])
        )
        net(x).sum().backward()
        return left, all(p.grad is not None for p in net.parameters())

    assert run_ranks(2, call) == [([True] * 3, True)] * 2


class Branches(nn.Module):
    """Layers beside one another; backward comes to the last one that forward has called first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x, order):
        return sum(torch.tanh(self.layers[number](x)) for number in order)


def test_gradients_in_another_order_than_was_planned_are_copied_early_too(monkeypatch):
    monkeypatch.setattr(flat_bucket, "WHOLE_BYTES", 0)
    monkeypatch.setattr(flat_bucket, "PART_BYTES", 2 * 30 * 4)  # two layers
    x, planned, plain = torch.ones(2, 5), (0, 1, 2, 3), Branches()

    def call(rank):
        net = copy.deepcopy(plain)
        lockstep.replicate(net, process_group=rank.group)
        for _ in range(2):
            net.zero_grad()
            net(x, planned).sum().backward()
        net.zero_grad()
        left: list[bool] = []
        net.layers[3].weight.register_hook(
            lambda grad: left.extend(each.weight.grad is None for each in net.layers[:2])
        )
        net(x, planned[::-1]).sum().backward()
        wanted = torch.autograd.grad(plain(x, planned).sum(), plain.parameters())
        return left, all(torch.allclose(a.grad, b) for a, b in zip(net.parameters(), wanted, strict=True))

    assert run_ranks(2, call) == [([True, True], True)] * 2


@pytest.mark.parametrize("part_bytes", [1, 100, 10**9])
@pytest.mark.parametrize("world", [1, 3])
def test_parts_of_any_size_give_the_same_means(monkeypatch, world, part_bytes):
    """Of layers that are not used on one rank, or on any; with gradients from before, in place or not."""
    monkeypatch.setattr(flat_bucket, "WHOLE_BYTES", 0)
    monkeypatch.setattr(flat_bucket, "PART_BYTES", part_bytes)
    steps = [((), "none"), ((), "none"), ((1,), "keep"), ((), "keep"), ((), "none"), ((2,), "zero"), ((), "none")]

    def losses(net, number, rank):
        without, _ = steps[number]
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * number + rank))
        return net(x, without if rank == 0 else ()).square().sum()

    torch.manual_seed(0)
    start = Layers(5)

    def call(rank):
        net = lockstep.replicate(copy.deepcopy(start), process_group=rank.group)
        found = []
        for number, (_, before) in enumerate(steps):
            if before != "keep":
                net.zero_grad(set_to_none=before == "none")
            if number == 4:
                with net.no_sync():
                    losses(net, 0, rank.rank).backward()
            losses(net, number, rank.rank).backward()
            found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        return found

    replicas = [copy.deepcopy(start) for _ in range(world)]
    expected = []
    for number, (_, before) in enumerate(steps):
        for replica in replicas:
            if before != "keep":
                replica.zero_grad(set_to_none=before == "none")
        for rank, replica in enumerate(replicas):
            if number == 4:
                losses(replica, 0, rank).backward()
            losses(replica, number, rank).backward()
        means = []
        for group in zip(*(replica.parameters() for replica in replicas), strict=True):
            grads = [p.grad for p in group if p.grad is not None]
            means.append(sum(grads) / world if grads else None)
        for replica in replicas:
            for p, mean in zip(replica.parameters(), means, strict=True):
                p.grad = None if mean is None else mean.clone()
        expected.append(means)

    for found in run_ranks(world, call):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
