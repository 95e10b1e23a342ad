"""The position within an epoch."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset

import lockstep
from lockstep.errors import CheckpointError, OptionError
from programs.ranks import on_ranks

ROWS = list(range(23))


def distributed(rank=0, world=2):
    return DistributedSampler(ROWS, world, rank, seed=3)


def batches_of(sampler, epochs, size=4, **options):
    loader = DataLoader(ROWS, size, sampler=sampler, **options)
    while sampler.epoch < epochs:
        epoch = sampler.epoch
        for batch in sampler.batches(loader):
            yield epoch, batch.tolist()


def resumed(order, state):
    sampler = lockstep.ResumableSampler(order)
    sampler.load_state_dict(state)
    return sampler


SAMPLERS = {
    "distributed": distributed,
    "random": lambda: RandomSampler(ROWS),
    "in order": lambda: SequentialSampler(ROWS),
    "with replacement": lambda: RandomSampler(ROWS, replacement=True, num_samples=10),
}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_it_goes_on_after_every_batch(kind, drop_last):
    run = lockstep.ResumableSampler(SAMPLERS[kind]())
    states, wanted = [run.state_dict()], []
    for epoch, batch in batches_of(run, 3, drop_last=drop_last):
        wanted.append((epoch, batch))
        states.append(run.state_dict())
    assert wanted[-1][0] == 2
    for number, state in enumerate(states):
        torch.rand(1)  # the order has nothing to do with the numbers of the program
        rest = batches_of(resumed(SAMPLERS[kind](), state), 3, drop_last=drop_last)
        assert list(rest) == wanted[number:]


def test_what_workers_have_fetched_ahead_is_not_consumed():
    run = lockstep.ResumableSampler(distributed())
    seen = batches_of(run, 1, num_workers=1, prefetch_factor=4)
    first = [next(seen)[1] for _ in range(2)]
    state = run.state_dict()
    assert state["consumed"] == 8
    rest = [batch for _, batch in seen]
    assert [batch for _, batch in batches_of(resumed(distributed(), state), 1)] == rest
    assert sorted(chain.from_iterable(first + rest)) == sorted(distributed())


def test_the_programs_random_numbers_are_left_alone():
    state = torch.get_rng_state()
    list(batches_of(lockstep.ResumableSampler(RandomSampler(ROWS)), 2))
    assert torch.equal(state, torch.get_rng_state())


def test_epochs_and_seeds_differ():
    orders = [list(batches_of(lockstep.ResumableSampler(RandomSampler(ROWS), seed=seed), 2, 23)) for seed in (0, 1)]
    assert len({tuple(batch) for order in orders for _, batch in order}) == 4


def test_the_plain_order_is_that_of_set_epoch():
    (_, first), (_, second) = batches_of(lockstep.ResumableSampler(distributed()), 2, 12)
    plain = distributed()
    assert first == list(plain)
    plain.set_epoch(1)
    assert second == list(plain)


@pytest.mark.parametrize("consumed", [0, 4, 5, 12])
def test_another_number_of_ranks_shares_what_is_left(consumed):
    """Nothing is left out; fewer samples than there are ranks come twice, beside those that PyTorch pads with."""
    had = [list(distributed(rank))[:consumed] for rank in range(2)]
    state = lockstep.ResumableSampler(distributed()).state_dict() | {"consumed": consumed}
    rest = []
    for rank in range(3):
        rest += [row for _, batch in batches_of(resumed(distributed(rank, 3), state), 1) for row in batch]
    before = set(chain.from_iterable(had))
    assert before | set(rest) == set(ROWS)
    assert len(before & set(rest)) <= 2 + 1


def test_the_end_of_an_epoch_and_break():
    sampler = lockstep.ResumableSampler(SequentialSampler(ROWS))
    loader = DataLoader(ROWS, 10, sampler=sampler)
    for _ in sampler.batches(loader):
        break
    assert (sampler.epoch, sampler.consumed, len(sampler), len(loader)) == (0, 10, 23, 3)
    assert [len(batch) for batch in sampler.batches(loader)] == [10, 3]
    assert (sampler.epoch, sampler.consumed) == (1, 0)


def test_a_shards_position_is_its_ranks_own(tmp_path):
    shard = Subset(ROWS, range(0, 23, 2))
    sampler = lockstep.ResumableSampler(RandomSampler(shard))
    assert not sampler.same_on_all_ranks
    assert lockstep.ResumableSampler(distributed()).same_on_all_ranks
    folder = lockstep.save(tmp_path, data=sampler)
    assert not (folder / "data.pt").exists()


@pytest.mark.parametrize("others", [2, 3, 5])
@on_ranks(2)
def test_a_batch_counts_when_training_has_it_also_where_another_loader_has_no_length(rank, others):
    """Rank 1 has a sampler, and rank 0 ``others`` batches of a loader that does not know how many it has."""
    model = lockstep.replicate(torch.nn.Linear(1, 1), process_group=rank.group)
    sampler = lockstep.ResumableSampler(SequentialSampler(ROWS[:5]))
    own = sampler.batches(DataLoader(ROWS, 2, sampler=sampler))
    seen = []
    for _ in lockstep.batches(own if rank.rank == 1 else (None for _ in range(others)), model):
        model(torch.ones(1, 1)).sum().backward()
        seen.append((sampler.epoch, sampler.consumed))
    if rank.rank == 1:
        assert seen == [(0, 2), (0, 4), *[(0, 5)] * max(1, others - 2)]
        assert (sampler.epoch, sampler.consumed) == (1, 0)


def test_what_is_refused():
    with pytest.raises(OptionError, match="the RandomSampler has a generator of its own"):
        lockstep.ResumableSampler(RandomSampler(ROWS, generator=torch.Generator()))
    sampler = lockstep.ResumableSampler(SequentialSampler(ROWS))
    with pytest.raises(OptionError, match=r"is gone through by `for batch in sampler.batches\(loader\)`"):
        next(iter(DataLoader(ROWS, sampler=sampler)))
    with pytest.raises(OptionError, match="the loader has another sampler"):
        sampler.batches(DataLoader(ROWS))
    state = sampler.state_dict()
    with pytest.raises(CheckpointError, match="saved for 23 samples an epoch on this rank, and the sampler has 5"):
        lockstep.ResumableSampler(SequentialSampler(ROWS[:5])).load_state_dict(state)
    with pytest.warns(UserWarning, match="saved with seed 0, and the sampler has 1: it goes on in another order"):
        lockstep.ResumableSampler(SequentialSampler(ROWS), seed=1).load_state_dict(state)
