"""Gradients of every kind: dtypes, layouts, optimizers, hooks, freezing, second order, failures; what is counted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.profiler import profile

import lockstep
from small_modules import fails_in_backward, one_weight, x_of
from threaded import run_ranks


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def rows(step, rank, shape=(3, 3), dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64).to(dtype)


def compare(rank, module, reference, rtol=1e-11, atol=1e-13):
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert p.grad.dtype == q.grad.dtype, name
            torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=atol)
            assert rank.all_equal(p.grad), name


# --------------------------------------------------------------------------------- dtypes and layouts


class Mixed(nn.Module):
    """Parameters of four dtypes in one module, one of them complex."""

    def __init__(self):
        super().__init__()
        self.fine = nn.Linear(3, 2).double()
        self.plain = nn.Linear(2, 2)
        self.coarse = nn.Linear(2, 2).bfloat16()
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.cdouble))

    def forward(self, x):
        x = self.fine(x)
        x = x + self.plain(x.float()).double() + self.coarse(x.bfloat16()).double()
        return (x * self.phase).abs().square().mean()


def mixed(rank, cap):
    module = lockstep.replicate(rank.make(Mixed), process_group=rank.group, bucket_cap_mb=cap)
    reference = copy.deepcopy(module)
    for step in range(3):
        for each in (module, reference):
            each.zero_grad(set_to_none=step == 1)
        module(rows(step, rank.rank)).backward()
        (sum(reference(rows(step, r)) for r in range(rank.world)) / rank.world).backward()
        compare(rank, module.fine, reference.fine)
        compare(rank, module.plain, reference.plain, 1e-5, 1e-6)
        compare(rank, module.coarse, reference.coarse, 3e-2, 3e-2)
        torch.testing.assert_close(module.phase.grad, reference.phase.grad)
        assert rank.all_equal(module.phase.grad)


@pytest.mark.parametrize("cap", [None, 1e-5], ids=["one bucket each", "many buckets"])
def test_dtypes_side_by_side(cap):
    run_ranks(2, mixed, cap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float64], ids=str)
def test_one_dtype_alone(dtype):
    """So the report rides in a bucket of that dtype, or on its own."""

    def train(rank):
        weight = nn.Parameter(torch.full((3,), 2.0, dtype=dtype))
        unused = nn.Parameter(torch.ones(2, dtype=dtype))
        module = lockstep.replicate(nn.ParameterList([weight, unused]), process_group=rank.group)
        for _ in range(3):
            module.zero_grad()
            (module[0] * (rank.rank + 1)).abs().sum().backward()
        assert unused.grad is None
        return weight.grad

    for grad in run_ranks(2, train):
        assert torch.equal(grad, torch.full((3,), 1.5, dtype=dtype))


def no_gradient_overflows(rank):
    """Divided before it is summed."""
    module = lockstep.replicate(one_weight().half(), process_group=rank.group)
    (module(torch.full((1, 1), 2.0**15, dtype=torch.half))).sum().backward()
    return next(module.parameters()).grad.item()


def test_sums_do_not_overflow_in_half_precision():
    assert run_ranks(4, no_gradient_overflows) == [2.0**15] * 4


def layouts(rank, cap):
    module = rank.make(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.LazyLinear(2)))
    module(torch.zeros(1, 3, 6, 6))
    module = module.double().to(memory_format=torch.channels_last)
    module[3].weight = nn.Parameter(module[3].weight.detach().t().contiguous().t())  # strides the other way round
    lockstep.replicate(module, process_group=rank.group, bucket_cap_mb=cap)
    reference = copy.deepcopy(module)
    strides = [parameter.stride() for parameter in module.parameters()]
    for step in range(3):
        for each in (module, reference):
            each.zero_grad(set_to_none=step != 1)
        module(rows(step, rank.rank, (2, 3, 6, 6))).square().mean().backward()
        reference(torch.cat([rows(step, r, (2, 3, 6, 6)) for r in range(rank.world)])).square().mean().backward()
        compare(rank, module, reference)
        assert [parameter.grad.stride() for parameter in module.parameters()] == strides


@pytest.mark.parametrize("cap", [None, 1e-4])
def test_gradients_are_laid_out_as_their_parameters(cap):
    run_ranks(2, layouts, cap)


class Tied(nn.Module):
    """A weight under two names and used three times; a layer registered twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x):
        return self.again(self.second(self.first(x).tanh()).tanh()).square().mean()


