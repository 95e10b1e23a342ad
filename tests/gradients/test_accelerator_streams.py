"""Forwards on several streams: a gradient is taken during backward only on the stream on which it is accumulated.

Autograd lets other streams wait for it only at the end of the pass. Simulated accelerators have no asynchronous
execution, so these tests look at where gradients are copied, not at values; `tests/gpu` has the values.
"""

from __future__ import annotations

import functools
import threading
import warnings

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError
from threaded import run_ranks

pytestmark = pytest.mark.usefixtures("sim")

on_accelerators = functools.partial(run_ranks, 1, device="sim")
LEFT, RIGHT = {(4, 3), (4,)}, {(5, 3), (5,)}


class Branches(nn.Module):
    """Two branches, of which the right one runs on a stream of its own, if there is one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 5)

    def forward(self, x, stream=None):
        here = torch.accelerator.current_stream(x.device)
        stream = stream or here
        stream.wait_stream(here)
        with stream:
            right = self.right(x)
        left = self.left(x)
        here.wait_stream(stream)
        return left.sum() + right.sum()


class CopiedGradients:
    """The shapes of gradients that are copied into a bucket together, the stream, and whether backward still runs."""

    def __init__(self, monkeypatch):
        self.seen = []
        self.caller = None
        self._copy = torch._foreach_copy_
        monkeypatch.setattr(torch, "_foreach_copy_", self)

    def __call__(self, views, gradients, *args, **kwargs):
        stream = torch.accelerator.current_stream(views[0].device).stream_id
        shapes = {tuple(gradient.shape) for gradient in gradients}
        self.seen.append((shapes, stream, threading.get_ident() != self.caller))
        return self._copy(views, gradients, *args, **kwargs)

    def of_step(self, model, x, **kwargs):
        self.seen, self.caller = [], threading.get_ident()
        model.zero_grad()
        model(x, **kwargs).backward()
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()
        return self.seen


@pytest.fixture
def copied(monkeypatch):
    return CopiedGradients(monkeypatch)


def branches(rank, **options):
    return lockstep.replicate(rank.make(Branches), process_group=rank.group, **options)


def one_bucket(rank, copied):
    model, side, x = branches(rank), torch.Stream(device=rank.device), torch.ones(2, 3)
    return [copied.of_step(model, x, stream=side) for _ in range(4)]


def test_a_bucket_of_two_streams_is_taken_when_backward_has_ended(copied):
    (steps,) = on_accelerators(one_bucket, copied)
    assert steps == [[(LEFT | RIGHT, 0, False)]] * 4


def bucket_for_each(rank, copied):
    model, side, x = branches(rank, bucket_cap_mb=1e-5), torch.Stream(device=rank.device), torch.ones(2, 3)
    return [copied.of_step(model, x, stream=side) for _ in range(4)], side.stream_id


def test_buckets_of_one_stream_are_taken_during_backward_on_it(copied):
    ((steps, side),) = on_accelerators(bucket_for_each, copied)
    for step in steps[1:]:
        assert all(during for _, _, during in step)
        assert {stream for shapes, stream, _ in step if shapes <= RIGHT} == {side}
        assert {stream for shapes, stream, _ in step if shapes <= LEFT} == {0}


def under_a_stream(rank, copied):
    model, side, x = branches(rank), torch.Stream(device=rank.device), torch.ones(2, 3)
    with side:
        return [copied.of_step(model, x) for _ in range(3)], side.stream_id


def test_training_on_a_stream_other_than_that_of_replicate_takes_buckets_during_backward(copied):
    ((steps, side),) = on_accelerators(under_a_stream, copied)
    assert steps == [[(LEFT | RIGHT, side, False)], *[[(LEFT | RIGHT, side, True)]] * 2]


def two_streams_later(rank, copied, sim):
    model, side, x = branches(rank), torch.Stream(device=rank.device), torch.ones(2, 3)
    for _ in range(3):
        copied.of_step(model, x)
    sim.reset_stream_log()
    with warnings.catch_warnings():  # of PyTorch, once: the node of a parameter is kept, as DDP keeps it
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        return copied.of_step(model, x, stream=side), side.stream_id, sim.stream_log()


def test_a_branch_on_another_stream_is_accumulated_where_it_was(copied, sim):
    ((step, side, log),) = on_accelerators(two_streams_later, copied, sim)
    assert step == [(LEFT | RIGHT, 0, True)]
    waits = {line.event for line in log if line.action == "wait" and line.stream == 0}
    produced = [line.event for line in log if line.action == "record" and line.stream == side]
    assert waits.issuperset(produced)
    assert len(produced) >= 2  # of forward, and of its gradients in backward


def unfrozen_later(rank, copied):
    model, side, x = branches(rank), torch.Stream(device=rank.device), torch.ones(2, 3)
    model.right.requires_grad_(False)
    for _ in range(3):
        copied.of_step(model, x)
    model.right.requires_grad_(True)
    return [copied.of_step(model, x, stream=side) for _ in range(4)]


def test_a_branch_that_is_unfrozen_and_runs_on_another_stream(copied):
    (steps,) = on_accelerators(unfrozen_later, copied)
    for step in steps:
        assert not any(shapes & LEFT and shapes & RIGHT and during for shapes, _, during in step)


def unfrozen_on_the_same_stream(rank, copied):
    model, x = branches(rank), torch.ones(2, 3)
    model.right.requires_grad_(False)
    for _ in range(3):
        copied.of_step(model, x)
    model.right.requires_grad_(True)
    return [copied.of_step(model, x) for _ in range(5)][3:]


def test_a_branch_that_is_unfrozen_is_taken_during_backward_again_after_three_passes(copied):
    (steps,) = on_accelerators(unfrozen_on_the_same_stream, copied)
    assert steps == [[(LEFT | RIGHT, 0, True)]] * 2


# ------------------------------------------------------------------------------------- captured graphs


def captured(rank, monkeypatch, warm_up):
    """A capture raises before any node of the graph runs, since CUDA may refuse one of them in its own words, and sends
    nothing; another module's backward may be captured. Then training goes on."""
    model, x = branches(rank), torch.ones(2, 3)
    for _ in range(warm_up):
        model(x).backward()
        model.zero_grad()
    before = dict(lockstep.loop.statistics(model).calls)
    with monkeypatch.context() as patched:
        patched.setattr(torch.sim, "is_current_stream_capturing", lambda: True)
        nn.Linear(3, 1)(x).sum().backward()
        with pytest.raises(OptionError, match=r"backward\(\) of a replicated module cannot be captured"):
            loss = model(x)
            loss.register_hook(lambda gradient: pytest.fail("backward has begun"))
            loss.backward()
    assert lockstep.loop.statistics(model).calls["collective"] == before["collective"]
    model.zero_grad()
    model(x).backward()
    wanted = torch.full((4, 3), 2.0)
    torch.testing.assert_close(model.left.weight.grad.cpu(), wanted.cpu())
    return True


