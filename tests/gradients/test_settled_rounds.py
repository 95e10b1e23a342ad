"""Where nothing has to be decided, a gradient runs no hook in Python."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import pytest
import torch

from lockstep.distributed.reduction.module.managed_parameters import Trigger
from programs.networks import mlp
from programs.ranks import clear, on_ranks, replicated


@pytest.fixture
def calls(monkeypatch):
    """How often triggers have been called, by thread."""
    counted: Counter[int] = Counter()
    call_trigger = Trigger.__call__

    def count(self, parameter):
        counted[threading.get_ident()] += 1
        call_trigger(self, parameter)

    monkeypatch.setattr(Trigger, "__call__", count)
    return counted


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("synchronises", [(True,) * 4, (True, True, False, False), (False, True, True, False, True)])
@on_ranks(2)
def test_no_hook_is_called_where_nothing_can_leave_early(rank, calls, synchronises, modules):
    """A backward for each module. In the first round each gradient has a trigger, by which ranks learn their order."""
    nets = [replicated(rank, lambda: mlp(*[4] * 6)) for _ in range(modules)]
    found = []
    for each in synchronises:
        clear(*nets)
        before = calls[threading.get_ident()]
        for net in nets:
            with contextlib.nullcontext() if each else net.no_sync():
                net(torch.ones(2, 4)).sum().backward()
            assert all(p.grad is not None for p in net.parameters())
        found.append(calls[threading.get_ident()] - before)
    first = synchronises.index(True)
    assert found == [10 * modules if step == first else 0 for step in range(len(synchronises))]
