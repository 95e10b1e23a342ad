"""Ranks with an accelerator each, simulated, and a group that speaks for accelerators alone, as one of NCCL does."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import AgreementError, PeerError
from small_modules import error_of
from threaded import for_accelerators, new_gloo_group, run_ranks

pytestmark = pytest.mark.usefixtures("sim")

on_accelerators = functools.partial(run_ranks, 2, device="sim", group_timeout=5)


class Net(nn.Module):
    """Layers, one of them used on demand, a buffer, and a backward that fails on demand."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.extra = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, extra=False, fails=False):
        y = self.last(self.norm(self.first(x)).tanh())
        y = y + self.extra(x) if extra else y
        return (Fails.apply(y) if fails else y).square().mean()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("a bad batch")


def replicated(rank, make=Net, **options):
    return lockstep.replicate(rank.make(make), process_group=rank.group, **options)


def inputs(rank, seed=0):
    return torch.randn(4, 3, generator=torch.Generator(rank.device).manual_seed(10 * seed + rank.rank))


def own_gradients(model, *args, **kwargs):
    """The gradients of this rank alone; zeros where there is none. Buffers are as before afterwards."""
    before = [buffer.clone() for buffer in model.buffers()]
    parameters = list(model.parameters())
    found = torch.autograd.grad(model(*args, **kwargs), parameters, allow_unused=True)
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def holds_means(rank, model, own, tolerance=1e-6):
    """Return True if parameters have the means of what all ranks have given, on this rank's accelerator."""
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        wanted = sum(rank.gather(gradient)) / rank.world
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert got.device == rank.device
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
        assert rank.all_equal(got)
    return True


def step(rank, model, seed=0, **kwargs):
    """Return True if a backward makes means."""
    model.zero_grad()
    own = own_gradients(model, inputs(rank, seed), **kwargs)
    model(inputs(rank, seed), **kwargs).backward()
    return holds_means(rank, model, own)


# ------------------------------------------------------------------------------------- right gradients


def several_steps(rank, cap):
    model = replicated(rank, bucket_cap_mb=cap)
    right = [step(rank, model, seed, extra=seed == 2 and rank.rank == 0) for seed in range(5)]
    lockstep.check_in_sync(model)
    return all(right) and all(rank.all_equal(buffer) for buffer in model.buffers())


@pytest.mark.parametrize("cap", [None, 1e-5])
def test_gradients_are_means_whichever_parameters_are_used(cap):
    assert on_accelerators(several_steps, cap) == [True, True]


def piled_up(rank):
    model = replicated(rank)
    own = [own_gradients(model, inputs(rank, seed)) for seed in range(3)]
    for seed in range(3):
        with model.no_sync() if seed < 2 else contextlib.nullcontext():
            model(inputs(rank, seed)).backward()
    return holds_means(rank, model, [sum(each) for each in zip(*own, strict=True)])


def late(rank):
    """A layer that was frozen is trained again: its gradients have no place in the plan."""
    model = replicated(rank)
    model.first.requires_grad_(False)
    for seed in range(2):
        model.zero_grad()
        model(inputs(rank, seed)).backward()
    model.first.requires_grad_(True)
    return step(rank, model, 5, extra=True)


def frozen_meanwhile(rank, when):
    """A layer is frozen when its forward has run, and trained again after the step, as two players do."""
    model, right = replicated(rank), []
    plain = copy.deepcopy(model)
    for seed in range(4):
        for each in (plain, model):
            each.zero_grad()
            loss = each(inputs(rank, seed))
            if when == "between two backwards":
                loss.backward(retain_graph=True)
            if when == "in a hook":
                loss.register_hook(lambda gradient, each=each: each.last.requires_grad_(False) and None)
            else:
                each.last.requires_grad_(False)
            loss.backward()
            each.last.requires_grad_(True)
        right.append(
            holds_means(rank, model, [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()])
        )
    return all(right)


@pytest.mark.parametrize("when", ["before backward", "in a hook", "between two backwards"])
def test_a_layer_may_be_frozen_when_its_forward_has_run(when):
    assert on_accelerators(frozen_meanwhile, when) == [True, True]


