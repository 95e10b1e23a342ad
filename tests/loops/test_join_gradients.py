"""Ranks with different numbers of batches under `join`: what a rank that has run out has before and after."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import lockstep
from ddp_reference import both, ddp_class
from lockstep.errors import OptionError
from processes import on_processes
from programs.networks import Applying
from programs.ranks import scalars
from small_modules import filled, one_weight, x_of


def branches():
    """Two weights; the second is used on demand."""
    forward = lambda m, x, both=True: m.layers[0](x) + (m.layers[1](x) if both else 0)  # noqa: E731
    return Applying(forward, (), layers=nn.ModuleList([one_weight(), one_weight()]))


@both
@on_processes(2)
def test_a_rank_that_has_run_out_begins_the_next_epoch_without_the_others_gradients(rank, implementation):
    """Two epochs of one batch on rank 0 and three on rank 1; gradients are cleared after each step. They are kept, left
    where they are, or sent alone, by their size."""
    for size, to_none in itertools.product([1, 9000, 2**20], [True, False]):
        end = None if to_none else 0.0
        ddp = ddp_class(implementation)(filled(nn.Linear(size, 1, bias=False)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        seen = []
        for _ in range(2):
            with ddp.join():
                for batch in range([1, 3][rank.rank]):
                    ddp(torch.full((1, size), 10.0 * (rank.rank + 1 + batch))).sum().backward()
                    seen.append(ddp.module.weight.grad[0, 0].item())
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
            seen.append(None if ddp.module.weight.grad is None else ddp.module.weight.grad[0, 0].item())
        assert seen == [[15.0, end] * 2, [15.0, 15.0, 20.0, end] * 2][rank.rank], (size, to_none)


@pytest.mark.parametrize(
    ("synchronise", "left", "after"),
    [
        (True, ([1.5, 1.5], [1.0, 1.0]), ([15.75, 1.5], [15.75, None])),
        (False, ([1.0, 1.0], [1.0, 1.0]), ([15.5, 0.5], [15.5, 0.5])),
    ],
    ids=["reduced", "its own"],
)
@on_processes(2)
def test_gradients_of_this_rank_alone_are_contributed_to_the_next_round(rank, synchronise, left, after):
    ddp = lockstep.DistributedDataParallel(branches())
    with ddp.join():
        for batch in range([1, 3][rank.rank]):
            ddp.zero_grad()
            ddp.set_requires_gradient_sync(synchronise or batch > 0)
            ddp(x_of(rank)).sum().backward()
    ddp.set_requires_gradient_sync(True)
    assert scalars(ddp) == left[rank.rank]
    if rank.rank:
        ddp.zero_grad()
    ddp(x_of(rank, 10.0), both=False).sum().backward()  # what rank 0 had counts
    assert scalars(ddp) == after[rank.rank]


@on_processes(2)
def test_a_rank_that_has_run_out_has_no_gradient_of_a_new_layer(rank):
    """A layer is replaced before ``join``, in which rank 0 has no batch."""
    module = branches()
    ddp = lockstep.DistributedDataParallel(module)
    module.layers[1] = one_weight()
    with ddp.join():
        for _ in range(rank.rank):
            ddp(x_of(rank)).sum().backward()
    assert scalars(module) == [[None, None], [1.0, 1.0]][rank.rank]


@on_processes(2)
def test_a_weight_stays_with_the_gradient_that_did_not_get_there(rank):
    """Rank 0 weighs a micro-batch, and has run out before it is synchronised."""
    ddp = lockstep.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with ddp.join():
        for batch in range([1, 2][rank.rank]):
            with lockstep.accumulate(ddp, last=batch == 1, weight=100 if rank.rank == 0 else 1):
                ddp(x_of(rank)).sum().backward()
    assert scalars(ddp) == [rank.rank + 1.0]
    if rank.rank:
        ddp.zero_grad()
    with lockstep.accumulate(ddp, weight=1):
        ddp(x_of(rank)).sum().backward()
    assert scalars(ddp) == [pytest.approx((1 + 1 + 2) / (100 + 1 + 1))]


@on_processes(2)
def test_optimizers_in_hooks_step_on_a_rank_that_has_run_out_too(rank):
    """An optimizer with momentum, in hooks: its state is no replica's if a rank that has run out stands still."""
    ddp = lockstep.DistributedDataParallel(one_weight())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)
    ddp.module.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    for _ in range(2):
        with ddp.join():
            for _ in range([1, 3][rank.rank]):
                ddp.zero_grad()
                ddp(x_of(rank)).sum().backward()
    assert rank.all_equal(ddp.module.weight)
    assert rank.all_equal(optimizer.state[ddp.module.weight]["momentum_buffer"])


@on_processes(2)
def test_skip_on_is_refused_in_join_before_a_rank_waits_for_one_that_fails(rank):
    ddp = lockstep.DistributedDataParallel(one_weight())
    with pytest.raises(OptionError, match=r"lockstep\.batches"), ddp.join(), lockstep.loop.skip_on(ValueError):
        ddp(x_of(rank)).sum().backward()
    with lockstep.loop.skip_on(ValueError):
        ddp(x_of(rank)).sum().backward()
    assert not lockstep.loop.skipped(ddp)


@on_processes(2)
def test_a_batch_is_skipped_in_join_after_its_forward_and_not_before(rank):
    ddp, seen = lockstep.DistributedDataParallel(one_weight()), []
    with ddp.join():
        for number in range([1, 3][rank.rank]):
            ddp.zero_grad()
            if number == 1:
                with pytest.raises(OptionError, match=r"before the forward of a module.*lockstep\.batches"):
                    lockstep.loop.skip_batch(ddp)
            loss = ddp(x_of(rank)).sum()
            if number == 1:
                lockstep.loop.skip_batch(ddp)
            else:
                loss.backward()
            seen.append(ddp.module.weight.grad is None)
    assert seen == [False, True, False][: [1, 3][rank.rank]]
