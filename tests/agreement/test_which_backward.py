"""Ranks whose backward passes are not the same ones: as many of them everywhere, so that their rounds pair off.

Each is an error on every rank, in the step in which gradients would be mixed. What may differ by rank is below.
"""

from __future__ import annotations

import contextlib
import functools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.distributed.reduction.autograd.engine import current_pass
from lockstep.errors import PeerError
from programs.ranks import on_ranks, replicated, scalars_of
from small_modules import x_of
from threaded import run_ranks


class Net(nn.Module):
    """Calls itself by its forward, or by another method."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 1, bias=False))
        nn.init.ones_(self.inner[0].weight)

    def forward(self, x, fails=False):
        if fails:
            raise ArithmeticError("a bad batch")
        return self.inner(x)

    def other(self, x):
        return self.inner(x)


class Wrapped:
    """A module as the program calls it: replicated in place, or in a wrapper."""

    def __init__(self, rank, wrapped, **options):
        self.module = Net()
        make = lockstep.DistributedDataParallel if wrapped else lockstep.replicate
        self.call = make(self.module, process_group=rank.group, **options)
        self.weight = self.module.inner[0].weight
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        self.seen = []

    def step(self, rank, forward=None):
        """One step of training; the gradient of rank r is r + 1. Returns the error, if there is one."""
        self.optimizer.zero_grad()
        try:
            (forward or self.call)(x_of(rank)).sum().backward()
        except PeerError as error:
            return str(error)
        self.seen.append(self.weight.grad.item())
        self.optimizer.step()
        return None


both_faces = pytest.mark.parametrize("wrapped", [False, True], ids=["replicate", "DistributedDataParallel"])


# --------------------------------------------------------------------------------- errors on every rank


def in_evaluation_mode(net, x):
    net.call.eval()
    try:
        return net.call(x)
    finally:
        net.call.train()


CALLS = {
    "a submodule": lambda net, x: net.module.inner(x),
    "another method": lambda net, x: net.module.other(x),
    "forward of the class": lambda net, x: Net.forward(net.module, x),
    "in evaluation mode": in_evaluation_mode,
}


@both_faces
@pytest.mark.parametrize("how", CALLS)
@on_ranks(3)
def test_a_backward_of_one_rank_is_an_error_on_all_ranks_in_that_step(rank, wrapped, how):
    """Rank 0 runs it between two steps."""
    net = Wrapped(rank, wrapped)
    assert [net.step(rank), net.step(rank)] == [None, None]
    before = net.weight.item()
    error = net.step(rank, None if rank.rank else functools.partial(CALLS[how], net))
    assert net.weight.item() == before
    assert net.step(rank) is None  # goes on
    lockstep.check_in_sync(net.call)
    through = "the module's forward in evaluation mode" if how == "in evaluation mode" else "no output of the module's"
    assert f"rank {rank.rank}: ranks 0 and 1 are not in the same backward pass (number 3 that synchronises)" in error
    assert f"on rank 0 it went through {through}" in error
    assert "on rank 1 through the module's forward in training mode" in error
    assert "under no_sync(), or take its gradients with torch.autograd.grad" in error
    assert net.seen == [2.0] * 3


def skip_after_forward(net, rank):
    net.call(torch.ones(1, 1))


def skip_after_a_failed_forward(net, rank):
    with contextlib.suppress(ArithmeticError):
        net.call(torch.ones(1, 1), fails=True)


def skip_after_a_failed_loss(net, rank):
    with contextlib.suppress(RuntimeError):
        (net.call(torch.ones(1, 1)) * torch.ones(2, 2)[:, :0].sum(1).reshape(3)).sum().backward()


def leave_out(rank, wrapped, skip, steps_more):
    """Rank 1 leaves out a batch, and goes on with the next one; or it has only looked at what the network gives."""
    net = Wrapped(rank, wrapped)
    errors = [net.step(rank)]
    for _ in range(1 if steps_more else 2):
        if rank.rank == 1:
            skip(net, rank)
            if steps_more:
                net.optimizer.step()
        errors.append(net.step(rank))
    return errors, net.seen


SKIPS = [skip_after_forward, skip_after_a_failed_forward, skip_after_a_failed_loss]


@both_faces
@pytest.mark.parametrize("skip", SKIPS)
def test_a_forward_more_on_one_rank_is_a_warning_once_on_all_ranks(wrapped, skip):
    with pytest.warns(UserWarning, match="If it was a forward for a log, .* If a rank has skipped a batch") as caught:
        assert run_ranks(2, leave_out, wrapped, skip, False) == [([None] * 3, [1.5] * 3)] * 2
    texts = sorted(str(each.message) for each in caught)
    assert [text[: len("rank 0: since the last one")] for text in texts] == [
        f"rank {rank}: since the last one" for rank in range(2)
    ]
    for text in texts:
        assert "rank 0 has left out no forwards, rank 1 1 forward (in training" in text


@both_faces
@pytest.mark.parametrize("skip", SKIPS)
@on_ranks(2)
def test_a_batch_that_one_rank_leaves_out_between_other_steps_is_an_error_on_all_ranks(rank, wrapped, skip):
    (first, second), _ = leave_out(rank, wrapped, skip, True)
    assert first is None
    assert f"rank {rank.rank}: ranks 0 and 1 are not in the same backward pass (number 2 that" in second
    assert "since the last one, rank 0 has left out no forwards, rank 1 1 forward (in training" in second


@on_ranks(2)
def test_a_forward_more_in_batches_is_right(rank):
    """In batches of a loop that counts them, forwards beside them are not compared."""
    net = Wrapped(rank, False)
    for step, _ in enumerate(lockstep.batches([0] * 3, group=rank.group)):
        assert net.step(rank) is None
        if rank.rank == 0 and step < 2:
            skip_after_forward(net, rank)
    assert net.seen == [1.5] * 3


# ------------------------------------------------------------------------------ what may differ by rank


def evaluate_without_gradients(net, rank):
    with torch.no_grad():
        for _ in range(rank.rank):
            net.call(torch.ones(1, 1))


def evaluate(net, rank):
    if rank.rank == 0:
        net.call.eval()
        net.call(torch.ones(1, 1))
        net.call.train()


def evaluate_frozen(net, rank):
    """A forward whose output has no graph."""
    if rank.rank == 0:
        net.call.requires_grad_(False)
        net.call(torch.ones(1, 1))
        net.call.requires_grad_(True)


def autograd_grad(net, rank):
    if rank.rank == 0:
        x = torch.ones(1, 1, requires_grad=True)
        torch.autograd.grad(net.call(x).sum(), x)
        torch.autograd.grad(net.module.inner(x).sum(), [x, net.weight])


def without_sync(net, rank):
    if rank.rank == 0:
        with net.call.no_sync():
            net.module.inner(torch.ones(1, 1)).sum().backward()
        net.optimizer.zero_grad()


def forward_without_sync(net, rank):
    """What one rank accumulates, and leaves out, is its own affair."""
    with net.call.no_sync():
        for micro_batch in range(2 + rank.rank):
            out = net.call(torch.zeros(1, 1)).sum()
            if micro_batch:
                out.backward()


def sequences(net, rank):
    """Forwards of one backward, as many as the sequence of the rank is long."""

    def call(x):
        return sum(net.call(x) for _ in range(20 * rank.rank + 1)) / (20 * rank.rank + 1)

    assert net.step(rank, call) is None


def terms_left_out(net, rank):
    """Terms of the loss are computed, but used on one rank only."""

    def call(x):
        first, second = net.call(x), net.call(0 * x)
        return first + second if rank.rank else first

    assert net.step(rank, call) is None


def otherwise_on_all_ranks(net, rank):
    assert net.step(rank, net.module.inner) is None
    assert net.step(rank, net.module.other) is None
    assert net.step(rank, (net.module.inner, net.module.other)[rank.rank % 2]) is None


def both_on_one_rank(net, rank):
    """One term of the loss comes past forward."""

    def call(x):
        return net.call(x) + (net.module.other(0 * x) if rank.rank else 0)

    assert net.step(rank, call) is None


def recomputed(net, rank):
    """Forwards that run again inside of a backward, more of them on one rank."""
    for reentrant in (False, True):
        times = 1 if reentrant else 1 + rank.rank  # each reentrant one is a backward pass of its own

        def call(x, reentrant=reentrant, times=times):
            x.requires_grad_()
            return sum(checkpoint(net.call, x, use_reentrant=reentrant) for _ in range(times)) / times

        assert net.step(rank, call) is None


FORWARDS = [evaluate_without_gradients, evaluate, evaluate_frozen, autograd_grad, without_sync, forward_without_sync]
STEPS = [sequences, terms_left_out, otherwise_on_all_ranks, both_on_one_rank, recomputed]


@both_faces
@pytest.mark.parametrize("use", FORWARDS + STEPS)
@on_ranks(2)
def test_what_may_differ_by_rank(rank, wrapped, use):
    """`use(net, rank)` between steps, or for one, on which ranks differ; gradients stay those of all ranks."""
    net = Wrapped(rank, wrapped)
    for _ in range(3):
        assert net.step(rank) is None
        use(net, rank)
    torch.testing.assert_close(torch.tensor(net.seen), torch.full((len(net.seen),), 1.5))


def test_a_pass_that_is_over_keeps_no_group():
    def hold(rank):
        module, held = replicated(rank), []
        loss = module(torch.ones(1, 1)).sum()
        loss.register_hook(lambda gradient: held.append(current_pass()))
        loss.backward()
        return held, weakref.ref(rank.group)

    for held, group in run_ranks(2, hold):
        assert held[0] is not None
        assert group() is None


@on_ranks(2)
def test_a_backward_without_any_gradient_is_forgotten(rank):
    """A backward of rank 1 alone reaches no trained parameter, and does not synchronise; both go past forward then."""
    model = replicated(rank)
    if rank.rank:
        with model.no_sync():
            model.requires_grad_(False)
            model(x_of(rank).requires_grad_()).sum().backward()
            model.requires_grad_(True)
    nn.functional.linear(x_of(rank), model.weight).sum().backward()
    assert model.weight.grad.item() == 1.5


@on_ranks(2)
def test_a_backward_for_inputs_alone_is_nobody_elses_concern(rank):
    model = replicated(rank)
    for _ in range(2):
        x = x_of(rank).requires_grad_()
        if rank.rank == 0:
            model(x).sum().backward(inputs=[x])
        assert scalars_of(model, loss=model(x).sum()) == [1.5]


def test_a_pass_goes_on_as_itself_after_one_inside_of_it():
    """Else a second pass inside of it, as of another checkpointed layer, would count as one of its own."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    model = lockstep.replicate(nn.Linear(1, 1), process_group=group)
    seen = []

    def run_another(gradient):
        seen.append(current_pass())
        with torch.enable_grad():
            torch.ones(1, requires_grad=True).sum().backward()
        seen.append(current_pass())

    loss = model(torch.ones(1, 1)).sum()
    loss.register_hook(run_another)
    loss.backward()
    assert seen[0] is not None
    assert seen[0] is seen[1]
    assert current_pass() is None
