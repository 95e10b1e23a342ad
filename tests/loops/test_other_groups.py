"""Loops and batches that are left out over one process group, where a module is replicated over another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import OptionError, PeerError
from processes import on_processes
from programs.ranks import replicated, rows, scalars_of
from small_modules import one_weight


def over_another_group(rank):
    return lockstep.replicate(rank.make(one_weight), process_group=dist.new_group())


@on_processes(2)
def test_a_rank_that_has_run_out_does_not_count_for_a_module_that_the_loop_does_not_serve(rank):
    model = over_another_group(rank)
    error = {0: (OptionError, r"lockstep.batches\(loader, model, other\)"), 1: (PeerError, "rank 0")}[rank.rank]
    taken = []
    with pytest.raises(error[0], match=error[1]):
        for number in lockstep.batches(range(1 + rank.rank)):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            taken.append(number)
    assert taken == [0]
    assert model.weight.grad is None
    loop = lockstep.batches(range(1 + rank.rank), model)
    assert [scalars_of(model, loss=model(torch.ones(1, 1)).sum() * (1 + rank.rank)) for _ in loop] == [[1.5], [2.0]]


@on_processes(2)
def test_loops_of_modules_over_different_groups_count_each_for_its_own(rank):
    of_all, other = replicated(rank), over_another_group(rank)
    seen = []
    for _ in lockstep.batches(range(1 + rank.rank)):
        outer = scalars_of(of_all, loss=of_all(torch.ones(1, 1)).sum() * (1 + rank.rank))
        inner = lockstep.batches(range(1), other)
        seen += [(outer, scalars_of(other, loss=other(torch.ones(1, 1)).sum() * (1 + rank.rank))) for _ in inner]
    assert seen == [([1.5], [1.5]), ([2.0], [1.5])]


@on_processes(3)
def test_numbers_of_a_rank_that_has_run_out_do_not_count_over_groups_that_the_loop_does_not_serve(rank):
    pair = [dist.new_group(each) for each in ([0, 1], [2])][rank.rank == 2]
    model, of_all, of_pair = over_another_group(rank), [], []
    for _ in lockstep.batches(range(1 + rank.rank // 2), model):
        for group, seen in ((None, of_all), (pair, of_pair)):
            seen.append((lockstep.mean(rank.rank, group=group), lockstep.loop.total([1], group)))
    assert of_all == [(1.0, [3.0]), (2.0, [1.0])]
    # Both of a pair have run out: what they compute together is theirs.
    assert of_pair == [(0.5, [2.0]) if rank.rank < 2 else (2.0, [1.0])] * 2


@on_processes(2)
def test_what_a_loss_exchanges_over_another_group_than_the_loops_leaves_padding_out(rank):
    of_all, other = replicated(rank), over_another_group(rank)
    for model, elsewhere in ((of_all, other), (other, of_all)):
        seen = []
        for x in lockstep.batches([torch.ones(1, 1) * (1 + rank.rank)] * (1 + rank.rank), model):
            model.zero_grad()
            found, _ = lockstep.loop.gather_rows(model(x), elsewhere)
            found.sum().backward()
            seen.append((len(found), model.weight.grad.item()))
        assert seen == [(2, 3.0), (1, 2.0)]
    means = [
        lockstep.loop.mean_over_ranks(torch.ones(1) * rank.rank).item()
        for _ in lockstep.batches([0] * (1 + rank.rank), other)
    ]
    assert means == [0.5, 1.0]


@pytest.mark.parametrize("shares", [None, 2])
@on_processes(
    2,
    raises=OptionError,
    says=["skip_on() has nothing to leave out", "skip_on(torch.OutOfMemoryError, modules=[model])"],
)
def test_a_batch_that_no_module_leaves_out_is_an_error_on_all_ranks(rank, shares):
    model = nn.Linear(3, 1).double()
    lockstep.replicate(model, **({"shares": shares} if shares else {"process_group": dist.new_group()}))
    with lockstep.loop.skip_on(ValueError):
        if rank.rank:
            raise ValueError
        with torch.set_grad_enabled(shares is None):
            loss = model(rows(0, rank.rank)).sum()
        if shares is None:
            with model.no_sync():
                loss.backward()


@on_processes(2)
def test_without_a_name_a_batch_is_that_of_the_only_group_with_modules(rank):
    model, seen = over_another_group(rank), []
    for number in range(3):
        with lockstep.loop.skip_on(ValueError, modules=[model]):
            if number == 1 and rank.rank:
                raise ValueError
            scalars_of(model, loss=model(torch.ones(1, 1)).sum())
        seen.append(bool(lockstep.loop.skipped))
    assert seen == [False, True, False]
    other = over_another_group(rank)
    with pytest.raises(OptionError, match=r"over 2 groups, .* lockstep\.loop\.skipped\(model\)"):
        lockstep.loop.skipped()
    of_all = replicated(rank)
    assert not lockstep.loop.skipped()
    assert [lockstep.loop.skipped(each) for each in (model, other, of_all)] == [False] * 3


@on_processes(2)
def test_requests_to_stop_travel_over_every_group_of_the_same_ranks(rank):
    model, reasons = over_another_group(rank), []
    request = lockstep.loop.stop_when(lambda: reasons)
    scalars_of(model, loss=model(torch.ones(1, 1)).sum())
    reasons += [rank.rank] * rank.rank
    assert not lockstep.should_stop()
    scalars_of(model, loss=model(torch.ones(1, 1)).sum())
    assert lockstep.should_stop()
    assert request.should_stop


@on_processes(2)
def test_a_rank_that_looks_for_requests_that_nothing_brings_is_warned(rank):
    request = lockstep.loop.stop_when(lambda: rank.rank == 1)
    looks = [lockstep.should_stop() for _ in range(999)]
    with pytest.warns(UserWarning, match=r"only when they do.* lockstep\.loop\.agree\(False\) in each step"):
        looks.append(lockstep.should_stop())
    assert not any(looks)
    lockstep.loop.agree(False)
    assert all(lockstep.should_stop() for _ in range(999))
    assert request.should_stop


@on_processes(2)
def test_samples_are_not_dealt_to_ranks_that_the_loop_does_not_serve(rank):
    own = [dist.new_group([number]) for number in range(2)][rank.rank]
    of_all = lockstep.loop.BalancedSampler([1] * 8, batch_size=4)
    of_own = lockstep.loop.BalancedSampler([1] * 8, batch_size=4, process_group=own)
    loaders = [torch.utils.data.DataLoader(range(8), batch_sampler=each) for each in (of_all, of_own)]
    with pytest.raises(OptionError, match=f"to ranks 0, 1, and this loop is over rank {rank.rank} alone"):
        lockstep.batches(loaders[0], group=own)
    assert [len([*lockstep.batches(each)]) for each in loaders] == [2, 2]
    assert sorted(torch.cat([*lockstep.batches(loaders[1], group=own)]).tolist()) == [*range(8)]
