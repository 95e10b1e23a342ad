"""Persistent replicas: what they are, when they are rebuilt, what is carried over, what a live graph may rely on."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import subprocess
import sys
import warnings
import weakref
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import lockstep
from lockstep import DataParallel
from lockstep.errors import DeviceError, NotReplicableError
from lockstep.local import ReplicaSet, replicate
from lockstep.local.module_copy import CACHE

CPU = torch.device("cpu")
compiling = pytest.mark.usefixtures("compiled")
scripting = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")


def on(device, make, *args, **kwargs):
    """Return what ``make`` makes, on a device. (Not moved there: that would untie shared parameters of simulated
    devices.)"""
    with device:
        return make(*args, **kwargs)


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(modules, chunks):
    """The sum over replicas of a loss of each one's chunk; ``modules`` may also be one module for all chunks."""
    modules = [modules] * len(chunks) if isinstance(modules, nn.Module) else modules
    losses = [m(c.to(_device(m))).square().sum() for m, c in zip(modules, chunks, strict=True)]
    return sum(loss.to("cpu") for loss in losses)


def _device(module):
    return next(module.parameters()).device


def gradients(network):
    return {name: None if p.grad is None else p.grad.clone() for name, p in network.named_parameters()}


def reference(network, chunks):
    """The gradients of the same chunks on one device."""
    twin = copy.deepcopy(network)
    twin.zero_grad()
    loss_of(twin, chunks).backward()
    return gradients(twin)


