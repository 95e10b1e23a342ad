"""Gradients of every kind: dtypes, layouts, optimizers, hooks, freezing, second order, failures; what is counted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.profiler import profile

import lockstep
from lockstep.errors import LockstepError, PeerError
from programs.networks import Applying, mlp
from programs.ranks import on_ranks, replicated, rows, same_as_one_process, scalars, scalars_of
from small_modules import chain, fails_in_backward, one_weight, x_of
from threaded import run_ranks


def network():
    return mlp(3, 4, 4, 1).double()


def mean_square(module, step, rank):
    return module(rows(step, rank)).square().mean()


# --------------------------------------------------------------------------------- dtypes and layouts


def four_dtypes():
    """Parameters of four dtypes in one module, one of them complex."""

    def forward(m, x):
        x = m.fine(x)
        x = x + m.linear(x.float()).double() + m.coarse(x.bfloat16()).double()
        return (x * m.phase).abs()

    phase = nn.Parameter(torch.randn(2, dtype=torch.cdouble))
    return Applying(forward, (2, 2), fine=nn.Linear(3, 2).double(), coarse=nn.Linear(2, 2).bfloat16(), phase=phase)


@pytest.mark.parametrize("cap", [None, 1e-5], ids=["one bucket each", "many buckets"])
@on_ranks(2)
def test_dtypes_side_by_side(rank, cap):
    module = replicated(rank, four_dtypes, bucket_cap_mb=cap)
    same_as_one_process(rank, module, mean_square, rtol=None, atol=None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float64], ids=str)
@on_ranks(2)
def test_one_dtype_alone(rank, dtype):
    """So the report rides in a bucket of that dtype, or on its own."""
    weight, unused = torch.full((3,), 2.0, dtype=dtype), torch.ones(2, dtype=dtype)
    module = replicated(rank, lambda: nn.ParameterList([weight, unused]))
    for _ in range(3):
        module.zero_grad()
        (module[0] * (rank.rank + 1)).abs().sum().backward()
    assert module[1].grad is None
    assert torch.equal(module[0].grad, torch.full((3,), 1.5, dtype=dtype))


@on_ranks(4)
def test_sums_do_not_overflow_in_half_precision(rank):
    """Divided before they are summed."""
    module = replicated(rank, lambda: one_weight().half())
    assert scalars_of(module, loss=module(torch.full((1, 1), 2.0**15, dtype=torch.half)).sum()) == [2.0**15]


def of_images(module, step, rank):
    return module(rows(step, rank, 2, 3, 6, 6)).square().mean()


@pytest.mark.parametrize("cap", [None, 1e-4])
@on_ranks(2)
def test_gradients_are_laid_out_as_their_parameters(rank, cap):
    module = rank.make(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2)))
    module.double()[1].to(memory_format=torch.channels_last)
    module[3].weight = nn.Parameter(module[3].weight.detach().t().contiguous().t())  # strides the other way round
    strides = [parameter.stride() for parameter in module.parameters()]

    def laid_out(each):
        assert [parameter.grad.stride() for parameter in each.parameters()] == strides

    lockstep.replicate(module, process_group=rank.group, bucket_cap_mb=cap)
    same_as_one_process(rank, module, of_images, then=laid_out)


def tied():
    """A weight under two names and used three times; a layer registered twice."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    forward = lambda m, x: m.again(m.second(m.first(x).tanh()).tanh())  # noqa: E731
    return Applying(forward, first=first, second=second, again=first)


def large():
    """A gradient of 4 MiB, which travels alone, among small ones."""

    def forward(m, x):
        x = m.linear(x).tanh()
        return torch.cat([m.last(x + (x @ m.large.weight[:8])), m.large(x)], 1)

    return Applying(forward, (3, 8), large=nn.Linear(8, 65536, bias=False), last=nn.Linear(8, 1))


@pytest.mark.parametrize("make", [tied, large])
@on_ranks(2)
def test_shared_and_large_parameters(rank, make):
    same_as_one_process(rank, replicated(rank, lambda: make().double()), mean_square)


# ------------------------------------------------------------------------------ optimizers and scaling

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adam foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adam fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


@on_ranks(2)
def test_optimizers_and_clipping(rank):
    for make in OPTIMIZERS.values():
        module = replicated(rank, network, bucket_cap_mb=1e-4)
        clip = lambda each: nn.utils.clip_grad_norm_(each.parameters(), 0.1)  # noqa: E731
        same_as_one_process(rank, module, mean_square, optimizer=make, then=clip)


