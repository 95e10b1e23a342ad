"""Gradients are copied into their bucket part by part while backward runs, and leave their own memory then."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.distributed.reduction import buckets as flat_bucket
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


def test_gradients_leave_their_memory_while_backward_runs(monkeypatch):
    monkeypatch.setattr(flat_bucket, "PART_BYTES", WIDTH * WIDTH * 4)  # one layer

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


def test_gradients_in_another_order_than_was_planned_are_copied_early_too(monkeypatch):
    monkeypatch.setattr(flat_bucket, "PART_BYTES", 2 * 30 * 4)  # two layers
    x, planned, plain = torch.ones(2, 5), (0, 1, 2, 3), Branches()

    def call(rank):
        net = copy.deepcopy(plain)
        lockstep.replicate(net, process_group=rank.group)
        for order in (planned, planned, planned[::-1]):  # triggers move in the last one
            net.zero_grad()
            net(x, order).sum().backward()
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


def leaving_one_out(rank, left_out):
    """Twelve gradients in one bucket of several parts; in the last round one of them is missing."""
    parameters = [torch.ones(16 * 1024) for _ in range(12)]
    model = lockstep.replicate(nn.ParameterList(parameters), process_group=rank.group)
    for turn in range(4):
        model.zero_grad()
        used = [(i, p) for i, p in enumerate(model) if not (turn == 3 and i == left_out)]
        sum(p.sum() * (rank.rank + 1 + i) for i, p in used).backward()
    return [None if p.grad is None else p.grad.unique().tolist() for p in model]


@pytest.mark.parametrize("left_out", [0, 6, 11])
def test_parts_of_which_a_gradient_is_missing(left_out):
    expected = [None if i == left_out else [1.5 + i] for i in range(12)]
    assert run_ranks(2, leaving_one_out, left_out) == [expected] * 2


class Recomputed(nn.Module):
    """Layers that are checkpointed one by one; one of them may come twice in a backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(torch.ones(16 * 1024) for _ in range(12))

    def forward(self, x, again=None):
        for i in range(12):
            x = checkpoint(self.add, x, i, use_reentrant=True)
            if i == 4 and again is not None:
                x = checkpoint(self.add, x, again, use_reentrant=True)
        return x.sum()

    def add(self, x, i):
        return x + self.layers[i].sum()


def coming_again(rank, ranks):
    """The seventh layer's gradient comes again when it has been copied into its bucket, which has not left."""
    model, seen = lockstep.replicate(Recomputed(), process_group=rank.group), []
    for turn in range(4):
        model.zero_grad()
        again = 7 if turn >= 2 and rank.rank in ranks else None
        model(torch.ones(1, requires_grad=True), again).backward()
        seen.append([p.grad.unique().tolist() for p in model.layers])
    return seen


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_gradient_that_comes_again_when_it_has_been_copied(ranks):
    once = [[1.0]] * 12
    again = [[1 + len(ranks) / 2] if i == 7 else [1.0] for i in range(12)]
    assert run_ranks(2, coming_again, ranks) == [[once, once, again, again]] * 2
