"""A rank repeats a batch that it cannot use, since others have batches left: theirs count."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lockstep
from lockstep.loop import skip_batch, skip_on, skipped
from programs.ranks import clear, on_ranks, rows, same_gradients
from small_modules import fails_in_backward

BAD = torch.full((4, 3), torch.nan, dtype=torch.float64)
LENGTHS = {"the second one": (4, 2), "the only one": (4, 1)}


def loss_of(models, x, fails=False):
    first, *others = models
    y = fails_in_backward(first(x), fails, ValueError)
    return sum((model(y).square().mean() for model in others), y.square().mean())


def skips_by_hand(models, x):
    loss = loss_of(models, x)
    if loss.isfinite():
        loss.backward()
    else:
        skip_batch(*models)


def before_forward(models, x):
    with skip_on(ValueError, modules=models):
        if not x.isfinite().all():
            raise ValueError
        loss_of(models, x).backward()


def in_backward(models, x):
    with skip_on(ValueError, modules=models):
        loss_of(models, x, fails=not x.isfinite().all()).backward()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("step", [skips_by_hand, before_forward, in_backward])
@pytest.mark.parametrize("count", [1, 2])
@on_ranks(2)
def test_only_the_batch_itself_is_left_out(rank, lengths, step, count):
    plain = [rank.make(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()) for _ in range(count)]
    models = [lockstep.replicate(copy.deepcopy(each), process_group=rank.group) for each in plain]
    batches = [rows(number, 0, 4, 3) for number in range(lengths[0])]
    own = batches if rank.rank == 0 else [*batches[: lengths[1] - 1], BAD]
    for number, x in enumerate(lockstep.batches(own, *models)):
        clear(*models, *plain)
        step(models, x)
        assert skipped(*models) == (number == lengths[1] - 1)
        if skipped(*models):
            continue
        loss_of(plain, batches[number]).backward()
        for model, alone in zip(models, plain, strict=True):
            same_gradients(rank, model, alone)
            assert all(map(rank.all_equal, model.buffers()))


@pytest.mark.parametrize("loader", [list, iter], ids=["a length", "no length"])
@pytest.mark.parametrize("step", [skips_by_hand, before_forward, in_backward])
@pytest.mark.parametrize("count", [1, 2])
@on_ranks(2)
def test_a_batch_that_no_rank_can_use_is_left_out_where_a_rank_has_run_out(rank, loader, step, count):
    models = [lockstep.replicate(nn.Linear(3, 3).double(), process_group=rank.group) for _ in range(count)]
    good, seen = rows(0, 0, 4, 3), []
    for x in lockstep.batches(loader([[good, BAD, good, BAD], [good, BAD]][rank.rank]), *models):
        clear(*models)
        step(models, x)
        seen.append(skipped(*models))
    assert seen[:4] == [False, True, False, True]
    assert seen[4:] in (
        [],
        [True],
    )  # a backward that fails does not tell which ranks have ended: then all pad once more