def twice_in_one_pass(rank):
    """Two modules, called in another order by each rank, in one backward."""
    models = [replicated(rank), replicated(rank)]
    for seed in range(3):
        for model in models:
            model.zero_grad()
        order = models if rank.rank == 0 else models[::-1]
        own = [own_gradients(model, inputs(rank, seed)) for model in models]
        sum(model(inputs(rank, seed)) for model in order).backward()
        assert all(holds_means(rank, model, each) for model, each in zip(models, own, strict=True))
    return True


def weighted(rank):
    model = replicated(rank)
    own = own_gradients(model, inputs(rank))
    with lockstep.accumulate(model, last=True, weight=1.0 + 2 * rank.rank):
        model(inputs(rank)).backward()
    return holds_means(rank, model, [gradient / 2 for gradient in own])


def mean_with_a_graph(rank):
    value = torch.full((3,), rank.rank + 1.0, requires_grad=True)
    (mean,) = lockstep.loop.mean_over_ranks([value * value], rank.group)
    mean.sum().backward()
    return mean.tolist() == [2.5] * 3 and value.grad.tolist() == [2 * (rank.rank + 1.0)] * 3


@pytest.mark.parametrize("function", [piled_up, late, twice_in_one_pass, weighted, mean_with_a_graph])
@pytest.mark.parametrize("control", [True, False], ids=["control", "device"])
def test_what_a_step_may_be(function, control):
    assert on_accelerators(function, control=control) == [True, True]


HOOKS = {
    "none": (None, default_hooks.allreduce_hook),
    "fp16": (None, default_hooks.fp16_compress_hook),
}


def through_hooks(rank, kind):
    """Hooks that lose nothing, or little; PowerSGD's futures communicate from their callbacks."""
    model = replicated(rank, make=functools.partial(nn.Linear, 3, 3), bucket_cap_mb=1e-5)
    if kind == "power":
        state = power.PowerSGDState(rank.group, matrix_approximation_rank=3, start_powerSGD_iter=2)
        model.register_comm_hook(state, power.powerSGD_hook)
    else:
        model.register_comm_hook(rank.group, HOOKS[kind][1])
    for seed in range(4):
        model.zero_grad()
        own = torch.autograd.grad(model(inputs(rank, seed)).square().mean(), list(model.parameters()))
        model(inputs(rank, seed)).square().mean().backward()
        holds_means(rank, model, own, tolerance=1e-2)
    return True


@pytest.mark.parametrize("kind", [*HOOKS, pytest.param("power", marks=pytest.mark.numpy)])
@pytest.mark.parametrize("control", [True, False], ids=["control", "device"])
def test_communication_hooks(kind, draws_in_turn, control):
    assert on_accelerators(through_hooks, kind, control=control) == [True, True]


def goes_back(rank):
    """A checkpoint is loaded when buffers have come with a round."""
    model = replicated(rank, make=Normed, buffer_policy="mean")
    assert all(step(rank, model, seed) for seed in range(3))
    saved = copy.deepcopy(model.state_dict()), lockstep.distributed.training_state_dict(model)
    assert all(step(rank, model.train(), seed) for seed in range(3))
    model.load_state_dict(saved[0])
    lockstep.distributed.load_training_state_dict(model, saved[1])
    model.eval()(inputs(rank))
    same = [torch.equal(value, saved[0][name]) for name, value in model.state_dict().items()]
    return all(same), step(rank, model.train())


def test_a_checkpoint_that_is_loaded_is_not_followed_by_what_has_come_before():
    assert on_accelerators(goes_back) == [(True, True)] * 2


# ------------------------------------------------------------------------------------ failed backward


def all_fail(rank):
    """Sums of the program's own, and another module, come right behind a backward that has failed on all ranks."""
    model, seen = replicated(rank), []
    for _ in range(10):
        raised = error_of(lambda: model(inputs(rank), fails=True).backward())
        seen.append((raised, [each.item() for each in rank.gather(torch.tensor([len(seen)]))]))
    other = replicated(rank)
    return seen == [(ArithmeticError, [n, n]) for n in range(10)] and step(rank, other) and step(rank, model)