def assert_close(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(got[name].cpu(), tensor.cpu(), msg=name)


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


# ------------------------------------------------------------------------------- what a replica is


@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_of_all_replicas_sum_into_the_network(devices, first, count):
    network = on(first, mlp)
    replicas = replicate(network, devices(count))
    chunks = torch.randn(count, 5, 3).unbind()
    assert [_device(r) for r in replicas] == devices(count)
    expected = reference(network, chunks)
    loss_of(replicas, chunks).backward()
    assert_close(gradients(network), expected)
    loss_of(replicate(network, devices(count)), chunks).backward()  # and on top of those
    assert_close(gradients(network), {name: 2 * g for name, g in expected.items()})


def test_replicas_hold_the_values_of_the_network(devices, first):
    network = on(first, nn.Sequential, OrderedDict(conv=nn.Conv2d(2, 3, 2), norm=nn.BatchNorm2d(3))).to(first)
    network.conv.weight.data = network.conv.weight.data.contiguous(memory_format=torch.channels_last)
    state = {name: t.cpu() for name, t in network.state_dict().items()}
    for device, replica in zip(devices(2), replicate(network, devices(2)), strict=True):
        assert replica.state_dict().keys() == state.keys()
        for name, tensor in replica.state_dict().items():
            assert tensor.device == device
            assert torch.equal(tensor.cpu(), state[name])
        assert replica.conv.weight.stride() == network.conv.weight.stride()


def test_the_first_replica_shares_the_storage_of_the_network(devices, first):
    """As in PyTorch, so that in-place updates of its buffers reach the network. Another replica's do not."""
    network = on(first, nn.BatchNorm1d, 2)
    one, two = replicate(network, devices(2))
    assert storage(one.weight) == storage(network.weight)
    assert storage(one.running_mean) == storage(network.running_mean)
    assert storage(two.running_mean) != storage(network.running_mean)
    x = torch.randn(4, 2)
    one(x.to(first))
    two(x.to(_device(two)) + 10)
    torch.testing.assert_close(network.running_mean.cpu(), 0.1 * x.mean(0))


def test_replicas_do_not_keep_the_replicas_that_their_network_keeps():
    network = nn.Linear(2, 2)
    for _ in range(2):
        lockstep.local.data_parallel(network, torch.ones(4, 2), ["cpu", "cpu"])
    assert CACHE in vars(network)
    assert not any(CACHE in vars(each) for each in replicate(network, ["cpu", "cpu"]))


def test_the_network_may_be_elsewhere(sim):
    """The replicas need not be where the network is: as in the C++ API, it may lie on the CPU."""
    network = mlp()
    replicas = replicate(network, sim.devices(2))
    chunks = torch.randn(2, 5, 3).unbind()
    assert [_device(r) for r in replicas] == sim.devices(2)
    expected = reference(network, chunks)
    loss_of(replicas, chunks).backward()
    assert_close(gradients(network), expected)


def test_former_parameters_are_those_of_the_replica(devices, first):
    network = nn.Sequential(nn.Linear(2, 2, bias=False)).to(first)
    for _ in range(2):
        for replica in replicate(network, devices(2)):
            assert dict(replica[0]._former_parameters) == {"weight": replica[0].weight}
            assert len(replica._former_parameters) == 0
    assert not hasattr(network[0], "_former_parameters")


def test_no_devices_no_replicas():
    assert replicate(mlp(), []) == []


def test_a_network_on_several_devices_is_refused(sim):
    network = mlp()
    network[2].to("sim:1")
    with pytest.raises(DeviceError, match="sim:1"):
        replicate(network, sim.devices(2))


class Scaled(nn.Module):
    """With a buffer that requires a gradient, and one that does not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((2,), 2.0, requires_grad=True))
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x):
        return self.linear(x) * self.scale + self.shift


def test_buffers_that_require_gradients_get_them(devices, first):
    network = on(first, Scaled)
    twin = copy.deepcopy(network)
    chunks = torch.randn(2, 5, 3).unbind()
    loss_of(twin, chunks).backward()
    for times in (1, 2):
        replicas = replicate(network, devices(2))
        loss_of(replicas, chunks).backward()
        assert all(r.scale.requires_grad and not r.shift.requires_grad for r in replicas)
        torch.testing.assert_close(network.scale.grad, times * twin.scale.grad)
    assert_close(gradients(network), {name: 2 * p.grad for name, p in twin.named_parameters()})


def test_a_buffer_computed_from_parameters_passes_gradients_on(devices, first):
    network = on(first, Scaled)
    network.scale = network.linear.bias * 3  # not a leaf
    chunks = torch.randn(2, 5, 3).unbind()
    with torch.no_grad():
        values = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    losses = [
        ((c.to(first) @ values["linear.weight"].t() + values["linear.bias"]) * values["linear.bias"] * 3 + 1)
        .square()
        .sum()
        for c in chunks
    ]
    sum(losses).backward()
    loss_of(replicate(network, devices(2)), chunks).backward()
    assert_close(gradients(network), {name: v.grad for name, v in values.items()})


def test_detached_replicas_are_not_differentiable(devices, first):
    network = on(first, Scaled)
    for replica in replicate(network, devices(2), detach=True):
        assert not any(t.requires_grad for t in (*replica.parameters(), *replica.buffers()))
        assert not replica(torch.ones(1, 3, device=_device(replica))).requires_grad
    x = torch.ones(1, 3, device=first)
    torch.testing.assert_close(replicate(network, devices(2), True)[0](x), network(x))


def test_detached_and_attached_replicas_are_different_sets():
    network = mlp()
    attached, detached = replicate(network, [CPU]), replicate(network, [CPU], detach=True)
    assert attached[0] is not detached[0]
    assert replicate(network, ["cpu"])[0] is attached[0]
    assert replicate(network, ["cpu", "cpu"])[0] is not attached[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.again = self.block
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("mask_too", self.mask)

    def forward(self, x):
        return self.head(self.again(self.block(self.embed(x)))) * self.mask * self.mask_too


def test_what_is_tied_or_shared_stays_so(devices, first):
    network = on(first, Tied)
    replicas = replicate(network, devices(2))
    for replica in replicas:
        assert replica.head.weight is replica.embed.weight
        assert replica.again is replica.block
        assert replica.mask_too is replica.mask
        assert replica.block is not network.block
        assert len(list(replica.parameters())) == len(list(network.parameters())) == 3
    chunks = torch.randn(2, 5, 3).unbind()
    loss_of(replicas, chunks).backward()
    assert_close(gradients(network), reference(network, chunks))


def test_none_stays_none(devices, first):
    network = on(first, nn.Sequential, nn.Linear(3, 2, bias=False)).to(first)
    network.register_parameter("absent", None)
    network.register_module("nobody", None)
    network.register_buffer("nothing", None)
    network.norm = on(first, nn.BatchNorm1d, 2, track_running_stats=False)
    for replica in replicate(network, devices(2)):
        assert replica.absent is replica.nobody is replica.nothing is replica[0].bias is None
        assert replica.norm.running_mean is None
        assert list(replica._modules) == list(network._modules)
        assert replica.state_dict().keys() == network.state_dict().keys()


def test_a_parameter_may_stand_without_gradient(devices, first):
    """A frozen parameter stays frozen; one that no replica uses gets no gradient."""
    network = on(first, lambda: nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}))
    network.used.bias.requires_grad_(False)
    replicas = replicate(network, devices(2))
    assert [p.requires_grad for p in replicas[1].parameters()] == [True, False, True, True]
    loss_of([r.used for r in replicas], torch.randn(2, 5, 3).unbind()).backward()
    assert [p.grad is None for p in network.parameters()] == [False, True, True, True]


def test_a_parameter_used_by_one_replica_only(devices, first):
    network = on(first, lambda: nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]))
    replicas = replicate(network, devices(2))
    chunks = torch.randn(2, 5, 3).unbind()
    loss_of([replicas[0][0], replicas[1][1]], chunks).backward()
    for layer, chunk in zip(network, chunks, strict=True):
        assert_close(gradients(layer), reference(layer, [chunk]))


# ------------------------------------------------------------------------------ kinds of modules


def scripted(*modules):
    return torch.jit.script(nn.Sequential(*modules))


@scripting
def test_scripted_modules(devices, first):
    network = scripted(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).to(first)
    chunks = torch.randn(2, 5, 3).unbind()
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    twin.load_state_dict({name: t.cpu() for name, t in network.state_dict().items()})
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (network, twin)]
    for _ in range(2):
        replicas = replicate(network, devices(2))
        assert all(isinstance(r, torch.jit.ScriptModule) for r in replicas)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(replicas, chunks).backward()
        loss_of(twin, chunks).backward()
        assert_close(gradients(network), gradients(twin))
        for optimizer in optimizers:
            optimizer.step()
    network.eval()
    twin.eval()
    twin.load_state_dict({name: t.cpu() for name, t in network.state_dict().items()})
    one, two = replicate(network, devices(2))
    assert not one.training
    torch.testing.assert_close(two(chunks[0].to(_device(two))).cpu(), twin(chunks[0]))


@scripting
def test_scripted_modules_inside_python_modules(devices, first):
    network = nn.Sequential(nn.Linear(3, 3), scripted(nn.Linear(3, 2), nn.Tanh())).to(first)
    chunks = torch.randn(2, 5, 3).unbind()
    plain = on(first, lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2), nn.Tanh())))
    plain.load_state_dict(network.state_dict())
    loss_of(replicate(network, devices(2)), chunks).backward()
    assert_close(gradients(network), reference(plain, chunks))


@scripting
def test_python_children_of_scripted_modules_are_refused():
    network = scripted(nn.Linear(3, 3))
    network._modules._python_modules["python"] = nn.Identity()
    reason = "python modules are children of ScriptModule: .*python is a Identity inside the scripted network"
    with pytest.raises(NotReplicableError, match=reason):
        replicate(network, ["cpu", "cpu"])
    with pytest.raises(RuntimeError, match=r"outer\.python .*inside the scripted outer"):
        replicate(nn.ModuleDict({"outer": network}), ["cpu", "cpu"])


def test_lazy_modules_are_refused_until_they_have_shapes(devices, first):
    network = on(first, lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()))
    with pytest.raises(NotReplicableError, match=r"0 is a LazyLinear whose parameters have no shape yet"):
        replicate(network, devices(2))
    network(torch.ones(2, 3, device=first))
    chunks = torch.randn(2, 5, 3).unbind()
    loss_of(replicate(network, devices(2)), chunks).backward()
    assert_close(gradients(network), reference(network, chunks))


class Positive(nn.Module):
    def forward(self, x):
        return F.softplus(x)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(3, 3), torch.randn(3, 3)])
        self.gains = nn.ParameterDict({"a": torch.ones(3), "b": torch.full((3,), 2.0)})

    def forward(self, x):
        assert len(self.weights) == 2
        assert list(self.gains) == ["a", "b"]
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.gains["a"] + x * self.gains["b"]


def parametrized():
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    parametrize.register_parametrization(network[0], "weight", Positive())
    return network


def legacy(norm):
    def make():
        with pytest.warns(FutureWarning, match="deprecated"):
            return nn.Sequential(norm(nn.Linear(3, 4)), nn.Linear(4, 2))

    return make


SPECIAL = {
    "parametrization": parametrized,
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)),
    "legacy weight_norm": legacy(nn.utils.weight_norm),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 2)),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.Linear(3, 2)),
    "ParameterList and ParameterDict": Lists,
    "attention": lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0, batch_first=True),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_special_modules(make):
    """On CPU replicas; evaluation, so that a power iteration does not change what is compared."""
    network = make().eval()
    chunks = torch.randn(2, 5, 3).unbind()
    values = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    losses = sum(torch.func.functional_call(network, values, c).square().sum() for c in chunks)
    grads = torch.autograd.grad(losses, [*values.values()])
    for _ in range(2):
        network.zero_grad()
        replicas = replicate(network, ["cpu", "cpu"])
        loss_of(replicas, chunks).backward()
        assert_close(gradients(network), dict(zip(values, grads, strict=True)))


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_special_modules_train_on_accelerators(make, sim):
    network = make()
    network.to("sim:0")
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    x = torch.randn(6, 2, 3, device="sim:0")
    parallel = lockstep.DataParallel(network, [0, 1])
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        parallel(x).square().mean().backward()
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in network.named_parameters())
    network.eval()
    torch.testing.assert_close(parallel(x), network(x))


def test_legacy_spectral_norm_follows_the_network(devices, first):
    network = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4))).to(first)
    before = network[0].weight_u.clone()
    parallel = lockstep.DataParallel(network, devices(2))
    parallel(torch.randn(4, 3, device=first)).sum().backward()
    assert not torch.equal(network[0].weight_u, before)  # the power iteration of replica 0 is the network's
    assert network[0].weight_orig.grad.abs().sum() > 0
    network.eval()
    x = torch.randn(4, 3, device=first)
    torch.testing.assert_close(parallel(x), network(x))


@pytest.mark.parametrize("kind_of_rnn", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnn_uses_the_weights_of_the_replica(devices, first, kind_of_rnn):
    network = on(first, kind_of_rnn, 3, 4, 2)
    chunks = torch.randn(2, 5, 2, 3).unbind()
    twin = copy.deepcopy(network)
    for _ in range(2):
        replicas = replicate(network, devices(2))
        for replica in replicas:
            assert len(replica._flat_weights) == len(network._flat_weights)
            own = dict(replica.named_parameters())
            names = network._flat_weights_names
            assert all(w is own[n] for w, n in zip(replica._flat_weights, names, strict=True))
            replica.flatten_parameters()
        for m in (network, twin):
            m.zero_grad()
        sum(r(c.to(_device(r)))[0].square().sum().cpu() for r, c in zip(replicas, chunks, strict=True)).backward()
        sum(twin(c.to(first))[0].square().sum() for c in chunks).backward()
        assert_close(gradients(network), gradients(twin))
        for m in (network, twin):
            torch.optim.SGD(m.parameters(), 0.1).step()


class Remembering(nn.Linear):
    """Extra Python state, in its state dict too."""

    def __init__(self):
        super().__init__(3, 2)
        self.history = [1, 2]
        self.config = {"a": [1]}

    def get_extra_state(self):
        return {"history": self.history}

    def set_extra_state(self, state):
        self.history = state["history"]


def test_extra_python_state(devices, first):
    network = on(first, Remembering)
    for replica in replicate(network, devices(2)):
        assert replica.history is network.history  # shared by reference, as PyTorch's replicas do
        assert replica.config is network.config
        assert replica.get_extra_state() == {"history": [1, 2]}
        assert replica.state_dict()["_extra_state"] == {"history": [1, 2]}
    network.load_state_dict({**network.state_dict(), "_extra_state": {"history": [9]}})
    assert [r.history for r in replicate(network, devices(2))] == [[9], [9]]


def test_sparse_buffers_and_sparse_gradients():
    network = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    network.register_buffer("graph", torch.eye(3).to_sparse())
    rows = torch.tensor([1, 2])
    for _ in range(2):
        replicas = replicate(network, ["cpu", "cpu"])
        assert all(r.graph.layout == torch.sparse_coo for r in replicas)
        network.zero_grad()
        sum(torch.sparse.mm(r.graph, r(rows).t()).sum() for r in replicas).backward()
        assert network[0].weight.grad.is_sparse
        assert network[0].weight.grad.to_dense().sum(1).tolist() == [0, 6, 6, 0, 0]
    network.graph = 2 * torch.eye(3).to_sparse()
    with torch.no_grad():
        assert replicate(network, ["cpu", "cpu"])[1].graph.to_dense()[0, 0] == 2


def test_networks_of_several_dtypes(devices, first):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2, dtype=torch.float64)
            self.z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
            self.register_buffer("steps", torch.tensor(3))
            self.register_buffer("empty", torch.empty(0))

        def forward(self, x):
            return (self.b(self.a(x).double()).float() * self.z).abs() * self.steps

    network = on(first, Mixed)
    chunks = torch.randn(2, 5, 3).unbind()
    loss_of(replicate(network, devices(2)), chunks).backward()
    assert_close(gradients(network), reference(network, chunks))


# ------------------------------------------------------------------------------------ persistence


def evaluated(replicas, x):
    with torch.no_grad():
        return [r(x.to(_device(r))).cpu() for r in replicas]


def test_the_same_modules_next_time(devices, first):
    network = on(first, mlp)
    modules = [list(r.modules()) for r in replicate(network, devices(2))]
    parameters = [list(r.parameters()) for r in replicate(network, devices(2))]
    for step in range(3):
        replicas = replicate(network, devices(2))
        loss_of(replicas, torch.randn(2, 5, 3).unbind()).backward()
        torch.optim.SGD(network.parameters(), 0.1).step()
        if step == 1:
            network.eval()
        for replica, own, tensors in zip(replicas, modules, parameters, strict=True):
            assert all(a is b for a, b in zip(replica.modules(), own, strict=True))
            assert all(a is b for a, b in zip(replica.parameters(), tensors, strict=True))


def test_nothing_is_rebuilt_in_training(devices, first):
    network = on(first, lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)))
    replicas = ReplicaSet(network, devices(2))
    optimizer = torch.optim.Adam(network.parameters())
    for _ in range(3):
        loss_of(replicas.refresh(), torch.randn(2, 5, 3).unbind()).backward()
        optimizer.step()
        optimizer.zero_grad()
        network.eval()
        replicas.refresh()
        network.train()
    assert replicas.builds == 1


def test_updates_reach_the_replicas(devices, first):
    network = on(first, lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))).eval()
    x = torch.randn(4, 3)

    def agrees():
        (expected,) = evaluated([network], x)
        return all(torch.allclose(y, expected) for y in evaluated(replicate(network, devices(2)), x))

    assert agrees()
    with torch.no_grad():
        network[0].weight.mul_(2)
        assert agrees()
        network[1].running_mean.add_(1)
        assert agrees()
        network[1].running_var = torch.full((2,), 4.0, device=first)
        assert agrees()
        network.load_state_dict({name: t + 1 for name, t in network.state_dict().items()})
        assert agrees()
    network[0].weight.data.add_(1)  # leaves no trace in the version counter; but a gradient may be wanted
    assert agrees()


def test_an_update_through_data_counts_at_the_next_evaluation_too(devices, first):
    network = on(first, mlp)
    replicas = replicate(network, devices(2))
    network[0].weight.data.add_(1)
    with torch.no_grad():
        replicas = replicate(network, devices(2))
    assert all(torch.equal(r[0].weight.cpu(), network[0].weight.cpu()) for r in replicas)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_values_are_sent_at_each_use_and_the_host_waits_for_no_device(sim, grad):
    """Also those that were written through `.data`, which no version counter tells of."""
    network = on(sim.devices(1)[0], mlp)
    replicas = ReplicaSet(network, sim.devices(2))
    with torch.set_grad_enabled(grad):
        for _ in range(3):  # the first one tries the connection
            replicas.refresh()
        for value in (1.0, 2.0):
            network[0].weight.data.fill_(value)
            sim.reset_copies()
            sim.reset_stream_log()
            (_, there) = replicas.refresh()
            assert list(sim.copies()) == [("sim:0", "sim:1")]
            assert not [line for line in sim.stream_log() if line.action.startswith("sync")]
            assert (there[0].weight.cpu() == value).all()


def test_parameters_travel_in_a_few_flat_transfers(sim):
    network = on(sim.devices(1)[0], lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))))
    replicas = ReplicaSet(network, sim.devices(2))
    replicas.refresh()
    sim.reset_copies()
    replicas.refresh()
    assert sim.copies()["sim:0", "sim:1"].calls == 1  # 40 parameters
    for _ in range(2):  # the first backward also tries whether copies between the two arrive
        loss = loss_of(replicas.refresh(), torch.ones(2, 1, 8))
        sim.reset_copies()
        loss.backward()
    assert sim.copies()["sim:1", "sim:0"].calls == 1  # their gradients


def test_parameters_that_share_a_storage_are_sent_from_it(sim):
    """Nothing is packed: the storage of an RNN's weights, or of flattened parameters, is as large as they are."""
    network = nn.Linear(100, 100).to("sim:0")
    flat = torch.randn(100 * 100 + 100 + 8, device="sim:0")
    network.weight.data, network.bias.data = flat[8:-100].view(100, 100), flat[-100:]
    replicas = ReplicaSet(network, sim.devices(2))
    replicas.refresh()
    torch.sim.reset_peak_memory_stats(0)
    before = torch.sim.memory_allocated(0)
    sim.reset_copies()
    _, there = replicas.refresh()
    assert torch.sim.max_memory_allocated(0) == before
    assert sim.copies()["sim:0", "sim:1"] == (1, flat.nbytes)
    for one, other in zip(network.parameters(), there.parameters(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def test_replicas_share_the_flat_copy_of_a_device(sim):
    """Two replicas on one device: the parameters travel there once."""
    network = on(sim.devices(1)[0], mlp)
    one, two = sim.devices(2)
    replicas = ReplicaSet(network, [one, two, two])
    replicas.refresh()
    sim.reset_copies()
    _, b, c = replicas.refresh()
    assert sim.copies()["sim:0", "sim:1"].calls == 1
    assert storage(b[0].weight) == storage(c[0].weight)


def test_a_dropped_network_is_freed():
    network = mlp()
    replica = weakref.ref(replicate(network, ["cpu", "cpu"])[1])
    network = weakref.ref(network)
    gc.collect()
    assert network() is None
    assert replica() is None


def test_a_replaced_buffer_is_freed():
    """And what it meant in the replicas: nothing must pile up where a forward makes new buffers each time."""
    network = nn.BatchNorm1d(2)
    network.holder = [network.running_mean]  # an attribute that means the replica's own buffer
    replicas = ReplicaSet(network, [CPU, CPU])
    replicas.refresh()
    kept = network.running_mean
    in_replica = weakref.ref(replicas.refresh()[1].running_mean)
    network.running_mean = torch.ones(2)
    network.holder = [network.running_mean]
    for _ in range(2):
        replica = replicas.refresh()[1]
        assert replica.holder[0] is replica.running_mean
        assert torch.equal(replica.running_mean, torch.ones(2))
    gc.collect()
    assert in_replica() is None
    network.kept = kept  # now a plain tensor like any other
    assert replicas.refresh()[1].kept is kept


# ---------------------------------------------------------------------------------------- rebuilds


def set_data(parameter, make):
    parameter.data = make(parameter.data)


REBUILDS = {
    "swap a submodule": lambda n: n.__setitem__(0, nn.Linear(3, 4)),
    "swap a submodule's child": lambda n: n[3].__setitem__(0, nn.Linear(2, 2)),
    "add a submodule": lambda n: n.append(nn.Tanh()),
    "add a nested submodule": lambda n: n[3].append(nn.Tanh()),
    "remove a submodule": lambda n: n.__delitem__(3),
    "swap a parameter": lambda n: setattr(n[0], "bias", nn.Parameter(torch.ones(4))),
    "add a parameter": lambda n: n[3].register_parameter("extra", nn.Parameter(torch.ones(2))),
    "remove a parameter": lambda n: setattr(n[0], "bias", None),
    "add a buffer": lambda n: n[3].register_buffer("extra", torch.ones(2)),
    "remove a buffer": lambda n: delattr(n, "count"),
    "buffer to None": lambda n: setattr(n, "count", None),
    "dtype": lambda n: n.double(),
    "tie two parameters": lambda n: setattr(n[3][1], "weight", n[3][0].weight),
}


@pytest.mark.parametrize("change", REBUILDS.values(), ids=REBUILDS)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_a_change_of_the_network_rebuilds_its_replicas(devices, first, change, grad):
    def make():
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
        net.append(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        net.register_buffer("count", torch.ones(1))
        return net

    network = on(first, make)
    replicas = ReplicaSet(network, devices(2))
    with torch.set_grad_enabled(grad):
        replicas.refresh()
        assert replicas.refresh() == replicas.refresh()
        assert replicas.builds == 1
        with first:
            change(network)
        found = replicas.refresh()
        assert replicas.builds == 2
        assert replicas.refresh() == found
        assert replicas.builds == 2
    for replica in found:
        assert [type(m) for m in replica.modules()] == [type(m) for m in network.modules()]
        state = replica.state_dict()
        assert state.keys() == network.state_dict().keys()
        assert all(torch.equal(state[k].cpu(), t.cpu()) for k, t in network.state_dict().items())
        assert all(state[k].dtype == t.dtype for k, t in network.state_dict().items())
    chunks = torch.randn(2, 5, 3, dtype=network[0].weight.dtype).unbind()
    loss_of(replicas.refresh(), chunks).backward()
    assert_close(gradients(network), reference(network, chunks))


ELSEWHERE = {
    "other data": lambda n: set_data(n[0].weight, lambda d: d * 2),
    "the same data in another layout": lambda n: set_data(n[2].weight, lambda d: d.view(4, 2).t()),
    "a square matrix transposed": lambda n: set_data(n[3].weight, torch.Tensor.t),
    "fewer rows of the same data": lambda n: (
        set_data(n[3].weight, lambda d: d[:1]),
        set_data(n[3].bias, lambda d: d[:1]),
    ),
    "another shape": lambda n: (
        set_data(n[3].weight, lambda d: d.repeat(2, 1)),
        set_data(n[3].bias, lambda d: d.repeat(2)),
    ),
    "one long tensor": lambda n: nn.utils.vector_to_parameters(
        2 * nn.utils.parameters_to_vector(n.parameters()).detach(), n.parameters()
    ),
}


@pytest.mark.parametrize("change", ELSEWHERE.values(), ids=ELSEWHERE)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("network_first", [False, True])
def test_other_data_behind_the_same_parameters(devices, first, change, grad, network_first):
    """``p.data = ...``, as pruning, flattening and many optimizers do it."""

    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False), nn.Linear(2, 2))

    network = on(first, make)
    replicas = ReplicaSet(network, devices(3), network_first=network_first)
    with torch.set_grad_enabled(grad):
        replicas.refresh()
        replicas.refresh()
        change(network)
        for replica in replicas.refresh():
            for got, want in zip(replica.parameters(), network.parameters(), strict=True):
                assert torch.equal(got.cpu(), want.cpu())
    chunks = torch.randn(3, 5, 3).unbind()
    for _ in range(2):
        network.zero_grad()
        loss_of(replicas.refresh(), chunks).backward()
        assert_close(gradients(network), reference(network, chunks))
        torch.optim.SGD(network.parameters(), 0.1).step()


def test_an_equal_number_of_another_type():
    network = mlp()
    network.factor = 1
    replicate(network, [CPU])
    network.factor = 1.0
    assert isinstance(replicate(network, [CPU])[0].factor, float)


def test_to_another_device_rebuilds(sim):
    one, two = sim.devices(2)
    network = on(one, mlp)
    replicas = ReplicaSet(network, [one, two])
    replicas.refresh()
    network.to(two)
    chunks = torch.randn(2, 5, 3).unbind()
    loss_of(replicas.refresh(), chunks).backward()
    assert replicas.builds == 2
    assert {p.grad.device for p in network.parameters()} == {two}
    assert_close(gradients(network), reference(network, chunks))


def test_a_buffer_alone_on_another_device_is_named(sim):
    network = on(sim.devices(1)[0], nn.BatchNorm1d, 2)
    replicas = ReplicaSet(network, sim.devices(2))
    replicas.refresh()
    network.running_var = network.running_var.to("sim:1")
    with pytest.raises(DeviceError, match="running_var"):
        replicas.refresh()


def test_a_failed_rebuild_is_tried_again(devices, first):
    network = on(first, mlp)
    replicas = ReplicaSet(network, devices(2))
    replicas.refresh()
    network.append(on(first, nn.LazyLinear, 2))
    for _ in range(2):
        with pytest.raises(NotReplicableError, match=r"3 is a LazyLinear"):
            replicas.refresh()
    network(torch.ones(1, 3, device=first))
    chunks = torch.randn(2, 5, 3).unbind()
    loss_of(replicas.refresh(), chunks).backward()
    assert_close(gradients(network), reference(network, chunks))


# ------------------------------------------------------------------------------------ carried over


def hook(module, *_):
    module.calls = getattr(module, "calls", 0) + 1


def kwargs_hook(module, args, kwargs):
    module.calls = getattr(module, "calls", 0) + 1


class Tree(nn.Module):
    """With every kind of attribute that leads back into the tree."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))
        self.last = nn.Linear(3, 2)
        self.register_buffer("mask", torch.ones(3))
        self.layers = [self.first, self.block[0]]
        self.unused = []

    def forward(self, x):
        return self.last(self.block(self.first(x)) * self.mask)

    def method(self):
        return self


def own(replica, value):
    """``value`` with names for parts that are the replica's own; other modules and tensors are "foreign"."""
    names = {id(m): f"module {name}" for name, m in replica.named_modules()}
    names |= {id(t): f"tensor {name}" for name, t in (*replica.named_parameters(), *replica.named_buffers())}

    def show(v):
        if isinstance(v, nn.Module | torch.Tensor):
            return names.get(id(v), "foreign")
        if isinstance(v, dict):
            return {show(k): show(x) for k, x in v.items()}
        if isinstance(v, list | tuple | deque):
            return type(v).__name__, [show(x) for x in v]
        if isinstance(v, set | frozenset):
            return type(v).__name__, sorted(map(show, v))
        if isinstance(v, functools.partial):
            return "partial", show(v.func), show(v.args), show(v.keywords)
        if isinstance(v, weakref.ref):
            return "weakref", show(v())
        if hasattr(v, "__self__") and hasattr(v, "__func__"):
            return "method", v.__func__, show(v.__self__)
        return v

    return show(value)


def attribute(name, make):
    return lambda n: setattr(n, name, make(n)), lambda n: own(n, getattr(n, name, "absent"))


def parent_of(n):
    vars(n.block[2])["parent"] = weakref.ref(n)


CARRIED = {
    "eval": (lambda n: n.eval(), lambda n: [m.training for m in n.modules()]),
    "eval of one submodule": (lambda n: n.block.eval(), lambda n: [m.training for m in n.modules()]),
    "dropout rate": (lambda n: setattr(n.block[1], "p", 0.1), lambda n: n.block[1].p),
    "attribute of the root": (lambda n: setattr(n, "temperature", 2.0), lambda n: getattr(n, "temperature", None)),
    "deep attribute": (lambda n: setattr(n.block[2], "name", "x"), lambda n: getattr(n.block[2], "name", None)),
    "attribute deleted": (lambda n: delattr(n, "unused"), lambda n: hasattr(n, "unused")),
    "deep attribute deleted": (
        lambda n: delattr(n.block[2], "in_features"),
        lambda n: "in_features" in vars(n.block[2]),
    ),
    "method replaced": (
        lambda n: setattr(n, "forward", n.method),
        lambda n: own(n, vars(n).get("forward", "absent")),
    ),
    "list of layers": attribute("picked", lambda n: [n.last, n.block[0]]),
    "list of layers appended to": (lambda n: n.layers.append(n.last), lambda n: own(n, n.layers)),
    "empty list appended to": (lambda n: n.unused.append(n.last), lambda n: own(n, n.unused)),
    "list item replaced": (lambda n: n.layers.__setitem__(0, n.last), lambda n: own(n, n.layers)),
    "dict of layers": attribute("by_name", lambda n: {"a": n.last, "b": [n.block]}),
    "dict by layer": attribute("names", lambda n: {n.last: "a", n.block: "b"}),
    "ordered dict": attribute("by_name", lambda n: OrderedDict(a=n.last)),
    "tuple": attribute("pair", lambda n: (n.first, (n.last,))),
    "set": attribute("group", lambda n: {n.first, n.last}),
    "frozenset": attribute("group", lambda n: frozenset({n.first})),
    "deque": attribute("queue", lambda n: deque([n.first])),
    "bound method": attribute("shortcut", lambda n: n.block[0].forward),
    "its own bound method": attribute("shortcut", lambda n: n.method),
    "partial": attribute("call", lambda n: functools.partial(n.block[0], n.mask, bias=n.last.bias)),
    "weak reference": attribute("parent", weakref.ref),
    "weak reference to a parent": (parent_of, lambda n: own(n, vars(n.block[2]).get("parent"))),
    "parameters": attribute("weights", lambda n: [n.first.weight, n.last.bias]),
    "buffer": attribute("buffers_too", lambda n: {"m": n.mask}),
    "layer outside the slots": (
        lambda n: vars(n).__setitem__("hidden", n.last),
        lambda n: own(n, vars(n).get("hidden")),
    ),
    "requires_grad": (
        lambda n: n.first.requires_grad_(False),
        lambda n: [p.requires_grad for p in n.parameters()],
    ),
}


@pytest.mark.parametrize(("change", "observe"), CARRIED.values(), ids=CARRIED)
def test_what_is_set_on_the_network_is_seen_by_every_replica(devices, first, change, observe):
    network = on(first, Tree)
    replicas = ReplicaSet(network, devices(2))
    found = replicas.refresh()
    before = [observe(r) for r in found]
    assert before == [observe(network)] * 2
    change(network)
    assert replicas.refresh() == found
    assert replicas.builds == 1
    after = [observe(r) for r in found]
    assert "foreign" not in str(after)
    assert after == [observe(network)] * 2 != before


@pytest.mark.parametrize(("change", "observe"), CARRIED.values(), ids=CARRIED)
def test_what_was_set_before_the_first_use_is_seen(devices, first, change, observe):
    network = on(first, Tree)
    change(network)
    after = [observe(r) for r in ReplicaSet(network, devices(2)).refresh()]
    assert "foreign" not in str(after)
    assert after == [observe(network)] * 2


@pytest.mark.parametrize("deep", [False, True], ids=["the container", "what is nested in it"])
def test_containers_changed_in_place(deep):
    network = Tree()
    network.stages = {"a": [network.first]}
    network.queue = deque([network.first])
    replicas = ReplicaSet(network, [CPU, CPU])
    replicas.refresh()
    if deep:
        network.stages["a"].append(network.last)
    else:
        network.stages["b"] = network.last
    network.queue.append(network.last)
    for replica in replicas.refresh():
        assert own(replica, replica.stages) == own(network, network.stages)
        assert replica.queue[1] is replica.last
    assert replicas.builds == 1


def test_attributes_that_hold_tensors_follow_new_ones():
    """A buffer is another tensor at each use, parameters are others after a rebuild; lists that hold them keep up."""
    network = Tree()
    network.kept = {"mask": network.mask, "weight": network.first.weight}
    replicas = ReplicaSet(network, [CPU, CPU])
    for step in range(4):
        if step == 2:
            network.double()
            network.kept = {"mask": network.mask, "weight": network.first.weight}
        if step == 3:
            network.first.weight.requires_grad_(False)
        for replica in replicas.refresh():
            assert replica.kept["mask"] is replica.mask
            assert replica.kept["weight"] is replica.first.weight


REGISTRATIONS = {
    "forward": lambda m: m.register_forward_hook(hook),
    "forward with kwargs": lambda m: m.register_forward_hook(hook, with_kwargs=True),
    "forward pre": lambda m: m.register_forward_pre_hook(hook),
    "forward pre with kwargs": lambda m: m.register_forward_pre_hook(kwargs_hook, with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(hook),
    "backward pre": lambda m: m.register_full_backward_pre_hook(hook),
}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("register", REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_hooks_added_and_removed(devices, first, register, deep):
    network = on(first, Tree)
    replicas = ReplicaSet(network, devices(2))

    def calls():
        found = replicas.refresh()
        for m in (m for r in found for m in r.modules()):
            vars(m).pop("calls", None)
        loss_of(found, torch.randn(2, 5, 3, requires_grad=True).unbind()).backward()
        return [[vars(m).get("calls", 0) for m in (r, r.block[2])] for r in found]

    assert calls() == [[0, 0], [0, 0]]
    handle = register(network.block[2] if deep else network)
    assert calls() == [[0, 1], [0, 1]] if deep else [[1, 0], [1, 0]]
    handle.remove()
    assert calls() == [[0, 0], [0, 0]]
    assert replicas.builds == 1


def test_a_hook_that_is_a_method_is_called_on_the_replica():
    class Counter(Tree):
        def __init__(self):
            super().__init__()
            self.seen = []
            self.block.register_forward_hook(self.count)

        def count(self, module, args, output):
            assert module is self.block
            self.ran = True

    network = Counter()
    replicas = replicate(network, [CPU, CPU])
    for replica in replicas:
        assert not hasattr(replica, "ran")
        replica(torch.ones(1, 3))
        assert replica.ran
    assert not hasattr(network, "ran")


def test_hooks_of_a_replica_are_its_own():
    network = mlp()
    one, two = replicate(network, [CPU, CPU])
    one[0].register_forward_hook(hook)
    loss_of([one, two], torch.randn(2, 5, 3).unbind())
    assert (hasattr(one[0], "calls"), hasattr(two[0], "calls")) == (True, False)
    assert not network[0]._forward_hooks


def test_requires_grad_back_and_forth(devices, first):
    network = on(first, mlp)
    replicas = ReplicaSet(network, devices(2))
    chunks = torch.randn(2, 5, 3).unbind()
    for frozen in (False, True, False, True):
        network[0].requires_grad_(not frozen)
        network.zero_grad()
        loss_of(replicas.refresh(), chunks).backward()
        assert_close(gradients(network), reference(network, chunks))
        assert (network[0].weight.grad is None) == frozen
    assert replicas.builds == 1


def test_a_network_that_is_frozen_as_a_whole(devices, first):
    network = on(first, mlp).requires_grad_(False)
    x = torch.ones(1, 3, requires_grad=True)
    loss_of(replicate(network, devices(2)), [x, x]).backward()
    assert x.grad.abs().sum() > 0
    assert all(p.grad is None for p in network.parameters())


# --------------------------------------------------------------------------- a replica is a module


def test_a_replica_answers_as_a_module(devices, first):
    network = on(first, Tree)
    for device, replica in zip(devices(2), replicate(network, devices(2)), strict=True):
        assert isinstance(replica, Tree)
        assert next(replica.parameters()).device == device
        assert all(isinstance(p, nn.Parameter) for p in replica.parameters())
        assert [n for n, _ in replica.named_parameters()] == [n for n, _ in network.named_parameters()]
        assert [n for n, _ in replica.named_buffers()] == ["mask"]
        assert replica.state_dict().keys() == network.state_dict().keys()
        assert sum(p.numel() for p in replica.parameters()) == sum(p.numel() for p in network.parameters())
        assert repr(replica) == repr(network)


def test_parameters_of_a_replica_inside_its_forward(devices, first):
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            parameter = next(self.parameters())
            assert parameter.device == x.device
            norm = sum(p.square().sum() for p in self.parameters())
            return self.linear(x.to(parameter.dtype)) * norm

    network = on(first, Asking)
    chunks = torch.randn(2, 4, 3).unbind()
    loss_of(replicate(network, devices(2)), chunks).backward()
    assert_close(gradients(network), reference(network, chunks))


def test_replicas_can_be_copied_and_saved(devices, first):
    network = on(first, mlp)
    replica = replicate(network, devices(2))[1]
    x = torch.ones(1, 3, device=_device(replica))
    twin = copy.deepcopy(replica)
    assert torch.equal(twin(x), replica(x))
    assert all(p.is_leaf and p.requires_grad for p in twin.parameters())
    twin(x).sum().backward()
    assert all(p.grad is None for p in network.parameters())
    file = io.BytesIO()
    torch.save(replica.state_dict(), file)
    file.seek(0)
    assert torch.load(file).keys() == network.state_dict().keys()


class Plain(nn.Sequential):
    """At module level, to be pickled."""


def test_copies_of_the_network_are_clean(devices, first):
    network = on(first, Plain, nn.Linear(3, 2)).to(first)
    shared = copy.copy(network)
    replicate(network, devices(2))
    lockstep.local.data_parallel(network, torch.ones(4, 3, device=first), devices(2))
    chunks = torch.randn(2, 5, 3).unbind()
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network)), copy.copy(network), shared):
        assert twin is not network
        assert twin.state_dict().keys() == network.state_dict().keys()
        replicas = replicate(twin, devices(2))
        assert not {id(m) for m in replicas} & {id(m) for m in replicate(network, devices(2))}
        network.zero_grad()
        twin.zero_grad()
        loss_of(replicas, chunks).backward()
        assert_close(gradients(twin), reference(twin, chunks))
    assert len(pickle.dumps(network)) < len(pickle.dumps(on(first, Plain, nn.Linear(3, 2)))) + 500


# -------------------------------------------------------------------------------------- live graphs


class Interrupted:
    """A forward over two replicas whose backward is still to come, and the gradients it must give."""

    def __init__(self, network, devices, *, parallel=False):
        self.network, self.devices = network, devices
        self.chunks = torch.randn(2, 5, 3).unbind()
        self.expected = reference(network, self.chunks)
        if parallel:
            dp = lockstep.DataParallel(network, devices)
            self.again = lambda: dp(torch.cat(self.chunks).to(devices[0])).square().sum()
        else:
            self.again = lambda: loss_of(replicate(network, devices), self.chunks)
        self.loss = self.again()

    def finish(self):
        self.network.zero_grad()
        self.loss.backward()
        assert_close(gradients(self.network), self.expected)


@pytest.fixture(params=[False, True], ids=["replicate", "DataParallel"])
def interrupted(request, devices, first):
    return Interrupted(on(first, Spare), devices(2), parallel=request.param)


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.spare = nn.Linear(3, 3)

    def forward(self, x):
        y = self.body(x)
        self.norm(y.detach())  # only counts
        return y


def test_a_second_forward_before_backward(interrupted):
    interrupted.again()
    interrupted.finish()


def test_an_evaluation_before_backward(interrupted):
    interrupted.network.eval()
    with torch.no_grad():
        interrupted.again()
    interrupted.network.train()
    interrupted.finish()


def test_a_whole_step_of_others_before_backward(interrupted):
    """Two forwards, two backwards, in both orders."""
    second = interrupted.again()
    second.backward()
    interrupted.finish()


def test_an_update_of_other_parameters_before_backward(interrupted):
    network = interrupted.network
    with torch.no_grad():
        network.spare.weight.add_(1)
        network.spare.bias.zero_()
        interrupted.again()
    interrupted.again()
    interrupted.finish()


def test_a_rebuild_before_backward(interrupted):
    interrupted.network.extra = nn.Identity()
    interrupted.again()
    interrupted.finish()


def test_freezing_before_backward(interrupted):
    interrupted.network.spare.requires_grad_(False)
    interrupted.again()
    interrupted.finish()


def test_an_update_of_the_same_parameter_is_an_error_as_on_one_device(interrupted):
    with torch.no_grad():
        interrupted.network.body[3].weight.add_(1)
    interrupted.again()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        interrupted.loss.backward()


@pytest.mark.parametrize("replica", [0, 1])
def test_an_update_of_the_same_parameter_is_an_error_in_every_replica(devices, first, replica):
    """Also in one that has a copy of the parameter: the refresh that writes there counts as the update."""
    network = on(first, mlp)
    chunk = torch.randn(5, 3)
    loss = loss_of([replicate(network, devices(2))[replica]], [chunk])
    with torch.no_grad():
        network[2].weight.add_(1)
    replicate(network, devices(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Averaging(nn.Module):
    """Its output needs the buffer in backward, and then the buffer is updated: in place or by a new tensor."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("average", torch.ones(3))

    def forward(self, x):
        y = x * self.weight * self.average
        mean = x.detach().mean(0)
        if self.in_place:
            self.average = self.average.clone()
            self.average.mul_(0.5).add_(mean, alpha=0.5)
        else:
            self.average = 0.5 * self.average + 0.5 * mean
        return y


@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_saved_for_backward_are_never_written(devices, first, in_place):
    """Two forwards, one backward: each replica's gradient is that of its own rows with the buffer it saw."""
    network = on(first, Averaging, in_place)
    parallel = lockstep.DataParallel(network, devices(2))
    batches = torch.randn(2, 4, 3)
    average, expected = torch.ones(3), torch.zeros(3)
    for batch in batches:
        expected += (batch * average).sum(0)  # the buffer at the start of a forward is the same on all replicas
        average = 0.5 * average + 0.5 * batch[:2].mean(0)  # the network is replica 0, which saw the first rows
    loss = sum(parallel(batch.to(first)).sum() for batch in batches)
    loss.backward()
    torch.testing.assert_close(network.weight.grad.cpu(), expected)
    torch.testing.assert_close(network.average.cpu(), average)


class InPlaceAveraging(nn.Module):
    """As batch norm does it: the buffer itself is written after use, under a mask that backward needs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("average", torch.ones(3))

    def forward(self, x):
        seen = self.average.clone()
        y = x * self.weight * seen
        self.average.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return y


def test_buffers_written_in_place_by_forward(devices, first):
    network = on(first, InPlaceAveraging)
    parallel = lockstep.DataParallel(network, devices(2))
    batches = torch.randn(2, 4, 3)
    average, expected = torch.ones(3), torch.zeros(3)
    for batch in batches:
        expected += (batch * average).sum(0)
        average = 0.5 * average + 0.5 * batch[:2].mean(0)
    sum(parallel(batch.to(first)).sum() for batch in batches).backward()
    torch.testing.assert_close(network.weight.grad.cpu(), expected)
    torch.testing.assert_close(network.average.cpu(), average)


def test_a_buffer_that_replicas_saved_survives_the_next_use(devices, first):
    network = on(first, Averaging, False)
    _, two = replicate(network, devices(2))
    x = torch.randn(4, 3)
    loss = (x.to(_device(two)) * two.weight * two.average).sum()
    with torch.no_grad():
        network.average.mul_(10)  # in place, on the network
    replicate(network, devices(2))
    assert torch.equal(two.average.cpu(), torch.full((3,), 10.0))
    loss.backward()
    torch.testing.assert_close(network.weight.grad.cpu(), x.sum(0))


def test_batch_norm_two_forwards_one_backward(devices, first):
    network = on(first, lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    twin = copy.deepcopy(network)
    parallel = lockstep.DataParallel(network, devices(2))
    batches = torch.randn(2, 8, 3)
    sum(parallel(b.to(first)).square().sum() for b in batches).backward()
    sum(twin(half.to(first)).square().sum() for b in batches for half in b.chunk(2)).backward()
    assert_close(gradients(network), gradients(twin))


# --------------------------------------------------------------------------------- inside DataParallel


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.forwards = 0
        self.cache = {}
        self.instances = []

    def forward(self, x):
        self.forwards += 1
        self.rows = len(x)
        self.last_input = x.detach()
        self.instances = [self]
        return self.linear(x)


def test_replica_0_is_the_network(devices, first):
    network = on(first, Counting)
    parallel = lockstep.DataParallel(network, devices(3))
    replicas = parallel.replicate(network, devices(3))
    assert replicas[0] is network
    assert len({id(r) for r in replicas}) == 3
    for step in range(1, 4):
        parallel(torch.ones(9, 3, device=first))
        assert network.forwards == step


def test_state_of_every_replica_persists(devices, first):
    """And replica 0's, which is the network's, does not overwrite it; what the user sets does."""
    network = on(first, Counting)
    parallel = lockstep.DataParallel(network, devices(3))
    for step in range(1, 4):
        parallel(torch.ones(5, 3, device=first))
        replicas = parallel.replicate(network, devices(3))
        assert [r.forwards for r in replicas] == [step] * 3
        assert [r.rows for r in replicas] == [2, 2, 1]
        assert [r.last_input.device for r in replicas] == devices(3)
        assert all(r.instances == [r] for r in replicas)
    network.forwards = 100
    parallel(torch.ones(5, 3, device=first))
    assert [r.forwards for r in parallel.replicate(network, devices(3))] == [101] * 3


def test_state_persists_through_an_error(devices, first):
    class Failing(Counting):
        def forward(self, x):
            y = super().forward(x)
            if x.sum() < 0:
                raise ValueError("negative")
            return y

    network = on(first, Failing)
    parallel = lockstep.DataParallel(network, devices(2))
    parallel(torch.ones(4, 3, device=first))
    with pytest.raises(ValueError, match="negative"):
        parallel(-torch.ones(3, 3, device=first))
    replicas = parallel.replicate(network, devices(2))
    assert [r.forwards for r in replicas] == [2, 2]
    assert [r.rows for r in replicas] == [2, 1]


@pytest.mark.parametrize("setting", [False, True], ids=["", "forward sets an attribute"])
def test_a_hook_that_removes_itself_is_gone_from_every_replica(devices, first, setting):
    network = on(first, mlp)
    parallel = lockstep.DataParallel(network, devices(2))
    x = torch.ones(4, 3, device=first)
    if setting:
        network[1].register_forward_hook(lambda module, args, output: setattr(module, "last", object()))
    parallel(x)
    calls = []

    def once(module, args, output):
        calls.append(module)
        handle.remove()

    handle = network[0].register_forward_hook(once)
    parallel(x)
    assert calls
    calls.clear()
    parallel(x)
    assert calls == []


# ------------------------------------------------------------------------------------------ backward


def test_backward_reduces_buckets_as_gradients_become_ready():
    """A layer's gradients are summed before the backward of the layer two before it, whenever there is one."""
    count = 6
    network = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(count)))
    replicas = ReplicaSet(network, [CPU] * 3, cap_bytes=1)
    events = []
    for i, layer in enumerate(network):
        layer.weight.register_hook(lambda _, i=i: events.append(("sum", i)))
    for _ in range(3):
        events.clear()
        total = 0
        for replica in replicas.refresh():
            x = torch.randn(2, 3)
            for i, layer in enumerate(replica):
                x = layer(x)
                x.register_hook(lambda _, i=i: events.append(("backward", i)))
            total = total + x.sum()
        total.backward()
        assert sorted(i for what, i in events if what == "sum") == list(range(count))
        for i in range(2, count):
            last_of_early_layer = max(n for n, event in enumerate(events) if event == ("backward", i - 2))
            assert events.index(("sum", i)) < last_of_early_layer


def test_buckets_hold_what_the_cap_allows():
    network = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))

    def nodes(cap_bytes):
        replica = ReplicaSet(network, [CPU], cap_bytes=cap_bytes).refresh()[0]
        return [layer.weight.grad_fn for layer in replica]

    assert len(set(nodes(1 << 20))) == 1
    assert len(set(nodes(1))) == 6
    three = nodes(2 * 4 * 4 * 4)
    assert len(set(three)) == 3
    assert three[4] is three[5] is not three[3]  # late layers first


