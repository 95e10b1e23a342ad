"""A backward pass that fails on one rank: told to the others before its exception reaches the program, and only if they
wait for it."""

from __future__ import annotations

import os
import select
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import PeerError
from processes import run_processes
from programs.networks import Applying
from programs.ranks import clear, on_ranks, replicated, scalars, scalars_of
from small_modules import CallInBackward, error_of, fails_in_backward, one_weight, x_of
from threaded import count_collectives


def good_step(rank, model, x=None):
    """Return True if a step gives the mean of 1 and 2, which tells of any round that is one too many, or too few."""
    return set(scalars_of(model, loss=model(x_of(rank) if x is None else x).sum())) == {1.5}


# ------------------------------------------------------------------------------------------- when


def detour(device):
    """Its second half is on another device, where backward may fail: in a thread of the engine's."""
    forward = lambda m, x, fails=False: fails_in_backward(m.layer(x).to(device), fails).cpu()  # noqa: E731
    return Applying(forward, (), layer=one_weight())


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("first", [True, False])
@on_ranks(2)
def test_a_failure_is_told_before_the_program_has_its_exception(rank, first):
    """What this rank has sent by the time that the exception is here, and sums of the program's own behind it."""
    model = lockstep.replicate(detour(f"sim:{rank.rank}"), process_group=rank.group)
    if not first:
        good_step(rank, model)
    kind = (ArithmeticError, PeerError)[rank.rank]
    for number in range(20):
        with count_collectives(rank) as sent:
            raised = error_of(lambda: model(x_of(rank), fails=rank.rank == 0).sum().backward())
            late = len(sent)
            failed = torch.full((1,), float(raised is not None))
            dist.all_reduce(failed, group=rank.group)
        more = int(first and number == 0)  # in the first round ranks compare their communication hooks
        # The report, and then the statuses of the ranks.
        assert (raised, late, len(sent), failed.item()) == (kind, 2 + more, 3 + more, 2.0)
        assert good_step(rank, model)


# ------------------------------------------------------------------------------------------ whether


def backward_while_frozen(model, x):
    model.requires_grad_(False)
    try:
        model(fails_in_backward(x)).sum().backward()
    finally:
        model.requires_grad_(True)


def backward_beside(model, x):
    with torch.no_grad():
        model(x)
    fails_in_backward(x).sum().backward()


def backward_without_sync(model, x):
    with model.no_sync():
        model(fails_in_backward(x)).sum().backward()


LOCAL = {
    "grad of inputs": lambda model, x: torch.autograd.grad(model(fails_in_backward(x)).sum(), x),
    "grad of parameters": lambda model, x: torch.autograd.grad(
        model(fails_in_backward(x)).sum(), [*model.parameters(), x]
    ),
    "backward into inputs": lambda model, x: model(fails_in_backward(x)).sum().backward(inputs=[x]),
    "backward without sync": backward_without_sync,
    "backward beside": backward_beside,
    "backward while frozen": backward_while_frozen,
}


@pytest.mark.parametrize("how", LOCAL.values(), ids=LOCAL)
@pytest.mark.parametrize("modules", [1, 2])
@on_ranks(2)
def test_a_pass_that_reaches_no_parameter_is_nobody_elses_concern(rank, how, modules):
    """One rank's own pass fails, which accumulates into no parameter that others wait for."""
    models = [replicated(rank) for _ in range(modules)]
    for model in models:
        assert good_step(rank, model)
    if rank.rank == 0:
        x = torch.ones(1, 1, requires_grad=True)
        with count_collectives(rank) as sent:
            assert error_of(lambda: how(models[0], x)) is ArithmeticError
        assert not sent
    assert [good_step(rank, model) for model in (*models, *models)] == [True] * (2 * modules)


@on_ranks(2)
def test_a_pass_that_fails_without_synchronising_is_forgotten(rank):
    """It has come to the module's output, and to no parameter; the next one goes past the module's forward."""
    model = lockstep.replicate(detour("cpu"), process_group=rank.group)
    assert good_step(rank, model)
    with model.no_sync():
        failed = error_of(lambda: model(x_of(rank), fails=rank.rank == 0).sum().backward())
    model.zero_grad()
    model.layer(x_of(rank)).sum().backward()
    assert (failed, model.layer.weight.grad.item()) == [(ArithmeticError, 1.5), (None, 1.5)][rank.rank]