def test_after_a_failure_on_all_ranks_collectives_are_in_order():
    assert on_accelerators(all_fail) == [True, True]


def one_fails_unusually(rank):
    """Not every parameter is used."""
    model, seen = replicated(rank), []
    for seed in range(4):
        raised = error_of(lambda seed=seed: model(inputs(rank, seed), fails=rank.rank == 1).backward())
        seen.append((raised, step(rank, model, seed)))
    return seen


def test_a_failure_is_an_error_on_every_rank():
    told, failing = on_accelerators(one_fails_unusually)
    assert told == [(PeerError, True)] * 4
    assert failing == [(ArithmeticError, True)] * 4


class Whole(nn.Module):
    """Every parameter is used in every round."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, fails=False):
        y = self.layer(x).sum()
        return Fails.apply(y) if fails else y


def one_fails_quietly(rank):
    model = replicated(rank, make=Whole)
    seen = []
    for _ in range(2):
        assert all(step(rank, model, seed) for seed in range(3))
        with pytest.raises((ArithmeticError, PeerError)) as caught:
            model(inputs(rank), fails=rank.rank == 0).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        seen.append((caught.type, str(caught.value)))
    assert all(step(rank, model, seed) for seed in range(2))
    return seen


@pytest.mark.parametrize("control", [True, False], ids=["control", "device"])
def test_a_failure_is_told_at_once_also_in_a_settled_round(control):
    failing, told = on_accelerators(one_fails_quietly, control=control)
    assert [raised for raised, _ in failing] == [ArithmeticError] * 2
    for raised, text in told:
        assert raised is PeerError
        assert "rank 1: backward failed on rank 0" in text
        assert "No gradient has been handed out" in text


class Normed(Whole):
    """The same, with buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, fails=False):
        return super().forward(self.norm(x), fails)


def optimizer_steps(rank, policy):
    """Rank 0 fails in some backward passes; each rank goes on with the next batch, without a step."""
    model = replicated(rank, make=Normed, buffer_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    seen = []
    for seed in range(8):
        optimizer.zero_grad()
        try:
            model(inputs(rank, seed), fails=rank.rank == 0 and seed in (3, 6)).backward()
            other.step()
            optimizer.step()
        except (ArithmeticError, PeerError) as error:
            seen.append((seed, type(error).__name__, str(error)))
    model.eval()(inputs(rank))
    lockstep.check_in_sync(model)
    return seen, all(rank.all_equal(each) for each in model.state_dict().values())


@pytest.mark.parametrize("policy", ["rank0", "mean"])
def test_no_optimizer_steps_on_the_gradients_of_a_round_that_has_failed(policy):
    (failing, in_sync), (told, also) = on_accelerators(optimizer_steps, policy)
    assert (in_sync, also) == (True, True)
    assert [(seed, name) for seed, name, _ in failing] == [(3, "ArithmeticError"), (6, "ArithmeticError")]
    assert [(seed, name) for seed, name, _ in told] == [(3, "PeerError"), (6, "PeerError")]
    for _, _, text in told:
        assert "rank 1: backward failed on rank 0" in text
        assert "No gradient has been handed out; every rank can go on with the next batch after zero_grad()" in text


def buffers_of_a_failed_round(rank):
    """Parameters and buffers of rank 1 before its forward, where rank 0 fails, and after its step."""
    model = replicated(rank, make=Normed, buffer_policy="mean")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        model(inputs(rank, seed)).backward()
        optimizer.step()
    loss = model(inputs(rank), fails=rank.rank == 0)
    before = [each.clone() for each in model.state_dict().values()]
    error = error_of(lambda: (loss.backward(), optimizer.step()))
    optimizer.step()  # which has nothing to step on, although nobody has called zero_grad()
    return error, [torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True)]


@pytest.mark.parametrize("control", [True, False], ids=["control", "device"])
def test_a_round_that_has_failed_leaves_weights_and_buffers_as_they_were(control):
    failing, told = on_accelerators(buffers_of_a_failed_round, control=control)
    assert failing == (ArithmeticError, [True] * 7)
    assert told == (PeerError, [True] * 7)


