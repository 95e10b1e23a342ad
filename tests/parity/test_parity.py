"""Training on several devices computes what training on one computes, for the same batch."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lockstep import DataParallel
from lockstep.local import data_parallel
from programs.networks import STRUCTURES, mlp
from programs.one_device import USES, on, same_gradients, trains_as_alone

ROUNDING = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}
small = partial(mlp, 6, 6, 6, 3)


def pair(make, device, dtype=torch.float64):
    """Two models alike."""
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        made.append(on(device, make).to(dtype))
    return made


def batch(rows, device, dtype=torch.float64):
    return torch.randn(rows, 6, dtype=dtype).to(device), torch.randn(rows, dtype=dtype).to(device)


def loss_of(output, target):
    return (output - target.reshape(-1, *[1] * (output.dim() - 1))).square().mean()


def grads(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(got, expected, dtype=torch.float64):
    torch.testing.assert_close(got, expected, **ROUNDING[dtype], equal_nan=False)


def train(device_list, make=small, **options):
    """An MLP in float64, or another network, its twin in a DataParallel, and seven rows for them."""
    plain, twin = pair(make, device_list[0])
    return plain, DataParallel(twin, device_list, **options), *batch(7, device_list[0])


BACKWARDS = {
    "forward": lambda parallel, x, y: loss_of(parallel(x), y).backward(),
    "step": lambda parallel, x, y: parallel.step(loss_of, x, y),
}
both_ways = pytest.mark.parametrize("backward", BACKWARDS.values(), ids=BACKWARDS)


# ---------------------------------------------------------------------------------- networks of every kind


@pytest.mark.parametrize(("replicas", "rows"), [(1, 4), (2, 6), (5, 7), (5, 3)])
@pytest.mark.parametrize("use", USES)
def test_any_numbers_of_replicas_and_rows(devices, first, use, replicas, rows):
    network = on(first, mlp)
    trains_as_alone(network, USES[use](network, devices(replicas)), devices(replicas), rows=rows)


TWICE_DIFFERENTIABLE = [
    *("mlp", "tied", "ParameterList and ParameterDict", "channels last", "attention", "LSTM", "GRU", "parametrization"),
    *("weight_norm", "legacy weight_norm", "spectral_norm", "legacy spectral_norm"),
]


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", TWICE_DIFFERENTIABLE)
def test_second_order_gradients(devices, first, name):
    """A penalty on the gradients of all parameters, and of the input."""
    plain, twin = pair(STRUCTURES[name], first)
    parallel, penalties = DataParallel(twin, devices(3)), []
    data = torch.randn(7, 3, dtype=torch.float64).to(first)
    for model in (plain, parallel):
        x = data.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # the fused one has no second derivative
            loss = model(x).square().mean()
        found = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True, allow_unused=True)
        penalty = sum(g.square().sum() for g in found if g is not None)
        (loss + penalty).backward()
        penalties.append((penalty, x.grad))
    assert_same(penalties[1], penalties[0])
    same_gradients(parallel, plain)


# ---------------------------------------------------------------------------------------- batch norm


@pytest.mark.parametrize("use_step", [False, True], ids=["forward", "step"])
def test_batch_norm_in_training_normalises_each_replicas_rows(devices, use_step):
    normalised = lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))  # noqa: E731
    plain, twin = pair(normalised, devices(1)[0])
    parallel = DataParallel(twin, devices(3))
    x, y = batch(7, devices(1)[0])
    for _ in range(2):
        plain.zero_grad()
        parallel.zero_grad()
        first, *others = x.tensor_split(3)
        passing = [{name: b.clone() for name, b in plain.named_buffers()} for _ in others]
        outputs = [functional_call(plain, *call) for call in zip(passing, others, strict=True)]
        outputs.insert(0, plain(first))  # only these statistics stay
        loss_of(torch.cat(outputs), y).backward()
        if use_step:
            parallel.step(loss_of, x, y)
        else:
            output = parallel(x)
            assert_same(output, torch.cat(outputs))
            loss_of(output, y).backward()
        same_gradients(parallel, plain)
        assert_same(dict(twin.named_buffers()), dict(plain.named_buffers()))
    assert twin[1].num_batches_tracked == 2


# --------------------------------------------------------------------------- how people train models


@pytest.mark.parametrize("use_step", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_autocast(devices, kind, dtype, use_step):
    plain, twin = pair(small, devices(1)[0], torch.float32)
    parallel = DataParallel(twin, devices(3))
    x, y = batch(7, devices(1)[0], torch.float32)
    with torch.autocast(kind, dtype) if dtype else nullcontext():
        output = plain(x)
        assert output.dtype == (dtype or torch.float32)
        loss = loss_of(output.float(), y)
        if use_step:
            parallel_loss = parallel.step(lambda output, y: loss_of(output.float(), y), x, y)
        else:
            parallel_output = parallel(x)
            assert parallel_output.dtype == output.dtype
            assert_same(parallel_output, output, torch.float32)  # row by row: the same kernels
            parallel_loss = loss_of(parallel_output.float(), y)
    loss.backward()
    if not use_step:
        parallel_loss.backward()
    close = {"rtol": 0.05, "atol": 0.01} if dtype else ROUNDING[torch.float32]
    torch.testing.assert_close(parallel_loss.detach(), loss.detach(), **close)
    torch.testing.assert_close(grads(twin), grads(plain), **close)
    assert {g.dtype for g in grads(twin).values()} == {torch.float32}


@both_ways
def test_accumulation_and_clipping(devices, backward):
    plain, parallel, *_ = train(devices(3))
    for rows in (7, 4, 2):
        x, y = batch(rows, devices(1)[0])
        loss_of(plain(x), y).backward()
        backward(parallel, x, y)
        same_gradients(parallel, plain)
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (plain, parallel)]
    assert norms[0] > 0.1
    assert_same(norms[1], norms[0])
    same_gradients(parallel, plain)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(6, 6), small(), reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x).tanh(), use_reentrant=self.reentrant)


@both_ways
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpoint(devices, reentrant, backward):
    plain, parallel, x, y = train(devices(3), lambda: Checkpointed(reentrant))
    for _ in range(2):
        loss_of(plain(x), y).backward()
        backward(parallel, x, y)
        same_gradients(parallel, plain)


def test_grad_scaler(devices, kind):
    """With a batch that overflows: no step, a smaller scale; then one that does not."""
    plain, parallel, x, y = train(devices(3))
    results = []
    for model in (plain, parallel):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=1)
        for rows in (x, x * float("inf"), x):
            optimiser.zero_grad()
            scaler.scale(loss_of(model(rows), y)).backward()
            scaler.unscale_(optimiser)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimiser)
            scaler.update()
        results.append((scaler.get_scale(), [p.detach() for p in model.parameters()]))
    assert results[0][0] == 2048.0
    assert_same(results[1], results[0])


@both_ways
def test_gradient_hooks_see_the_whole_gradient_once(devices, backward):
    plain, parallel, x, y = train(devices(3))
    seen = {}
    for name, model in (("plain", plain), ("parallel", parallel)):
        calls = seen[name] = []
        for number, parameter in enumerate(model.parameters()):
            parameter.register_hook(lambda grad, calls=calls, n=number: calls.append((2 * n, grad.clone())))
            parameter.register_post_accumulate_grad_hook(
                lambda p, calls=calls, n=number: calls.append((2 * n + 1, p.grad.clone()))
            )
    loss_of(plain(x), y).backward()
    backward(parallel, x, y)
    assert len(seen["plain"]) == 12
    assert_same(*(sorted(calls, key=lambda call: call[0]) for calls in (seen["parallel"], seen["plain"])))


def test_a_hook_may_replace_the_gradient(devices):
    plain, parallel, x, y = train(devices(3))
    for model in (plain, parallel):
        next(model.parameters()).register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    loss_of(plain(x), y).backward()
    parallel.step(loss_of, x, y)
    same_gradients(parallel, plain)


def test_an_optimiser_that_steps_inside_backward(devices):
    plain, parallel, x, y = train(devices(3))
    for model in (plain, parallel):
        for parameter in model.parameters():
            optimiser = torch.optim.SGD([parameter], lr=0.1)

            def step(p, optimiser=optimiser):
                optimiser.step()
                optimiser.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        loss_of(plain(x), y).backward()
        parallel.step(loss_of, x, y)
        assert_same(parallel.module.state_dict(), plain.state_dict())
        loss_of(plain(x), y).backward()
        loss_of(parallel(x), y).backward()
        assert_same(parallel.module.state_dict(), plain.state_dict())


@both_ways
def test_sparse_gradients(backward):
    plain, twin = pair(lambda: nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 2)), "cpu")
    parallel = DataParallel(twin, ["cpu"] * 3)
    for _ in range(2):
        x, y = torch.randint(10, (7, 4)), torch.randn(7, dtype=torch.float64)
        loss_of(plain(x), y).backward()
        backward(parallel, x, y)
        got, expected = twin[0].weight.grad, plain[0].weight.grad
        assert got.is_sparse
        assert_same(got.coalesce().to_dense(), expected.coalesce().to_dense())
        assert_same(twin[1].weight.grad, plain[1].weight.grad)


class Siblings(nn.Module):
    """Parameters and a buffer that needs a gradient, of one module that uses some of them."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.register_buffer("learned", torch.randn(6).requires_grad_())
        self.register_buffer("idle", torch.randn(6).requires_grad_())

    def forward(self, x):
        return x * self.used * self.learned


