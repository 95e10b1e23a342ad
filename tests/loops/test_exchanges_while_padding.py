"""What ranks exchange in forward and in losses, where some have run out of batches: that of the others is as if these
were alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep
from lockstep.local import SyncBatchNorm
from lockstep.loop import gather_rows, mean_over_ranks
from processes import on_processes, run_processes
from programs.networks import mlp
from programs.ranks import clear, on_ranks, same_gradients

BATCHES = [torch.randn(n, 4, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (3, 2, 0)]
"""By rank. The last one has none, and goes through one that is no number."""
NOT_A_NUMBER = torch.full((4, 3), torch.nan, dtype=torch.float64)


class Normalised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def similar(features):
    return features @ features.T, torch.arange(len(features)).roll(1)


def whole_loss(model, x, group):
    return cross_entropy(*similar(gather_rows(model(x), model).rows))


def own_part(model, x, group):
    features, own = gather_rows(model(x), model)
    logits, labels = similar(features)
    ranks = len(gather_rows(torch.ones(1), model).rows)
    return cross_entropy(logits[own], labels[own], reduction="sum") * ranks / len(features)


def penalty(model, parts, mean=lambda grads: grads):
    """The squared mean of the gradients of the parts of a batch."""
    losses = [model(x).square().sum() for x in parts]
    grads = [torch.autograd.grad(loss, [*model.parameters()], create_graph=True) for loss in losses]
    means = mean([sum(each) / len(parts) for each in zip(*grads, strict=True)])
    return sum(each.square().sum() for each in means)


def loss_of_similar(model, parts):
    return cross_entropy(*similar(model(torch.cat(parts))))


PROGRAMS = {
    "batch normalisation": (
        Normalised,
        lambda model, x, _: model(x).square().mean(),
        lambda model, parts: model(torch.cat(parts)).square().mean(),
    ),
    "a loss of all rows": (lambda: mlp(3, 4), whole_loss, loss_of_similar),
    "a part of it": (lambda: mlp(3, 4), own_part, loss_of_similar),
    "a mean of gradients": (
        lambda: mlp(3, 4, 1),
        lambda model, x, group: penalty(model, [x], lambda grads: mean_over_ranks(grads, group)),
        penalty,
    ),
}


def with_replica(rank, network):
    """The network, and a replicated copy whose batch normalisation is over ranks."""
    plain = rank.make(lambda: network().double())
    net = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), rank.group)
    return plain, lockstep.replicate(net, process_group=rank.group)


@pytest.mark.parametrize(("network", "loss_of", "loss_of_all"), PROGRAMS.values(), ids=PROGRAMS)
@on_ranks(3)
def test_ranks_without_a_batch_are_left_out(rank, network, loss_of, loss_of_all):
    plain, model = with_replica(rank, network)
    for number, x in enumerate(lockstep.batches(BATCHES[rank.rank], model, padding=NOT_A_NUMBER)):
        clear(model, plain)
        loss_of(model, x, rank.group).backward()
        loss_of_all(plain, [each[number] for each in BATCHES if len(each) > number]).backward()
        same_gradients(rank, model, plain, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close([*model.buffers()], [*plain.buffers()], rtol=1e-10, atol=1e-12)
    assert number == 2


@pytest.mark.parametrize(("network", "loss_of", "_"), PROGRAMS.values(), ids=PROGRAMS)
@on_ranks(2)
def test_a_batch_that_counts_nothing_on_any_rank(rank, network, loss_of, _):
    """One rank has run out in the outer loop, the other one in the inner loop."""
    _, model = with_replica(rank, network)
    x, seen = torch.ones(2, 3, dtype=torch.float64) * torch.arange(2)[:, None], []
    for _ in lockstep.batches([0] * (1 + rank.rank), model):
        turns = lockstep.batches([x] * (2 - rank.rank), model)
        for each in turns:
            model.zero_grad()
            loss_of(model, each, rank.group).backward()
            seen.append([p.grad is not None for p in model.parameters()])
    assert len(seen) == 4
    assert not any(seen[-1])
    assert all(map(any, seen[:-1]))


@on_processes(2)
def test_a_normalisation_over_another_group_than_the_loop(rank):
    rows = dist.new_group([0, 1])
    net = Normalised().double()
    for each in net.parameters():
        nn.init.constant_(each, 0.1)
    plain = copy.deepcopy(net)
    model = lockstep.replicate(SyncBatchNorm.convert_sync_batchnorm(net, rows))
    batches = [each[: 2 - number] for number, each in enumerate(BATCHES[:2])]
    for x in lockstep.batches(batches[rank.rank], model):
        model(x).square().mean().backward()
    plain(torch.cat([each[0] for each in batches]))
    plain(batches[0][1])
    torch.testing.assert_close([*model.buffers()], [*plain.buffers()])


def compares(rank, what_it_passed):
    with lockstep.session() as run:
        model = lockstep.replicate(nn.Linear(3, 4).double())
        for x in run.batches(BATCHES[run.rank]):
            features = model(x)
            rows, own = gather_rows(features, model)
            its_own = features if what_it_passed else rows[own]
            cross_entropy(its_own @ rows.T, torch.arange(own.start, own.stop)).backward()
        raise ValueError("evaluation")


def test_a_loss_of_what_was_passed_is_an_error_that_says_what_to_take_instead():
    first, second = run_processes(2, compares, True, launched=True, errors=True)
    assert "Expected input batch_size (4) to match target batch_size (0)" in str(second.error)
    assert all("take its own rows from the result, rows[own]" in str(each.error.__cause__) for each in (first, second))


def test_an_error_after_the_loop_has_nothing_to_do_with_it():
    for each in run_processes(2, compares, False, launched=True, errors=True):
        assert "rows[own]" not in str(each.error.__cause__)