class Large(nn.Module):
    """A gradient of 4 MiB, which travels alone, among small ones."""

    def __init__(self):
        super().__init__()
        self.first, self.large, self.last = nn.Linear(3, 8), nn.Linear(8, 65536, bias=False), nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x).tanh()
        return self.last(x + (x @ self.large.weight[:8])).square().mean() + self.large(x).square().mean()


def own_and_whole(rank, make, steps):
    module = lockstep.replicate(rank.make(make).double(), process_group=rank.group)
    reference = copy.deepcopy(module)
    for step in range(steps):
        for each in (module, reference):
            each.zero_grad(set_to_none=step % 2 == 0)
        module(rows(step, rank.rank)).backward()
        (sum(reference(rows(step, r)) for r in range(rank.world)) / rank.world).backward()
        compare(rank, module, reference)


@pytest.mark.parametrize("make", [Tied, Large])
def test_shared_and_large_parameters(make):
    run_ranks(2, own_and_whole, make, 3)


# ------------------------------------------------------------------------------ optimizers and scaling

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adam foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adam fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


def optimize(rank):
    for make in OPTIMIZERS.values():
        module = lockstep.replicate(rank.make(network).double(), process_group=rank.group, bucket_cap_mb=1e-4)
        reference = copy.deepcopy(module)
        optimizers = [make(each.parameters()) for each in (module, reference)]
        for step in range(3):
            losses = [
                module(rows(step, rank.rank)).square().mean(),
                reference(torch.cat([rows(step, r) for r in range(rank.world)])).square().mean(),
            ]
            norms = []
            for each, loss, optimizer in zip((module, reference), losses, optimizers, strict=True):
                loss.backward()
                norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 1)
            torch.testing.assert_close(*norms, rtol=1e-10, atol=0)
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
        lockstep.check_in_sync(module)


def test_optimizers_and_clipping():
    run_ranks(2, optimize)


