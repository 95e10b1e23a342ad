"""Each rank's part of a data set or stream, and each worker's of that: every sample once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loader_worker

import lockstep
from lockstep.errors import OptionError
from lockstep.session.session import generator, seed_this_rank
from threaded import run_ranks


class Stream(IterableDataset):
    """Numbers, in an order that ``seed`` shuffles; it may divide itself by workers, as PyTorch's documentation says."""

    def __init__(self, count: int, divides: bool = False, seed: int | None = None) -> None:
        self.count, self.divides, self.seed = count, divides, seed

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        order = list(range(self.count))
        if self.seed is not None:
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed)).tolist()
        info = get_worker_info() if self.divides else None
        yield from order if info is None else order[info.id :: info.num_workers]


KINDS = {
    "data set": lambda: range(8),
    "stream": lambda: Stream(8),
    "iterator": lambda: iter(range(8)),
    "iterable without a length": lambda: map(int, "01234567"),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_shards_are_unequal_by_one_at_most(make):
    shards = run_ranks(3, lambda rank: list(lockstep.loop.shard(make(), rank.group)))
    assert shards == [[0, 3, 6], [1, 4, 7], [2, 5]]


@pytest.mark.parametrize("divides", [False, True])
def test_each_worker_has_its_part(divides):
    shards = run_ranks(2, lambda rank: lockstep.loop.shard(Stream(11, divides), rank.group))
    loaders = [DataLoader(each, batch_size=2, num_workers=n) for each, n in zip(shards, (2, 1), strict=True)]
    found = [[batch.tolist() for batch in loader] for loader in loaders]
    assert found == [[[0, 4], [2, 6], [8], [10]], [[1, 3], [5, 7], [9]]]


def test_several_workers_do_not_share_an_iterator(monkeypatch):
    (part,) = run_ranks(1, lambda rank: lockstep.loop.shard(iter("abc"), rank.group))
    with monkeypatch.context() as worker, pytest.raises(OptionError, match=r"and 2 workers of a loader would share it"):
        # Two processes of a loader would end 10 s later: PyTorch waits for workers that have raised.
        worker.setattr(loader_worker, "_worker_info", SimpleNamespace(id=0, num_workers=2))
        next(iter(part))
    assert list(DataLoader(part, batch_size=None, num_workers=1)) == ["a", "b", "c"]


def with_noise(sample):
    return sample, torch.rand(()).item()


def test_the_order_is_common_and_workers_draw_different_numbers():
    """As docs/uneven.md says, with the seeds of a session's ranks."""
    common = [generator(0, "shared") for _ in range(2)]
    epochs = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            orders = [int(torch.randint(2**31, (), generator=each)) for each in common]
            shards = run_ranks(2, lambda rank, n: lockstep.loop.shard(Stream(9, seed=n[rank.rank]), rank.group), orders)
            epochs.append([])
            for rank, part in enumerate(shards):
                seed_this_rank(len(epochs), rank)
                epochs[-1] += [(s[0], noise) for s, noise in DataLoader(part, num_workers=2, collate_fn=with_noise)]
    for epoch in epochs:
        assert sorted(sample for sample, _ in epoch) == list(range(9))
    assert [sample for sample, _ in epochs[0]] != [sample for sample, _ in epochs[1]]
    assert len({noise for epoch in epochs for _, noise in epoch}) == 18