def another_backward(rank):
    """Rank 1 alone runs a backward past forward, which pairs with the others' next one."""
    model = replicated(rank, make=Whole)
    assert all(step(rank, model, seed) for seed in range(3))
    texts = []
    for seed in range(2):
        try:
            (model.layer(inputs(rank, seed)).sum() if rank.rank == 1 and seed == 0 else model(inputs(rank))).backward()
        except PeerError as error:
            texts.append(str(error))
    return texts, step(rank, model)


def test_another_backward_is_told_at_once():
    for texts, right in on_accelerators(another_backward):
        (text,) = texts
        assert "ranks 0 and 1 are not in the same backward pass" in text
        assert "No gradient has been handed out" in text
        assert right


def another_layer(rank):
    """Rank 0 alone replaces a layer, and later puts the old one back."""
    model = replicated(rank, make=Whole)
    assert all(step(rank, model, seed) for seed in range(3))
    old = model.layer
    if rank.rank == 0:
        model.layer = nn.Linear(3, 1)
    for _ in range(2):
        with pytest.raises(AgreementError, match=r"layer\.weight is another object .* on rank 0"):
            model(inputs(rank)).backward()
    model.layer = old
    return all(step(rank, model, seed) for seed in range(2))


def test_another_layer_on_one_rank_is_told_at_once():
    assert on_accelerators(another_layer) == [True, True]


class Twice(nn.Module):
    """A layer is used twice, and may be checkpointed; another one may be left out."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last, self.extra = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, recomputes=False, leaves_out=False):
        twice = functools.partial(checkpoint, self.twice, use_reentrant=True) if recomputes else self.twice
        y = twice(self.last(twice(self.first(x))).tanh())
        return (y if leaves_out else y + self.extra(x)).square().mean()


def recomputing(rank, recomputing_ranks, leaving_out):
    """In two batches a layer comes in two pieces on some ranks."""
    model = replicated(rank, make=Twice, bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(7):
        optimizer.zero_grad()
        leaves_out = rank.rank in leaving_out and seed == 3
        recomputes = rank.rank in recomputing_ranks and seed in (3, 5)
        own = own_gradients(model, inputs(rank, seed), leaves_out=leaves_out)
        model(inputs(rank, seed), recomputes, leaves_out).backward()
        assert holds_means(rank, model, own)
        optimizer.step()
    lockstep.check_in_sync(model)
    return True


PIECES = [((0,), ()), ((1,), ()), ((0, 1), ()), ((0,), (1,)), ((1,), (0,))]


@pytest.mark.parametrize(("recomputing_ranks", "leaving_out"), PIECES)
def test_a_gradient_that_comes_in_pieces_on_any_rank_is_reduced(recomputing_ranks, leaving_out):
    assert on_accelerators(recomputing, recomputing_ranks, leaving_out) == [True, True]


class Through(Whole):
    """On demand the output has a graph, but no parameter in it."""

    def forward(self, x, fails=False, nothing=False):
        return x.sum() if nothing else super().forward(x, fails)


def told_without_a_gradient(rank):
    """Rank 1 hears of a failure in a backward that gives it no gradient."""
    model = replicated(rank, make=Through)
    assert all(step(rank, model, seed) for seed in range(3))
    x, fails = inputs(rank).requires_grad_(), rank.rank == 0
    raised = error_of(lambda: model(x, fails=fails, nothing=not fails).backward())
    return raised, all(step(rank, model, seed) for seed in range(2))


def test_a_failure_that_is_told_where_there_is_no_gradient_keeps_nobody_waiting():
    assert on_accelerators(told_without_a_gradient) == [(ArithmeticError, True), (PeerError, True)]


def goes_on_after_a_batch_left_out(rank):
    """Rank 0 leaves out a batch, and rank 1 goes on without asking."""
    model = replicated(rank, make=Normed, buffer_policy="mean")
    assert all(step(rank, model, seed) for seed in range(3))
    if rank.rank == 0:
        lockstep.loop.skip_batch(model)
    else:
        model(inputs(rank)).backward()
    gone = all(parameter.grad is None for parameter in model.parameters())
    return gone, step(rank, model) and all(rank.all_equal(each) for each in model.buffers())


@pytest.mark.parametrize("control", [True, False], ids=["control", "device"])
def test_a_batch_left_out_leaves_no_gradient_on_any_rank(control):
    assert on_accelerators(goes_on_after_a_batch_left_out, control=control) == [(True, True)] * 2


def asked_to_stop(rank):
    """Return True if to stop, after each of some steps; in the last two rank 0 has a reason."""
    model, reasons, seen = replicated(rank, make=Whole), [], []
    decisions = lockstep.loop.stop_when(lambda: rank.rank == 0 and bool(reasons), rank.group)
    for seed in range(5):
        reasons += [seed] * (seed == 3)
        model(inputs(rank, seed)).backward()
        seen.append(lockstep.should_stop(rank.group))
    del decisions
    return seen


def test_all_ranks_stop_at_the_same_step():
    assert on_accelerators(asked_to_stop) == [[False] * 3 + [True] * 2] * 2


class Growing(nn.Module):
    """Layers that may become more."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def grows(rank):
    """A layer comes in front of the others."""
    model = replicated(rank, make=Growing)
    right = [step(rank, model, seed) for seed in range(3)]
    model.layers.insert(0, rank.make(lambda: nn.Linear(3, 3, bias=False)))
    return right + [step(rank, model, seed) for seed in range(3)]


