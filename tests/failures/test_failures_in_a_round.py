"""Anything that fails on one rank in a round: copying in, the report, buffers, hooks, late gradients. The others are
told in the same step, and training goes on."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.errors import AgreementError, CommunicationError, OptionError, PeerError
from programs.networks import Applying
from programs.ranks import holds_means, on_ranks, replicated
from small_modules import error_of, fails_in_backward
from tensor_classes import Hiding, aten
from threaded import run_ranks


def two_layers(buffered=4):
    """And a buffer."""
    first, last = (nn.Linear(4, 4, bias=False) for _ in range(2))
    forward = lambda m, x: m.last(m.first(x)).square().sum()  # noqa: E731
    return Applying(forward, (), first=first, last=last, kept=torch.zeros(buffered))


def inputs(rank, seed=0):
    return torch.randn(2, 4, generator=rank.generator(seed), device="cpu").to(rank.device)


def mean_gradients(rank, model, seed):
    """Return True if backward makes the mean of what each rank would get alone."""
    x = inputs(rank, seed)
    own = torch.autograd.grad(model(x), list(model.parameters()))
    model.zero_grad()
    model(x).backward()
    return holds_means(rank, model, own)


def backward_of(rank, model, fails, seed=0):
    """What a backward raises, which fails between the layers if it is to."""
    model.zero_grad()
    hidden = model.first(inputs(rank, seed))
    return error_of(model.last(fails_in_backward(hidden, fails)).square().sum().backward)


class Unjoined(TorchDispatchMode):
    """Refuses to put one tensor together with others, as what is sent has to be; memory may run out there."""

    def __init__(self, tensor):
        super().__init__()
        self._tensor = tensor

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (aten.cat.default, aten.stack.default) and any(each is self._tensor for each in args[0]):
            raise ArithmeticError("not with me")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("buffered", [4, 200_000])
@on_ranks(2)
def test_what_cannot_be_sent_is_told(rank, buffered, modules):
    models = [replicated(rank, lambda: two_layers(buffered)) for _ in range(modules)]
    for model in models:
        mean_gradients(rank, model, 0)
        model.zero_grad()
    loss = sum(model(inputs(rank)) for model in models)
    with Unjoined(models[0].kept) if rank.rank == 0 else nullcontext():
        raised = error_of(loss.backward)
    others = [parameter.grad is not None for model in models[1:] for parameter in model.parameters()]
    went_on = [mean_gradients(rank, model, seed) for seed in (1, 2) for model in models]
    assert raised is (ArithmeticError, PeerError)[rank.rank]
    assert all(others)  # the rounds of the other modules are as good as ever
    assert all(went_on)


def hiding_buffer_fails(rank, size, replaced):
    """An error at each look at a buffer, until mended: what is raised, and whether training goes on."""
    model = two_layers()
    hiding = lambda size: Hiding(torch.full((size,), rank.rank + 1, dtype=torch.int8), torch.ones(1))  # noqa: E731
    model.kept = hiding(size)
    lockstep.replicate(model, process_group=rank.group)
    mean_gradients(rank, model, 0)
    raised = []
    while True:
        model.zero_grad()
        loss = model(inputs(rank))
        if replaced:
            model.kept = hiding(size + len(raised) + 1)
        model.kept.left = len(raised) if rank.rank == 0 else None
        try:
            loss.backward()
        except (ArithmeticError, PeerError, AgreementError) as error:
            raised.append((type(error), "ArithmeticError: not again" in str(error), type(error.__cause__)))
        else:
            return raised
        model.kept.left = None
        assert mean_gradients(rank, model, len(raised))
        assert rank.all_equal(model.kept.payload)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("size", [4, 300_000])
def test_a_buffer_that_fails_at_any_look_at_it_is_told(size, replaced):
    """Either before the report, which tells of it, or when ranks compare, since the module has changed or seems so."""
    failing, told = run_ranks(2, hiding_buffer_fails, size, replaced)
    nothing = type(None)
    amid = (ArithmeticError, False, nothing), (PeerError, False, nothing)
    compared = (AgreementError, True, ArithmeticError), (AgreementError, True, nothing)
    renewed = (ArithmeticError, False, nothing), (AgreementError, True, nothing)
    assert len(failing) == len(told) > 2
    expected = {compared, renewed} if replaced else {amid, compared} if size == 4 else {amid}
    assert set(zip(failing, told, strict=True)) == expected


class Uncopied(torch.Tensor):
    """A gradient that refuses to be copied."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            raise ArithmeticError("not me")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("buffered", [4, 200_000])
