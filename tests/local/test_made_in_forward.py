"""A parameter that forward makes: refused by name, since every replica would have its own."""

import copy

import pytest
import torch
from torch import nn

from lockstep import DataParallel
from lockstep.errors import NotReplicableError
from programs.networks import Applying
from programs.one_device import same_gradients


def a_weight(m, x):
    if m.weight is None:
        m.weight = nn.Parameter(torch.ones(x.shape[1], device=x.device))
    return x * m.weight


def a_layer(m, x):
    if not hasattr(m, "layer"):
        m.layer = nn.Linear(x.shape[1], 2, device=x.device)
    return m.layer(x)


def making(forward):
    """A module without parameters of its own, which makes one when it first sees an input."""
    network = Applying(forward)
    del network.linear
    network.register_parameter("weight", None)
    return network


def call(parallel, use_step, x):
    return parallel.step(lambda output: output.mean(), x) if use_step else parallel(x)


@pytest.mark.parametrize("use_step", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize(("forward", "name"), [(a_weight, "weight"), (a_layer, "layer.weight")])
@pytest.mark.parametrize("grad", [True, False])
def test_it_is_refused_by_name_and_right_from_then_on(devices, first, forward, name, use_step, grad):
    network, x = making(forward).to(first), torch.randn(5, 4).to(first)
    parallel = DataParallel(network, devices(3))
    message = rf"{name} in replica 0, .*{name} in replica 2"
    with torch.set_grad_enabled(grad or use_step), pytest.raises(NotReplicableError, match=message):
        call(parallel, use_step, x)
    assert all(p.grad is None for p in network.parameters())
    plain = copy.deepcopy(network)
    plain(x).mean().backward()
    if use_step:
        call(parallel, use_step, x)
    else:
        parallel(x).mean().backward()
    same_gradients(network, plain, 1.3e-6, 1e-5)


def test_one_that_only_another_replica_makes():
    parallel = DataParallel(making(lambda m, x: a_weight(m, x) if bool(x[0, 0] > 0) else x), ["cpu", "cpu"])
    with pytest.raises(NotReplicableError, match="only one replica has: weight in replica 1"):
        parallel(torch.tensor([[-1.0], [1.0]]))


def test_a_parameter_in_the_place_of_another(devices, first):
    def forward(m, x):
        m.weight = nn.Parameter(m.weight * 1)
        return x * m.weight

    network, x = Applying(forward, weight=nn.Parameter(torch.ones(4))).to(first), torch.randn(5, 4).to(first)
    parallel = DataParallel(network, devices(2))
    with pytest.raises(NotReplicableError, match="weight in replica 0, weight in replica 1"):
        parallel(x)
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), x)


@pytest.mark.parametrize("use_step", [False, True], ids=["forward", "step"])
def test_weights_that_forward_ties(use_step):
    """A replica's parameter has a graph, so PyTorch does not let it be assigned."""

    def forward(m, x):
        m.other.weight = m.linear.weight
        return m.other(m.linear(x))

    network = Applying(forward, (4, 4), other=nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"in replica 1(.|\n)*Cannot assign non-leaf Tensor to parameter 'weight'"):
        call(DataParallel(network, ["cpu", "cpu"]), use_step, torch.randn(5, 4))


def test_the_error_of_a_forward_comes_first():
    def forward(m, x):
        a_weight(m, x)
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        DataParallel(making(forward), ["cpu", "cpu"])(torch.ones(4, 2))
