"""A set of buffers notices what has become of the tensors that it has seen before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.distributed.reduction.module.buffers import BufferSet
from tensor_classes import Attributed


def retype(module):
    module.running_mean.data = module.running_mean.data.double()


def reshape(module):
    module.running_mean.data = torch.zeros(5)


def tie(module):
    module.running_var = module.running_mean


def untie(module):
    module.running_var = module.running_mean.clone()


def give_a_class(module):
    module.running_mean = module.running_mean.as_subclass(Attributed)


def take_the_class(module):
    module.running_mean = torch.zeros(3)


@pytest.mark.parametrize(
    ("change", "before"),
    [(retype, None), (reshape, None), (tie, None), (untie, tie), (give_a_class, None), (take_the_class, give_a_class)],
)
def test_a_change_is_noticed_after_looks_that_found_none(change, before):
    module = nn.BatchNorm1d(3)
    if before:
        before(module)
    found = BufferSet(module, (), ())
    for _ in range(2):
        module(torch.randn(4, 3))  # written in place
        assert not found.changed()
    change(module)
    assert found.changed()
