"""Ranks with different numbers of batches under `join`: what a rank that has run out has before and after."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from ddp_reference import both, ddp_class
from processes import on_processes, run_processes
from small_modules import x_of


def two_weights():
    layers = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    for layer in layers:
        nn.init.ones_(layer.weight)
    return layers


class Branches(nn.Module):
    """Two weights; the second is used from the second call on."""

    def __init__(self):
        super().__init__()
        self.layers = two_weights()

    def forward(self, x, both=True):
        return self.layers[0](x) + (self.layers[1](x) if both else 0)


def gradients(module):
    return [None if p.grad is None else p.grad.item() for p in module.parameters()]


@both
@pytest.mark.parametrize("size", [1, 9000, 2**20], ids=["kept", "left to the gradients", "alone"])
@pytest.mark.parametrize("clear", ["none", "zero"])
@on_processes(2)
def test_a_rank_that_has_run_out_begins_the_next_epoch_without_the_others_gradients(rank, implementation, clear, size):
    """Two epochs of one batch on rank 0 and three on rank 1; gradients are cleared after each step."""
    end = None if clear == "none" else 0.0
    layer = nn.Linear(size, 1, bias=False)
    nn.init.ones_(layer.weight)
    ddp = ddp_class(implementation)(layer)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    seen = []
    for _ in range(2):
        with ddp.join():
            for batch in range([1, 3][rank.rank]):
                ddp(torch.full((1, size), 10.0 * (rank.rank + 1 + batch))).sum().backward()
                seen.append(ddp.module.weight.grad[0, 0].item())
                optimizer.step()
                optimizer.zero_grad(set_to_none=clear == "none")
        seen.append(None if ddp.module.weight.grad is None else ddp.module.weight.grad[0, 0].item())
    assert seen == [[15.0, end] * 2, [15.0, 15.0, 20.0, end] * 2][rank.rank]


def own_gradients(rank, synchronise):
    """Return what is left of the last batch before a rank runs out, reduced or its own."""
    ddp = lockstep.DistributedDataParallel(Branches())
    with ddp.join():
        for batch in range([1, 3][rank.rank]):
            ddp.zero_grad()
            ddp.set_requires_gradient_sync(synchronise or batch > 0)
            ddp(x_of(rank)).sum().backward()
    ddp.set_requires_gradient_sync(True)
    left = gradients(ddp)
    if rank.rank:
        ddp.zero_grad()
    ddp(x_of(rank, 10.0), both=False).sum().backward()  # what rank 0 had counts
    return left, gradients(ddp)


def test_gradients_that_a_rank_had_before_it_ran_out_are_there_afterwards():
    assert run_processes(2, own_gradients, True) == [([1.5, 1.5], [15.75, 1.5]), ([1.0, 1.0], [15.75, None])]


def test_gradients_of_this_rank_alone_are_contributed_to_the_next_round():
    assert run_processes(2, own_gradients, False) == [([1.0, 1.0], [15.5, 0.5]), ([1.0, 1.0], [15.5, 0.5])]


@on_processes(2)
def test_a_rank_that_has_run_out_has_no_gradient_of_a_new_layer(rank):
    """A layer is replaced before ``join``, in which rank 0 has no batch."""
    module = Branches()
    ddp = lockstep.DistributedDataParallel(module)
    module.layers[1] = two_weights()[1]
    with ddp.join():
        for _ in range(rank.rank):
            ddp(x_of(rank)).sum().backward()
    assert gradients(module) == [[None, None], [1.0, 1.0]][rank.rank]


def weights(rank):
    """Rank 0 weighs a micro-batch, and has run out before it is synchronised."""
    ddp = lockstep.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with ddp.join():
        for batch in range([1, 2][rank.rank]):
            with lockstep.accumulate(ddp, last=batch == 1, weight=100 if rank.rank == 0 else 1):
                ddp(x_of(rank)).sum().backward()
    left = gradients(ddp)
    if rank.rank:
        ddp.zero_grad()
    with lockstep.accumulate(ddp, weight=1):
        ddp(x_of(rank)).sum().backward()
    return left, gradients(ddp)


def test_a_weight_stays_with_the_gradient_that_did_not_get_there():
    left, after = zip(*run_processes(2, weights), strict=True)
    assert left == ([1.0], [2.0])
    for (gradient,) in after:
        assert gradient == pytest.approx((1 + 1 + 2) / (100 + 1 + 1))


def optimizers(rank):
    """An optimizer with momentum, in hooks: its state is no replica's if a rank that has run out stands still."""
    ddp = lockstep.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.ones_(ddp.module.weight)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)
    ddp.module.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    for _ in range(2):
        with ddp.join():
            for _ in range([1, 3][rank.rank]):
                ddp.zero_grad()
                ddp(x_of(rank)).sum().backward()
    momentum = optimizer.state[ddp.module.weight]["momentum_buffer"].item()
    return ddp.module.weight.item(), momentum


def test_optimizers_in_hooks_step_on_a_rank_that_has_run_out_too():
    first, second = run_processes(2, optimizers)
    assert first == second
