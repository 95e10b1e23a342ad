"""Ranks are processes with an accelerator each, simulated, and a default group of Gloo's, which sums on the host."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CommunicationError
from processes import on_processes
from programs.networks import mlp
from programs.ranks import makes_means
from small_modules import fails_in_backward

pytestmark = pytest.mark.usefixtures("sim")

on_accelerators = functools.partial(on_processes, 2, device="sim", group_timeout=5)


def network():
    return mlp(2, 4, 3, 1)


def loss_of(rank, model):
    x = torch.full((2, 2), rank.rank + 1.0)
    return model(x).square().sum()


def is_the_mean(rank, model):
    """Return True if backward makes the mean of what each rank would get alone."""
    return makes_means(rank, model, lambda each: loss_of(rank, each), rtol=1.3e-6, atol=1e-5)


@on_accelerators()
def test_gradients_are_means(rank):
    for wrap in (lockstep.replicate, lockstep.DistributedDataParallel):
        model = wrap(rank.make(network))
        assert all(is_the_mean(rank, model) for _ in range(3))
        lockstep.check_in_sync(model)


@on_accelerators()
def test_after_a_failure_on_all_ranks_collectives_are_in_order(rank):
    """Backward fails on all ranks; a sum of the program's own and a second wrapper come right behind it."""
    model = lockstep.DistributedDataParallel(rank.make(network))
    for _ in range(10):
        with pytest.raises(ArithmeticError):
            fails_in_backward(loss_of(rank, model)).backward()
        dist.all_reduce(failed := torch.ones(1))
        assert failed.item() == 2.0
    other = lockstep.DistributedDataParallel(rank.make(network))
    assert is_the_mean(rank, other)
    assert is_the_mean(rank, model)


@on_accelerators()
def test_sums_from_callbacks_of_communication_hooks_keep_their_order(rank):
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
    assert all(is_the_mean(rank, model) for _ in range(2))
    assert called[2].is_set()


@on_accelerators(backend="shm")
def test_shm_refuses_accelerators(rank):
    said = f"the shm process group moves tensors on the CPU, got one on sim:{rank.rank}"
    with pytest.raises(CommunicationError, match=said):
        lockstep.replicate(rank.make(network))


def step_by_hand(parameters):
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def normalised():
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("policy", ["rank0", "mean"])
@pytest.mark.parametrize("batches", [[(0, 10)], [(3, 7), (5, 0)]], ids=str)
@on_accelerators()
def test_a_rank_without_batches_follows_steps_on_gradients_of_the_others(rank, policy, batches):
    """Every second step is on gradients of this rank's own. There is a second wrapper, so that ranks tell each other in
    each backward which of them takes part."""
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
    equal = [rank.all_equal(value) for model in models for value in model.state_dict().values()]
    assert equal == [True] * 18
