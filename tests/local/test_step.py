"""A training step on any devices is what one backward pass over the whole batch is, for whoever looks."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep import DataParallel
from programs.networks import Applying, mlp
from programs.one_device import gradients, on, same, same_gradients


@pytest.fixture
def module(first):
    return mlp(4, 5, 4).double().to(first)


@pytest.fixture
def x(first):
    return torch.randn(6, 4, dtype=torch.float64).to(first)


def of_one_device(module, x, y=None):
    """A copy of the module that has the gradients."""
    plain = copy.deepcopy(module)
    F.mse_loss(plain(x), x if y is None else y).backward()
    return plain


def test_an_input_with_a_graph(devices, first, module, x):
    before = mlp(4, 5, 4).double().to(first)
    both = of_one_device(nn.Sequential(before, module), x)
    DataParallel(module, devices(3)).step(F.mse_loss, before(x), x)
    same_gradients(nn.Sequential(before, module), both)


def test_a_hook_of_an_input_sees_the_whole_gradient_once(devices, module, x):
    x.requires_grad_()
    of_one_device(module, x, torch.zeros_like(x))
    expected, x.grad, seen = x.grad, None, []
    x.register_hook(lambda grad: seen.append(grad.clone()))
    DataParallel(module, devices(3)).step(F.mse_loss, x, torch.zeros_like(x))
    same([*seen, x.grad], [expected, expected], 1e-12, 1e-12)


def test_a_hook_where_a_parameter_accumulates_sees_the_whole_gradient_once(devices, module, x):
    plain, seen, weight = of_one_device(module, x), [], module[0].weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(weight.grad.clone()))
    DataParallel(module, devices(3)).step(F.mse_loss, x, x)
    same(seen, [plain[0].weight.grad], 1e-12, 1e-12)
    same_gradients(module, plain)


def test_buffers_and_other_tensors_that_need_gradients(devices, first, x):
    """Also a tensor that only a closure holds."""
    forward = lambda m, x: m.linear(x) * m.scale  # noqa: E731
    module = on(first, lambda: Applying(forward, (4, 4), scale=torch.ones(4)).double())
    module.scale.requires_grad_()
    shift, seen = torch.ones(4, dtype=torch.float64, requires_grad=True), []
    loss = lambda output, y: F.mse_loss(output + shift.to(output.device), y)  # noqa: E731
    loss(module(x), x).backward()
    expected, of_shift = gradients(module), shift.grad
    for hooked in (False, True):
        module.zero_grad()
        shift.grad = module.scale.grad = None
        if hooked:
            shift.register_hook(lambda grad: seen.append(grad.clone()))
            module.scale.register_hook(lambda grad: seen.append(grad.clone()))
        DataParallel(module, devices(3)).step(loss, x, x)
        same(gradients(module), expected, 1e-12, 1e-12)
        same([shift.grad], [of_shift], 1e-12, 1e-12)
    assert len(seen) == 2
    assert {tuple(g.tolist()) for g in seen} == {tuple(shift.grad.tolist()), tuple(module.scale.grad.tolist())}


def partly():
    return Applying(lambda m, x: m.linear(x) if bool(x[0, 0] > 0) else x, (4, 4)).double()


@pytest.mark.parametrize("positive", [0, 1])
def test_a_replica_whose_loss_needs_no_gradient(devices, first, positive):
    module = partly().to(first)
    plain, x = copy.deepcopy(module), -torch.ones(2, 4, dtype=torch.float64, device=first)
    x[positive] = 1
    (plain(x[positive : positive + 1]).mean() / 2).backward()
    DataParallel(module, devices(2)).step(lambda output: output.mean(), x)
    same_gradients(module, plain)


def test_no_loss_that_needs_a_gradient(devices, first):
    module = partly().to(first)
    with pytest.raises(RuntimeError, match="does not require grad"):
        DataParallel(module, devices(2)).step(lambda output: output.mean(), -torch.ones(2, 4, device=first))
    assert module.linear.weight.grad is None


@pytest.mark.parametrize(("reentrant", "hook"), [(False, False), (False, True), (True, False)])
def test_checkpointed_layers(devices, first, x, reentrant, hook):
    forward = lambda m, x: checkpoint(m.other, m.linear(x), use_reentrant=reentrant)  # noqa: E731
    module = Applying(forward, (4, 4), other=mlp(4, 4, 4)).double().to(first)
    plain = of_one_device(module, x)
    if hook:
        module.other[2].weight.register_hook(lambda grad: grad * 1)
    DataParallel(module, devices(3)).step(F.mse_loss, x, x)
    same_gradients(module, plain)


def test_gradients_add_up_and_memory_is_kept(devices, module, x):
    plain, parallel = copy.deepcopy(module), DataParallel(module, devices(3))
    for step in range(4):
        F.mse_loss(plain(x), x).backward()
        kept = [p.grad for p in module.parameters()]
        parallel.step(F.mse_loss, x, x)
        assert step == 0 or all(p.grad is grad for p, grad in zip(module.parameters(), kept, strict=True))
    same_gradients(module, plain)


@pytest.mark.parametrize("how", ["two steps", "a step and a forward"])
def test_several_threads(devices, module, x, how):
    plain, parallel, times = copy.deepcopy(module), DataParallel(module, devices(2)), 40
    start = threading.Barrier(2, timeout=20)

    def steps(forward):
        start.wait()
        for _ in range(times):
            if forward:
                F.mse_loss(parallel(x), x).backward()
            else:
                parallel.step(F.mse_loss, x, x)

    threads = [threading.Thread(target=steps, args=(forward,)) for forward in (False, how != "two steps")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (2 * times * F.mse_loss(plain(x), x)).backward()
    same_gradients(module, plain, rtol=1e-9, atol=1e-9)


def test_a_use_inside_a_step(devices, module, x):
    plain, parallel = copy.deepcopy(module), DataParallel(module, devices(2))
    plain(plain(x)).square().mean().backward()
    parallel.step(lambda output: parallel(output).to(output.device).square().mean(), x)
    same_gradients(module, plain)


@pytest.mark.parametrize("detached", [False, True])
def test_a_loss_function_that_runs_backward_itself_is_told_so(devices, module, x, detached):
    def loss_fn(output, y):
        loss = F.mse_loss(output, y)
        loss.backward()
        return loss.detach() if detached else loss

    with pytest.raises(RuntimeError) as caught:
        DataParallel(module, devices(2)).step(loss_fn, x, x)
    (note,) = caught.value.__notes__
    assert "step() runs backward itself" in note


def test_backward_runs_outside_the_autocast_that_is_around_the_step(devices, first):
    seen = []

    def forward(m, x):
        y = m.linear(x)
        y.register_hook(lambda _: seen.append([torch.is_autocast_enabled(k) for k in ("cpu", first.type)]))
        return y

    module = Applying(forward, (4, 4)).to(first)
    with torch.autocast(first.type, torch.bfloat16):
        DataParallel(module, devices(2)).step(lambda y: y.float().square().mean(), torch.randn(4, 4).to(first))
        assert torch.is_autocast_enabled(first.type)
    assert seen == [[False, False]] * 2
