"""Which gradients a backward pass has changed, by a look before and after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.distributed.reduction.autograd.gradients import GradientSnapshot


def parameters(grads):
    made = [nn.Parameter(torch.ones(2)) for _ in grads]
    for parameter, grad in zip(made, grads, strict=True):
        parameter.grad = grad
    return made


def backward(*used):
    sum(each.sum() for each in used).backward()


@pytest.mark.parametrize("had", [(None, None, None), (torch.ones(2),) * 3, (None, torch.ones(2), None)])
@pytest.mark.parametrize("used", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_what_backward_has_reached_has_changed(had, used):
    own = parameters([None if each is None else each.clone() for each in had])
    look = GradientSnapshot(own)
    assert list(look.changed()) == []
    backward(*(own[i] for i in used)) if used else None
    assert list(look.changed()) == list(used)
    assert list(look.missing(range(3), [each.grad for each in own])) == [i for i in range(3) if i not in used]
    assert list(GradientSnapshot(own).changed()) == []


def test_gradients_of_one_memory_change_one_by_one():
    flat = torch.zeros(6)
    own = parameters([view.data for view in flat.split(2)])
    look = GradientSnapshot(own)
    backward(own[1])
    assert list(look.changed()) == [1]
    assert flat.tolist() == [0, 0, 1, 1, 0, 0]


def test_another_object_is_a_change_and_none_is_none():
    own = parameters([torch.ones(2), torch.ones(2)])
    look = GradientSnapshot(own)
    own[0].grad = own[0].grad.clone()
    own[1].grad = None
    assert list(look.changed()) == [0]
    assert list(look.missing([0, 1], [each.grad for each in own])) == [1]


def test_a_sparse_gradient_that_is_added_to():
    weight = nn.Embedding(4, 2, sparse=True).weight
    torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    look = GradientSnapshot([weight])
    torch.nn.functional.embedding(torch.tensor([2]), weight, sparse=True).sum().backward()
    assert list(look.changed()) == [0]


def test_a_gradient_without_a_version():
    (own,) = parameters([None])
    with torch.inference_mode():
        made = torch.ones(2)
    own.grad = made
    look = GradientSnapshot([own])
    assert list(look.changed()) == []
    own.grad = None
    backward(own)
    assert list(look.changed()) == [0]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph():
    own = parameters([None])
    look = GradientSnapshot(own)
    own[0].square().sum().backward(create_graph=True)
    assert list(look.changed()) == [0]
    look = GradientSnapshot(own)
    own[0].square().sum().backward(create_graph=True)
    assert list(look.changed()) == [0]
