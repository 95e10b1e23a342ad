"""Parameters whose data a forward replaces: replicas must not go on with data that no transfer reaches."""

import copy

import pytest
import torch
from torch import nn

from lockstep import DataParallel
from lockstep.local import replicate


class Quantised(nn.Module):
    """Replaces its weight's data in forward, as old quantisation code does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.round()
        return x * self.weight


def test_data_replaced_in_forward(devices, first):
    network = Quantised().to(first)
    parallel = DataParallel(network, devices(3))
    for value in (3.0, -2.0, 5.0):
        with torch.no_grad():
            network.weight.fill_(value)
        x = torch.ones(3, 2, device=first)
        output = parallel(x)
        assert output.tolist() == [[value, value]] * 3
        output.sum().backward()
        assert network.weight.grad.tolist() == [3.0, 3.0]
        network.weight.grad = None
        parallel.step(lambda out: out.sum(), x)
        assert network.weight.grad.tolist() == [1.0, 1.0]  # a third of each of three sums over one row
        network.weight.grad = None
    assert parallel.statistics().calls["build"] == 1


def test_data_replaced_without_gradients(devices, first):
    network = Quantised().to(first)
    parallel = DataParallel(network, devices(2))
    with torch.no_grad():
        for value in (3.0, -2.0, 5.0, 4.0):
            network.weight.fill_(value)
            assert parallel(torch.ones(2, 2, device=first)).tolist() == [[value, value]] * 2


def test_data_replaced_in_replicas_that_the_caller_runs(devices, first):
    network = Quantised().to(first)
    for value in (3.0, -2.0, 5.0):
        with torch.no_grad():
            network.weight.fill_(value)
        replicas = replicate(network, devices(2))
        outputs = [r(torch.ones(2, device=d)) for r, d in zip(replicas, devices(2), strict=True)]
        assert [output.tolist() for output in outputs] == [[value, value]] * 2


@pytest.mark.parametrize("kind_of_rnn", [nn.LSTM, nn.GRU])
def test_the_weights_of_an_rnn_lie_in_replicas_as_in_the_network(sim, kind_of_rnn):
    """cuDNN wants them in one storage, in its order (#24155), as flatten_parameters lays them."""
    one, two = sim.devices(2)
    rnn = kind_of_rnn(3, 4, batch_first=True).to(one)
    weights = list(rnn.parameters())
    flat = torch.cat([w.detach().reshape(-1) for w in weights])
    for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.data = part.view_as(weight)
    network = nn.Sequential(nn.Linear(3, 3).to(one), rnn)
    replica = replicate(network, [one, two])[1]
    lies = [(p.storage_offset(), p.untyped_storage().data_ptr()) for p in replica[1].parameters()]
    assert [offset for offset, _ in lies] == [w.storage_offset() for w in weights]
    assert len({storage for _, storage in lies}) == 1
    assert replica[0].weight.untyped_storage().data_ptr() != lies[0][1]
    for ours, theirs in zip(replica.parameters(), network.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
    with torch.no_grad():
        rnn.weight_ih_l0.add_(1)
    replicate(network, [one, two])
    assert torch.equal(replica[1].weight_ih_l0.cpu(), rnn.weight_ih_l0.cpu())


def test_flatten_parameters_in_a_replica_moves_nothing(devices, first):
    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    network = Flattens().double()
    parallel = DataParallel(copy.deepcopy(network).to(first), devices(2))
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(parallel(x.to(first)).cpu(), network(x), rtol=1e-12, atol=1e-12)
    replica = parallel._replicas.refresh()[1]
    before = [p.data_ptr() for p in replica.parameters()]
    replica.rnn.flatten_parameters()
    assert [p.data_ptr() for p in replica.parameters()] == before