@both_ways
def test_a_parameter_that_its_module_does_not_use_gets_no_gradient(devices, backward):
    plain, twin = pair(Siblings, devices(1)[0])
    for module in (plain, twin):  # a copy on another device is no leaf
        module.learned, module.idle = (b.detach().requires_grad_() for b in (module.learned, module.idle))
    parallel = DataParallel(twin, devices(3))
    x, y = batch(7, devices(1)[0])
    loss_of(plain(x), y).backward()
    backward(parallel, x, y)
    assert twin.unused.grad is twin.idle.grad is None
    same_gradients(parallel, plain)
    assert_same(twin.learned.grad, plain.learned.grad)
    called = []
    handle = twin.unused.register_hook(called.append)
    loss_of(parallel(x), y).backward()
    parallel.step(loss_of, x, y)
    assert called == []
    handle.remove()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss_of(parallel(x), y), list(parallel.parameters()))


class Loss(nn.Module):
    """A loss with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.tensor(0.1))

    def forward(self, output, y):
        return loss_of(output * self.temperature + self.offset, y)


def test_step_with_a_loss_that_learns(devices):
    plain, parallel, x, y = train(devices(3))
    loss, twin = pair(Loss, devices(1)[0])
    for _ in range(2):
        loss(plain(x), y).backward()
        parallel.step(twin, x, y)
    same_gradients(parallel, plain)
    assert_same(grads(twin), grads(loss))


def test_step_with_one_batch_entry_and_with_three(devices):
    plain, parallel, x, _ = train(devices(3))
    plain(x).square().mean().backward()
    parallel.step(lambda output: output.square().mean(), x)
    same_gradients(parallel, plain)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = small()

        def forward(self, one, other):
            return self.layer(one + other)

    plain, twin = pair(Sum, devices(1)[0])
    x, y = batch(7, devices(1)[0])
    loss_of(plain(x, x * 2), y).backward()
    parallel = DataParallel(twin, devices(3))
    parallel.step(loss_of, x, x * 2, y)
    same_gradients(parallel, plain)


def test_keyword_arguments_only(devices):
    plain, parallel, x, y = train(devices(3))
    output = parallel(input=x)
    assert_same(output, plain(x))
    loss_of(output, y).backward()
    loss_of(plain(x), y).backward()
    same_gradients(parallel, plain)


# ------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("use_step", [False, True], ids=["forward", "step"])
def test_split_by_weights(devices, use_step):
    plain, parallel, x, y = train(devices(2), split=[2, 1])
    rows = []
    parallel.module.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    loss = loss_of(plain(x), y)
    loss.backward()
    if use_step:
        assert_same(parallel.step(loss_of, x, y), loss.detach())
    else:
        loss_of(parallel(x), y).backward()
    assert sorted(rows) == [2, 5]
    same_gradients(parallel, plain)


def test_outputs_stay_apart(devices):
    plain, parallel, x, y = train(devices(3), gather_outputs=False)
    outputs = parallel(x)
    assert [tuple(output.shape) for output in outputs] == [(3, 3), (2, 3), (2, 3)]
    assert [output.device for output in outputs] == devices(3)
    loss_of(plain(x), y).backward()
    loss_of(torch.cat([output.to(x.device) for output in outputs]), y).backward()
    same_gradients(parallel, plain)


def test_another_dimension(devices):
    plain, twin = pair(lambda: nn.LSTM(6, 5), devices(1)[0])
    parallel = DataParallel(twin, devices(3), dim=1)
    x = torch.randn(4, 7, 6, dtype=torch.float64).to(devices(1)[0])
    (output, (h, c)), expected = parallel(x), plain(x)
    assert_same((output, (h, c)), expected)
    output.square().mean().backward()
    expected[0].square().mean().backward()
    same_gradients(parallel, plain)
    twin.zero_grad()
    loss = parallel.step(lambda output, target: (output[0] - target).square().mean(), x, torch.zeros_like(expected[0]))
    assert_same(loss, expected[0].square().mean().detach())
    same_gradients(parallel, plain)


@pytest.mark.parametrize("where", ["cpu", -1, 1])
@pytest.mark.filterwarnings("ignore:Using -1:FutureWarning")
def test_output_device(sim, where):
    targets = sim.devices(3)
    plain, parallel, x, y = train(targets, output_device=where)
    target = torch.device("sim:1" if where == 1 else "cpu")
    for output in (data_parallel(parallel.module, x, targets, where), parallel(x)):
        assert output.device == target
        assert_same(output.to("sim:0"), plain(x))
    loss_of(output, y.to(target)).backward()
    loss_of(plain(x), y).backward()
    same_gradients(parallel, plain)
    assert parallel.step(loss_of, x, y).device == target


# ------------------------------------------------------------------ updates, and what lies in between


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_sees_every_update(devices, mode):
    plain, parallel, x, _ = train(devices(3))
    models = (plain, parallel.module)

    def check():
        with mode():
            output = parallel(x)
            assert not output.requires_grad
            assert_same(output.clone(), plain(x).clone())

    check()
    for model in models:
        model.eval()
        with torch.no_grad():
            model[0].weight.mul_(1.1)
    check()
    average = [p.detach() * 0.5 for p in plain.parameters()]
    for model in models:
        for p, mean in zip(model.parameters(), average, strict=True):
            p.data = mean.clone()  # swap an average in
    check()
    parallel(x).sum().backward()
    for model in models:
        for p in model.parameters():
            p.data.add_(0.1)
    parallel(x)
    check()
    for model in models:
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    check()
    for model in models:
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters())
    check()


class Late(torch.autograd.Function):
    """Calls something in backward; at the very input, that is after all parameters have their gradients."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


