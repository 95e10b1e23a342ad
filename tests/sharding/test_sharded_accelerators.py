"""Sharded steps on ranks with an accelerator each, simulated: what the host waits for, and what is noticed later."""

from __future__ import annotations

import functools

import pytest
import torch

from lockstep.errors import PeerError, ShardingError
from lockstep.sharding import full_state_dict
from sharded_runs import begun, equal, failing_sgd, results, values
from threaded import run_ranks

pytestmark = pytest.mark.usefixtures("sim")

on_accelerators = functools.partial(run_ranks, 2, device="sim")


def backward(rank, model, step):
    with torch.device("cpu"):
        x = torch.randn(4, 37, generator=rank.generator(step))
    model(x.to(rank.device)).square().mean().backward()


def steps(rank, sharded, count=4):
    model, optimizer = begun(rank, sharded=sharded)
    for step in range(count):
        optimizer.zero_grad()
        backward(rank, model, step)
        optimizer.step()
    return [value.cpu() for value in values(model)]


def test_weights_have_the_bits_of_the_whole_optimizer():
    assert equal(on_accelerators(steps, True), on_accelerators(steps, False))


def waits(rank, sim):
    """The lines that show a wait for the device, in the third step. (In PyTorch 2.11 AdamW itself waits.)"""
    model, optimizer = begun(rank, failing_sgd, granularity="element")
    for step in range(3):
        optimizer.zero_grad()
        backward(rank, model, step)
        rank.gather(torch.zeros(1))
        if rank.rank == 0:
            sim.reset_stream_log()
        rank.gather(torch.zeros(1))
        before = len(sim.stream_log())
        optimizer.step()
        log = sim.stream_log()[before:]
        rank.gather(torch.zeros(1))
    return [line for line in log if line.action.startswith("sync") and line.device == str(rank.device)]


def test_the_host_waits_for_no_kernel_of_the_step_or_of_backward(sim):
    for lines in on_accelerators(waits, sim):
        assert [line.action for line in lines] == ["sync event"]  # of what the step before has read


def failing(rank):
    model, optimizer = begun(rank, failing_sgd, granularity="element")
    backward(rank, model, 0)
    optimizer.step()
    before, state = results(model, optimizer)
    optimizer.fails = ValueError if rank.rank == 1 else None
    expected = (ValueError, "on purpose") if optimizer.fails else (PeerError, r"failed on rank 1 .*on purpose")
    with pytest.raises(expected[0], match=expected[1]):
        optimizer.step()
    assert equal(values(model), before)
    optimizer.fails = None
    optimizer.load_state_dict(state)
    optimizer.step()
    return not equal(values(model), before)


def test_a_step_that_fails_on_one_rank_fails_on_all():
    assert on_accelerators(failing) == [True, True]


def differing(rank, again):
    """A gradient that one rank changes after backward, in the third step, and in the fourth as well if `again`."""
    model, optimizer = begun(rank)
    state = full_state_dict(optimizer, all_ranks=True)
    for step in range(4):
        optimizer.zero_grad()
        backward(rank, model, step)
        if rank.rank == 1 and (step == 2 or (again and step == 3)):
            model[0].weight.grad.add_(1)
        if step < 3:
            optimizer.step()
    with pytest.raises(ShardingError) as raised:
        optimizer.step()
    with pytest.raises(ShardingError, match="step 3 of the optimizer was made with gradients that differ by rank"):
        optimizer.step()
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    backward(rank, model, 5)
    optimizer.step()
    return str(raised.value)


@pytest.mark.parametrize("again", [False, True])
def test_gradients_that_differ_are_an_error_in_the_next_step(again):
    for text in on_accelerators(differing, again):
        assert "noticed one step later: step 3 of the optimizer was made with gradients that differ" in text
        assert ("parameter 0.weight on rank 1" in text) == again
        assert "Load a checkpoint" in text