def test_sums_are_taken_in_the_order_of_the_replicas(devices, first):
    network = on(first, mlp)
    scales = torch.tensor([1e4, 1.0, 1e-4, 1e2])
    chunks = [torch.randn(5, 3) * s for s in scales]
    apart = []
    for device, chunk in zip(devices(4), chunks, strict=True):
        twin = on(device, mlp)
        twin.load_state_dict(network.state_dict())
        loss_of(twin, [chunk]).backward()
        apart.append([p.grad.to(first) for p in twin.parameters()])
    expected = [((a + b) + c) + d for a, b, c, d in zip(*apart, strict=True)]
    replicas = ReplicaSet(network, devices(4), cap_bytes=64)
    for _ in range(5):
        network.zero_grad()
        loss_of(replicas.refresh(), chunks).backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(network.parameters(), expected, strict=True))


def test_the_network_first_then_the_sum_of_the_others(devices, first):
    network = on(first, mlp)
    chunks = [torch.randn(5, 3) * s for s in (1e4, 1.0, 1e-4)]
    apart = []
    for device, chunk in zip(devices(3), chunks, strict=True):
        twin = on(device, mlp)
        twin.load_state_dict(network.state_dict())
        loss_of(twin, [chunk]).backward()
        apart.append([p.grad.to(first) for p in twin.parameters()])
    expected = [a + (b + c) for a, b, c in zip(*apart, strict=True)]
    replicas = ReplicaSet(network, devices(3), network_first=True, cap_bytes=64)
    for _ in range(5):
        network.zero_grad()
        loss_of(replicas.refresh(), chunks).backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(network.parameters(), expected, strict=True))


