"""`BalancedSampler`: the samples of each step, and which rank gets which."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import lockstep
from lockstep.errors import AgreementError, OptionError
from lockstep.loop import BalancedSampler
from programs.networks import Applying
from programs.ranks import on_ranks, replicated
from threaded import run_ranks

LENGTHS = [1 + round(random.Random(2).lognormvariate(1, 1) * each % 13) for each in range(1, 45)]


def group_of(rank, world):
    """A process group without a backend: it knows its rank and size."""
    return dist.ProcessGroup(rank, world)


def samplers(world, *args, **options):
    return [BalancedSampler(*args, **options, process_group=group_of(rank, world)) for rank in range(world)]


def loader_of(sampler, **options):
    return DataLoader(range(len(sampler.costs)), batch_sampler=sampler, collate_fn=list, **options)


def epoch_of(each):
    return list(each.batches(loader_of(each)))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_step_has_the_samples_of_the_plain_sampler(world, epoch):
    plain = [DistributedSampler(range(42), world, rank, seed=5) for rank in range(world)]
    for each in plain:
        each.set_epoch(epoch)
    size = 12 // world
    wanted = [
        sorted(itertools.chain(*(list(each)[first : first + size] for each in plain)))
        for first in range(0, 42 // world, size)
    ]
    found = []
    for each in samplers(world, LENGTHS[:42], 12, seed=5):
        for _ in range(epoch + 1):
            own = epoch_of(each)
        found.append(own)
    assert [sorted(itertools.chain(*parts)) for parts in zip(*found, strict=True)] == wanted


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"batch_cost": 60.0, "padded": True}, {"batch_size": 44}])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_sample_comes_once_in_an_epoch(world, options):
    each = samplers(world, LENGTHS, **options)
    orders = []
    for epoch in range(2):
        assert [sampler.epoch for sampler in each] == [epoch] * world
        assert [len(sampler) for sampler in each] == [sampler.left() for sampler in each]
        batches = [epoch_of(sampler) for sampler in each]
        orders.append(batches)
        assert sorted(itertools.chain(*itertools.chain(*batches))) == list(range(len(LENGTHS)))
        assert all(batch for own in batches for batch in own)
        assert {len(own) for own in batches} <= {len(batches[0]), len(batches[0]) - 1}
    assert orders[0] != orders[1]


def test_ranks_cost_about_the_same():
    lengths = [random.Random(each).lognormvariate(5, 0.8) for each in range(256)]
    batches = [epoch_of(each) for each in samplers(4, lengths, 64)]
    for parts in zip(*batches, strict=True):
        costs = [sum(lengths[sample] for sample in part) for part in parts]
        assert max(costs) <= 1.01 * sum(costs) / 4
    plain = [list(range(rank, 256, 4)) for rank in range(4)]
    assert max(sum(lengths[s] for s in own[:16]) for own in plain) > 1.1 * sum(lengths[:64]) / 4


def test_with_padding_samples_of_similar_cost_go_together():
    lengths = [8, 2, 8, 2, 2, 2, 2, 2, 2, 2]
    first, second = (epoch_of(each)[0] for each in samplers(2, lengths, 10, shuffle=False, padded=True))
    assert (first, second) == ([0, 2], [1, 3, 4, 5, 6, 7, 8, 9])


def test_batches_cost_at_most_batch_cost():
    (each,) = samplers(1, LENGTHS, batch_cost=40)
    costs = [sum(LENGTHS[sample] for sample in batch) for batch in epoch_of(each)]
    assert max(costs) <= 40
    assert min(costs[:-1]) > 40 - max(LENGTHS)


@pytest.mark.parametrize("world", [3, 6, 7, 12])
@pytest.mark.parametrize("cost", [0.1, 0.3, 0.7])
def test_the_least_batch_cost_is_a_sample_for_each_rank_whatever_the_rounding(world, cost):
    costs = [cost] * 4 * world
    for each in samplers(world, costs, batch_cost=world * cost, shuffle=False):
        assert [len(batch) for batch in epoch_of(each)] == [1] * 4


def test_a_last_batch_that_is_not_full_may_be_left_out():
    assert [len(batch) for batch in epoch_of(samplers(1, LENGTHS, 10, drop_last=True)[0])] == [10] * 4


# ---------------------------------------------------------------------------- the place


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_after_every_batch_on_any_number_of_ranks(workers):
    def seen(sampler, epochs):
        loader = loader_of(sampler, num_workers=workers)
        while sampler.epoch < epochs:
            yield from sampler.batches(loader)

    (run,) = samplers(1, LENGTHS, 12)
    states, wanted = [run.state_dict()], []
    for batch in seen(run, 2):
        wanted.append(sorted(batch))
        states.append(run.state_dict())
    for number in [3] if workers else range(len(states)):  # workers are processes
        state, rest = states[number], wanted[number:]
        resumed = samplers(2 if workers else 3, LENGTHS, 12)
        for each in resumed:
            each.load_state_dict(state)
        batches = [list(seen(each, 2)) for each in resumed]
        assert [sorted(itertools.chain(*parts)) for parts in zip(*batches, strict=True)] == rest


def test_after_break_the_next_loop_continues():
    (each,) = samplers(1, LENGTHS, 12)
    loader = loader_of(each)
    first = [next(iter(each.batches(loader)))]
    assert len(each.batches(loader)) == 3
    assert sorted(itertools.chain(*first, *each.batches(loader))) == list(range(44))


def test_a_plain_loop_begins_the_next_epoch_and_cannot_be_saved():
    (each,) = samplers(1, LENGTHS, 12)
    loader = loader_of(each, num_workers=2)
    (again,) = samplers(1, LENGTHS, 12)
    assert [list(loader) for _ in range(2)] == [epoch_of(again), epoch_of(again)]
    with pytest.raises(OptionError, match=r"loop over run\.batches\(loader\)"):
        each.state_dict()
    each.load_state_dict(again.state_dict())
    assert each.state_dict() == again.state_dict()


def test_programs_may_go_on_calling_set_epoch():
    each, again = samplers(1, LENGTHS, 12) + samplers(1, LENGTHS, 12)
    for epoch in range(2):
        each.set_epoch(epoch)
        assert epoch_of(each) == epoch_of(again)
    each.set_epoch(0)
    again.load_state_dict({**again.state_dict(), "epoch": 0})
    assert epoch_of(each) == epoch_of(again)


def test_the_random_numbers_of_the_program_are_left_alone():
    (each,) = samplers(1, LENGTHS, 12)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    epoch_of(each)
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------------- beside one process


def network():
    """A layer, and the sum of its outputs over the tokens of a padded batch."""
    forward = lambda m, tokens, mask: (torch.tanh(m.linear(tokens)).square().sum(-1) * mask).sum()  # noqa: E731
    return Applying(forward, (3, 3)).double()


def sentence(sample):
    return torch.arange(LENGTHS[sample] * 3, dtype=torch.float64).add(sample).mul(0.7).sin().view(-1, 3)


def padded(samples):
    sentences = [sentence(sample) for sample in samples]
    mask = [torch.ones(len(each), dtype=torch.float64) for each in sentences]
    pad = nn.utils.rnn.pad_sequence
    return pad(sentences, batch_first=True), pad(mask, batch_first=True)


def train(rank, options, epochs=2, folder=None, stop=None):
    model = replicated(rank, network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = BalancedSampler(LENGTHS, **options, process_group=rank.group)
    loader = DataLoader(range(len(LENGTHS)), batch_sampler=sampler, collate_fn=padded)
    run = {"group": rank.group, "model": model, "optimizer": optimizer, "sampler": sampler}
    if folder is not None and stop is None:
        lockstep.resume(folder, **run)
    steps, losses = 0, []
    while sampler.epoch < epochs:
        for tokens, mask in lockstep.batches(loader, model):
            optimizer.zero_grad()
            with lockstep.accumulate(model, weight=mask.sum()):
                loss = model(tokens, mask)
                loss.backward()
            optimizer.step()
            losses.append(model.linear.weight.grad.norm().item())
            steps += 1
            if steps == stop:
                lockstep.save(folder, **run)
                return None
    return torch.tensor(losses, dtype=torch.float64), model.linear.weight.detach().clone()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "options", [{"batch_size": 6}, {"batch_cost": 60.0, "padded": True}, {"batch_size": 14, "padded": True}]
)
def test_gradients_are_those_of_one_process_with_the_whole_batch(world, options):
    (wanted,) = run_ranks(1, train, options)
    assert len(wanted[0]) >= 8
    for found in run_ranks(world, train, options):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*what each rank had of its own is not loaded")
@pytest.mark.parametrize("stop", [7, 8, *(pytest.param(stop, marks=pytest.mark.around) for stop in (3, 11))])
def test_a_run_goes_on_on_another_number_of_ranks(stop, tmp_path):
    """The last of eight batches has two samples, so of three ranks one has none."""
    options = {"batch_size": 6}
    assert len(LENGTHS) % 6 == 2
    (wanted,) = run_ranks(1, train, options)
    for before, after in ((3, 2), (2, 3), (3, 3)):
        run_ranks(before, train, options, 2, tmp_path, stop)
        for found in run_ranks(after, train, options, 2, tmp_path):
            torch.testing.assert_close(found[1], wanted[1], rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "either batch_size or batch_cost"),
        ({"batch_size": 4, "batch_cost": 5}, "either batch_size or batch_cost"),
        ({"batch_size": 0}, "a whole number of samples"),
        ({"batch_size": 2.0}, "a whole number of samples"),
        ({"batch_size": 2}, "2 are too few for 3 ranks"),
        ({"batch_cost": 20}, "at least 3 times the cost"),
    ],
)
def test_options_that_are_refused(args, says):
    with pytest.raises(OptionError, match=says):
        len(samplers(3, LENGTHS, **args)[0])


def test_another_state_is_refused():
    each, other = samplers(1, LENGTHS, 12) + samplers(1, [*LENGTHS[1:], 1], 12)
    with pytest.raises(OptionError, match=r"with costs="):
        other.load_state_dict(each.state_dict())


def test_a_loader_with_another_sampler_is_refused():
    each, other = samplers(1, LENGTHS, 12) + samplers(1, LENGTHS, 12)
    with pytest.raises(OptionError, match="another batch sampler"):
        each.batches(loader_of(other))


@pytest.mark.parametrize("what", ["seed", "costs", "batch"])
@on_ranks(2)
def test_samplers_that_differ_are_refused_on_every_rank(rank, what):
    costs, seed = list(LENGTHS), 0
    if rank.rank == 1:
        costs[3] += what == "costs"
        seed += what == "seed"
    sampler = BalancedSampler(costs, 12, seed=seed, process_group=rank.group)
    sampler.batch += what == "batch" and rank.rank == 1
    with pytest.raises(AgreementError, match=f"ranks differ in {what} of the BalancedSampler"):
        list(lockstep.batches(loader_of(sampler), group=rank.group))
