"""Embeddings with sparse gradients: every rank gets the rows of all, whatever its backend does with sparse tensors."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import PeerError
from threaded import run_ranks


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
    parameters = list(model.parameters())
    own = torch.autograd.grad(model(ids_of(rank, seed), **kwargs), parameters, allow_unused=True)
    model.zero_grad()
    model(ids_of(rank, seed), **kwargs).backward()
    for parameter, grad in zip(parameters, own, strict=True):
        dense = torch.zeros_like(parameter) if grad is None else grad.to_dense()
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        torch.testing.assert_close(got, sum(rank.gather(dense)) / rank.world)
        assert rank.all_equal(got)
    return [None if each.weight.grad is None else each.weight.grad.is_sparse for each in (model.words, model.late)]


def rows(rank, dtype, monkeypatch):
    """Ranks have different numbers of rows, one of them none; later one rank's gradients are dense, with and without a
    place in the plan, and no rank's backend sums sparse tensors."""
    all_reduce = Collectives.all_reduce

    def only_dense(self, tensor, *args, **kwargs):
        assert not tensor.is_sparse
        return all_reduce(self, tensor, *args, **kwargs)

    monkeypatch.setattr(Collectives, "all_reduce", only_dense)
    model = lockstep.replicate(rank.make(functools.partial(Rows, dtype)), process_group=rank.group)
    seen = [step(rank, model, seed) for seed in range(3)]
    one = rank.rank == 1
    seen.append(step(rank, model, 3, uses_late=True, regularised=["late"] if one else []))
    seen.append(step(rank, model, 4, uses_late=True, regularised=["words", "late"] if one else []))
    seen.append(step(rank, model, 5, uses_late=True))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hosts", ["", "aaa", "aab"])
def test_means_of_rows(dtype, hosts, monkeypatch):
    wanted = [[True, None]] * 3 + [[True, False], [False, False], [True, True]]
    assert run_ranks(3, rows, dtype, monkeypatch, hosts=hosts) == [wanted] * 3


def fails(rank):
    """Backward fails on one rank in each second step, and on one rank a batch is left out."""
    model, seen = lockstep.replicate(rank.make(Rows), process_group=rank.group), []
    for seed in range(2, 8):
        with contextlib.suppress(PeerError, ArithmeticError):
            if seed % 2:
                loss = model(ids_of(rank, seed))
                if rank.rank == 1:
                    loss.register_hook(lambda gradient: 1 / 0)
                loss.backward()
                seen.append("went on")
            assert step(rank, model, seed) == [True, None]
    model.zero_grad()
    with lockstep.loop.skip_on(ValueError, group=rank.group):
        if rank.rank == 0:
            raise ValueError("a bad batch")
        model(ids_of(rank, 0)).backward()
    return seen, lockstep.loop.skipped(model), step(rank, model, 2)


def test_rows_of_a_backward_that_fails_on_a_rank_are_dropped():
    assert run_ranks(2, fails) == [([], True, [True, None])] * 2
