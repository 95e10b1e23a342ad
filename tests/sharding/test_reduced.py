"""The number by which ranks notice other gradients: a step looks at a sample, and some steps at everything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.sharding.reduced import ELEMENTS, TENSORS, number_of_gradients


def with_gradients(*shapes):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    return [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]


def turns_that_notice(named, spoil, turns):
    before = [number_of_gradients(named, turn) for turn in range(turns)]
    spoil()
    return [turn for turn in range(turns) if number_of_gradients(named, turn) != before[turn]]


@pytest.mark.parametrize("spoiled", [0, 1, 2, 299])
def test_each_of_many_gradients_is_looked_at_in_turn(spoiled):
    named = with_gradients(*[(2, 2)] * 300)
    assert len(named) > 2 * TENSORS
    spoil = named[spoiled][1].grad[1, 1].mul_
    assert turns_that_notice(named, lambda: spoil(-1), 6) == [spoiled % 3, spoiled % 3 + 3]


@pytest.mark.parametrize("spoiled", [0, 1, 2, -1])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_element_of_a_large_gradient_is_looked_at_in_turn(spoiled, transposed):
    named = with_gradients((ELEMENTS // 2, 6))
    gradient = named[0][1].grad.view(-1)
    if transposed:
        named[0][1].grad = named[0][1].grad.t().contiguous().t()
        gradient = named[0][1].grad.t().view(-1)
    noticed = turns_that_notice(named, lambda: gradient[spoiled].mul_(-1), 6)
    assert noticed == [noticed[0], noticed[0] + 3]


def test_without_gradients_there_is_a_number():
    assert number_of_gradients([], 5) == 0