# ------------------------------------------------------------------------------- whatever was called


class Parts(nn.Module):
    """Two layers, with a failure before the first one's gradient, or before any."""

    def __init__(self):
        super().__init__()
        self.first, self.last = one_weight(), one_weight()

    def forward(self, x, fails=False):
        return self.tail(self.first(x), fails)

    def tail(self, x, fails):
        return self.last(fails_in_backward(x, fails))

    def part(self, x, fails):
        return fails_in_backward(self.first(x), fails)

    def recomputed(self, x, fails):
        return checkpoint(self.part, x, fails, use_reentrant=True) * self.last.weight


@pytest.mark.parametrize("call", ["tail", "part", "forward", "recomputed"])
@on_ranks(2)
def test_a_failure_is_told_whatever_was_called(rank, call):
    """Backward through something else than the module's own forward fails on one rank."""
    model = lockstep.replicate(Parts(), process_group=rank.group)
    x = x_of(rank).requires_grad_()
    raised = error_of(lambda: getattr(model, call)(x, rank.rank == 1).sum().backward())
    assert raised is (PeerError, ArithmeticError)[rank.rank]
    assert good_step(rank, model)


def recomputed(module, x, depth):
    """The module, called as a whole in reentrant checkpoints inside of one another."""
    return checkpoint(recomputed, module, x, depth - 1, use_reentrant=True) if depth else module(x)


def recomputing():
    """All of its parameters are hidden in a reentrant checkpoint: no graph shows them."""
    return Applying(lambda m, x: recomputed(m.layer, x, 1), (), layer=one_weight())


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("depth", [0, 1, 2])
@on_ranks(2)
def test_a_failure_is_told_before_it_gets_to_checkpoints_of_whole_modules(rank, modules, depth):
    """A loss fails on one rank, before its backward has got to checkpoints around whole modules, or inside of them."""
    models = [replicated(rank, one_weight if depth else recomputing) for _ in range(modules)]
    teacher = replicated(rank)
    for raises, grad in [((PeerError, ArithmeticError)[rank.rank], None), (None, 1.5)]:
        x = x_of(rank).requires_grad_()
        clear(*models)
        with torch.no_grad():
            target = checkpoint(teacher, x, use_reentrant=True)  # in no graph
        loss = sum(recomputed(model, x, depth) for model in models) - target
        raised = error_of(fails_in_backward(loss, raises is not None and rank.rank == 1).sum().backward)
        assert (raised, scalars(*models)) == (raises, [grad] * modules)
    assert all(good_step(rank, model, x) for model in [*models, teacher])