def test_backward_in_parts(devices, first):
    """Two outputs of one forward, each with a backward of its own."""
    network = on(first, mlp)
    chunks = torch.randn(2, 5, 3).unbind()
    expected = reference(network, chunks)
    replicas = replicate(network, devices(2))
    for replica, chunk in zip(replicas, chunks, strict=True):
        loss_of([replica], [chunk]).backward()
    assert_close(gradients(network), expected)


def test_gradients_of_gradients(devices, first):
    network = on(first, mlp)
    chunks = torch.randn(2, 5, 3).unbind()

    def penalty(modules, parameters):
        grads = torch.autograd.grad(loss_of(modules, chunks), parameters, create_graph=True)
        return sum(g.square().sum() for g in grads)

    twin = copy.deepcopy(network)
    penalty(twin, [*twin.parameters()]).backward()
    penalty(replicate(network, devices(2)), [*network.parameters()]).backward()
    assert_close(gradients(network), gradients(twin))


def test_hooks_on_parameters_see_the_sum_once(devices, first):
    network = on(first, mlp)
    chunks = torch.randn(2, 5, 3).unbind()
    expected = reference(network, chunks)
    seen = []
    network[0].weight.register_hook(lambda g: seen.append(g) or g * 2)
    network[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    loss_of(replicate(network, devices(2)), chunks).backward()
    assert len(seen) == 2
    assert_close({"0.weight": network[0].weight.grad}, {"0.weight": 2 * expected["0.weight"]})


# ------------------------------------------------------------------------------ modes of the caller


def test_built_in_inference_mode_used_in_training(devices, first):
    network = on(first, lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    replicas = ReplicaSet(network, devices(2))
    x = torch.randn(4, 3)
    with torch.inference_mode():
        for replica in replicas.refresh():
            replica(x.to(_device(replica)))
    chunks = torch.randn(2, 5, 3).unbind()
    expected = reference(network, chunks)
    loss_of(replicas.refresh(), chunks).backward()
    assert_close(gradients(network), expected)
    assert replicas.builds == 1


def test_a_network_made_in_inference_mode(devices, first):
    with torch.inference_mode():
        network = on(first, mlp)
        x = torch.randn(4, 3)
        for _ in range(2):
            (expected,) = evaluated([network], x)
            assert all(torch.allclose(y, expected) for y in evaluated(replicate(network, devices(2)), x))
            network[0].weight.add_(1)


# ------------------------------------------------------------------------------------ torch.compile


@pytest.fixture
def compiled():
    """Nothing that was compiled before, and nothing left."""
    torch._dynamo.reset()
    with (
        warnings.catch_warnings()
    ):  # the compiler looks at .grad, and hides the warnings about it: from users, not here
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield
    torch._dynamo.reset()


@compiling
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.around)])
@pytest.mark.parametrize("where", ["the network", "its blocks", "in place", "blocks in place"])
def test_compiled_modules_use_the_parameters_of_their_replica(backend, where):
    plain = mlp()
    network = copy.deepcopy(plain)
    if where == "the network":
        network = torch.compile(network, backend=backend)
    elif where == "its blocks":
        network[0], network[2] = (torch.compile(network[i], backend=backend) for i in (0, 2))
    elif where == "in place":
        network.compile(backend=backend)
    else:
        network[0].compile(backend=backend)
        network[2].compile(backend=backend)
    chunks = torch.randn(2, 5, 3).unbind()
    replicas = replicate(network, [CPU, CPU])
    for replica in replicas:
        assert not {id(p) for p in replica.parameters()} & {id(p) for p in network.parameters()}
    expected = list(reference(plain, chunks).values())
    for times in (1, 2):
        loss_of(replicate(network, [CPU, CPU]), chunks).backward()
        for p, e in zip(network.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, times * e)
    (apart,) = torch.autograd.grad(loss_of([replicas[1]], chunks[:1]), [next(replicas[1].parameters())])
    assert apart.abs().sum() > 0  # the replica's own parameter is what was used
    assert replicate(network, [CPU, CPU]) == replicas


