"""Recurrent networks: cuDNN finds the replicas' weights in one piece, and they follow the network's."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep


class Recurrent(nn.Module):
    """Two recurrent layers one after the other, and a linear one."""

    def __init__(self, kind: type[nn.RNNBase], *, flatten: bool = False, **options) -> None:
        super().__init__()
        self.first = kind(6, 8, batch_first=True, **options)
        width = (options.get("proj_size") or 8) * (2 if options.get("bidirectional") else 1)
        self.second = kind(width, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.flatten = flatten

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.flatten:  # what many programs do, because torch.nn.DataParallel's replicas warn otherwise
            self.first.flatten_parameters()
            self.second.flatten_parameters()
        return self.head(self.second(self.first(x)[0])[0][:, -1])


def twin(one: Recurrent) -> Recurrent:
    """A copy whose weights are in one piece: `copy.deepcopy` clones each by itself, of which cuDNN warns."""
    many = copy.deepcopy(one)
    many.first.flatten_parameters()
    many.second.flatten_parameters()
    return many


KINDS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, both ways": (nn.LSTM, {"bidirectional": True}),
    "LSTM, projected": (nn.LSTM, {"proj_size": 4}),
    "LSTM, no bias": (nn.LSTM, {"bias": False}),
    "GRU": (nn.GRU, {}),
    "GRU, both ways": (nn.GRU, {"bidirectional": True}),
    "RNN": (nn.RNN, {}),
}


def train(one: nn.Module, many: nn.Module, call, device: torch.device, steps: int = 4) -> None:
    """Both get the same batches; after each step their gradients, and at the end their weights, are the same."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (one, many)]
    for _ in range(steps):
        x, y = torch.randn(9, 5, 6, device=device), torch.randn(9, 3, device=device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        functional.mse_loss(one(x), y).backward()
        functional.mse_loss(call(x), y).backward()
        for (name, p), q in zip(one.named_parameters(), many.parameters(), strict=True):
            torch.testing.assert_close(
                q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}.grad: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_replicas_train_without_a_warning(name, places, exact):
    kind, options = KINDS[name]
    if "proj_size" in options and places[0].type == "cpu":
        pytest.skip("PyTorch warns of projections on the CPU")
    one = Recurrent(kind, **options).to(places[0])
    many = twin(one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "RNN module weights are not part of single contiguous chunk of memory"
        train(one, many, lockstep.DataParallel(many, places), places[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_flattening_in_forward_leaves_replicas_attached(kind, places, exact):
    # flatten_parameters() moves a module's weights to other memory: a replica's must still follow the network's.
    one = Recurrent(kind).to(places[0])
    many = twin(one)
    many.flatten = True
    train(one, many, lockstep.DataParallel(many, places), places[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_flattening_in_forward_of_replicas_that_are_all_copies(kind, places, exact):
    one = Recurrent(kind).to(places[0])
    many = twin(one)
    many.flatten = True

    def call(x: torch.Tensor) -> torch.Tensor:
        replicas = lockstep.local.replicate(many, places)
        shares = lockstep.local.scatter(x, places)
        return lockstep.local.gather(lockstep.local.parallel_apply(replicas, shares, devices=places), places[0])

    train(one, many, call, places[0])


def test_evaluation_without_a_warning(places, exact):
    network = Recurrent(nn.LSTM).to(places[0]).eval()
    parallel = lockstep.DataParallel(network, places)
    x = torch.randn(9, 5, 6, device=places[0])
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(parallel(x), network(x), rtol=1e-4, atol=1e-5)
            network.first.weight_ih_l0.mul_(0.5)


def test_packed_sequences(home, exact):
    class Packed(Recurrent):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return self.head(self.first(packed)[1][0][-1])

    network = Packed(nn.LSTM).to(home)
    x, lengths = torch.randn(6, 5, 6, device=home), torch.tensor([5, 3, 1, 4, 2, 5])
    expected = network(x, lengths)
    parallel = lockstep.DataParallel(network, [home, home])
    torch.testing.assert_close(parallel(x, lengths), expected, rtol=1e-4, atol=1e-5)