@pytest.mark.parametrize("past_forward", [False, True])
@on_ranks(2)
def test_a_failure_is_told_before_it_gets_to_parameters_that_are_new(rank, past_forward):
    """One rank's loss fails in backward, before the pass gets to a module all of whose parameters are new."""
    model = replicated(rank)
    good_step(rank, model)
    model.load_state_dict({"weight": torch.ones(1, 1)}, assign=True)
    loss = (nn.functional.linear(x_of(rank), model.weight) if past_forward else model(x_of(rank))).sum()
    if rank.rank == 1:
        loss.register_hook(lambda _: 1 // 0)
    found = (error_of(loss.backward), good_step(rank, model))
    assert found == [(PeerError, True), (ZeroDivisionError, True)][rank.rank]


@on_ranks(2)
def test_a_pass_inside_may_fail_alone(rank):
    """A pass inside of a pass fails, and what it was inside of goes on: nobody has to know."""
    model = replicated(rank)

    def tries():
        with torch.enable_grad():
            leaf = torch.ones(1, 1, requires_grad=True)
            error_of(lambda: torch.autograd.grad(fails_in_backward(leaf, rank.rank == 0).sum(), leaf))

    model(CallInBackward.apply(x_of(rank).requires_grad_(), tries)).sum().backward()
    assert model.weight.grad.item() == 1.5
    assert good_step(rank, model)


@on_ranks(2)
def test_a_pass_inside_may_fail_alone_though_it_comes_to_the_modules_parameter_first(rank):
    model = replicated(rank)

    def tries():
        with torch.enable_grad():
            loss = fails_in_backward(1 * model.weight, rank.rank == 0).sum()
        if rank.rank == 0:
            error_of(loss.backward)

    CallInBackward.apply(nn.functional.linear(x_of(rank), model.weight), tries).sum().backward()
    assert model.weight.grad.item() == 1.5
    assert good_step(rank, model)


@on_ranks(2)
def test_a_pass_inside_of_another_fails_once(rank):
    """A hook of rank 0 runs a backward of its own through the module, which fails, and the pass around it as well."""
    model = replicated(rank)
    assert good_step(rank, model)
    loss = model(x_of(rank)).sum()
    if rank.rank == 0:
        inner = model(fails_in_backward(x_of(rank).requires_grad_())).sum()
        loss.register_hook(lambda _: inner.backward())  # before the pass around it has come to the module
    raised = error_of(loss.backward)
    assert (raised, good_step(rank, model)) == [(ArithmeticError, True), (PeerError, True)][rank.rank]


@on_ranks(2)
def test_a_failure_in_a_callback_of_the_engine_is_told(rank):
    """The engine's callback of somebody else raises on one rank: the pass has failed there, before its round."""
    model = replicated(rank)

    def fail():
        raise ArithmeticError("a callback")

    out = model(x_of(rank))
    queue = torch.autograd.Variable._execution_engine.queue_callback
    handle = model.weight.register_hook(lambda _: queue(fail) if rank.rank == 0 else None)
    raised = error_of(lambda: out.sum().backward())
    handle.remove()
    found = (raised, model.weight.grad, good_step(rank, model))
    assert found == [(ArithmeticError, None, True), (PeerError, None, True)][rank.rank]


@on_ranks(2)
def test_modules_on_two_groups_are_both_told(rank, store):
    groups = rank.group, dist.ProcessGroupGloo(store, rank.rank, rank.world)
    models = [lockstep.replicate(one_weight(), process_group=group) for group in groups]
    out = models[1](fails_in_backward(models[0](x_of(rank)), rank.rank == 0))
    assert error_of(lambda: out.sum().backward()) is (ArithmeticError, PeerError)[rank.rank]
    assert [good_step(rank, model) for model in models] == [True, True]


@on_ranks(2)
def test_a_pass_that_another_entry_begins(rank):
    """A pass that does not come through Python's entry to the engine, as one that C++ begins."""
    model = replicated(rank)
    run = torch._C._ImperativeEngine().run_backward

    def backward(fails):
        out = model(fails_in_backward(x_of(rank).requires_grad_(), fails))
        run((out,), (torch.ones(1, 1),), False, False, (), allow_unreachable=True, accumulate_grad=True)

    backward(False)
    grad = model.weight.grad.item()
    found = (grad, error_of(lambda: backward(rank.rank == 0)), good_step(rank, model))
    assert found == [(1.5, ArithmeticError, True), (1.5, PeerError, True)][rank.rank]


def fails_and_ends(rank):
    """Rank 0 fails, and its process ends before rank 1 begins its backward."""
    model = lockstep.replicate(one_weight())
    assert good_step(rank, model)
    process = os.pidfd_open(int(rank.gather(torch.tensor([os.getpid()]))[0]))
    raised = None
    try:
        if rank.rank == 1:
            select.select([process], [], [])
        model(fails_in_backward(x_of(rank).requires_grad_(), rank.rank == 0)).sum().backward()
    except (ArithmeticError, PeerError) as error:
        raised = str(error)
    if rank.rank == 0:
        sys.exit(0 if raised else 1)  # as a program ends: a killed one may not have sent what its thread is to send
    return raised


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_fails_and_ends_is_named(backend):
    failing, told = run_processes(2, fails_and_ends, backend=backend, errors=True)
    assert failing.returncode == 0
    assert told.error is None
    assert "backward failed on rank 0" in told.result
