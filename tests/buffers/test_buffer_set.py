"""A set of buffers notices what has become of the tensors that it has seen before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.distributed.reduction.module.buffers import BufferSet


def retype(module):
    module.running_mean.data = module.running_mean.data.double()


def reshape(module):
    module.running_mean.data = torch.zeros(5)


def tie(module):
    module.running_var = module.running_mean


@pytest.mark.parametrize("change", [retype, reshape, tie])
def test_a_change_is_noticed_after_looks_that_found_none(change):
    module = nn.BatchNorm1d(3)
    found = BufferSet(module, (), ())
    for _ in range(2):
        module(torch.randn(4, 3))  # written in place
        assert not found.changed()
    change(module)
    assert found.changed()