@pytest.mark.parametrize(("policy", "expected"), [("mean", [1.5, 2.5]), ("rank0", [1.0, 2.0])])
@on_ranks(2)
def test_a_late_gradient_that_cannot_be_sent_is_told(rank, buffered, policy, expected):
    """A parameter that is used for the first time: its gradient is reduced after all others, and fails on one rank.

    And what else the round has brought is not taken for that of the next one.
    """
    model = replicated(rank, lambda: two_layers(buffered), buffer_policy=policy)
    model.last.requires_grad_(False)
    for _ in range(3):
        model.zero_grad()
        model(inputs(rank)).backward()
    model.zero_grad()
    model.last.requires_grad_(True)
    loss = model(inputs(rank))

    def spoil(_):
        if rank.rank == 1:
            model.last.weight.grad = model.last.weight.grad.as_subclass(Uncopied)

    handle = model.first.weight.register_hook(spoil)
    raised = error_of(loss.backward)
    handle.remove()
    kept = []
    for seed in (1, 2):
        model.kept.fill_(seed + rank.rank)
        mean_gradients(rank, model, seed)
        kept += model.kept.unique().tolist()
    assert (raised, kept) == ((PeerError, ArithmeticError)[rank.rank], expected)


# ------------------------------------------------------------------------- on accelerators


@pytest.mark.usefixtures("sim")
@on_ranks(2, device="sim")
def test_a_weight_that_was_not_given_is_an_error_on_accelerators_too(rank):
    """Rank 0 gives a weight in one step, rank 1 never."""
    model = replicated(rank, two_layers)
    raised = []
    for step in range(8):
        model.zero_grad()
        with lockstep.accumulate(model, weight=3.0 if step == 3 and rank.rank == 0 else None):
            raised.append(error_of(model(inputs(rank, step)).square().sum().backward))
    assert raised == [None] * 3 + [OptionError] + [None] * 4
    assert [mean_gradients(rank, model, seed) for seed in (1, 2)] == [True, True]


# -------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("which", [0, 1])
@on_ranks(2)
def test_a_held_hook_that_raises_does_not_keep_other_modules_from_their_rounds(rank, which):
    """A user's hook raises on one rank; the gradients of all modules have been reduced before."""
    models = [replicated(rank, two_layers) for _ in range(2)]
    handle = None
    if rank.rank == 1:

        def hook(parameter):
            raise ArithmeticError("an optimizer")

        handle = models[which].first.weight.register_post_accumulate_grad_hook(hook)
    loss = sum(model(inputs(rank, seed)) for seed, model in enumerate(models))
    raised = error_of(loss.backward)
    equal = [rank.all_equal(parameter.grad) for model in models for parameter in model.parameters()]
    if handle is not None:
        handle.remove()
    assert (raised, equal) == [(None, [True] * 4), (ArithmeticError, [True] * 4)][rank.rank]


# ------------------------------------------------------------------------------- communication hooks


HOOKS = {
    "of a tensor": lambda rank: (None, lambda state, bucket: bucket.buffer()),
    "allreduce": lambda rank: (rank.group, default_hooks.allreduce_hook),
    "fp16": lambda rank: (rank.group, default_hooks.fp16_compress_hook),
}


