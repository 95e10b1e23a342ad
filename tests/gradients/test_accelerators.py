"""Ranks with an accelerator each, simulated, and a group that speaks for accelerators alone, as one of NCCL does."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.utils.checkpoint import checkpoint

import lockstep
import programs.ranks
from lockstep.errors import AgreementError, PeerError
from programs.networks import Applying, OnDemand
from programs.ranks import clear, holds_means, makes_means, own_gradients
from small_modules import error_of, fails_in_backward
from threaded import for_accelerators, new_gloo_group

pytestmark = pytest.mark.usefixtures("sim")

on_accelerators = functools.partial(programs.ranks.on_ranks, 2, device="sim", group_timeout=5)
controls = pytest.mark.parametrize("control", [True, False], ids=["control", "device"])


def replicated(rank, make=OnDemand, **options):
    return programs.ranks.replicated(rank, make, **options)


def whole():
    """Every parameter is used in every round."""
    return Applying(lambda m, x, fails=False: fails_in_backward(m.linear(x).sum(), fails), (3, 1))


def normed():
    """The same, with buffers."""
    return Applying(
        lambda m, x, fails=False: fails_in_backward(m.linear(m.norm(x)).sum(), fails), (3, 1), norm=nn.BatchNorm1d(3)
    )


def inputs(rank, seed=0):
    return torch.randn(4, 3, generator=torch.Generator(rank.device).manual_seed(10 * seed + rank.rank))


def step(rank, model, seed=0, **kwargs):
    """Return True if a backward makes means."""
    return makes_means(rank, model, lambda each: each(inputs(rank, seed), **kwargs))


def steps(rank, model, count=3):
    return all(step(rank, model, seed) for seed in range(count))


def in_sync(rank, model):
    return all(rank.all_equal(each) for each in model.state_dict().values())


def of_this_rank(rank, model, seed=0):
    return own_gradients(model, lambda each: each(inputs(rank, seed)))


# ------------------------------------------------------------------------------------- right gradients


@pytest.mark.parametrize("cap", [None, 1e-5])
@on_accelerators()
def test_gradients_are_means_whichever_parameters_are_used(rank, cap):
    model = replicated(rank, bucket_cap_mb=cap)
    for seed in range(5):
        assert step(rank, model, seed, extra=seed == 2 and rank.rank == 0)
    lockstep.check_in_sync(model)
    assert all(rank.all_equal(buffer) for buffer in model.buffers())


def piled_up(rank):
    model = replicated(rank)
    own = [of_this_rank(rank, model, seed) for seed in range(3)]
    for seed in range(3):
        with model.no_sync() if seed < 2 else contextlib.nullcontext():
            model(inputs(rank, seed)).backward()
    assert holds_means(rank, model, [sum(each) for each in zip(*own, strict=True)])


def late(rank):
    """A layer that was frozen is trained again: its gradients have no place in the plan."""
    model = replicated(rank)
    model.first.requires_grad_(False)
    for seed in range(2):
        model.zero_grad()
        model(inputs(rank, seed)).backward()
    model.first.requires_grad_(True)
    assert step(rank, model, 5, extra=True)


@pytest.mark.parametrize("when", ["before backward", "in a hook", "between two backwards"])
@on_accelerators()
def test_a_layer_may_be_frozen_when_its_forward_has_run(rank, when):
    """It is trained again after the step, as two players do."""
    model = replicated(rank)
    plain = copy.deepcopy(model)
    for seed in range(4):
        clear(plain, model)
        for each in (plain, model):
            loss = each(inputs(rank, seed))
            if when == "between two backwards":
                loss.backward(retain_graph=True)
            if when == "in a hook":
                loss.register_hook(lambda gradient, each=each: each.last.requires_grad_(False) and None)
            else:
                each.last.requires_grad_(False)
            loss.backward()
            each.last.requires_grad_(True)
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()]
        assert holds_means(rank, model, own)


def twice_in_one_pass(rank):
    """Two modules, called in another order by each rank, in one backward."""
    models = [replicated(rank), replicated(rank)]
    for seed in range(3):
        clear(*models)
        order = models if rank.rank == 0 else models[::-1]
        own = [of_this_rank(rank, model, seed) for model in models]
        sum(model(inputs(rank, seed)) for model in order).backward()
        assert all(holds_means(rank, model, each) for model, each in zip(models, own, strict=True))


def weighted(rank):
    model = replicated(rank)
    own = of_this_rank(rank, model)
    with lockstep.accumulate(model, last=True, weight=1.0 + 2 * rank.rank):
        model(inputs(rank)).backward()
    assert holds_means(rank, model, [gradient / 2 for gradient in own])


def mean_with_a_graph(rank):
    value = torch.full((3,), rank.rank + 1.0, requires_grad=True)
    (mean,) = lockstep.loop.mean_over_ranks([value * value], rank.group)
    mean.sum().backward()
    assert (mean.tolist(), value.grad.tolist()) == ([2.5] * 3, [2 * (rank.rank + 1.0)] * 3)


@pytest.mark.parametrize("function", [piled_up, late, twice_in_one_pass, weighted, mean_with_a_graph])
@controls
@on_accelerators("control")
def test_what_a_step_may_be(rank, function):
    function(rank)


HOOKS = {"none": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook, "power": power.powerSGD_hook}


@pytest.mark.parametrize("kind", ["none", "fp16", pytest.param("power", marks=pytest.mark.numpy)])
@pytest.mark.usefixtures("draws_in_turn")
@controls
@on_accelerators("control")
def test_communication_hooks(rank, kind):
    """Hooks that lose nothing, or little; PowerSGD's futures communicate from their callbacks."""
    model = replicated(rank, lambda: nn.Linear(3, 3), bucket_cap_mb=1e-5)
    state = rank.group
    if kind == "power":
        state = power.PowerSGDState(rank.group, matrix_approximation_rank=3, start_powerSGD_iter=2)
    model.register_comm_hook(state, HOOKS[kind])
    for seed in range(4):
        x = inputs(rank, seed)
        assert makes_means(rank, model, lambda each, x=x: each(x).square().mean(), rtol=1e-2, atol=1e-2)