def scale(rank):
    """Overflow on one rank: both leave the step out, and halve the scale."""
    module = lockstep.replicate(one_weight(), process_group=rank.group)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    values = []
    for batch in (x_of(rank), x_of(rank) * (float("inf") if rank.rank else 1.0), x_of(rank)):
        optimizer.zero_grad()
        scaler.scale(module(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        values.append((next(module.parameters()).item(), scaler.get_scale()))
    return values


def test_gradient_scaling_agrees_on_overflow():
    assert run_ranks(2, scale) == [[(-0.5, 4.0), (-0.5, 2.0), (-2.0, 2.0)]] * 2


def autocast(rank):
    module = lockstep.replicate(rank.make(network), process_group=rank.group)
    reference = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(rows(0, rank.rank, dtype=torch.float32)).float().square().mean()
        whole = [reference(rows(0, r, dtype=torch.float32)).float().square().mean() for r in range(rank.world)]
    loss.backward()
    (sum(whole) / rank.world).backward()
    compare(rank, module, reference, 2e-2, 1e-3)


def test_autocast():
    run_ranks(2, autocast)


@pytest.mark.parametrize("registered", ["before", "after"])
def test_hooks_for_accumulated_gradients_see_reduced_ones(registered):
    """An optimizer for each parameter, which steps and drops the gradient as soon as it is there."""

    def train(rank):
        module = rank.make(network).double()
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
            module(rows(number, rank.rank)).square().mean().backward()
            whole.zero_grad()
            reference(torch.cat([rows(number, r) for r in range(rank.world)])).square().mean().backward()
            whole.step()
        assert len(seen) == 3 * len(optimizers)
        assert all(parameter.grad is None for parameter in module.parameters())
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-13)
        with module.no_sync():
            module(rows(0, rank.rank)).sum().backward()
        assert len(seen) == 3 * len(optimizers)  # what is this rank's alone waits for the ranks
        module(rows(0, rank.rank)).sum().backward()
        assert len(seen) == 4 * len(optimizers)
        lockstep.check_in_sync(module)

    run_ranks(2, train)


def tensor_hooks(rank):
    """They see what autograd has computed here, and what they return is what is averaged."""
    module = lockstep.replicate(one_weight(), process_group=rank.group)
    seen = []
    (weight,) = module.parameters()
    weight.register_hook(lambda grad: seen.append(grad.item()))
    weight.register_hook(lambda grad: 10 * grad)
    module(x_of(rank)).sum().backward()
    return seen, weight.grad.item()


def test_hooks_of_tensors_see_this_ranks_gradient():
    assert run_ranks(2, tensor_hooks) == [([1.0], 15.0), ([2.0], 15.0)]


# ------------------------------------------------------------------------------- gradients that are kept


def keep(rank, how, size):
    """Keeps what each step has given, in some way."""
    module = lockstep.replicate(nn.ParameterList([torch.ones(size), torch.ones(3)]), process_group=rank.group)
    kept = []
    for step in range(4):
        module.zero_grad()
        sum((p * (step + rank.rank)).sum() for p in module).backward()
        kept.append(how(module))
    return [each.flatten()[0].item() for each in kept]


def whole(module):
    return module[0].grad


def detached(module):
    return module[0].grad.detach()


def view(module):
    return module[0].grad[:2]


def other_view(module):
    return module[0].grad.view(-1)


def as_numpy(module):
    return torch.from_numpy(module[0].grad.numpy())


@pytest.mark.parametrize("size", [4, 1 << 20], ids=["in a bucket", "alone"])
@pytest.mark.parametrize("how", [whole, detached, view, other_view, as_numpy], ids=lambda each: each.__name__)
def test_a_gradient_that_somebody_keeps_is_not_overwritten(how, size):
    assert run_ranks(2, keep, how, size) == [[0.5, 1.5, 2.5, 3.5]] * 2


def free(rank):
    module = lockstep.replicate(nn.ParameterList([torch.ones(4), torch.ones(3)]), process_group=rank.group)
    found = []
    for step in range(3):
        module.zero_grad()
        sum((p * (step + rank.rank)).sum() for p in module).backward()
        found += [p.grad[0].item() for p in module]
        module[0].grad.untyped_storage().resize_(0)
    return found


def test_memory_of_gradients_that_the_program_has_freed_is_not_written():
    assert run_ranks(2, free) == [[0.5, 0.5, 1.5, 1.5, 2.5, 2.5]] * 2


def memory(rank):
    """Return where gradients lie in each step, if nobody keeps them."""
    module = lockstep.replicate(nn.ParameterList([torch.ones(4), torch.ones(3)]), process_group=rank.group)
    places = []
    for step in range(6):
        module.zero_grad(set_to_none=step != 3)
        sum(p.sum() for p in module).backward()
        places.append(module[0].grad.data_ptr())
        assert module[0].grad.untyped_storage().data_ptr() == module[1].grad.untyped_storage().data_ptr()
    return len(set(places[1:]))


def test_gradients_that_nobody_keeps_stay_where_they_are():
    assert run_ranks(2, memory) == [1, 1]


def given_by_the_user(rank):
    """A gradient that the user has put there is added to, as on one device, not replaced; and it is theirs."""
    module = lockstep.replicate(one_weight(), process_group=rank.group)
    (weight,) = module.parameters()
    module(x_of(rank)).sum().backward()
    weight.grad = torch.full((1, 1), 10.0)
    module(x_of(rank)).sum().backward()
    return weight.grad.item()


def test_a_gradient_put_there_by_hand_is_added_to():
    assert run_ranks(2, given_by_the_user) == [11.5] * 2


# -------------------------------------------------------------------------- freezing, calling, second order


def freeze(rank):
    module = nn.Sequential(one_weight(), one_weight())
    module[0].requires_grad_(False)
    lockstep.replicate(module, process_group=rank.group)
    seen = []
    for first, second in ((False, True), (True, True), (True, False), (False, True), (True, True)):
        module[0].requires_grad_(first)
        module[1].requires_grad_(second)
        module.zero_grad()
        module(x_of(rank)).sum().backward()
        seen.append([None if p.grad is None else p.grad.item() for p in module.parameters()])
    return seen


def test_frozen_thawed_and_frozen_again():
    wanted = [[None, 1.5], [1.5, 1.5], [1.5, None], [None, 1.5], [1.5, 1.5]]
    assert run_ranks(2, freeze) == [wanted] * 2


class Methods(nn.Module):
    """Several ways in."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = one_weight(), one_weight()

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def encode(self, x):
        return self.encoder(x)


def call(rank):
    module = lockstep.replicate(Methods(), process_group=rank.group)
    seen = []
    for use in (
        module.encode,
        module.encoder,
        lambda x: module.decoder(module.encode(x)),
        lambda x: torch.func.functional_call(module, dict(module.named_parameters()), (x,)),
        lambda x: x @ module.decoder.weight,
    ):
        module.zero_grad()
        use(x_of(rank)).sum().backward()
        seen.append([None if p.grad is None else p.grad.item() for p in module.parameters()])
    return seen


def test_whatever_is_called():
    assert run_ranks(2, call) == [[[1.5, None], [1.5, None], [1.5, 1.5], [1.5, 1.5], [None, 1.5]]] * 2


def penalty(rank):
    """A gradient penalty beside one process, over three steps."""
    module = lockstep.replicate(rank.make(network).double(), process_group=rank.group)
    reference = copy.deepcopy(module)
    for step in range(3):
        for each in (module, reference):
            each.zero_grad()
        parameters = list(module.parameters())
        loss = module(rows(step, rank.rank)).square().mean()
        grads = lockstep.loop.mean_over_ranks(torch.autograd.grad(loss, parameters, create_graph=True), rank.group)
        sum(grad.square().sum() for grad in grads).backward()
        whole = reference(torch.cat([rows(step, r) for r in range(rank.world)])).square().mean()
        wanted = torch.autograd.grad(whole, list(reference.parameters()), create_graph=True)
        torch.testing.assert_close([*grads], [*wanted], rtol=1e-10, atol=1e-13)
        sum(grad.square().sum() for grad in wanted).backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            got, wanted_grad = (torch.zeros_like(each) if each.grad is None else each.grad for each in (p, q))
            torch.testing.assert_close(got, wanted_grad, rtol=1e-9, atol=1e-12)


def test_second_order():
    run_ranks(2, penalty)


def local_only(rank):
    module = lockstep.replicate(one_weight(), process_group=rank.group)
    (weight,) = module.parameters()
    (grad,) = torch.autograd.grad(module(x_of(rank)).sum(), weight)
    first = grad.item(), weight.grad, lockstep.loop.mean_over_ranks(grad, rank.group).item()
    module(x_of(rank)).sum().backward()
    return *first, weight.grad.item()


def test_autograd_grad_is_this_ranks():
    assert run_ranks(2, local_only) == [(rank, None, 1.5, 1.5) for rank in (1.0, 2.0)]


# ------------------------------------------------------------------------------------------- failures


def fail(rank, cap, where, failing, weight):
    """Backward fails on some ranks, before or after a layer; all go on with another branch."""
    module = nn.Sequential(one_weight(), one_weight(), one_weight())
    lockstep.replicate(module, process_group=rank.group, bucket_cap_mb=cap)
    module(x_of(rank)).sum().backward()
    module.zero_grad()
    errors = []
    for _ in range(2):
        x = x_of(rank)
        for index in range(2):
            x = fails_in_backward(x, rank.rank in failing) if index == where else x
            x = module[index](x)
        with lockstep.accumulate(module, weight=weight):
            try:
                x.sum().backward()
            except (ArithmeticError, lockstep.errors.PeerError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        module.zero_grad()
    with lockstep.accumulate(module, weight=weight):
        module[2](x_of(rank)).sum().backward()
    return errors, [None if p.grad is None else p.grad.item() for p in module.parameters()]


@pytest.mark.parametrize("weight", [None, 1.0])
@pytest.mark.parametrize("cap", [None, 1e-6], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize(("where", "failing"), [(1, {1}), (1, {0}), (1, {0, 1})])
def test_backward_that_fails_on_one_rank_fails_on_all_and_is_forgotten(where, failing, cap, weight):
    for rank, (errors, grads) in enumerate(run_ranks(2, fail, cap, where, failing, weight)):
        for error in errors:
            if rank in failing:
                assert error == "ArithmeticError: a bad batch"
            else:
                assert error.startswith("PeerError: ")
                assert f"backward failed on rank {min(failing)}" in error
        assert len(errors) == 2
        assert grads == [None, None, 1.5]


def fail_in_forward(rank, weight):
    """Nothing has been sent, so the rank may take another batch, if batches are weighed."""
    module = lockstep.replicate(one_weight(), process_group=rank.group)
    if rank.rank == 1:
        with pytest.raises(RuntimeError):
            module(torch.ones(3, 3))
    with lockstep.accumulate(module, weight=weight):
        module(x_of(rank)).sum().backward()
    return next(module.parameters()).grad.item()


def test_forward_that_fails_costs_nothing_where_batches_are_weighed():
    assert run_ranks(2, fail_in_forward, 1.0) == [1.5] * 2


def test_forward_that_fails_and_another_batch_are_a_warning_on_all_ranks():
    with pytest.warns(UserWarning, match="If a rank has skipped a batch after its forward") as caught:
        assert run_ranks(2, fail_in_forward, None) == [1.5] * 2
    assert {str(each.message).partition(",")[0] for each in caught} == {
        f"rank {rank}: since the last one" for rank in range(2)
    }


# --------------------------------------------------------------------------------- devices, statistics


def test_simulated_accelerators(sim):
    """Gloo cannot send their memory: the error is one of ours, on each rank."""
    device = sim.devices(1)[0]

    def train(rank):
        with pytest.raises(lockstep.errors.LockstepError) as caught:
            lockstep.replicate(one_weight().to(device), process_group=rank.group)
        return str(caught.value)

    for message in run_ranks(2, train):
        assert "initial values failed" in message


def observe(rank):
    module = lockstep.replicate(rank.make(network), process_group=rank.group, bucket_cap_mb=1e-4)
    for step in range(2):
        module(rows(step, rank.rank, dtype=torch.float32)).sum().backward()
    before = lockstep.loop.statistics(module)
    with module.no_sync():
        module(rows(0, rank.rank, dtype=torch.float32)).sum().backward()
    quiet = lockstep.loop.statistics(module).calls["collective"] - before.calls["collective"]
    with profile(acc_events=True) as profiled:  # this thread's alone
        module(rows(0, rank.rank, dtype=torch.float32)).sum().backward()
    after = lockstep.loop.statistics(module)
    labels = [event.name for event in profiled.events() if event.name.startswith("lockstep::")]
    return quiet, after.calls["collective"] - before.calls["collective"], set(after.seconds) == set(after.calls), labels


def test_statistics_and_labels():
    for quiet, collectives, alike, labels in run_ranks(1, observe):  # the profiler is one for all threads
        assert quiet == 0
        assert collectives == sum(label.startswith("lockstep::collective (all_reduce, bucket") for label in labels) > 1
        assert alike
        assert "lockstep::wait" in labels
        assert any(label.startswith("lockstep::finish (round ") for label in labels)
        assert "lockstep::collect" in labels


def collectives_of_a_step(rank):
    """How many a settled step takes of a module whose gradients are two MiB, none of them large."""
    model = lockstep.replicate(
        rank.make(lambda: torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))), process_group=rank.group
    )
    for _ in range(3):
        before = lockstep.loop.statistics(model).calls.get("collective", 0)
        model(torch.ones(1, 256)).sum().backward()
    return lockstep.loop.statistics(model).calls["collective"] - before


@pytest.mark.parametrize(("hosts", "expected"), [("", 2), ("ab", 2), ("aa", 1)])
def test_a_first_bucket_keeps_a_network_busy_and_there_is_none_in_shared_memory(hosts, expected):
    assert run_ranks(2, collectives_of_a_step, hosts=hosts) == [expected, expected]
