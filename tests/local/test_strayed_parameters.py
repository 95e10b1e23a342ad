"""Parameters whose data a forward replaces: replicas must not go on with data that no transfer reaches."""

import pytest
import torch
from torch import nn

from lockstep import DataParallel
from lockstep.local import replicate
from programs.networks import Applying


def rounds(m, x):
    """As old quantisation code does it."""
    m.weight.data = m.weight.data.round()
    return x * m.weight


def test_data_replaced_in_forward(devices, first):
    network = Applying(rounds, weight=nn.Parameter(torch.ones(2))).to(first)
    parallel, x = DataParallel(network, devices(3)), torch.ones(3, 2, device=first)
    for value in (3.0, -2.0, 5.0):
        with torch.no_grad():
            network.weight.fill_(value)
            for _ in range(2):
                assert parallel(x).tolist() == [[value, value]] * 3
            network.weight.fill_(value + 1)
        for replica, device in zip(replicate(network, devices(2)), devices(2), strict=True):
            assert replica(torch.ones(2, device=device)).tolist() == [value + 1] * 2
        output = parallel(x)
        assert output.tolist() == [[value + 1] * 2] * 3
        output.sum().backward()
        assert network.weight.grad.tolist() == [3.0, 3.0]
        network.zero_grad()
        parallel.step(lambda out: out.sum(), x)
        assert network.weight.grad.tolist() == [1.0, 1.0]  # a third of each of three sums over one row
        network.zero_grad()
    assert parallel.statistics().calls["build"] == 1


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
