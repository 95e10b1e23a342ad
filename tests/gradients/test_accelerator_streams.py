"""Forwards on several streams: a gradient is taken during backward only on the stream on which it is accumulated.

Autograd lets other streams wait for it only at the end of the pass. Simulated accelerators have no asynchronous
execution, so these tests look at where gradients are copied, not at values; `tests/gpu` has the values.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError
from programs.networks import Applying
from programs.ranks import on_ranks, replicated

pytestmark = pytest.mark.usefixtures("sim")

on_accelerator = functools.partial(on_ranks, 1, device="sim")
LEFT, RIGHT = {(4, 3), (4,)}, {(5, 3), (5,)}


def branches():
    """Two branches, of which the right one runs on a stream of its own, if there is one."""

    def forward(m, x, stream=None):
        here = torch.accelerator.current_stream(x.device)
        stream = stream or here
        stream.wait_stream(here)
        with stream:
            right = m.right(x)
        left = m.linear(x)
        here.wait_stream(stream)
        return left.sum() + right.sum()

    return Applying(forward, (3, 4), right=nn.Linear(3, 5))


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


@on_accelerator()
def test_a_bucket_of_two_streams_is_taken_when_backward_has_ended(rank, copied):
    model, side, x = replicated(rank, branches), torch.Stream(device=rank.device), torch.ones(2, 3)
    for _ in range(4):
        assert copied.of_step(model, x, stream=side) == [(LEFT | RIGHT, 0, False)]


@on_accelerator()
def test_buckets_of_one_stream_are_taken_during_backward_on_it(rank, copied):
    model = replicated(rank, branches, bucket_cap_mb=1e-5)
    side, x = torch.Stream(device=rank.device), torch.ones(2, 3)
    copied.of_step(model, x, stream=side)
    for _ in range(3):
        step = copied.of_step(model, x, stream=side)
        assert all(during for _, _, during in step)
        assert {stream for shapes, stream, _ in step if shapes <= RIGHT} == {side.stream_id}
        assert {stream for shapes, stream, _ in step if shapes <= LEFT} == {0}


@on_accelerator()
def test_training_on_a_stream_other_than_that_of_replicate_takes_buckets_during_backward(rank, copied):
    model, side, x = replicated(rank, branches), torch.Stream(device=rank.device), torch.ones(2, 3)
    with side:
        steps = [copied.of_step(model, x) for _ in range(3)]
    assert steps == [[(LEFT | RIGHT, side.stream_id, during)] for during in (False, True, True)]


@on_accelerator()
def test_a_branch_on_another_stream_is_accumulated_where_it_was(rank, copied, sim):
    model, side, x = replicated(rank, branches), torch.Stream(device=rank.device), torch.ones(2, 3)
    for _ in range(3):
        copied.of_step(model, x)
    sim.reset_stream_log()
    with warnings.catch_warnings():  # of PyTorch, once: the node of a parameter is kept, as DDP keeps it
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        assert copied.of_step(model, x, stream=side) == [(LEFT | RIGHT, 0, True)]
    log = sim.stream_log()
    waits = {line.event for line in log if line.action == "wait" and line.stream == 0}
    produced = [line.event for line in log if line.action == "record" and line.stream == side.stream_id]
    assert waits.issuperset(produced)
    assert len(produced) >= 2  # of forward, and of its gradients in backward


def unfrozen(rank, copied):
    """A module whose right branch was frozen in three steps, and is trained again."""
    model = replicated(rank, branches)
    model.right.requires_grad_(False)
    for _ in range(3):
        copied.of_step(model, torch.ones(2, 3))
    model.right.requires_grad_(True)
    return model


@on_accelerator()
def test_a_branch_that_is_unfrozen_and_runs_on_another_stream(rank, copied):
    model, side = unfrozen(rank, copied), torch.Stream(device=rank.device)
    for _ in range(4):
        step = copied.of_step(model, torch.ones(2, 3), stream=side)
        assert not any(shapes & LEFT and shapes & RIGHT and during for shapes, _, during in step)


@on_accelerator()
def test_a_branch_that_is_unfrozen_is_taken_during_backward_again_after_three_passes(rank, copied):
    model = unfrozen(rank, copied)
    steps = [copied.of_step(model, torch.ones(2, 3)) for _ in range(5)]
    assert steps[3:] == [[(LEFT | RIGHT, 0, True)]] * 2


# ------------------------------------------------------------------------------------- captured graphs


@pytest.fixture
def capturing(monkeypatch):
    """A context in which the current stream is captured."""

    @contextlib.contextmanager
    def capture():
        with monkeypatch.context() as patched:
            patched.setattr(torch.sim, "is_current_stream_capturing", lambda: True)
            yield

    return capture


@pytest.mark.parametrize("warm_up", [0, 1, 3])
@on_accelerator()
def test_a_captured_backward_is_an_error_before_anything_is_sent(rank, capturing, warm_up):
    """It raises before any node of the graph runs, since CUDA may refuse one of them in its own words, and sends
    nothing; another module's backward may be captured. Then training goes on."""
    model, x = replicated(rank, branches), torch.ones(2, 3)
    for _ in range(warm_up):
        model(x).backward()
        model.zero_grad()
    before = dict(lockstep.loop.statistics(model).calls)
    with capturing():
        nn.Linear(3, 1)(x).sum().backward()
        with pytest.raises(OptionError, match=r"backward\(\) of a replicated module cannot be captured"):
            loss = model(x)
            loss.register_hook(lambda gradient: pytest.fail("backward has begun"))
            loss.backward()
    assert lockstep.loop.statistics(model).calls["collective"] == before["collective"]
    model.zero_grad()
    model(x).backward()
    assert model.linear.weight.grad.cpu().tolist() == [[2.0] * 3] * 4


@on_accelerator()
def test_a_sharded_step_and_a_step_of_shares_that_are_captured_are_errors(rank, capturing):
    model = replicated(rank, branches)
    optimizer = lockstep.sharding.shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    of_shares = replicated(rank, lambda: nn.Linear(1, 1), shares=1)
    with torch.device("cpu"):
        rows = torch.utils.data.TensorDataset(torch.ones(4, 1))
    model(torch.ones(2, 3)).backward()
    with capturing():
        with pytest.raises(OptionError, match="the step of a sharded optimizer cannot be captured"):
            optimizer.step()
        with pytest.raises(OptionError, match="a step of shares cannot be captured"):
            for batch in lockstep.shares.GlobalBatches(rows, 4, 1, process_group=rank.group):
                for (x,) in batch:
                    of_shares(x.to(rank.device)).sum().backward()
    optimizer.step()