@both_ways
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_evaluation_by_another_thread_during_backward(devices, backward, grad):
    """As a thread that validates does, while the main one trains."""
    plain, parallel, x, y = train(devices(3))

    def evaluate():
        with torch.set_grad_enabled(grad):
            parallel(x * 2)

    def evaluate_elsewhere():
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()

    body = parallel.module
    active = []

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = body

        def forward(self, x):
            if active:
                x = Late.apply(x.requires_grad_(), active.pop())
            return self.body(x)

    parallel.module = Body()
    loss_of(plain(x), y).backward()
    active.append(evaluate_elsewhere)
    backward(parallel, x, y)
    assert not active
    assert_same([p.grad for p in parallel.parameters()], [p.grad for p in plain.parameters()])


def test_a_step_of_meta_learning(devices):
    """The inner step's parameters are results of the first backward, and are differentiated through."""
    plain, parallel, x, y = train(devices(3))
    with pytest.raises(
        RuntimeError, match=r"can.t be used with nn\.DataParallel"
    ):  # PyTorch's own: it asks for the class
        functional_call(parallel, {}, (x,))
    for model in (plain, nn.Sequential(parallel)):
        names, parameters = zip(*model.named_parameters(), strict=True)
        inner = torch.autograd.grad(loss_of(model(x), y), parameters, create_graph=True)
        fast = {name: p - 0.1 * g for name, p, g in zip(names, parameters, inner, strict=True)}
        loss_of(functional_call(model, fast, (x * 2,)), y).backward()
    same_gradients(parallel, plain)
    loss_of(parallel(x), y).backward()
    loss_of(plain(x), y).backward()
    same_gradients(parallel, plain)


