"""A training step on any devices is what one backward pass over the whole batch is, for whoever looks."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep import DataParallel

TIMEOUT = 20


def network(first):
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double().to(first)


def rows(first, count=6):
    return torch.randn(count, 4, dtype=torch.float64).to(first)


def assert_same_gradients(module, plain):
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_an_input_with_a_graph(devices, first):
    module, before, x = network(first), network(first), rows(first)
    plain, before_plain = copy.deepcopy(module), copy.deepcopy(before)
    F.mse_loss(plain(before_plain(x)), x).backward()
    DataParallel(module, devices(3)).step(F.mse_loss, before(x), x)
    assert_same_gradients(module, plain)
    assert_same_gradients(before, before_plain)


def test_a_hook_of_an_input_sees_the_whole_gradient_once(devices, first):
    module, x = network(first), rows(first).requires_grad_()
    plain, seen = copy.deepcopy(module), []
    F.mse_loss(plain(x), torch.zeros_like(x)).backward()
    expected, x.grad = x.grad, None
    x.register_hook(lambda grad: seen.append(grad.clone()))
    DataParallel(module, devices(3)).step(F.mse_loss, x, torch.zeros_like(x))
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)


def test_a_hook_where_a_parameter_accumulates_sees_the_whole_gradient_once(devices, first):
    module, x = network(first), rows(first)
    plain, seen = copy.deepcopy(module), []
    F.mse_loss(plain(x), x).backward()
    weight = module[0].weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(weight.grad.clone()))
    DataParallel(module, devices(3)).step(F.mse_loss, x, x)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], plain[0].weight.grad, rtol=1e-12, atol=1e-12)
    assert_same_gradients(module, plain)


class Learned(nn.Module):
    """A buffer that needs a gradient, and a tensor that only a closure holds."""

    def __init__(self, device):
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64, device=device)
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64, device=device).requires_grad_())

    def forward(self, x):
        return self.layer(x) * self.scale


def test_buffers_and_other_tensors_that_need_gradients(devices, first):
    torch.manual_seed(0)
    module, plain, x = Learned(first), Learned(first), rows(first)
    plain.load_state_dict(module.state_dict())
    shift = torch.ones(4, dtype=torch.float64, requires_grad=True)
    seen: list[torch.Tensor] = []
    loss = lambda output, y: F.mse_loss(output + shift.to(output.device), y)  # noqa: E731
    loss(plain(x), x).backward()
    expected, shift.grad = shift.grad, None
    for hooked in (False, True):
        module.zero_grad()
        shift.grad = module.scale.grad = None
        if hooked:
            shift.register_hook(lambda grad: seen.append(grad.clone()))
            module.scale.register_hook(lambda grad: seen.append(grad.clone()))
        DataParallel(module, devices(3)).step(loss, x, x)
        assert_same_gradients(module, plain)
        torch.testing.assert_close(module.scale.grad, plain.scale.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(shift.grad, expected, rtol=1e-12, atol=1e-12)
    assert len(seen) == 2
    assert {tuple(g.tolist()) for g in seen} == {tuple(shift.grad.tolist()), tuple(module.scale.grad.tolist())}


class Partly(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64, device=first)

    def forward(self, x):
        return self.layer(x) if bool(x[0, 0] > 0) else x


@pytest.mark.parametrize("positive", [0, 1])
def test_a_replica_whose_loss_needs_no_gradient(devices, first, positive):
    module = Partly(first)
    plain, x = copy.deepcopy(module), -torch.ones(2, 4, dtype=torch.float64, device=first)
    x[positive] = 1
    (plain(x[positive : positive + 1]).mean() / 2).backward()
    DataParallel(module, devices(2)).step(lambda output: output.mean(), x)
    assert_same_gradients(module, plain)


def test_no_loss_that_needs_a_gradient(devices, first):
    module = Partly(first)
    with pytest.raises(RuntimeError, match="does not require grad"):
        DataParallel(module, devices(2)).step(lambda output: output.mean(), -torch.ones(2, 4, device=first))
    assert module.layer.weight.grad is None


@pytest.mark.parametrize(("reentrant", "hook"), [(False, False), (False, True), (True, False)])
def test_checkpointed_layers(devices, first, reentrant, hook):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, self[0](x), use_reentrant=reentrant)

    module, x = Checkpointed(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double().to(first), rows(first)
    plain = copy.deepcopy(module)
    F.mse_loss(plain(x), x).backward()
    if hook:
        module[2].weight.register_hook(lambda grad: grad * 1)
    DataParallel(module, devices(3)).step(F.mse_loss, x, x)
    assert_same_gradients(module, plain)


def test_gradients_add_up_and_memory_is_kept(devices, first):
    module, x = network(first), rows(first)
    plain, parallel = copy.deepcopy(module), DataParallel(module, devices(3))
    for _ in range(3):
        F.mse_loss(plain(x), x).backward()
        parallel.step(F.mse_loss, x, x)
    kept = [p.grad for p in module.parameters()]
    F.mse_loss(plain(x), x).backward()
    parallel.step(F.mse_loss, x, x)
    assert all(p.grad is grad for p, grad in zip(module.parameters(), kept, strict=True))
    assert_same_gradients(module, plain)


@pytest.mark.parametrize("how", ["two steps", "a step and a forward"])
def test_several_threads(devices, first, how):
    module, x = network(first), rows(first)
    plain, parallel, times = copy.deepcopy(module), DataParallel(module, devices(2)), 40
    start = threading.Barrier(2)

    def steps():
        start.wait(TIMEOUT)
        for _ in range(times):
            parallel.step(F.mse_loss, x, x)

    def forwards():
        start.wait(TIMEOUT)
        for _ in range(times):
            F.mse_loss(parallel(x), x).backward()

    threads = [threading.Thread(target=steps), threading.Thread(target=steps if how == "two steps" else forwards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (2 * times * F.mse_loss(plain(x), x)).backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_a_use_inside_a_step(devices, first):
    module, x = network(first), rows(first)
    plain, parallel = copy.deepcopy(module), DataParallel(module, devices(2))
    plain(plain(x)).square().mean().backward()
    parallel.step(lambda output: parallel(output).to(output.device).square().mean(), x)
    assert_same_gradients(module, plain)


@pytest.mark.parametrize("detached", [False, True])
def test_a_loss_function_that_runs_backward_itself_is_told_so(devices, first, detached):
    def loss_fn(output, y):
        loss = F.mse_loss(output, y)
        loss.backward()
        return loss.detach() if detached else loss

    parallel, x = DataParallel(network(first), devices(2)), rows(first)
    with pytest.raises(RuntimeError) as caught:
        parallel.step(loss_fn, x, x)
    (note,) = caught.value.__notes__
    assert "step() runs backward itself" in note


class Regularised(nn.Module):
    """Runs backward in forward, for a term that is a sum over rows."""

    def __init__(self, first):
        super().__init__()
        self.layer, self.other = (nn.Linear(4, 4, dtype=torch.float64, device=first) for _ in range(2))

    def forward(self, x):
        self.other(x).square().sum().backward()
        return self.layer(x)


@pytest.mark.parametrize("use_step", [False, True])
def test_a_module_that_runs_a_backward_of_its_own(devices, first, use_step):
    module, x = Regularised(first), rows(first)
    plain, parallel = copy.deepcopy(module), DataParallel(module, devices(3))
    F.mse_loss(plain(x), x).backward()
    if use_step:
        parallel.step(F.mse_loss, x, x)
    else:
        F.mse_loss(parallel(x), x).backward()
    assert_same_gradients(module, plain)


def test_backward_runs_outside_the_autocast_that_is_around_the_step(devices, first):
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(lambda _: seen.append([torch.is_autocast_enabled(k) for k in ("cpu", first.type)]))
            return y

    module = Watched(4, 4).to(first)
    with torch.autocast(first.type, torch.bfloat16):
        DataParallel(module, devices(2)).step(lambda y: y.float().square().mean(), torch.randn(4, 4).to(first))
        assert torch.is_autocast_enabled(first.type)
    assert seen == [[False, False]] * 2
