"""Sums of shares in bfloat16: the same bits on any number of ranks, half the bytes, and an error that stays small."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.distributed import load_training_state_dict, training_state_dict
from lockstep.errors import AgreementError, OptionError
from programs.ranks import on_ranks, replicated
from share_runs import backward, batches_of, data_of, digits, forever, make_optimizer
from threaded import count_collectives, run_ranks

WORLDS = [(1, ""), (2, ""), (2, "aa"), (3, ""), (3, "aaa"), (4, ""), (4, "aabb"), (8, "")]


def trained(rank, dtype=None, reduce_dtype=torch.bfloat16, steps=4):
    """Gradients accumulate over two batches, and the second backward of a share comes after its buckets have left."""
    model = lockstep.replicate(
        rank.make(digits).to(dtype), shares=8, process_group=rank.group, reduce_dtype=reduce_dtype
    )
    optimizer = make_optimizer("fused AdamW", model)
    batches = lockstep.shares.GlobalBatches(data_of("digits"), 30, 8, seed=1, process_group=rank.group)
    for number, batch in enumerate(itertools.islice(forever(batches), steps)):
        if number % 2 == 0:
            optimizer.zero_grad()
        for x, y in batch:
            loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y, reduction="sum")
            loss.backward(retain_graph=number == 2)
            if number == 2:
                loss.backward()
        optimizer.step()
    return lockstep.shares.fingerprint(model, optimizer)


@pytest.mark.around
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_fingerprint_at_all_world_sizes(dtype):
    found = {run_ranks(world, trained, dtype, hosts=hosts)[0] for world, hosts in WORLDS}
    assert len(found) == 1
    assert found != set(run_ranks(1, trained, dtype, None))


def rows_of(shares, numel=4096):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(numel, generator=generator) + 0.5 * torch.randn(shares, numel, generator=generator)


def gradient_of(rank, reduce_dtype, shares):
    """The gradient of a step with one row in each share, and the exact one in float64."""
    rows = rows_of(shares)
    model = nn.ParameterList([nn.Parameter(torch.zeros(rows.shape[1]))])
    lockstep.replicate(model, shares=shares, process_group=rank.group, reduce_dtype=reduce_dtype)
    for (x,) in next(iter(batches_of(rank, TensorDataset(rows), shares, shares))):
        (model[0] * x).sum().backward()
    return model[0].grad.double(), rows.double().mean(0)


def test_gradients_and_sums_are_rounded_and_the_mean_is_not():
    found, _ = run_ranks(2, gradient_of, torch.bfloat16, 3)[0]
    a, b, c = (each.bfloat16().float() for each in rows_of(3))
    total = ((a + b).bfloat16().float() + c).bfloat16().float()
    assert torch.equal(found.float(), total / 3)


def error_of(shares):
    found, exact = run_ranks(1, gradient_of, torch.bfloat16, shares)[0]
    return ((found - exact).norm() / exact.norm()).item() * 2**9


def test_the_error_does_not_grow_with_the_number_of_shares():
    """In units of the rounding of one number: 1.3, at 8 shares and at 128."""
    errors = [error_of(shares) for shares in (8, 32, 128)]
    assert max(errors) < 1.5
    assert max(errors) < 1.1 * min(errors)


def test_half_the_bytes():
    def counted(rank, reduce_dtype):
        model = replicated(rank, lambda: nn.Linear(100, 100), shares=4, reduce_dtype=reduce_dtype)
        for batch in batches_of(rank, TensorDataset(torch.ones(8, 100))):
            with count_collectives(rank) as seen:
                backward(model, batch)
        return sum(each.numel * each.dtype.itemsize for each in seen)

    half, whole = (run_ranks(2, counted, dtype)[0] for dtype in (torch.bfloat16, None))
    assert half < 0.52 * whole


def test_float16_is_refused_as_a_sum_may_be_too_large():
    with pytest.raises(OptionError, match=r"got reduce_dtype=torch\.float16 beside shares: .*use torch\.bfloat16"):
        lockstep.replicate(nn.Linear(2, 1), shares=2, reduce_dtype=torch.float16)


@on_ranks(2)
def test_ranks_that_differ_and_runs_that_were_saved_with_something_else(rank):
    with pytest.raises(AgreementError, match="option reduce_dtype"):
        replicated(rank, digits, shares=8, reduce_dtype=(None, torch.bfloat16)[rank.rank])
    model = replicated(rank, digits, shares=8)
    other = replicated(rank, digits, shares=8, reduce_dtype=torch.bfloat16)
    with pytest.raises(AgreementError, match=r"reduce_dtype was None, now it is torch.bfloat16"):
        load_training_state_dict(other, training_state_dict(model))
