"""SyncBatchNorm: batch normalisation over all replicas' rows (PyTorch has none without a process group: #38940)."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from lockstep import DataParallel
from lockstep.errors import LayoutError, NotReplicableError
from lockstep.local import SyncBatchNorm
from programs.networks import Applying
from programs.one_device import same, same_gradients


def network(momentum: float | None = 0.1, affine: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, momentum=momentum, affine=affine),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 16, 3),
        nn.BatchNorm1d(3, momentum=momentum, affine=affine),
    ).double()


def pair(plain):
    """A module in float64, and its copy with synchronised layers."""
    return plain.double(), SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))


@pytest.mark.parametrize("how", ["step", "forward"])
@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, True), (0.0, False)])
def test_as_on_one_device(devices, first, how, momentum, affine):
    plain, network_ = pair(network(momentum, affine))
    parallel = DataParallel(network_.to(first), devices(3))
    for _ in range(3):
        x, y = torch.randn(7, 1, 6, 6, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
        F.mse_loss(plain(x), y).backward()
        if how == "step":
            parallel.step(F.mse_loss, x.to(first), y.to(first))
        else:
            F.mse_loss(parallel(x.to(first)), y.to(first)).backward()
        same_gradients(parallel, plain)
        same(parallel.buffers(), plain.buffers(), 1e-12, 1e-12)
    same([parallel.eval()(x.to(first))], [plain.eval()(x)], 1e-12, 1e-12)


def test_outside_of_data_parallel_it_is_batch_norm():
    norm, x = nn.BatchNorm1d(2), torch.randn(5, 2)
    converted = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))
    assert torch.equal(converted(x), norm(x))
    assert torch.equal(converted.running_var, norm.running_var)


def test_conversion_keeps_parameters_buffers_mode_and_names():
    plain = network().eval()
    parameters, state = list(plain.parameters()), copy.deepcopy(plain.state_dict())
    converted = SyncBatchNorm.convert_sync_batchnorm(plain)
    assert converted is plain
    assert [type(m) for m in converted.modules()].count(SyncBatchNorm) == 2
    assert all(a is b for a, b in zip(converted.parameters(), parameters, strict=True))
    assert list(converted.state_dict()) == list(state)
    assert not any(m.training for m in converted.modules())
    again = SyncBatchNorm.convert_sync_batchnorm(converted)
    assert again[1] is converted[1]
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)), SyncBatchNorm)


def test_half_precision_input(devices, first):
    norm = SyncBatchNorm(2).to(first)
    x = torch.randn(6, 2).to(first, torch.bfloat16)
    output = DataParallel(norm, devices(2))(x)
    assert output.dtype == torch.bfloat16
    expected = F.batch_norm(x.float().cpu(), None, None, training=True)
    torch.testing.assert_close(output.float().cpu(), expected, rtol=0.02, atol=0.02)


def test_a_replica_that_takes_another_way_is_an_error_in_all():
    network = Applying(lambda m, x: x if bool((x > 5).all()) else m.norm(x), norm=SyncBatchNorm(2))
    parallel = DataParallel(network, ["cpu"] * 3)
    x = torch.randn(6, 2).clamp(-2, 2)
    x[2:4] = 9.0
    with pytest.raises(RuntimeError, match=r"waits at SyncBatchNorm \d+ for replicas \[1\]"):
        parallel(x)
    assert parallel(torch.randn(6, 2)).shape == (6, 2)


def test_shapes_are_checked():
    with pytest.raises(LayoutError, match=r"expected an input of shape \(N, C\) or \(N, C, ...\), got \(3,\)"):
        SyncBatchNorm(3)(torch.zeros(3))
    norm = SyncBatchNorm(3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        DataParallel(norm, ["cpu", "cpu"])(torch.zeros(1, 3))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("use_step", [False, True])
def test_inside_a_checkpointed_segment_it_is_refused(devices, first, reentrant, use_step):
    forward = lambda m, x: checkpoint(m.norm, m.linear(x), use_reentrant=reentrant)  # noqa: E731
    network, x = Applying(forward, (4, 4), norm=SyncBatchNorm(4)).to(first), torch.randn(6, 4).to(first)
    parallel = DataParallel(network, devices(2))
    with pytest.raises(NotReplicableError, match="inside a checkpointed segment"):
        if use_step:
            parallel.step(F.mse_loss, x, x)
        else:
            parallel(x)
    parallel.eval()
    parallel(x).sum().backward()


class OtherCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint that is not PyTorch's."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run, ctx.x = run, x.detach()
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(grad)
        return None, x.grad


def test_recomputation_by_another_kind_of_checkpoint_is_refused():
    forward = lambda m, x: OtherCheckpoint.apply(m.norm, m.linear(x))  # noqa: E731
    network, x = Applying(forward, (4, 4), norm=SyncBatchNorm(4)), torch.randn(6, 4)
    output = DataParallel(network, ["cpu", "cpu"])(x)
    with pytest.raises(NotReplicableError, match="inside a checkpointed segment"):
        output.sum().backward()
    network(x).sum().backward()  # on one device it is right


def test_a_checkpoint_around_the_whole():
    plain, network = pair(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    parallel, x = DataParallel(network, ["cpu", "cpu"]), torch.randn(6, 4, dtype=torch.float64)
    plain(x).pow(3).sum().backward()
    checkpoint(parallel, x.clone().requires_grad_(), use_reentrant=True).pow(3).sum().backward()
    same_gradients(network, plain, 1e-7, 1e-7)


def test_copies_are_layers_of_their_own():
    layer = SyncBatchNorm(3)
    forward = lambda m, x: (m.one if bool(x[0, 0] > 0) else m.other)(x)  # noqa: E731
    parallel = DataParallel(Applying(forward, one=layer, other=copy.deepcopy(layer)), ["cpu", "cpu"])
    with pytest.raises(RuntimeError, match=r"waits at SyncBatchNorm \d+ for replicas that wait elsewhere"):
        parallel(torch.cat([torch.ones(4, 3), -torch.ones(4, 3)]))
    parallel(torch.randn(8, 3).abs())


@pytest.mark.parametrize("rows", [8, 7, 3])
def test_inside_of_another_data_parallel(rows):
    """Statistics are those of the whole batch, also where an inner one uses fewer replicas than another."""
    plain, network = pair(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    outer = DataParallel(nn.Sequential(DataParallel(network, ["cpu", "cpu"])), ["cpu", "cpu"])
    x = torch.randn(rows, 4, dtype=torch.float64)
    expected, got = plain(x), outer(x)
    torch.testing.assert_close(got, expected)
    expected.pow(3).sum().backward()
    got.pow(3).sum().backward()
    same_gradients(network, plain, 1e-7, 1e-7)
    torch.testing.assert_close(network[1].running_var, plain[1].running_var)


class Activated(nn.BatchNorm1d):
    """As timm's."""

    def forward(self, x):
        return super().forward(x).relu()


def test_conversion_of_a_pruned_layer_of_one_under_two_names_and_of_what_it_cannot_keep():
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3)))
    network.again = network[0]
    network[1].also = network[0]
    prune.random_unstructured(network[1][0], "weight", 1)
    handle, seen = network[0].register_forward_hook(lambda *_: seen.append(1)), []
    x = torch.randn(5, 3)
    expected = network[1][0](x)
    SyncBatchNorm.convert_sync_batchnorm(network)
    assert network.again is network[1].also is network[0]
    assert [type(m) for m in network.modules()].count(SyncBatchNorm) == 2
    torch.testing.assert_close(network[1][0](x), expected)
    network[0](x)
    assert seen == [1]
    handle.remove()
    spectral = nn.utils.parametrize.register_parametrization(nn.BatchNorm1d(3), "weight", nn.Softplus())
    refused = {
        "is parametrized": spectral,
        "has no shapes yet": nn.LazyBatchNorm1d(),
        "Activated .* forward": Activated(3),
    }
    for reason, norm in refused.items():
        with pytest.raises(NotReplicableError, match=reason):
            SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(norm))
