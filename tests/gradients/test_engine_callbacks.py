"""Callbacks that programs queue in the autograd engine, to run when backward is over."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from ddp_reference import both, ddp_class
from lockstep.errors import PeerError
from processes import run_processes
from small_modules import one_weight


def queue(callback):
    Variable._execution_engine.queue_callback(callback)


def reading_the_mean(rank, implementation, recomputes):
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
        x = torch.full((1, 1), rank.rank + 1.0, requires_grad=True)
        (checkpoint(model, x, use_reentrant=True) if recomputes else model(x)).sum().backward()
        plain(x).sum().backward()
    return seen


@both
def test_what_a_callback_queues_runs_when_gradients_are_means(implementation):
    assert run_processes(2, reading_the_mean, implementation, False) == [[1.5, "last", "plain"] * 3] * 2


def test_what_a_callback_queues_in_a_checkpoint_runs_when_gradients_are_means():
    assert run_processes(2, reading_the_mean, "lockstep", True) == [[1.5, "last", "plain"] * 3] * 2


def failing(rank, where):
    """What rank 1 has queued in a pass that fails is not run, nor is it in a later one."""
    model = ddp_class("lockstep")(one_weight())
    weight, seen = model.module.weight, []
    raised = []
    for step in range(2):

        def fails(step=step):
            if step == 0 and rank.rank == 1:
                raise ArithmeticError("a bad batch")

        def read(step=step, fails=fails):
            seen.append((step, weight.grad.item()))
            if where == "later":
                fails()

        def first(read=read, fails=fails):
            queue(read)
            if where == "first":
                fails()

        model.zero_grad()
        handle = weight.register_hook(lambda grad, first=first: queue(first))
        try:
            model(torch.full((1, 1), rank.rank + 1.0)).sum().backward()
            raised.append(None)
        except (ArithmeticError, PeerError) as error:
            raised.append(type(error))
        handle.remove()
    return seen, raised


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("first", [([(1, 1.5)], [PeerError, None]), ([(1, 1.5)], [ArithmeticError, None])]),
        ("later", [([(0, 1.5), (1, 1.5)], [None, None]), ([(0, 1.5), (1, 1.5)], [ArithmeticError, None])]),
    ],
)
def test_a_callback_that_fails(where, told):
    assert run_processes(2, failing, where) == told
