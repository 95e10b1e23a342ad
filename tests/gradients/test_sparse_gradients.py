"""Embeddings with sparse gradients: every rank gets the rows of all, whatever its backend does with sparse tensors."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import PeerError
from programs.ranks import makes_means, on_ranks, replicated
from small_modules import error_of, fails_in_backward


class Rows(nn.Module):
    """Two embeddings: the second is used on demand. Both may have a dense gradient as well."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.words, self.late = (nn.Embedding(6, 3, sparse=True, dtype=dtype) for _ in range(2))
        self.last = nn.Linear(3, 1, dtype=dtype)

    def forward(self, ids, uses_late=False, regularised=()):
        y = self.last(self.words(ids).sum(1))
        y = y + self.last(self.late(ids[:1]).sum(1)) if uses_late else y
        return y.square().sum() + sum(getattr(self, name).weight.square().sum() for name in regularised)


def ids_of(rank, seed):
    generator = torch.Generator().manual_seed(10 * seed + rank.rank)
    return torch.randint(6, (0 if seed == 1 and rank.rank == 0 else 2 + rank.rank, 2), generator=generator)


def step(rank, model, seed, **kwargs):
    """Run a backward that makes means; return whether the gradients of the embeddings are sparse, None without any."""
    assert makes_means(rank, model, lambda each: each(ids_of(rank, seed), **kwargs), rtol=1.3e-6, atol=1e-5)
    return [None if each.weight.grad is None else each.weight.grad.is_sparse for each in (model.words, model.late)]


@pytest.fixture
def only_dense(monkeypatch):
    """No rank's backend sums sparse tensors."""
    all_reduce = Collectives.all_reduce

    def checked(self, tensor, *args, **kwargs):
        assert not tensor.is_sparse
        return all_reduce(self, tensor, *args, **kwargs)

    monkeypatch.setattr(Collectives, "all_reduce", checked)


@pytest.mark.usefixtures("only_dense")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hosts", ["", "aaa", "aab"])
@on_ranks(3, "hosts")
def test_means_of_rows(rank, dtype):
    """Ranks have different numbers of rows, one of them none; later one rank's gradients are dense, with and without a
    place in the plan."""
    model = replicated(rank, functools.partial(Rows, dtype))
    one = rank.rank == 1
    for seed in range(3):
        assert step(rank, model, seed) == [True, None]
    assert step(rank, model, 3, uses_late=True, regularised=["late"] if one else []) == [True, False]
    assert step(rank, model, 4, uses_late=True, regularised=["words", "late"] if one else []) == [False, False]
    assert step(rank, model, 5, uses_late=True) == [True, True]


@on_ranks(2)
def test_rows_of_a_backward_that_fails_on_a_rank_are_dropped(rank):
    """It fails on one rank in each second step, and on one rank a batch is left out."""
    model = replicated(rank, Rows)
    for seed in range(2, 8):
        if seed % 2:
            loss = fails_in_backward(model(ids_of(rank, seed)), rank.rank == 1)
            assert error_of(loss.backward) is (ArithmeticError if rank.rank == 1 else PeerError)
        else:
            assert step(rank, model, seed) == [True, None]
    model.zero_grad()
    with lockstep.loop.skip_on(ValueError, group=rank.group):
        if rank.rank == 0:
            raise ValueError("a bad batch")
        model(ids_of(rank, 0)).backward()
    assert lockstep.loop.skipped(model)
    assert step(rank, model, 2) == [True, None]