def test_a_layer_that_all_ranks_have_when_they_agree_anew():
    assert on_accelerators(grows) == [[True] * 6] * 2


def loaded(model):
    """Other objects with the same values: ranks agree anew."""
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def go_through_groups_in_other_orders(rank, store):
    """Both modules are changed on all ranks, in a pass that goes through them in another order on each."""
    group = for_accelerators(store, new_gloo_group(store, rank.rank, rank.world, 5.0))
    models = [replicated(rank, make=Whole), lockstep.replicate(rank.make(Whole), process_group=group)]
    for model in models:
        assert all(step(rank, model, seed) for seed in range(3))
        model.zero_grad()
        loaded(model)
        model.zero_grad()
    own = [own_gradients(model, inputs(rank)) for model in models]
    sum(model(inputs(rank)) for model in (models if rank.rank else models[::-1])).backward()
    right = [holds_means(rank, model, each) for model, each in zip(models, own, strict=True)]
    return right + [step(rank, model) for model in models]


def test_what_takes_all_ranks_of_a_group_waits_for_the_end_of_the_pass():
    assert on_accelerators(go_through_groups_in_other_orders, dist.HashStore()) == [[True] * 4] * 2


class Digits(nn.Module):
    """A buffer notes for each forward on which rank it was."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("digits", torch.zeros(1))

    def forward(self, x, digit):
        self.digits = 10 * self.digits + digit
        return self.layer(x).sum()


def noted(rank, known):
    """Rank 0 has fewer batches."""
    model = replicated(rank, make=Digits)
    for _ in range(3):
        model(torch.ones(1, 3), rank.rank + 1).backward()
    own = [torch.ones(1, 3)] * (2 + 2 * rank.rank)
    for x in lockstep.batches(own if known else iter(own), model):
        model.zero_grad()
        model(x, rank.rank + 1).backward()
    return model.digits.item()


@pytest.mark.parametrize("known", [True, False], ids=["lengths", "streams"])
def test_buffers_of_the_next_rank_go_on_from_those_of_the_last(known):
    assert on_accelerators(noted, known) == [1111122.0] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_gradient_that_another_thread_of_the_engine_sets_when_the_pass_has_failed_is_gone(failing):
    """The pass fails in the thread of the CPU, while that of the accelerator is about to set a gradient."""

    def call(rank):
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
        error = error_of(loss.backward)
        has_raised.set()
        (torch.ones((), requires_grad=True) * 1).backward()  # the thread has ended what it was at
        left = [parameter.grad for parameter in model.parameters()]
        if rank.rank == failing:
            handle.remove()
        model(inputs(rank)).sum().backward()
        return error, left, all(rank.all_equal(parameter.grad) for parameter in model.parameters())

    errors = [ArithmeticError if rank == failing else PeerError for rank in range(2)]
    assert on_accelerators(call) == [(error, [None, None], True) for error in errors]