@compiling
@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="no such option in this PyTorch"
)
@pytest.mark.around
@pytest.mark.parametrize("where", ["the network", "in place"])
def test_many_compiled_replicas_stay_below_the_recompile_limit(where):
    """Each counts its own compilations: of eight, for different sizes in two modes, none runs uncompiled."""

    class Modes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x) if self.training else 2 * self.layer(x)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    network = Modes()
    plain = copy.deepcopy(network)
    if where == "the network":
        network = torch.compile(network, backend=backend, dynamic=False)
    else:
        network.compile(backend=backend, dynamic=False)
    parallel = DataParallel(network, [CPU] * 8, split=range(1, 9))
    x = torch.randn(36, 3)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for mode in (True, False):
            torch.testing.assert_close(parallel.train(mode)(x), plain.train(mode)(x))
    assert len(graphs) == 16 > torch._dynamo.config.recompile_limit


@compiling
def test_compiling_the_network_after_its_first_use():
    class Doubling(nn.Module):  # PyTorch compiles its own containers only inside other modules
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return 2 * self.body(x)

    network = Doubling()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    replicate(network, [CPU, CPU])
    network.compile(backend=backend)
    chunks = torch.randn(2, 5, 3).unbind()
    loss_of(replicate(network, [CPU, CPU]), chunks).backward()
    assert graphs
    plain = Doubling()
    plain.load_state_dict(network.state_dict())
    assert_close(gradients(network), reference(plain, chunks))


