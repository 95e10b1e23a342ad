"""Ranks are processes with an accelerator each, simulated, and a default group of Gloo's, which sums on the host."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from processes import run_processes
from programs.networks import mlp
from programs.ranks import makes_means
from small_modules import fails_in_backward

pytestmark = pytest.mark.usefixtures("sim")


def network():
    return mlp(2, 4, 3, 1)


def loss_of(rank, model):
    x = torch.full((2, 2), rank.rank + 1.0)
    return model(x).square().sum()


def is_the_mean(rank, model):
    """Return True if backward makes the mean of what each rank would get alone."""
    return makes_means(rank, model, lambda each: loss_of(rank, each), rtol=1.3e-6, atol=1e-5)


def replicated_and_wrapped(rank):
    models = [lockstep.replicate(rank.make(network)), lockstep.DistributedDataParallel(rank.make(network))]
    right = [is_the_mean(rank, model) for model in models for _ in range(3)]
    for model in models:
        lockstep.check_in_sync(model)
    return all(right)


def test_gradients_are_means(sim):
    assert run_processes(2, replicated_and_wrapped, device="sim") == [True, True]


def all_fail(rank):
    """Backward fails on all ranks; a sum of the program's own and a second wrapper come right behind it."""
    model, seen = lockstep.DistributedDataParallel(rank.make(network)), []
    for _ in range(10):
        with pytest.raises(ArithmeticError):
            fails_in_backward(loss_of(rank, model)).backward()
        dist.all_reduce(failed := torch.ones(1))
        seen.append(failed.item())
    other = lockstep.DistributedDataParallel(rank.make(network))
    return seen == [2.0] * 10 and is_the_mean(rank, other) and is_the_mean(rank, model)


def test_after_a_failure_on_all_ranks_collectives_are_in_order(sim):
    assert run_processes(2, all_fail, device="sim", group_timeout=5) == [True, True]


def sums_from_callbacks(rank):
    """A communication hook whose future sums once more, on rank 1 not before the next bucket's hook has been called, if
    that is called before it is done."""
    model = lockstep.replicate(rank.make(network), bucket_cap_mb=1e-5)
    called = [threading.Event() for _ in range(10)]

    def hook(state, bucket):
        called[bucket.index()].set()

        def again(done):
            if rank.rank == 1:
                called[bucket.index() + 1].wait(0.1)
            total = done.value()[0]
            dist.all_reduce(total, async_op=True).wait()
            return total / rank.world**2

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

    model.register_comm_hook(None, hook)
    right = [is_the_mean(rank, model) for _ in range(2)]
    return all(right) and called[2].is_set()


def test_sums_from_callbacks_of_communication_hooks_keep_their_order(sim):
    assert run_processes(2, sums_from_callbacks, device="sim", group_timeout=5) == [True, True]


def on_shm(rank):
    try:
        lockstep.replicate(rank.make(network))
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_shm_refuses_accelerators(sim):
    errors = run_processes(2, on_shm, device="sim", backend="shm", group_timeout=5)
    for rank, (kind, text) in enumerate(errors):
        assert kind == "CommunicationError"
        assert f"the shm process group moves tensors on the CPU, got one on sim:{rank}" in text


def step_by_hand(parameters):
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def normalised():
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def joined(rank, policy, batches):
    """Every second step is on gradients of this rank's own. There is a second wrapper, so that ranks tell each other in
    each backward which of them takes part. Returns whether ranks are equal when it is over."""
    warnings.filterwarnings("ignore", "rank .: parameter .* was changed while its gradient was only one rank's")
    models = [lockstep.DistributedDataParallel(rank.make(normalised), buffer_policy=policy) for _ in range(2)]
    for steps in batches:
        for model in models:
            with model.join():
                for number in range(steps[rank.rank]):
                    with model.no_sync() if number % 2 else contextlib.nullcontext():
                        loss_of(rank, model).backward()
                        step_by_hand(model.parameters())
    for model in models:
        model.eval()(torch.ones(1, 2))
    return [rank.all_equal(value) for model in models for value in model.state_dict().values()]


@pytest.mark.parametrize("policy", ["rank0", "mean"])
@pytest.mark.parametrize("batches", [[(0, 10)], [(3, 7), (5, 0)]], ids=str)
def test_a_rank_without_batches_follows_steps_on_gradients_of_the_others(sim, policy, batches):
    assert run_processes(2, joined, policy, batches, device="sim", group_timeout=5) == [[True] * 18] * 2
