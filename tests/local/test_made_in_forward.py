"""A parameter that forward makes: refused by name, since every replica would have its own."""

import copy

import pytest
import torch
from torch import nn

from lockstep import DataParallel
from lockstep.errors import NotReplicableError


class OnFirstUse(nn.Module):
    """Makes its weight when it first sees an input."""

    def __init__(self):
        super().__init__()
        self.register_parameter("weight", None)

    def forward(self, x):
        if self.weight is None:
            self.weight = nn.Parameter(torch.ones(x.shape[1], device=x.device))
        return x * self.weight


class Layered(nn.Module):
    """Adds a submodule when it first sees an input."""

    def forward(self, x):
        if not hasattr(self, "layer"):
            self.layer = nn.Linear(x.shape[1], 2, device=x.device)
        return self.layer(x)


class Replacing(nn.Module):
    """Puts a parameter of its own making in the place of another, at every use."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.weight = nn.Parameter(self.weight * 1)
        return x * self.weight


class Tying(nn.Module):
    """Ties two weights in forward."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.other.weight = self.one.weight
        return self.other(self.one(x))


def call(parallel, use_step, x):
    return parallel.step(lambda output: output.mean(), x) if use_step else parallel(x)


@pytest.mark.parametrize("use_step", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize(("make", "name"), [(OnFirstUse, "weight"), (Layered, "layer.weight")])
@pytest.mark.parametrize("grad", [True, False])
def test_it_is_refused_by_name_and_right_from_then_on(devices, first, make, name, use_step, grad):
    network, x = make().to(first), torch.randn(5, 4).to(first)
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
    for one, other in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_one_that_only_another_replica_makes():
    class Odd(OnFirstUse):
        def forward(self, x):
            return super().forward(x) if bool(x[0, 0] > 0) else x

    parallel = DataParallel(Odd(), ["cpu", "cpu"])
    x = torch.tensor([[-1.0], [1.0]])
    with pytest.raises(NotReplicableError, match="only one replica has: weight in replica 1"):
        parallel(x)


def test_a_parameter_in_the_place_of_another(devices, first):
    network, x = Replacing().to(first), torch.randn(5, 4).to(first)
    parallel = DataParallel(network, devices(2))
    with pytest.raises(NotReplicableError, match="weight in replica 0, weight in replica 1"):
        parallel(x)
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), x)


@pytest.mark.parametrize("use_step", [False, True], ids=["forward", "step"])
def test_weights_that_forward_ties(use_step):
    """A replica's parameter has a graph, so PyTorch does not let it be assigned."""
    with pytest.raises(ValueError, match=r"in replica 1(.|\n)*Cannot assign non-leaf Tensor to parameter 'weight'"):
        call(DataParallel(Tying(), ["cpu", "cpu"]), use_step, torch.randn(5, 4))


def test_the_error_of_a_forward_comes_first():
    class Fails(OnFirstUse):
        def forward(self, x):
            super().forward(x)
            raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        DataParallel(Fails(), ["cpu", "cpu"])(torch.ones(4, 2))