# ------------------------------------------------------------------------------------------- threads


def test_different_networks_in_different_threads(devices, first):
    networks = [on(first, mlp) for _ in range(4)]
    chunks = torch.randn(2, 5, 3).unbind()

    def train(network):
        for _ in range(5):
            network.zero_grad()
            loss_of(replicate(network, devices(2)), chunks).backward()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, networks))
    for network in networks:
        assert_close(gradients(network), reference(network, chunks))


def test_one_network_in_several_threads(devices, first):
    """Built once, whoever comes first; every evaluation is right, and gradients of all add up."""
    network = on(first, mlp)
    parallel = lockstep.DataParallel(network, devices(2))
    batches = torch.randn(8, 4, 3)
    expected = reference(network, batches.unbind())
    outputs = [network(b.to(first)) for b in batches]

    def evaluate(batch):
        with torch.no_grad():
            return parallel(batch.to(first))

    def train(batch):
        parallel(batch.to(first)).square().sum().backward()

    with ThreadPoolExecutor(4) as pool:
        for got, output in zip(pool.map(evaluate, batches), outputs, strict=True):
            torch.testing.assert_close(got, output)
        list(pool.map(train, batches))
    assert_close(gradients(network), expected)
    assert parallel.statistics().calls["build"] == 1


@pytest.mark.around
def test_a_network_that_has_replicas_loads_where_there_is_no_lockstep(tmp_path):
    network = nn.Linear(2, 1)
    replicate(network, [CPU, CPU])
    torch.save(network, tmp_path / "network.pt")
    program = (
        "import sys; sys.modules['lockstep'] = None; import torch; "
        f"network = torch.load({str(tmp_path / 'network.pt')!r}, weights_only=False); "
        "print(network(torch.ones(1, 2)).item())"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(loaded.stdout) == pytest.approx(network(torch.ones(1, 2)).item())


@pytest.mark.parametrize("how", ["load_state_dict", "double"])
def test_parameters_that_were_swapped_in_place_get_their_gradients(how, devices, first):
    network = nn.Linear(3, 2).to(first)
    parallel = DataParallel(network, devices(2))
    x = torch.randn(4, 3, device=first)
    parallel(x).sum().backward()
    parallel.step(lambda output: output.mean(), x)
    network.zero_grad()
    weight = network.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if how == "double":
            network.double()
        else:  # the swapped parameter is at the same address
            network.load_state_dict({name: value + 1 for name, value in network.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert network.weight is weight
    x = x.to(weight.dtype)
    for use in (lambda: parallel(x).mean().backward(), lambda: parallel.step(lambda output: output.mean(), x)):
        network.zero_grad()
        use()
        expected = copy.deepcopy(network)
        expected.zero_grad()
        expected(x).mean().backward()
        torch.testing.assert_close(network.weight.grad, expected.weight.grad)
        torch.testing.assert_close(network.bias.grad, expected.bias.grad)
