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


def other_data(module):
    for p in module.parameters():
        p.grad.data = p.grad.data * 2


def other_data_of_one(module):
    module[0].grad.data = module[0].grad.data * 2


def other_object(module):
    for p in module.parameters():
        p.grad = p.grad.detach()


def other_gradient(module):
    for p in module.parameters():
        p.grad = p.grad * 2


def transposed_data(module):
    module[0].grad.data = module[0].grad.data.t()


def transposed_by_somebody_who_kept_it(module):
    kept = module[0].grad
    module.zero_grad()
    kept.data = kept.data.t()


def moved_by_somebody_who_kept_it(module):
    kept = module[0].grad
    module.zero_grad()
    kept.data = kept.data * 2


def transposed(module):
    module[0].grad = module[0].grad.t()


def exchanged(module):
    module[0].grad, module[1].grad = module[1].grad, module[0].grad


def exchanged_data(module):
    first, second = module[0].grad.data, module[1].grad.data
    module[0].grad.data, module[1].grad.data = second, first


def one_flat_tensor(module):
    """As optimizers do that want all gradients side by side; with something of their own behind it."""
    grads = [p.grad for p in module.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads] + [torch.zeros(1000)])
    for grad, part in zip(grads, flat.split([g.numel() for g in grads] + [1000]), strict=False):
        grad.data = part.view_as(grad)


CHANGES = [
    other_data,
    other_data_of_one,
    other_object,
    other_gradient,
    transposed_data,
    transposed_by_somebody_who_kept_it,
    moved_by_somebody_who_kept_it,
    transposed,
    exchanged,
    exchanged_data,
    one_flat_tensor,
]


def keep(module):
    """The next backward adds to what is there."""


def to_none(module):
    module.zero_grad()


def to_zero(module):
    module.zero_grad(set_to_none=False)


def square(side):
    return nn.ParameterList([torch.ones(side, side), torch.ones(side, side)])


def same_gradients(module, reference):
    torch.testing.assert_close([p.grad for p in module], [p.grad for p in reference])


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
@on_ranks(2)
def test_gradients_that_were_given_other_memory_are_synchronised(rank, change):
    """Gradients that differ from place to place, beside one process."""
    for side, clear in itertools.product(SIDES.values(), (keep, to_none, to_zero)):
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
                change(module)
                change(reference)


@pytest.mark.parametrize("channels", [8, 400], ids=["small", "large"])
@pytest.mark.parametrize("clear", [keep, to_none, to_zero], ids=lambda each: each.__name__)
@on_ranks(2)
def test_another_memory_format_while_there_are_gradients(rank, clear, channels):
    """`Module.to` gives existing gradients other memory, and keeps the objects."""
    module = replicated(rank, lambda: nn.Sequential(nn.Conv2d(channels, 4, 3), nn.Conv2d(4, 4, 1)))
    reference = copy.deepcopy(module)
    for step in range(4):
        if step:
            clear(module)
            clear(reference)
        x = torch.randn(2, channels, 4, 4, generator=torch.Generator().manual_seed(step))
        module(x[rank.rank : rank.rank + 1]).sum().backward()
        (reference(x).sum() / 2).backward()
        same_gradients(module.parameters(), reference.parameters())
        for each in (module, reference):
            each.to(memory_format=torch.channels_last if step % 2 else torch.contiguous_format)


@pytest.mark.parametrize("change", [other_data, other_object, exchanged, keep], ids=lambda each: each.__name__)
@on_ranks(2)
def test_a_gradient_of_a_parameter_that_is_not_used_stays_wherever_it_lies(rank, change):
    """What it holds stays as it is."""
    module = replicated(rank, lambda: square(4))
    sum((p * (rank.rank + 1.0)).sum() for p in module).backward()
    change(module)
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