@on_ranks(2)
def test_gradient_scaling_agrees_on_overflow(rank):
    """Overflow on one rank: both leave the step out, and halve the scale."""
    module = replicated(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    values = []
    for batch in (x_of(rank), x_of(rank) * (float("inf") if rank.rank else 1.0), x_of(rank)):
        optimizer.zero_grad()
        scaler.scale(module(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        values.append((next(module.parameters()).item(), scaler.get_scale()))
    assert values == [(-0.5, 4.0), (-0.5, 2.0), (-2.0, 2.0)]


def in_bfloat16(module, step, rank):
    with torch.autocast("cpu", torch.bfloat16):
        return module(rows(step, rank, dtype=torch.float32)).float().square().mean()


@on_ranks(2)
def test_autocast(rank):
    module = replicated(rank, lambda: network().float())
    same_as_one_process(rank, module, in_bfloat16, steps=1, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("registered", ["before", "after"])
@on_ranks(2)
def test_hooks_for_accumulated_gradients_see_reduced_ones(rank, registered):
    """An optimizer for each parameter, which steps and drops the gradient as soon as it is there."""
    module = rank.make(network)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in module.parameters()}
    seen = []

    def step(parameter):
        seen.append(parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def register():
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    if registered == "before":
        register()
    lockstep.replicate(module, process_group=rank.group, bucket_cap_mb=1e-4)
    if registered == "after":
        register()
    reference = copy.deepcopy(module)
    whole = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        mean_square(module, number, rank.rank).backward()
        whole.zero_grad()
        (sum(mean_square(reference, number, r) for r in range(rank.world)) / rank.world).backward()
        whole.step()
    assert len(seen) == 3 * len(optimizers)
    assert all(parameter.grad is None for parameter in module.parameters())
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-13)
    with module.no_sync():
        mean_square(module, 0, rank.rank).backward()
    assert len(seen) == 3 * len(optimizers)  # what is this rank's alone waits for the ranks
    mean_square(module, 0, rank.rank).backward()
    assert len(seen) == 4 * len(optimizers)
    lockstep.check_in_sync(module)


@on_ranks(2)
def test_hooks_of_tensors_see_this_ranks_gradient(rank):
    """They see what autograd has computed here, and what they return is what is averaged."""
    module, seen = replicated(rank), []
    module.weight.register_hook(lambda grad: seen.append(grad.item()))
    module.weight.register_hook(lambda grad: 10 * grad)
    assert scalars_of(module, loss=module(x_of(rank)).sum()) == [15.0]
    assert seen == [rank.rank + 1.0]


# ------------------------------------------------------------------------------- gradients that are kept

WAYS = {
    "whole": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "view": lambda grad: grad[:2],
    "other view": lambda grad: grad.view(-1),
    "as numpy": lambda grad: torch.from_numpy(grad.numpy()),
}


def two_parameters(rank, size=4):
    return replicated(rank, lambda: nn.ParameterList([torch.ones(size), torch.ones(3)]))


@pytest.mark.parametrize("size", [4, 1 << 20], ids=["in a bucket", "alone"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_gradient_that_somebody_keeps_is_not_overwritten(rank, way, size):
    module, kept = two_parameters(rank, size), []
    for step in range(4):
        module.zero_grad()
        sum((p * (step + rank.rank)).sum() for p in module).backward()
        kept.append(WAYS[way](module[0].grad))
    assert [each.flatten()[0].item() for each in kept] == [0.5, 1.5, 2.5, 3.5]


@on_ranks(2)
def test_memory_of_gradients_that_the_program_has_freed_is_not_written(rank):
    module, found = two_parameters(rank), []
    for step in range(3):
        module.zero_grad()
        sum((p * (step + rank.rank)).sum() for p in module).backward()
        found += [p.grad[0].item() for p in module]
        module[0].grad.untyped_storage().resize_(0)
    assert found == [0.5, 0.5, 1.5, 1.5, 2.5, 2.5]


@on_ranks(2)
def test_gradients_that_nobody_keeps_stay_where_they_are(rank):
    module, places = two_parameters(rank), []
    for step in range(6):
        module.zero_grad(set_to_none=step != 3)
        sum(p.sum() for p in module).backward()
        places.append(module[0].grad.data_ptr())
        assert module[0].grad.untyped_storage().data_ptr() == module[1].grad.untyped_storage().data_ptr()
    assert len(set(places[1:])) == 1


# -------------------------------------------------------------------------- freezing, calling, second order


@on_ranks(2)
def test_whatever_is_called(rank):
    module = Applying(lambda m, x: m.decoder(m.encoder(x)), (), encoder=one_weight(), decoder=one_weight())
    module.encode = lambda x: module.encoder(x)
    lockstep.replicate(module, process_group=rank.group)
    for use, wanted in (
        (module.encode, [1.5, None]),
        (module.encoder, [1.5, None]),
        (lambda x: module.decoder(module.encode(x)), [1.5, 1.5]),
        (lambda x: torch.func.functional_call(module, dict(module.named_parameters()), (x,)), [1.5, 1.5]),
        (lambda x: x @ module.decoder.weight, [None, 1.5]),
    ):
        assert scalars_of(module, loss=use(x_of(rank)).sum()) == wanted


@on_ranks(2)
def test_autograd_grad_is_this_ranks(rank):
    module = replicated(rank)
    (grad,) = torch.autograd.grad(module(x_of(rank)).sum(), module.weight)
    assert (grad.item(), module.weight.grad) == (rank.rank + 1.0, None)
    assert lockstep.loop.mean_over_ranks(grad, rank.group).item() == 1.5
    assert scalars_of(module, loss=module(x_of(rank)).sum()) == [1.5]


# ------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("weight", [None, 1.0])
@pytest.mark.parametrize("cap", [None, 1e-6], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("failing", [{1}, {0}, {0, 1}])
@on_ranks(2)
def test_backward_that_fails_on_one_rank_fails_on_all_and_is_forgotten(rank, failing, cap, weight):
    """Between two layers; all go on with another branch."""
    module = replicated(rank, lambda: chain(3), bucket_cap_mb=cap)
    module(x_of(rank)).sum().backward()
    message = "a bad batch" if rank.rank in failing else f"backward failed on rank {min(failing)}"
    for _ in range(2):
        module.zero_grad()
        y = module[1](fails_in_backward(module[0](x_of(rank)), rank.rank in failing))
        error = ArithmeticError if rank.rank in failing else PeerError
        with lockstep.accumulate(module, weight=weight), pytest.raises(error, match=message):
            y.sum().backward()
    module.zero_grad()
    with lockstep.accumulate(module, weight=weight):
        module[2](x_of(rank)).sum().backward()
    assert scalars(module) == [None, None, 1.5]


def fail_in_forward(rank, weight):
    """Nothing has been sent, so the rank may take another batch, if batches are weighed."""
    module = replicated(rank)
    if rank.rank == 1:
        with pytest.raises(RuntimeError):
            module(torch.ones(3, 3))
    with lockstep.accumulate(module, weight=weight):
        module(x_of(rank)).sum().backward()
    return scalars(module)


def test_forward_that_fails_costs_nothing_where_batches_are_weighed():
    assert run_ranks(2, fail_in_forward, 1.0) == [[1.5]] * 2


def test_forward_that_fails_and_another_batch_are_a_warning_on_all_ranks():
    with pytest.warns(UserWarning, match="If a rank has skipped a batch after its forward") as caught:
        assert run_ranks(2, fail_in_forward, None) == [[1.5]] * 2
    assert {str(each.message).partition(",")[0] for each in caught} == {
        f"rank {rank}: since the last one" for rank in range(2)
    }


# --------------------------------------------------------------------------------- devices, statistics


@on_ranks(2)
def test_simulated_accelerators(rank, sim):
    """Gloo cannot send their memory: the error is one of ours, on each rank."""
    with pytest.raises(LockstepError, match="initial values failed"):
        lockstep.replicate(one_weight().to(sim.devices(1)[0]), process_group=rank.group)


@on_ranks(1)  # the profiler is one for all threads
def test_statistics_and_labels(rank):
    module = replicated(rank, network, bucket_cap_mb=2e-4)
    for step in range(2):
        mean_square(module, step, rank.rank).backward()
    before = lockstep.loop.statistics(module)
    with module.no_sync():
        mean_square(module, 0, rank.rank).backward()
    assert lockstep.loop.statistics(module).calls["collective"] == before.calls["collective"]
    with profile(acc_events=True) as profiled:  # this thread's alone
        mean_square(module, 0, rank.rank).backward()
    after = lockstep.loop.statistics(module)
    labels = [event.name for event in profiled.events() if event.name.startswith("lockstep::")]
    collectives = after.calls["collective"] - before.calls["collective"]
    assert collectives == sum(label.startswith("lockstep::collective (all_reduce, bucket") for label in labels) > 1
    assert set(after.seconds) == set(after.calls)
    assert "lockstep::wait" in labels
    assert any(label.startswith("lockstep::finish (round ") for label in labels)
    assert "lockstep::collect" in labels


@pytest.mark.parametrize(("hosts", "expected"), [("", 2), ("ab", 2), ("aa", 1)])
@on_ranks(2, "hosts")
def test_a_first_bucket_keeps_a_network_busy_and_there_is_none_in_shared_memory(rank, expected):
    """Of gradients of two MiB, none of them large; what a settled step takes."""
    module = replicated(rank, lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    for _ in range(3):
        before = lockstep.loop.statistics(module).calls.get("collective", 0)
        module(torch.ones(1, 256)).sum().backward()
    assert lockstep.loop.statistics(module).calls["collective"] - before == expected
