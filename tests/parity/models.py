"""The zoo: small models of every kind that people train, each with a maker of inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm


class Case(NamedTuple):
    """`make()` gives a new model (seed it first), `inputs(rows)` a batch for it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]


def vectors(rows: int) -> torch.Tensor:
    return torch.randn(rows, 6)


def sequences(rows: int) -> torch.Tensor:
    return torch.randn(rows, 4, 6)


def images(rows: int) -> torch.Tensor:
    return torch.randn(rows, 2, 5, 5)


def tokens(rows: int) -> torch.Tensor:
    return torch.randint(10, (rows, 4))


class First(nn.Module):
    """The output of a recurrent network, without its last state."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Tied(nn.Module):
    """An embedding whose weight is also the decoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(10, 6), nn.Linear(6, 10)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.embedding(x).tanh())


class Twice(nn.Module):
    """A submodule that is called twice, and registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.other = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).tanh())


class Listed(nn.Module):
    """Parameters in a ParameterList and in a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(6, 6) for _ in range(2))
        self.extras = nn.ParameterDict({"bias": torch.randn(6), "scale": torch.randn(1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = (x @ weight).tanh()
        return x * self.extras["scale"] + self.extras["bias"]


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def mlp(hidden: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), hidden or nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))


def trained_cnn() -> nn.Module:
    """In evaluation mode, with statistics that are not those of a new model."""
    model = cnn()
    for _ in range(3):
        model(images(8) * 2 + 1)
    return model.eval()


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


def parametrized() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return mlp(layer)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return mlp(weight_norm(nn.Linear(6, 6)))


ZOO = {
    "mlp": Case(mlp, vectors),
    "cnn": Case(trained_cnn, images),
    "transformer": Case(transformer, sequences),
    "lstm": Case(lambda: First(nn.LSTM(6, 5, batch_first=True, bidirectional=True)), sequences),
    "gru": Case(lambda: First(nn.GRU(6, 5, num_layers=2, batch_first=True)), sequences),
    "tied": Case(Tied, tokens),
    "twice": Case(Twice, vectors),
    "weight_norm": Case(lambda: mlp(parametrizations.weight_norm(nn.Linear(6, 6))), vectors),
    "old_weight_norm": Case(old_weight_norm, vectors),
    "spectral_norm": Case(lambda: mlp(parametrizations.spectral_norm(nn.Linear(6, 6))), vectors),
    "old_spectral_norm": Case(lambda: mlp(spectral_norm(nn.Linear(6, 6))), vectors),
    "parametrized": Case(parametrized, vectors),
    "listed": Case(Listed, vectors),
}
