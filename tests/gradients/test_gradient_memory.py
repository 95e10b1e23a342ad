"""Gradients that users move, replace or exchange: what counts is the memory that a parameter's gradient has."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from programs.ranks import on_ranks, replicated

# PyTorch says so, too, in one process where a gradient is laid out differently from its parameter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract"),
    pytest.mark.usefixtures("alone_from_64_kib"),
]

SIDES = {"memory that is kept": 4, "memory that is left to the gradients": 96, "a bucket of its own": 130}


def double(grad):
    return grad * 2


def detached(grad):
    return grad.detach()


def set_data(change, *parameters):
    """Gives the gradients other memory; the objects stay."""
    for p in parameters:
        p.grad.data = change(p.grad.data)


def set_gradients(change, *parameters):
    for p in parameters:
        p.grad = change(p.grad)


def drop_and_set_data(change, module):
    """Changes the memory of a gradient that somebody has kept, and the module has no more."""
    kept = module[0].grad
    module.zero_grad()
    kept.data = change(kept.data)


def exchange_gradients(module):
    module[0].grad, module[1].grad = module[1].grad, module[0].grad


def exchange_data(module):
    first, second = module[0].grad.data, module[1].grad.data
    module[0].grad.data, module[1].grad.data = second, first


def one_flat_tensor(module):
    """As optimizers do that want all gradients side by side; with something of their own behind it."""
    grads = [p.grad for p in module.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads] + [torch.zeros(1000)])
    for grad, part in zip(grads, flat.split([g.numel() for g in grads] + [1000]), strict=False):
        grad.data = part.view_as(grad)


CHANGES = {
    "other data": lambda module: set_data(double, *module),
    "other data of one": lambda module: set_data(double, module[0]),
    "transposed data": lambda module: set_data(torch.t, module[0]),
    "other objects": lambda module: set_gradients(detached, *module),
    "other gradients": lambda module: set_gradients(double, *module),
    "transposed": lambda module: set_gradients(torch.t, module[0]),
    "moved by somebody who kept it": lambda module: drop_and_set_data(double, module),
    "transposed by somebody who kept it": lambda module: drop_and_set_data(torch.t, module),
    "exchanged": exchange_gradients,
    "exchanged data": exchange_data,
    "one flat tensor": one_flat_tensor,
    "none": lambda module: None,
}


CLEARS = {
    "kept": lambda module: None,  # the next backward adds to what is there
    "to none": lambda module: module.zero_grad(),
    "to zero": lambda module: module.zero_grad(set_to_none=False),
}


def square(side):
    return nn.ParameterList([torch.ones(side, side), torch.ones(side, side)])


def same_gradients(module, reference):
    torch.testing.assert_close([p.grad for p in module], [p.grad for p in reference])


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_gradients_that_were_given_other_memory_are_synchronised(rank, change):
    """Gradients that differ from place to place, beside one process."""
    for side, clear in itertools.product(SIDES.values(), CLEARS.values()):
        module = replicated(rank, lambda side=side: square(side))
        reference = copy.deepcopy(module)
        pattern = torch.arange(float(side * side)).view(side, side) % 7
        for step in range(5):
            if step:
                clear(module)
                clear(reference)
            (module[0] * pattern * (rank.rank + step) + module[1] * pattern * rank.rank).sum().backward()
            (reference[0] * pattern * (0.5 + step) + reference[1] * pattern * 0.5).sum().backward()
            same_gradients(module.parameters(), reference.parameters())
            if step in (1, 2):
                CHANGES[change](module)
                CHANGES[change](reference)


@pytest.mark.parametrize("channels", [8, 400], ids=["small", "large"])
@pytest.mark.parametrize("clear", CLEARS)
@on_ranks(2)
def test_another_memory_format_while_there_are_gradients(rank, clear, channels):
    """`Module.to` gives existing gradients other memory, and keeps the objects."""
    module = replicated(rank, lambda: nn.Sequential(nn.Conv2d(channels, 4, 3), nn.Conv2d(4, 4, 1)))
    reference = copy.deepcopy(module)
    for step in range(4):
        if step:
            CLEARS[clear](module)
            CLEARS[clear](reference)
        x = torch.randn(2, channels, 4, 4, generator=torch.Generator().manual_seed(step))
        module(x[rank.rank : rank.rank + 1]).sum().backward()
        (reference(x).sum() / 2).backward()
        same_gradients(module.parameters(), reference.parameters())
        for each in (module, reference):
            each.to(memory_format=torch.channels_last if step % 2 else torch.contiguous_format)


@pytest.mark.parametrize("change", ["other data", "other objects", "exchanged", "none"])
@on_ranks(2)
def test_a_gradient_of_a_parameter_that_is_not_used_stays_wherever_it_lies(rank, change):
    """What it holds stays as it is."""
    module = replicated(rank, lambda: square(4))
    sum((p * (rank.rank + 1.0)).sum() for p in module).backward()
    CHANGES[change](module)
    before = module[1].grad.clone()
    for _ in range(2):
        module[0].grad = None
        (module[0] * (rank.rank + 1.0)).sum().backward()
        torch.testing.assert_close(module[0].grad, torch.full((4, 4), 1.5))
        assert torch.equal(module[1].grad, before)


@on_ranks(2)
def test_a_large_gradient_that_lies_otherwise_on_one_rank(rank):
    """On rank 1; it is reduced where it lies."""
    module = replicated(rank, lambda: nn.ParameterList([torch.ones(120, 140)]))
    (weight,) = module
    values = torch.arange(120 * 140.0).view(120, 140) % 101
    for _ in range(2):
        (weight * values).sum().backward()
        module.zero_grad()
    weight.grad = torch.zeros(140, 120).t() if rank.rank else torch.zeros(120, 140)
    (weight * values).sum().backward()
    assert torch.equal(weight.grad, values)
