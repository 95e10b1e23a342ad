"""Callbacks that programs queue in the autograd engine, to run when backward is over."""

from __future__ import annotations

import pytest
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import lockstep
from ddp_reference import both, ddp_class
from lockstep.errors import PeerError
from processes import on_processes
from small_modules import error_of, one_weight, x_of


def queue(callback):
    Variable._execution_engine.queue_callback(callback)


@both
@pytest.mark.parametrize("recomputes", [False, True])
@on_processes(2)
def test_what_a_callback_queues_runs_when_gradients_are_means(rank, implementation, recomputes):
    """A hook queues a callback, which queues another one, as AdaScale does, and that a third one."""
    model = ddp_class(implementation)(one_weight())
    weight, seen = model.module.weight, []
    plain = one_weight()

    def read():
        seen.append(weight.grad.item())
        queue(lambda: seen.append("last"))

    weight.register_hook(lambda grad: queue(lambda: queue(read)))
    plain.weight.register_hook(lambda grad: queue(lambda: queue(lambda: seen.append("plain"))))
    for _ in range(3):
        model.zero_grad()
        x = x_of(rank).requires_grad_()
        (checkpoint(model, x, use_reentrant=True) if recomputes else model(x)).sum().backward()
        plain(x).sum().backward()
    assert seen == [1.5, "last", "plain"] * 3


@pytest.mark.parametrize(("where", "read", "on_rank_0"), [("first", [1], PeerError), ("later", [0, 1], None)])
@on_processes(2)
def test_a_callback_that_fails(rank, where, read, on_rank_0):
    """What rank 1 has queued in a pass that fails is not run, nor is it in a later one."""
    model = lockstep.DistributedDataParallel(one_weight())
    weight, seen, raised = model.module.weight, [], []

    def call(place, step):
        """What is queued first queues what reads the gradient. One of them fails."""
        if place == "first":
            queue(lambda: call("later", step))
        else:
            seen.append((step, weight.grad.item()))
        if (place, step, rank.rank) == (where, 0, 1):
            raise ArithmeticError("a bad batch")

    for step in range(2):
        model.zero_grad()
        handle = weight.register_hook(lambda grad, step=step: queue(lambda: call("first", step)))
        raised.append(error_of(model(x_of(rank)).sum().backward))
        handle.remove()
    assert seen == [(step, 1.5) for step in read]
    assert raised == [ArithmeticError if rank.rank else on_rank_0, None]