@on_accelerators()
def test_a_checkpoint_that_is_loaded_is_not_followed_by_what_has_come_before(rank):
    """It is loaded when buffers have come with a round."""
    model = replicated(rank, normed, buffer_policy="mean")
    assert steps(rank, model)
    saved = copy.deepcopy(model.state_dict()), lockstep.distributed.training_state_dict(model)
    assert steps(rank, model.train())
    model.load_state_dict(saved[0])
    lockstep.distributed.load_training_state_dict(model, saved[1])
    model.eval()(inputs(rank))
    assert all(torch.equal(value, saved[0][name]) for name, value in model.state_dict().items())
    assert step(rank, model.train())


# ------------------------------------------------------------------------------------ failed backward


@on_accelerators()
def test_after_a_failure_on_all_ranks_collectives_are_in_order(rank):
    """Sums of the program's own, and another module, come right behind a backward that has failed on all ranks."""
    model = replicated(rank)
    for number in range(10):
        assert error_of(model(inputs(rank), fails=True).backward) is ArithmeticError
        assert [each.item() for each in rank.gather(torch.tensor([number]))] == [number, number]
    assert step(rank, replicated(rank))
    assert step(rank, model)


@on_accelerators()
def test_a_failure_is_an_error_on_every_rank(rank):
    """Where not every parameter is used."""
    model = replicated(rank)
    for seed in range(4):
        error = error_of(model(inputs(rank, seed), fails=rank.rank == 1).backward)
        assert error is (ArithmeticError if rank.rank == 1 else PeerError)
        assert step(rank, model, seed)


def failure_of_rank_0(rank):
    """What its failure is on each rank."""
    if rank.rank == 0:
        return pytest.raises(ArithmeticError, match="a bad batch")
    told = (
        "rank 1: backward failed on rank 0.*No gradient has been handed out; every rank can go on with the next batch"
    )
    return pytest.raises(PeerError, match=rf"(?s){told} after zero_grad\(\)")


@controls
@on_accelerators("control")
def test_a_failure_is_told_at_once_also_in_a_settled_round(rank):
    model = replicated(rank, whole)
    for _ in range(2):
        assert steps(rank, model)
        with failure_of_rank_0(rank):
            model(inputs(rank), fails=rank.rank == 0).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert steps(rank, model, 2)


