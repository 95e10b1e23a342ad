"""An optimizer's step is told to whoever watches a module, also while another thread lets the module go."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.reduction.module.drift import DriftWatch
from programs.ranks import on_ranks


@pytest.mark.parametrize("shares", [None, 2])
@on_ranks(2)
def test_a_watch_whose_module_is_gone_is_told_of_a_step(rank, shares):
    model = lockstep.replicate(nn.Linear(1, 1), process_group=rank.group, shares=shares)
    weight = model.weight
    watches = [each for each in gc.get_objects() if isinstance(each, DriftWatch)]
    watches = [each for each in watches if any(tensor is weight for tensor in each.table.tensors)]
    del model
    gc.collect()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for watch in watches:
        watch.step_begins(optimizer, closure=False)
        watch.step_ended(optimizer, closure=False)
    assert len(watches) == 1
