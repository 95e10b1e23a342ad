"""Where nothing has to be decided, a gradient runs no hook in Python."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.reduction.module.managed_parameters import Trigger
from threaded import run_ranks


@pytest.mark.parametrize("synchronises", [True, False])
def test_no_hook_is_called_where_nothing_can_leave_early(monkeypatch, synchronises):
    calls: Counter[int] = Counter()
    call_trigger = Trigger.__call__

    def counted(self, parameter):
        calls[threading.get_ident()] += 1
        call_trigger(self, parameter)

    monkeypatch.setattr(Trigger, "__call__", counted)

    def call(rank):
        net = lockstep.replicate(
            rank.make(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))), process_group=rank.group
        )
        found = []
        for number in range(4):
            net.zero_grad()
            with contextlib.nullcontext() if synchronises or number < 2 else net.no_sync():
                before = calls[threading.get_ident()]
                net(torch.ones(2, 4)).sum().backward()
                found.append(calls[threading.get_ident()] - before)
            assert all(p.grad is not None for p in net.parameters())
        return found

    # In the first round each gradient has a trigger, by which ranks learn their order.
    assert run_ranks(2, call) == [[10, 0, 0, 0]] * 2