def test_two_losses_with_a_retained_graph(devices):
    plain, parallel, x, y = train(devices(3))
    for model in (plain, parallel):
        output = model(x)
        loss_of(output, y).backward(retain_graph=True)
        output.sum().backward()
    same_gradients(parallel, plain)


def test_adversarial_steps_of_two_networks(devices):
    """Generator through discriminator: gradients of one network flow through the other."""
    results = []
    for wrap in (lambda m: m, lambda m: DataParallel(m, devices(3))):
        torch.manual_seed(1)
        generator, critic = (wrap(on(devices(1)[0], make).double()) for make in (partial(mlp, 6, 6, 6), small))
        noise = torch.randn(7, 6, dtype=torch.float64).to(devices(1)[0])
        for _ in range(3):
            fake = generator(noise)
            critic.zero_grad()
            critic(fake.detach()).mean().backward()
            with torch.no_grad():
                for p in critic.parameters():
                    p.sub_(p.grad, alpha=0.1)
            generator.zero_grad()
            critic(fake).square().mean().backward()
            with torch.no_grad():
                for p in generator.parameters():
                    p.sub_(p.grad, alpha=0.1)
        results.append([p.detach() for model in (generator, critic) for p in model.parameters()])
    assert_same(results[1], results[0])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_models_of_other_dtypes(devices, name):
    dtype = getattr(torch, name)
    plain, twin = pair(small, devices(1)[0], dtype)
    parallel = DataParallel(twin, devices(3))
    x, y = batch(7, devices(1)[0], dtype)
    torch.testing.assert_close(parallel(x), plain(x))
    F.mse_loss(parallel(x), y[:, None].expand(7, 3)).backward()
    F.mse_loss(plain(x), y[:, None].expand(7, 3)).backward()
    assert {p.grad.dtype for p in twin.parameters()} == {dtype}
    torch.testing.assert_close(grads(twin), grads(plain), rtol=0.05, atol=0.02)
