"""A network used at random, in DataParallel and, as a copy, on one device: whatever is done to both, they agree."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep import DataParallel


class Net(nn.Module):
    """Layers in a registered list, in a plain list, tied, normalised without statistics of the batch, and optional."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.path = [self.layers[0], self.layers[1]]
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.layers[2].weight
        self.norm = nn.LayerNorm(6)
        self.extra: nn.Module | None = None
        self.scale = 1.0
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale < 0:
            raise ValueError("a negative scale")
        x = self.first(x)
        for layer in self.path:
            x = torch.tanh(layer(x))
        x = self.norm(self.tied(x) + self.layers[2](x)) * self.scale + self.shift
        return x if self.extra is None else self.extra(x)


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


class Pair:
    """The network that DataParallel holds, and the one that is used plainly."""

    def __init__(self, devices: list[torch.device], seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        plain = Net().double()
        self.networks = copy.deepcopy(plain).to(devices[0]), plain
        self.networks[0].tied.weight = self.networks[0].layers[2].weight  # a move to a simulated device unties
        self.parallel = DataParallel(self.networks[0], devices)
        self.first = devices[0]
        self.hooks: list[list[Any]] = []

    def both(self, change: Callable[[Net], object]) -> None:
        for network in self.networks:
            change(network)

    def batch(self) -> torch.Tensor:
        return torch.randn(self.random.randint(1, 9), 4, dtype=torch.float64)

    def same(self, one: torch.Tensor | None, other: torch.Tensor | None) -> None:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-11)

    def compare_gradients(self) -> None:
        for one, other in zip(*(network.parameters() for network in self.networks), strict=True):
            self.same(one.grad, other.grad)

    # What may happen #

    def train(self) -> None:
        x = self.batch()
        outputs = self.parallel(x.to(self.first)), self.networks[1](x)
        self.same(*outputs)
        if outputs[1].requires_grad:
            for output in outputs:
                output.square().mean().backward()
        self.compare_gradients()

    def step(self) -> None:
        x = self.batch()
        expected = F.mse_loss(self.networks[1](x), torch.ones(len(x), 6, dtype=torch.float64))
        if expected.requires_grad:
            expected.backward()
            y = torch.ones(len(x), 6, dtype=torch.float64)
            self.same(self.parallel.step(F.mse_loss, x.to(self.first), y.to(self.first)), expected.detach())
        self.compare_gradients()

    def evaluate(self) -> None:
        x = self.batch()
        with self.random.choice([torch.no_grad, torch.inference_mode])():
            self.same(self.parallel(x.to(self.first)), self.networks[1](x))

    def optimise(self) -> None:
        for network in self.networks:
            with torch.no_grad():
                for parameter in network.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad.clamp(-1, 1), alpha=0.01)
                        parameter.grad = None

    def optimise_unseen(self) -> None:
        """As old training loops do; after a use with gradients, as there."""
        self.train()
        self.both(lambda n: [p.data.mul_(0.99) for p in n.parameters()])

    def swap_data(self) -> None:
        self.both(lambda n: [setattr(p, "data", p.data * 0.99) for p in n.layers.parameters()])

    def freeze(self) -> None:
        index = self.random.randrange(3)
        self.both(lambda n: n.layers[index].requires_grad_(not n.layers[index].weight.requires_grad))

    def swap_layer(self) -> None:
        new = nn.Linear(6, 6).double()
        for network in self.networks:
            network.layers[0] = copy.deepcopy(new).to(network.first.weight.device)
            network.path = [network.layers[0], network.layers[1]]

    def lengthen(self) -> None:
        self.both(lambda n: n.path.append(n.layers[1]) if len(n.path) < 4 else n.path.pop())

    def replace_buffer(self) -> None:
        value = torch.randn(6, dtype=torch.float64)
        self.both(lambda n: setattr(n, "shift", value.to(n.shift.device)))

    def write_buffer(self) -> None:
        self.both(lambda n: n.shift.add_(0.1))

    def rescale(self) -> None:
        value = self.random.uniform(0.5, 1.5)
        self.both(lambda n: setattr(n, "scale", value))

    def hook(self) -> None:
        if len(self.hooks) > 2 or (self.hooks and self.random.random() < 0.5):
            for handle in self.hooks.pop():
                handle.remove()
        else:
            self.hooks.append([network.norm.register_forward_hook(double) for network in self.networks])

    def add_or_remove(self) -> None:
        new = nn.Linear(6, 6).double() if self.networks[0].extra is None else None
        for network in self.networks:
            network.extra = None if new is None else copy.deepcopy(new).to(network.first.weight.device)

    def fail(self) -> None:
        scale = self.networks[0].scale
        self.networks[0].scale = -1.0
        with pytest.raises(ValueError, match="a negative scale"):
            self.parallel(self.batch().to(self.first))
        self.networks[0].scale = scale

    def clear(self) -> None:
        self.both(lambda n: n.zero_grad(self.random.random() < 2))


USES = [Pair.train, Pair.step, Pair.evaluate]
CHANGES = [
    value
    for name, value in vars(Pair).items()
    if callable(value) and name not in ("__init__", "both", "batch", "same", "compare_gradients")
]


def use_at_random(devices: list[torch.device], seed: int, count: int) -> None:
    pair = Pair(devices, seed)
    done = []
    for number in range(count):
        action = pair.random.choice(USES if number % 2 else CHANGES)
        done.append(action.__name__)
        try:
            action(pair)
        except Exception as error:
            error.add_note(f"seed {seed}, after {done[-12:]}")
            raise


@pytest.mark.parametrize("seed", range(6))
def test_random_use(devices, seed):
    use_at_random(devices(2 + seed % 2), seed, 60)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 120))
def test_random_use_for_long(devices, seed):
    use_at_random(devices(2 + seed % 4), seed, 1500)
