"""Where nothing has to be decided, a gradient runs no hook in Python."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.reduction.parameter_hooks import ParameterHook
from threaded import run_ranks


@pytest.mark.parametrize("synchronises", [True, False])
def test_only_the_hook_that_opens_a_pass_is_called(monkeypatch, synchronises):
    calls: Counter[int] = Counter()
    tell = ParameterHook._tell

    def counted(self, parameter):
        calls[threading.get_ident()] += 1
        tell(self, parameter)

    monkeypatch.setattr(ParameterHook, "_tell", counted)

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

    # The first round looks at each gradient, to learn their order.
    assert run_ranks(2, call) == [[10, 1, 1, 1]] * 2
