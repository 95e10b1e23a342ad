"""What stands in the slots of modules, and whether anything else does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.distributed.reduction.module.parameters import SlotSnapshot
from lockstep.distributed.reduction.module.selection import Selection
from lockstep.errors import NotReplicableError


def test_a_module_that_is_gone_is_a_change():
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    watch = SlotSnapshot(list(net.modules()))
    assert not watch.changed()
    part = net[0]
    del net
    assert watch.changed()
    assert isinstance(part.weight, torch.Tensor)


def test_what_was_replicated_does_not_keep_the_module():
    net = nn.Linear(1, 1)
    selection = Selection(net, (), taking_over=False)
    assert selection.alive
    assert selection.module is net
    del net
    assert not selection.alive
    with pytest.raises(NotReplicableError, match="does not exist any more"):
        selection.contents()
