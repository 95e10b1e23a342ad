"""Weights that a rank has changed after replicating are an error on every rank once an optimizer has stepped on them.

What counts are values after an optimizer's step; what a rank adds to its weights for one forward and backward does not.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import OutOfSyncError, PeerError
from programs.ranks import on_ranks
from threaded import count_collectives, run_ranks

X = torch.linspace(-2, 3, 16, dtype=torch.float64).view(8, 2)


class ChoosesItsScale(nn.Module):
    """Divides by a scale that the first batch decides, as ActNorm of flows does."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("is_chosen", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        if not self.is_chosen:
            self.scale.data = x.detach().abs().mean(dim=0)
            self.is_chosen.fill_(True)
        return x / self.scale


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), ChoosesItsScale(), nn.Linear(2, 1)).double()


def load_a_checkpoint(net, rank):
    if rank.rank == 1:
        net.load_state_dict({name: value + 1 for name, value in net.named_parameters()}, strict=False)


def begin_with_the_rank_s_seed(net, rank):
    torch.manual_seed(rank.rank)
    nn.init.normal_(net[0].bias)


def run_forward(net, rank):
    net(X[: 1 + rank.rank])


def change_nothing(net, rank):
    pass


def backward(net, rank, shares):
    """Each rank has half of the rows."""
    net.zero_grad()
    if not shares:
        net(X[rank.rank :: 2]).square().sum().backward()
        return
    data = lockstep.shares.GlobalBatches(TensorDataset(X), 8, shares, shuffle=False, process_group=rank.group)
    for batch in data:
        for (rows,) in batch:
            net(rows).square().sum().backward()


def train(rank, change, shares=None, **options):
    """Return the error of the second step, the gradients that it leaves, and those of a step with equal weights."""
    net = lockstep.replicate(network(), process_group=rank.group, shares=shares, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    change(net, rank)
    backward(net, rank, shares)
    optimizer.step()
    error = None
    try:
        backward(net, rank, shares)
    except OutOfSyncError as raised:
        error = str(raised)
    left = [p.grad for p in net.parameters()]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
        net[1].is_chosen.fill_(True)
    for _ in range(3):
        backward(net, rank, shares)
        optimizer.step()
    return error, left, [p.grad for p in net.parameters()]


def wanted(divisor):
    net = network()
    net(X)
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    (net(X).square().sum() / divisor).backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("shares", [None, 4], ids=["rounds", "shares"])
@pytest.mark.parametrize(
    ("change", "name"),
    [(load_a_checkpoint, "0.weight"), (begin_with_the_rank_s_seed, "0.bias"), (run_forward, "1.scale")],
)
def test_weights_that_only_one_rank_has_changed_are_an_error_on_every_rank(change, name, shares):
    for error, left, after in run_ranks(2, train, change, shares):
        assert error.startswith(f"parameter {name} is out of sync: digest ")
        assert "between replicate() and step 1." in error
        assert "replicate(init_sync=False)" in error
        assert left == [None] * 5
        torch.testing.assert_close(after, wanted(8 if shares else 2))  # a step of shares divides by its rows


def test_a_forward_that_chooses_weights_by_the_rank_s_batch_is_an_error_on_every_rank():
    """The first forward is that of the first step."""
    for error, *_ in run_ranks(2, train, change_nothing):
        assert error.startswith("parameter 1.scale is out of sync")
        assert "run one forward on the same batch on every rank before" in error


def test_values_are_not_compared_without_init_sync():
    (first, *_), (second, *_) = run_ranks(2, lambda rank: train(rank, load_a_checkpoint, init_sync=False))
    assert (first, second) == (None, None)


@on_ranks(2)
def test_values_are_compared_until_they_are_equal(rank):
    net = lockstep.replicate(network(), process_group=rank.group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    load_a_checkpoint(net, rank)
    errors = 0
    for _ in range(6):
        try:
            net(X).square().sum().backward()
        except OutOfSyncError:
            errors += 1
        optimizer.step()
    assert errors == 3  # after a step on gradients, of which there are none after an error


@on_ranks(2)
def test_values_from_before_a_failed_round_are_not_compared(rank):
    """One rank has stepped before it fails, and all load the same checkpoint."""
    net = lockstep.replicate(network()[0], process_group=rank.group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(X[:4]).sum().backward()
    load_a_checkpoint(net, rank)
    optimizer.step()
    loss = net(X[4:]).sum()
    if rank.rank == 1:
        loss.register_hook(lambda gradient: 1 / 0)
    with pytest.raises((PeerError, ZeroDivisionError)):
        loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
    for _ in range(3):
        net(X).sum().backward()
        optimizer.step()


@on_ranks(2)
def test_a_settled_step_has_one_collective(rank):
    net = lockstep.replicate(network()[0], process_group=rank.group)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    seen = []
    for _ in range(30):
        with count_collectives(rank) as collectives:
            net(X).square().sum().backward()
            optimizer.step()
        seen.append(len(collectives))
    assert set(seen[3:]) == {1}


def weight_noise(net, rank, number):
    numbers = rank.generator(number)
    return [0.01 * torch.randn(p.shape, dtype=p.dtype, generator=numbers) for p in net.parameters()]


def gradient_of_the_rank(net, rank, number):
    """As in sharpness-aware minimisation by torch.autograd.grad."""
    loss = net(X[rank.rank :: 2]).square().sum()
    return [0.01 * each for each in torch.autograd.grad(loss, list(net.parameters()))]


def gradient_under_no_sync(net, rank, number):
    with net.no_sync():
        net(X[rank.rank :: 2]).square().sum().backward()
    found = [0.01 * p.grad for p in net.parameters()]
    net.zero_grad()
    return found


@pytest.mark.parametrize("perturbation", [weight_noise, gradient_of_the_rank, gradient_under_no_sync])
def test_what_a_rank_adds_to_its_weights_for_one_backward_is_no_error(perturbation):
    def work(rank):
        net = lockstep.replicate(rank.make(network)[0], process_group=rank.group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for number in range(20):
            before = [p.detach().clone() for p in net.parameters()]
            added = perturbation(net, rank, number)
            with torch.no_grad():
                torch._foreach_add_(list(net.parameters()), added)
            optimizer.zero_grad()
            net(X[rank.rank :: 2]).square().mean().backward()
            with torch.no_grad():
                torch._foreach_copy_(list(net.parameters()), before)
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    first, second = run_ranks(2, work)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