@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_a_captured_backward_is_an_error_before_anything_is_sent(monkeypatch, warm_up):
    assert on_accelerators(captured, monkeypatch, warm_up) == [True]


def captured_steps(rank, monkeypatch):
    model = lockstep.replicate(rank.make(Branches), process_group=rank.group)
    optimizer = lockstep.sharding.shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    of_shares = lockstep.replicate(nn.Linear(1, 1), shares=1, process_group=rank.group)
    with torch.device("cpu"):
        rows = torch.utils.data.TensorDataset(torch.ones(4, 1))
    model(torch.ones(2, 3)).backward()
    with monkeypatch.context() as patched:
        patched.setattr(torch.sim, "is_current_stream_capturing", lambda: True)
        with pytest.raises(OptionError, match="the step of a sharded optimizer cannot be captured"):
            optimizer.step()
        with pytest.raises(OptionError, match="a step of shares cannot be captured"):
            for batch in lockstep.shares.GlobalBatches(rows, 4, 1, process_group=rank.group):
                for (x,) in batch:
                    of_shares(x.to(rank.device)).sum().backward()
    optimizer.step()
    return True


def test_a_sharded_step_and_a_step_of_shares_that_are_captured_are_errors(monkeypatch):
    assert on_accelerators(captured_steps, monkeypatch) == [True]
