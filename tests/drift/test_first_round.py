"""Weights that a rank has changed after replicating are an error on every rank, before it has the first gradient."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import OutOfSyncError, PeerError
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
        net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()}, strict=False)


def begin_with_the_rank_s_seed(net, rank):
    torch.manual_seed(rank.rank)
    nn.init.normal_(net[0].bias)


def run_forward(net, rank):
    net(X[: 1 + rank.rank])


def change_nothing(net, rank):
    pass


def step(net, rank, shares):
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
    """Return the error of the first step, the gradients that it leaves, and those of a step with equal weights."""
    net = lockstep.replicate(network(), process_group=rank.group, shares=shares, **options)
    change(net, rank)
    error = None
    try:
        step(net, rank, shares)
    except OutOfSyncError as raised:
        error = str(raised)
    left = [p.grad for p in net.parameters()]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
        net[1].is_chosen.fill_(True)
    step(net, rank, shares)
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
    told = (
        f"parameter {name} was changed after the module was replicated, and has other values on rank 1 than on rank 0"
    )
    for error, left, after in run_ranks(2, train, change, shares):
        assert error.startswith(told)
        assert left == [None] * 5
        torch.testing.assert_close(after, wanted(8 if shares else 2))  # a step of shares divides by its rows


def test_a_forward_that_chooses_weights_by_the_rank_s_batch_is_an_error_on_every_rank():
    """The first forward is that of the first step."""
    for error, *_ in run_ranks(2, train, change_nothing):
        assert error.startswith("parameter 1.scale was changed after the module was replicated")
        assert error.endswith("run one forward on the same batch on every rank before")


def test_values_are_not_compared_without_init_sync():
    (first, *_), (second, *_) = run_ranks(2, lambda rank: train(rank, load_a_checkpoint, init_sync=False))
    assert (first, second) == (None, None)


def test_values_are_compared_until_they_are_equal():
    def work(rank):
        net = lockstep.replicate(network(), process_group=rank.group)
        load_a_checkpoint(net, rank)
        for _ in range(2):
            with pytest.raises(OutOfSyncError):
                net(X).square().sum().backward()

    run_ranks(2, work)


def test_values_from_before_a_failed_round_are_not_compared():
    """One rank has seen values in a micro-batch, the other one fails before; then all load the same checkpoint."""

    def work(rank):
        net = lockstep.replicate(network()[0], process_group=rank.group)
        if rank.rank == 0:
            with net.no_sync():
                net(X[:4]).sum().backward()
        loss = net(X[4:]).sum()
        if rank.rank == 1:
            loss.register_hook(lambda gradient: 1 / 0)
        with pytest.raises((PeerError, ZeroDivisionError)):
            loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.5)
        net(X).sum().backward()

    run_ranks(2, work)


def test_values_are_compared_once():
    def work(rank):
        net = lockstep.replicate(network()[0], process_group=rank.group)
        seen = []
        for _ in range(4):
            with count_collectives(rank) as collectives:
                net(X).square().sum().backward()
            seen.append(len(collectives))
        return seen

    for seen in run_ranks(2, work):
        assert seen[0] > seen[3] == 1


def test_what_a_rank_adds_to_its_weights_after_its_first_backward_is_no_error():
    """As sharpness-aware minimisation does, with the gradient of the rank's own rows."""

    def work(rank):
        net = lockstep.replicate(network()[0], process_group=rank.group)
        x = X[rank.rank :: 2]
        with net.no_sync():
            net(x).square().sum().backward()
        added = [p.grad.clone() for p in net.parameters()]
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), added, strict=True):
                parameter += value
        net.zero_grad()
        net(x).square().sum().backward()
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), added, strict=True):
                parameter -= value
        return [p.grad for p in net.parameters()]

    first, second = run_ranks(2, work)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_values_that_all_ranks_change_after_one_has_accumulated_are_no_error():
    def work(rank):
        net = lockstep.replicate(network()[0], process_group=rank.group)
        if rank.rank == 1:
            with net.no_sync():
                net(X[:4]).sum().backward()
            net.zero_grad()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.5)
        net(X[rank.rank :: 2]).sum().backward()
        return [p.grad for p in net.parameters()]

    first, second = run_ranks(2, work)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_checkpoint_that_one_rank_loads_before_it_accumulates_is_an_error():
    def work(rank):
        net = lockstep.replicate(network(), process_group=rank.group)
        load_a_checkpoint(net, rank)
        with net.no_sync():
            net(X[:4]).square().sum().backward()
        with pytest.raises(OutOfSyncError, match=r"^parameter 0\.weight was changed after the module was replicated"):
            net(X[4:]).square().sum().backward()

    run_ranks(2, work)