@pytest.mark.parametrize("cap", [25, 1e-5])
@pytest.mark.parametrize("kind", HOOKS)
@on_ranks(2)
def test_a_failed_backward_is_told_through_communication_hooks(rank, kind, cap):
    model = replicated(rank, two_layers, bucket_cap_mb=cap)
    model.register_comm_hook(*HOOKS[kind](rank))
    for _ in range(2):
        model.zero_grad()
        model(inputs(rank)).backward()
    raised = backward_of(rank, model, rank.rank == 1)
    model.zero_grad()
    if kind == "fp16":
        model(inputs(rank)).backward()
        assert [rank.all_equal(parameter.grad) for parameter in model.parameters()] == [True, True]
    else:
        assert [mean_gradients(rank, model, seed) for seed in (1, 2)] == [True, True]
    assert raised is (PeerError, ArithmeticError)[rank.rank]


@pytest.mark.usefixtures("draws_in_turn")
@pytest.mark.numpy
def test_a_failed_backward_under_power_sgd():
    """Three all-reduces a bucket, some begun by callbacks; its state goes on alike on all ranks."""

    def train(rank):
        model = replicated(rank, two_layers, bucket_cap_mb=1e-5)
        state = power.PowerSGDState(rank.group, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, power.powerSGD_hook)
        raised = [backward_of(rank, model, step == 3 and rank.rank == 0, step) for step in range(6)]
        assert raised == [None] * 3 + [(ArithmeticError, PeerError)[rank.rank]] + [None] * 2
        assert [rank.all_equal(parameter.grad) for parameter in model.parameters()] == [True, True]
        return state.iter

    one, other = run_ranks(2, train)
    assert one == other


def hook_raises(rank, when, cap):
    """A communication hook raises on one rank, once, before it communicates or after."""
    model = replicated(rank, two_layers, bucket_cap_mb=cap)
    failures = [ArithmeticError("a hook")] if rank.rank == 1 else []

    def hook(state, bucket):
        if when == "before" and failures:
            raise failures.pop()
        future = default_hooks.allreduce_hook(rank.group, bucket)
        if when == "after" and failures:
            raise failures.pop()
        if when == "later" and failures:
            error = failures.pop()

            def fail(_):
                raise error

            return future.then(fail)
        return future

    model.register_comm_hook(None, hook)
    raised = error_of(lambda: model(inputs(rank)).backward())
    model.zero_grad()
    return raised, error_of(lambda: mean_gradients(rank, model, 1))


@pytest.mark.parametrize("cap", [25, 1e-5])
@pytest.mark.parametrize("when", ["before", "later"])
def test_a_communication_hook_that_raises_on_one_rank_is_told(when, cap):
    told, failing = run_ranks(2, hook_raises, when, cap)
    assert told == (PeerError, None)
    assert issubclass(failing[0], ArithmeticError if when == "before" else RuntimeError)
    assert failing[1] is None


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
def test_a_rank_whose_communication_hook_raises_tells_it_and_waits_for_nobody(hosts):
    """On ``shm`` a collective that is to be waited for at once goes on while it is waited for."""
    told = threading.Event()

    def call(rank):
        failures = [ArithmeticError("a hook")] if rank.rank == 1 else []

        def hook(state, bucket):
            if failures:
                raise failures.pop()
            return bucket.buffer()

        model = replicated(rank, two_layers)
        model.register_comm_hook(None, hook)
        raised = error_of(lambda: model(inputs(rank)).backward())
        if rank.rank == 0:
            told.set()
        return raised, told.wait(10)  # it does nothing more before the other one knows

    assert run_ranks(2, call, hosts=hosts, group_timeout=5) == [(PeerError, True), (ArithmeticError, True)]


@pytest.mark.parametrize("hosts", ["", "aa"])
def test_a_hook_that_raises_amid_its_communication_ends_it_on_every_rank(hosts):
    told, failing = run_ranks(2, hook_raises, "after", 25, group_timeout=2, hosts=hosts)
    assert issubclass(told[0], RuntimeError)  # of the hook's own collective: at once, or after the time-out
    assert issubclass(told[1], RuntimeError)
    assert failing == (ArithmeticError, CommunicationError)
