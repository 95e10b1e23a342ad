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


def shuffled(seed):
    return DataLoader(DATA, 2, shuffle=True, generator=torch.Generator().manual_seed(seed))


def sampled(rank, data):
    return DataLoader(data, 2, sampler=DistributedSampler(data, rank.world, rank.rank))


def part(rank):
    return lockstep.loop.shard(DATA, rank.group)


class Stateful:
    """A loader whose state says where it is."""

    def __init__(self, begin):
        self.batches = iter(torch.arange(begin, begin + 4.0)[:, None])

    def __iter__(self):
        return self.batches

    def state_dict(self):
        return {}


def with_states(rank):
    loader = Stateful(4 * rank.rank)
    return ((batch, loader.state_dict())[0] for batch in loader)


AHEAD = r"batches\(\) reads this Stateful one batch ahead, as it has no length, so a run that resumes "
SAME = r"rank \d: batches\(\) has given all ranks the same first batch, so they train on the same rows\. "
TWICE = r"batches\(\) got a DataLoader of shard\(\)'s part of a TensorDataset, with a DistributedSampler over 2 ranks, "


LOADERS = {
    "not divided": (lambda rank: DataLoader(DATA, 2), 2, SAME),
    "shuffled alike": (lambda rank: shuffled(0), 2, SAME),
    "streamed alike": (lambda rank: DataLoader(Rows(0), 2), 1, SAME),
    "divided twice": (lambda rank: sampled(rank, part(rank)), 1, TWICE),
    "sharded": (lambda rank: DataLoader(part(rank), 2), 3, None),
    "with a sampler": (lambda rank: sampled(rank, DATA), 3, None),
    "shuffled": (lambda rank: shuffled(rank.rank), 3, None),
    "streamed": (lambda rank: DataLoader(Rows(4 * rank.rank), 2), 3, None),
    "with a state": (lambda rank: Stateful(4 * rank.rank), 1, AHEAD),
    "with the state of each batch": (with_states, 2, None),
    "no loader": (lambda rank: [torch.ones(2, 1)], 3, None),
}


@pytest.mark.parametrize(("loader", "loops", "text"), LOADERS.values(), ids=LOADERS)
def test_loaders_of_all_ranks(loader, loops, text):
    def train(rank):
        model = lockstep.replicate(torch.nn.Linear(1, 1), process_group=rank.group)
        for _ in range(loops):
            for batch in lockstep.batches(loader(rank), model):
                rows = batch[0] if isinstance(batch, list) else batch
                model(rows.view(-1, 1)).sum().backward()

    with pytest.warns(UserWarning, match=text) if text else contextlib.nullcontext():
        run_ranks(2, train)
