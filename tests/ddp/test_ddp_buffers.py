"""Buffers of PyTorch's DistributedDataParallel and of ours: who sends what to whom, and when."""

from __future__ import annotations

import torch
from torch import nn

from ddp_reference import both_since_2_13, ddp_class, scalars
from processes import on_processes, run_processes
from programs.networks import Applying
from small_modules import one_weight, x_of


def buffered(value):
    return Applying(lambda m, x: m.layer(x), (), layer=one_weight(), kept=torch.full((2,), float(value)))


def on_every_rank(rank, tensor):
    return [part.tolist() for part in rank.gather(tensor)]


def step(ddp, rank):
    ddp(x_of(rank)).sum().backward()


@both_since_2_13
@on_processes(2)
def test_buffers_are_those_of_rank_0_after_backward(rank, implementation):
    make, seen = ddp_class(implementation), {}
    ddp = make(buffered(rank.rank))
    seen["at the start"] = on_every_rank(rank, ddp.module.kept)
    for _ in range(2):
        if rank.rank == 0:
            ddp.module.kept = ddp.module.kept + 1  # another tensor
        step(ddp, rank)
    seen["of rank 0, reassigned"] = on_every_rank(rank, ddp.module.kept)
    ddp.module.kept.fill_(5.0 + rank.rank)
    step(ddp.eval(), rank)
    seen["in place, eval"] = on_every_rank(rank, ddp.module.kept)
    ddp.train().module.register_buffer("late", torch.tensor(7 + rank.rank))
    step(ddp, rank)
    seen["registered later"] = on_every_rank(rank, ddp.module.late)
    with ddp.no_sync():
        step(ddp, rank)
        step(ddp, rank)
        ddp.module.kept.fill_(20.0 + rank.rank)
        step(ddp, rank)
    seen["in no_sync"] = on_every_rank(rank, ddp.module.kept)
    step(ddp, rank)
    step(ddp, rank)
    seen["after no_sync"] = on_every_rank(rank, ddp.module.kept)

    local = make(buffered(rank.rank), forward_sync_buffers=False)
    seen["local, at the start"] = on_every_rank(rank, local.module.kept)
    local.module.kept.fill_(5.0 + rank.rank)
    step(local, rank)
    seen["local"] = on_every_rank(rank, local.module.kept)

    unsent = make(buffered(rank.rank), init_sync=False)
    step(unsent, rank)
    seen["not sent at the start"] = on_every_rank(rank, unsent.module.kept)
    assert seen == {
        "at the start": [[0.0, 0.0]] * 2,
        "of rank 0, reassigned": [[2.0, 2.0]] * 2,
        "in place, eval": [[5.0, 5.0]] * 2,
        "registered later": [7, 7],
        "in no_sync": [[20.0, 20.0], [21.0, 21.0]],
        "after no_sync": [[20.0, 20.0]] * 2,
        "local, at the start": [[0.0, 0.0]] * 2,
        "local": [[5.0, 5.0], [6.0, 6.0]],
        "not sent at the start": [[0.0, 0.0]] * 2,
    }


@both_since_2_13
@on_processes(2)
def test_two_forwards_with_batch_normalisation(rank, implementation):
    """Batch normalisation: two forwards before one backward, then an ordinary step."""
    x = torch.randn(8, 3, generator=rank.generator())
    ddp = ddp_class(implementation)(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    (ddp(x).square().mean() + ddp(2 * x).square().mean()).backward()
    ddp(x).square().mean().backward()
    assert ddp.module[1].num_batches_tracked.item() == 3
    assert [rank.all_equal(p.grad) for p in ddp.parameters()] == [True] * 4


def remember(module, x):
    """Saves a buffer for backward, and gives it another value without writing into it."""
    kept = module.kept
    module.kept = kept + x.detach().sum()
    return module.layer(x) * kept


def two_forwards(rank, implementation):
    ddp = ddp_class(implementation)(Applying(remember, (), layer=one_weight(), kept=torch.ones(1)))
    x = x_of(rank)
    (ddp(x) + ddp(x)).sum().backward()
    return scalars(ddp)


def test_lockstep_never_writes_into_what_backward_has_saved():
    """Rank r: x (1 + (1 + x)) with x = r + 1; the reference broadcasts into the second factor."""
    assert run_processes(2, two_forwards, "lockstep") == [[(1 * (1 + 2) + 2 * (1 + 3)) / 2]] * 2
    assert run_processes(2, two_forwards, "torch") != [[(1 * (1 + 2) + 2 * (1 + 3)) / 2]] * 2
