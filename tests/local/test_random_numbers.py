"""Random numbers in replicas: on one device they draw one after the other, from the generators that the program has."""

import functools
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep import DataParallel
from lockstep.local import SyncBatchNorm, current_replica, parallel_apply
from programs.networks import Applying


def test_replicas_draw_one_after_the_other_from_the_callers_generators():
    own = torch.Generator().manual_seed(3)

    def draw(_=None):
        return [
            torch.rand(4),
            torch.randn(20),
            torch.tensor(random.random()),
            torch.tensor(np.random.rand(2)),
            torch.rand(2, generator=own),
            torch.vmap(lambda row: row * torch.rand(3), randomness="different")(torch.ones(2, 3)),
        ]

    def from_one_seed(draws):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        own.manual_seed(3)
        return [*itertools.chain.from_iterable(draws()), torch.rand(1)]

    found = from_one_seed(lambda: parallel_apply([draw] * 3, [0] * 3))
    expected = from_one_seed(lambda: [draw() for _ in range(3)])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_replicas_that_meet_draw_in_turns():
    def draw(_):
        drawn = []
        for number in range(3):
            drawn.append(torch.rand(4))
            current_replica().all_gather(f"meeting {number}", None)
        return torch.stack(drawn)

    torch.manual_seed(5)
    expected = torch.stack([torch.stack([torch.rand(4) for _ in range(3)]) for _ in range(3)])
    for _ in range(10):
        torch.manual_seed(5)
        found = torch.stack(parallel_apply([draw] * 3, [0] * 3), 1)  # by meeting, then by replica
        assert torch.equal(found, expected)


def test_what_a_replica_seeds_or_sets_stays_as_without_replicas():
    def forward(index):
        torch.manual_seed(index)
        with torch.random.fork_rng(devices=[]):
            torch.rand(3)
        return torch.rand(4)

    drawn = parallel_apply([forward] * 2, [7, 8])
    assert [torch.equal(x, forward(i)) for i, x in zip([7, 8], drawn, strict=True)] == [True, True]
    assert torch.initial_seed() == 8


def dropped(reentrant, together):
    """A dropout in a checkpointed segment, and one outside; before them, maybe, a meeting of the replicas."""

    def forward(m, x):
        m.normalised(x)
        x = F.dropout(x * m.weight)
        return x if reentrant is None else checkpoint(F.dropout, x, use_reentrant=reentrant)

    normalised = SyncBatchNorm(8) if together else nn.Identity()
    return Applying(forward, weight=nn.Parameter(torch.ones(1)), normalised=normalised)


@pytest.mark.parametrize("use_step", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "after a meeting"])
def test_in_a_segment_of_a_replica(first, together, reentrant, use_step):
    network = dropped(reentrant, together).to(first)
    parallel, x = DataParallel(network, [first] * 3), torch.randn(64, 8, device=first)
    if use_step:
        loss = parallel.step(lambda output: output.mean(), x)
    else:
        loss = parallel(x).mean()
        loss.backward()
    torch.testing.assert_close(network.weight.grad.sum(), loss.detach())  # the loss is linear in the weight


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inner", [None, False, True], ids=["alone", "around a segment", "around a reentrant segment"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("together", [False, True], ids=["turns", "met"])
def test_around_the_whole_wrapper(first, together, reentrant, inner):
    network = dropped(inner, together).to(first)
    parallel, x = DataParallel(network, [first] * 3), torch.randn(64, 8, device=first, requires_grad=True)
    loss = checkpoint(parallel, x, use_reentrant=reentrant).mean()
    state = torch.get_rng_state()
    loss.backward()
    torch.testing.assert_close(network.weight.grad.sum(), loss.detach())
    torch.testing.assert_close((x.grad * x.detach()).sum(), loss.detach())  # and in each input
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("inside", [True, False])
def test_selectively(inside):
    """y = (m * w)^2 with w = 1 and a mask m, so that the gradient of w is 2 * y, if backward has the same mask."""

    def recompute_all(context, operation, *args, **kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE

    def segment(function, *args):
        contexts = functools.partial(create_selective_checkpoint_contexts, recompute_all)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

    def squared(m, x):
        return F.dropout(x * m.weight, 0.5).pow(2)

    forward = (lambda m, x: segment(squared, m, x)) if inside else squared
    network, x = Applying(forward, weight=nn.Parameter(torch.ones(64))), torch.ones(4, 64)
    parallel = DataParallel(network, ["cpu"] * 4)
    out = parallel(x) if inside else segment(parallel, x)
    out.sum().backward()
    assert torch.equal(network.weight.grad, 2 * out.detach().sum(0))


class Names(TorchDispatchMode):
    """Lists every operation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_of_the_caller_sees_every_replica_and_changes_nothing():
    parallel, x = DataParallel(nn.Sequential(nn.Dropout(0.5), nn.Tanh()), ["cpu"] * 3), torch.ones(6, 4)
    torch.manual_seed(1)
    expected = parallel(x)
    torch.manual_seed(1)
    with Names() as names:
        assert torch.equal(parallel(x), expected)
    assert names.seen.count(torch.ops.aten.tanh.default) == 3


def test_accelerators_draw_from_their_own_generators(sim):
    devices = sim.devices(2)
    network = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).to(devices[0])
    parallel = DataParallel(network, devices)
    state = torch.get_rng_state()
    parallel(torch.ones(4, 4, device=devices[0])).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.around
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_replicas(compiler):
    network = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), backend="aot_eager")
    parallel, x = DataParallel(network, ["cpu", "cpu"]), torch.ones(6, 4)
    outputs = []
    for seed in (1, 1, 1, 2):  # the first call compiles
        torch.manual_seed(seed)
        outputs.append(parallel(x))
    assert [torch.equal(outputs[0], output) for output in outputs] == [True, True, True, False]
    outputs[0].sum().backward()