@pytest.mark.parametrize("policy", ["rank0", "mean"])
@on_accelerators()
def test_no_optimizer_steps_on_the_gradients_of_a_round_that_has_failed(rank, policy):
    """Rank 0 fails in some backward passes; each rank goes on with the next batch, without a step."""
    model = replicated(rank, normed, buffer_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for seed in range(8):
        optimizer.zero_grad()
        is_bad = seed in (3, 6)
        with failure_of_rank_0(rank) if is_bad else contextlib.nullcontext():
            model(inputs(rank, seed), fails=rank.rank == 0 and is_bad).backward()
            other.step()
            optimizer.step()
    model.eval()(inputs(rank))
    lockstep.check_in_sync(model)
    assert in_sync(rank, model)


@controls
@on_accelerators("control")
def test_a_round_that_has_failed_leaves_weights_and_buffers_as_they_were(rank):
    model = replicated(rank, normed, buffer_policy="mean")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        model(inputs(rank, seed)).backward()
        optimizer.step()
    loss = model(inputs(rank), fails=rank.rank == 0)
    before = copy.deepcopy(model.state_dict())
    with failure_of_rank_0(rank):
        loss.backward()
        optimizer.step()
    optimizer.step()  # which has nothing to step on, although nobody has called zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@on_accelerators()
def test_another_backward_is_told_at_once(rank):
    """Rank 1 alone runs a backward past forward, which pairs with the others' next one."""
    model, texts = replicated(rank, whole), []
    assert steps(rank, model)
    for seed in range(2):
        past = rank.rank == 1 and seed == 0
        try:
            (model.linear(inputs(rank, seed)).sum() if past else model(inputs(rank))).backward()
        except PeerError as error:
            texts.append(str(error))
    (text,) = texts
    assert "ranks 0 and 1 are not in the same backward pass" in text
    assert "No gradient has been handed out" in text
    assert step(rank, model)


@on_accelerators()
def test_another_layer_on_one_rank_is_told_at_once(rank):
    """Rank 0 alone replaces a layer, and later puts the old one back."""
    model = replicated(rank, whole)
    assert steps(rank, model)
    old = model.linear
    if rank.rank == 0:
        model.linear = nn.Linear(3, 1)
    for _ in range(2):
        with pytest.raises(AgreementError, match=r"linear\.weight is another object .* on rank 0"):
            model(inputs(rank)).backward()
    model.linear = old
    assert steps(rank, model, 2)


def twice():
    """A layer is used twice, and may be checkpointed; another one may be left out."""

    def forward(m, x, recomputes=False, leaves_out=False):
        used_twice = functools.partial(checkpoint, m.twice, use_reentrant=True) if recomputes else m.twice
        y = used_twice(m.last(used_twice(m.linear(x))).tanh())
        return (y if leaves_out else y + m.extra(x)).square().mean()

    return Applying(forward, (3, 3), **{name: nn.Linear(3, 3) for name in ("twice", "last", "extra")})


PIECES = [((0,), ()), ((1,), ()), ((0, 1), ()), ((0,), (1,)), ((1,), (0,))]


@pytest.mark.parametrize(("recomputing_ranks", "leaving_out"), PIECES)
@on_accelerators()
def test_a_gradient_that_comes_in_pieces_on_any_rank_is_reduced(rank, recomputing_ranks, leaving_out):
    """In two batches a layer comes in two pieces on some ranks."""
    model = replicated(rank, twice, bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(7):
        optimizer.zero_grad()
        leaves_out = rank.rank in leaving_out and seed == 3
        recomputes = rank.rank in recomputing_ranks and seed in (3, 5)
        x = inputs(rank, seed)
        own = own_gradients(model, lambda each, x=x, leaves_out=leaves_out: each(x, leaves_out=leaves_out))
        model(x, recomputes, leaves_out).backward()
        assert holds_means(rank, model, own)
        optimizer.step()
    lockstep.check_in_sync(model)


@on_accelerators()
def test_a_failure_that_is_told_where_there_is_no_gradient_keeps_nobody_waiting(rank):
    """Rank 1 hears of it in a backward whose graph has no parameter."""
    model = replicated(rank, whole)
    forward, fails = model.function, rank.rank == 0
    model.function = lambda m, x, nothing=False, **kwargs: x.sum() if nothing else forward(m, x, **kwargs)
    assert steps(rank, model)
    with failure_of_rank_0(rank):
        model(inputs(rank).requires_grad_(), fails=fails, nothing=not fails).backward()
    assert steps(rank, model, 2)


@controls
@on_accelerators("control")
def test_a_batch_left_out_leaves_no_gradient_on_any_rank(rank):
    """Rank 0 leaves it out, and rank 1 goes on without asking."""
    model = replicated(rank, normed, buffer_policy="mean")
    assert steps(rank, model)
    if rank.rank == 0:
        lockstep.loop.skip_batch(model)
    else:
        model(inputs(rank)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert step(rank, model)
    assert all(rank.all_equal(each) for each in model.buffers())


@on_accelerators()
def test_all_ranks_stop_at_the_same_step(rank):
    """In the last two steps rank 0 has a reason."""
    model, reasons, seen = replicated(rank, whole), [], []
    decisions = lockstep.loop.stop_when(lambda: rank.rank == 0 and bool(reasons), rank.group)
    for seed in range(5):
        reasons += [seed] * (seed == 3)
        model(inputs(rank, seed)).backward()
        seen.append(lockstep.should_stop(rank.group))
    del decisions
    assert seen == [False] * 3 + [True] * 2


@on_accelerators()
def test_a_layer_that_all_ranks_have_when_they_agree_anew(rank):
    """It comes in front of the others."""
    bare = lambda: nn.Linear(3, 3, bias=False)  # noqa: E731
    model = replicated(rank, lambda: nn.Sequential(bare(), bare()))
    for seed in range(6):
        if seed == 3:
            model.insert(0, rank.make(bare))
        x = inputs(rank, seed)
        assert makes_means(rank, model, lambda each, x=x: each(x).square().mean())


def loaded(model):
    """Other objects with the same values: ranks agree anew."""
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


@on_accelerators()
def test_what_takes_all_ranks_of_a_group_waits_for_the_end_of_the_pass(rank, store):
    """Two modules on two groups are changed on all ranks, in a pass that goes through them in another order on each."""
    group = for_accelerators(store, new_gloo_group(store, rank.rank, rank.world, 5.0))
    models = [replicated(rank, whole), lockstep.replicate(rank.make(whole), process_group=group)]
    for model in models:
        assert steps(rank, model)
        model.zero_grad()
        loaded(model)
        model.zero_grad()
    own = [of_this_rank(rank, model) for model in models]
    sum(model(inputs(rank)) for model in (models if rank.rank else models[::-1])).backward()
    assert all(holds_means(rank, model, each) for model, each in zip(models, own, strict=True))
    assert all(step(rank, model) for model in models)


def digits():
    """A buffer notes for each forward on which rank it was."""

    def forward(m, x, digit):
        m.digits = 10 * m.digits + digit
        return m.linear(x).sum()

    return Applying(forward, (3, 1), digits=torch.zeros(1))


@pytest.mark.parametrize("known", [True, False], ids=["lengths", "streams"])
@on_accelerators()
def test_buffers_of_the_next_rank_go_on_from_those_of_the_last(rank, known):
    """Rank 0 has fewer batches."""
    model = replicated(rank, digits)
    for _ in range(3):
        model(torch.ones(1, 3), rank.rank + 1).backward()
    own = [torch.ones(1, 3)] * (2 + 2 * rank.rank)
    for x in lockstep.batches(own if known else iter(own), model):
        model.zero_grad()
        model(x, rank.rank + 1).backward()
    assert model.digits.item() == 1111122.0


@pytest.mark.parametrize("failing", [0, 1])
@on_accelerators()
def test_a_gradient_that_another_thread_of_the_engine_sets_when_the_pass_has_failed_is_gone(rank, failing):
    """The pass fails in the thread of the CPU, while that of the accelerator is about to set a gradient."""
    is_at_gradient, has_raised = threading.Event(), threading.Event()

    def fail(grad):
        assert is_at_gradient.wait(30)
        raise ArithmeticError("a bad batch")

    def wait(grad):
        is_at_gradient.set()
        has_raised.wait(0.2)  # in vain, where the pass waits for this thread
        return grad

    model = replicated(rank, lambda: nn.Linear(3, 2))
    on_cpu = torch.ones((), device="cpu", requires_grad=True) * 1
    if rank.rank == failing:
        on_cpu.register_hook(fail)
        handle = model.weight.register_hook(wait)
    loss = model(inputs(rank)).sum().cpu() + on_cpu
    assert error_of(loss.backward) is (ArithmeticError if rank.rank == failing else PeerError)
    has_raised.set()
    (torch.ones((), requires_grad=True) * 1).backward()  # the thread has ended what it was at
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    if rank.rank == failing:
        handle.remove()
    model(inputs(rank)).sum().backward()
    assert all(rank.all_equal(parameter.grad) for parameter in model.parameters())
