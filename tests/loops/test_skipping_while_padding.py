"""A rank repeats a batch that it cannot use, since others have batches left: theirs count."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lockstep
from lockstep.loop import skip_batch, skip_on, skipped
from programs.ranks import on_ranks

BAD = torch.full((4, 3), torch.nan, dtype=torch.float64)
LENGTHS = {"the second one": (4, 2), "the only one": (4, 1)}


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError


def skips_by_hand(models, x):
    loss = sum(model(x).square().mean() for model in models)
    if loss.isfinite():
        loss.backward()
    else:
        skip_batch(*models)


def before_forward(models, x):
    with skip_on(ValueError, modules=models):
        if not x.isfinite().all():
            raise ValueError
        sum(model(x).square().mean() for model in models).backward()


def in_backward(models, x):
    with skip_on(ValueError, modules=models):
        x = models[0](x)
        if not x.isfinite().all():
            x = FailsInBackward.apply(x)
        sum([x.square().mean(), *(model(x).sum() for model in models[1:])]).backward()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("step", [skips_by_hand, before_forward, in_backward])
@pytest.mark.parametrize("count", [1, 2])
@on_ranks(2)
def test_only_the_batch_itself_is_left_out(rank, lengths, step, count):
    plain = [rank.make(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()) for _ in range(count)]
    models = [lockstep.replicate(copy.deepcopy(each), process_group=rank.group) for each in plain]
    batches = [rank.make(lambda: torch.randn(4, 3).double(), seed) for seed in range(lengths[0])]
    own = batches if rank.rank == 0 else [*batches[: lengths[1] - 1], BAD]
    for number, x in enumerate(lockstep.batches(own, *models)):
        for each in (*models, *plain):
            each.zero_grad()
        step(models, x)
        assert skipped(*models) == (number == lengths[1] - 1)
        if skipped(*models):
            continue
        step_of_one_process(plain, step, batches[number])
        assert all(rank.all_equal(each) for model in models for each in model.buffers())
        for model, alone in zip(models, plain, strict=True):
            for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(found.grad, wanted.grad)


def step_of_one_process(models, step, x):
    if step is in_backward:
        x = models[0](x)
        sum([x.square().mean(), *(model(x).sum() for model in models[1:])]).backward()
    else:
        sum(model(x).square().mean() for model in models).backward()
