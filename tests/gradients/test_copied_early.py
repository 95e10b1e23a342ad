"""Gradients leave their own memory while backward runs, when their bucket is full."""

from __future__ import annotations

import copy

import pytest
import torch

from programs.networks import Deep
from programs.ranks import clear, on_ranks, replicated, rows, same_gradients

MIB = 1 << 20


class Branches(Deep):
    """Layers beside one another; backward comes to the last one that forward has called first."""

    def forward(self, x, chosen):
        return sum(torch.tanh(self.layers[number](x)) for number in chosen)


@on_ranks(2)
def test_a_large_gradient_that_leaves_while_backward_runs_is_reduced_where_it_is(rank):
    width = 1 << 10  # a weight of 4 MiB travels alone
    net = replicated(rank, lambda: Deep(4, width))
    x = torch.full((2, width), float(rank.rank))
    net(x, range(4)).sum().backward()
    net.zero_grad()
    made: dict[int, int] = {}
    for number, layer in enumerate(net.layers):
        layer.weight.register_hook(lambda grad, number=number: made.update({number: grad.data_ptr()}))
    net(x, range(4)).sum().backward()
    assert [layer.weight.grad.data_ptr() == made[number] for number, layer in enumerate(net.layers)] == [True] * 4


@on_ranks(2)
def test_gradients_in_another_order_than_was_planned_leave_early_too(rank):
    x, planned, other = torch.ones(2, 5), (0, 1, 2, 3), (1, 0, 3, 2)
    net = replicated(rank, lambda: Branches(4, 5), bucket_cap_mb=2 * 30 * 4 / MIB)  # two layers
    plain = copy.deepcopy(net)
    wanted = torch.autograd.grad(plain(x, planned).sum(), list(plain.parameters()))
    for order in (planned, planned, other):  # a trigger moves in the last one
        net.zero_grad()
        net(x, order).sum().backward()
    net.zero_grad()
    left: list[bool] = []
    net.layers[0].weight.register_hook(lambda grad: left.extend(each.weight.grad is None for each in net.layers[2:]))
    net(x, other).sum().backward()
    assert left == [True, True]
    torch.testing.assert_close([p.grad for p in net.parameters()], [*wanted])


STEPS = [((), "none"), ((), "none"), ((1,), "keep"), ((), "keep"), ((), "none"), ((2,), "zero"), ((), "none")]
"""Layers that rank 0 leaves out, and what becomes of the gradients before."""


def losses(net, number, rank):
    without = STEPS[number][0] if rank == 0 else ()
    return net(rows(number, rank, 3, 5), [n for n in range(4) if n not in without]).square().sum()


@pytest.mark.parametrize("bucket_bytes", [1, 400, MIB])
@pytest.mark.parametrize("world", [1, 3])
@on_ranks(None, "world")
def test_buckets_of_any_size_give_the_same_means(rank, bucket_bytes):
    """Of layers that are not used on one rank, or on any; with gradients from before, in place or not."""
    net = replicated(rank, lambda: Deep(4, 5).double(), bucket_cap_mb=bucket_bytes / MIB)
    reference = copy.deepcopy(net)
    for number, (_, before) in enumerate(STEPS):
        if before != "keep":
            clear(net, reference, set_to_none=before == "none")
        if number == 4:
            with net.no_sync():
                losses(net, 0, rank.rank).backward()
        losses(net, number, rank.rank).backward()
        for each in (0, number) if number == 4 else (number,):
            (sum(losses(reference, each, r) for r in range(rank.world)) / rank.world).backward()
        same_gradients(rank, net, reference)
