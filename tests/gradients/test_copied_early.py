"""Gradients leave their own memory while backward runs, when their bucket is full."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lockstep
from threaded import run_ranks

MIB = 1 << 20


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x, without=()):
        for number, layer in enumerate(self.layers):
            if number not in without:
                x = torch.tanh(layer(x))
        return x


def test_a_large_gradient_that_leaves_while_backward_runs_is_reduced_where_it_is():
    width = 1 << 10  # a weight of 4 MiB travels alone

    def call(rank):
        torch.manual_seed(0)
        net = lockstep.replicate(Layers(width), process_group=rank.group)
        x = torch.full((2, width), float(rank.rank))
        net(x).sum().backward()
        net.zero_grad()
        made: dict[int, int] = {}
        for number, layer in enumerate(net.layers):
            layer.weight.register_hook(lambda grad, number=number: made.update({number: grad.data_ptr()}))
        net(x).sum().backward()
        return [layer.weight.grad.data_ptr() == made[number] for number, layer in enumerate(net.layers)]

    assert run_ranks(2, call) == [[True] * 4] * 2


class Branches(nn.Module):
    """Layers beside one another; backward comes to the last one that forward has called first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x, order):
        return sum(torch.tanh(self.layers[number](x)) for number in order)


def test_gradients_in_another_order_than_was_planned_leave_early_too():
    x, planned, other, plain = torch.ones(2, 5), (0, 1, 2, 3), (1, 0, 3, 2), Branches()

    def call(rank):
        net = copy.deepcopy(plain)
        lockstep.replicate(net, process_group=rank.group, bucket_cap_mb=2 * 30 * 4 / MIB)  # two layers
        for order in (planned, planned, other):  # a trigger moves in the last one
            net.zero_grad()
            net(x, order).sum().backward()
        net.zero_grad()
        left: list[bool] = []
        net.layers[0].weight.register_hook(
            lambda grad: left.extend(each.weight.grad is None for each in net.layers[2:])
        )
        net(x, other).sum().backward()
        wanted = torch.autograd.grad(plain(x, planned).sum(), plain.parameters())
        return left, all(torch.allclose(a.grad, b) for a, b in zip(net.parameters(), wanted, strict=True))

    assert run_ranks(2, call) == [([True, True], True)] * 2


@pytest.mark.parametrize("bucket_bytes", [1, 200, MIB])
@pytest.mark.parametrize("world", [1, 3])
def test_buckets_of_any_size_give_the_same_means(world, bucket_bytes):
    """Of layers that are not used on one rank, or on any; with gradients from before, in place or not."""
    steps = [((), "none"), ((), "none"), ((1,), "keep"), ((), "keep"), ((), "none"), ((2,), "zero"), ((), "none")]

    def losses(net, number, rank):
        without, _ = steps[number]
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * number + rank))
        return net(x, without if rank == 0 else ()).square().sum()

    torch.manual_seed(0)
    start = Layers(5)

    def call(rank):
        net = lockstep.replicate(copy.deepcopy(start), process_group=rank.group, bucket_cap_mb=bucket_bytes / MIB)
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
