"""Data that all ranks see alike, and data that is divided twice: a warning."""

import contextlib

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import lockstep
from threaded import run_ranks

DATA = TensorDataset(torch.arange(16.0)[:, None], torch.arange(16))


class Rows(IterableDataset):
    """Rows that each rank loads from the place ``begin`` on."""

    def __init__(self, begin):
        self.begin = begin

    def __iter__(self):
        return iter(torch.arange(4.0) + self.begin)


def not_divided(rank):
    return DataLoader(DATA, 2)


def shuffled_alike(rank):
    return DataLoader(DATA, 2, shuffle=True, generator=torch.Generator().manual_seed(0))


def sharded(rank):
    return DataLoader(lockstep.loop.shard(DATA, rank.group), 2)


def with_sampler(rank):
    return DataLoader(DATA, 2, sampler=DistributedSampler(DATA, rank.world, rank.rank))


def shuffled(rank):
    return DataLoader(DATA, 2, shuffle=True, generator=torch.Generator().manual_seed(rank.rank))


def divided_twice(rank):
    part = lockstep.loop.shard(DATA, rank.group)
    return DataLoader(part, 2, sampler=DistributedSampler(part, rank.world, rank.rank))


def streamed_alike(rank):
    return DataLoader(Rows(0), 2)


def streamed(rank):
    return DataLoader(Rows(4 * rank.rank), 2)


def no_loader(rank):
    return [torch.ones(2, 1)]


SAME = r"rank \d: batches\(\) has given all ranks the same first batch, so they train on the same rows\. "
TWICE = r"batches\(\) got a DataLoader of shard\(\)'s part of a TensorDataset, with a DistributedSampler over 2 ranks, "


@pytest.mark.parametrize(
    ("loader", "loops", "text"),
    [
        (not_divided, 2, SAME),
        (shuffled_alike, 2, SAME),
        (streamed_alike, 1, SAME),
        (divided_twice, 1, TWICE),
        *((each, 3, None) for each in (sharded, with_sampler, shuffled, streamed, no_loader)),
    ],
)
def test_loaders_of_all_ranks(loader, loops, text):
    def train(rank):
        model = lockstep.replicate(torch.nn.Linear(1, 1), process_group=rank.group)
        for _ in range(loops):
            for batch in lockstep.batches(loader(rank), model):
                rows = batch[0] if isinstance(batch, list) else batch
                model(rows.view(-1, 1)).sum().backward()

    with pytest.warns(UserWarning, match=text) if text else contextlib.nullcontext():
        run_ranks(2, train)
