"""Shares that are dealt by speed: when the deal changes, and that no bit does."""

from __future__ import annotations

import itertools
import random
import threading
from math import isnan, nan

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import lockstep
from fuzz.shares import choose_at_random
from lockstep.errors import OptionError, PeerError
from lockstep.shares import balance
from lockstep.shares.balance import Balance, Pace, ShareClock
from processes import run_processes
from programs.ranks import on_ranks, replicated
from share_runs import CELLS, MODELS, backward, batches_of, data_of, forever, make_optimizer
from threaded import run_ranks

# ---------------------------------------------------------------------------- when the deal changes


def deals_of(reports, shares=8, ahead=(0, 0, 0)):
    """The deal of each batch, after which these seconds are reported."""
    each, found = Balance(), []
    for batch, seconds in enumerate(reports):
        found.append(each.deal(batch, shares, len(seconds)))
        each.decide(batch, found[-1], [Pace(*pace) for pace in zip(seconds, ahead, strict=False)])
    return found


def test_the_deal_follows_the_times_of_the_ranks():
    reports = [(nan, 1)] * 2 + [(1, 2)] * 6 + [(1, 1)] * 5
    assert deals_of(reports) == [(4, 4)] * 4 + [(6, 2)] * 6 + [(4, 4)] * 3


@pytest.mark.parametrize("ahead", [(0, 3), (3, 1)])
def test_a_deal_begins_behind_what_any_loader_has_asked_for(ahead):
    assert deals_of([(1, 2)] * 9, ahead=ahead) == [(4, 4)] * 5 + [(6, 2)] * 4


def test_noise_moves_no_shares():
    rng = random.Random(0)
    assert set(deals_of([(rng.uniform(1, 1.25), rng.uniform(1, 1.25)) for _ in range(100)])) == {(4, 4)}
    assert set(deals_of([(1, 1.04, 1)] * 9, shares=8)) == {(3, 3, 2)}
    assert deals_of([(1.2, 1, 1)] * 9, shares=8)[-1] == (2, 3, 3)


def test_what_the_loader_has_asked_for():
    each = Balance()
    assert each.ahead(0) == 0
    each.ask_for(5)
    assert (each.ahead(3), each.ahead(5), each.ahead(6)) == (2, 0, 0)


def test_the_clock_reports_the_median_of_the_last_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(balance, "perf_counter", lambda: now[0])
    clock, found = ShareClock(), []
    for seconds in (90.0, 1.0, 2.0, 3.0, 4.0, 50.0, 6.0):
        clock.begin([torch.device("cpu")])
        now[0] += 3 * seconds
        clock.end(3)
        now[0] += 1000
        found.append(clock.seconds())
    assert isnan(found[0])
    assert isnan(found[1])
    assert found[2:] == [2.0, 2.5, 3.0, 3.0, 4.0]


@pytest.mark.usefixtures("sim")
def test_the_clock_of_an_accelerator_waits_for_nothing():
    device = torch.device("sim", 0)
    clock = ShareClock()
    for _ in range(4):
        clock.begin([torch.device("cpu"), device])
        torch.ones(4, device=device).add_(1)
        clock.end(1)
    torch.accelerator.synchronize(device)
    assert clock.seconds() >= 0


# ---------------------------------------------------------------------------- in a training

PACE = threading.local()
"""What the clock of a rank says."""


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(ShareClock, "seconds", lambda self: PACE.seconds)


@pytest.fixture
def at_random(monkeypatch):
    """Deals that change as often as they can."""
    monkeypatch.setattr(balance, "choose", choose_at_random)
    monkeypatch.setattr(balance, "_LEAST_STEPS", 1)


def train(rank, cell=CELLS[0], steps=12, options=None, paces=None, state=None, stop=None):
    """The fingerprint after so many steps, and the deals; or the state to go on from."""
    model = replicated(rank, MODELS[cell.model], shares=8)
    optimizer = make_optimizer(cell.optimizer, model)
    options = {"balance": "speed", "last": "smaller", "seed": 1, "process_group": rank.group, **(options or {})}
    audits = options.pop("audits", None)
    lockstep.shares.audit(model, audits)
    with torch.device("cpu"):
        data = data_of(cell.model)
    batches = lockstep.shares.GlobalBatches(data, 32, 8, **options)
    run = {"group": rank.group, "model": model, "optimizer": optimizer, "data": batches}
    if state is not None and stop is None:
        lockstep.resume(state, **run)
    deals = []
    for number, batch in enumerate(itertools.islice(forever(batches), steps)):
        PACE.seconds = 1.0 if paces is None else paces(rank.rank, number)
        optimizer.zero_grad()
        found = 0
        for x, y in batch:
            output = model(x.to(rank.device))
            torch.nn.functional.cross_entropy(output, y.to(rank.device), reduction="sum").backward()
            found += not batch.is_auditing
        optimizer.step()
        assert found == len(batch)
        deals.append(found)
        if number + 1 == stop:
            lockstep.save(state, **run)
            return None
    return lockstep.shares.fingerprint(model, optimizer), deals


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, train)[0][0]


def slow_for_a_while(rank, step):
    """The second rank is, in steps 2 to 5."""
    return 2.0 if rank == 1 and step in range(2, 6) else 1.0


@pytest.mark.usefixtures("told")
def test_a_rank_that_is_slow_computes_fewer_shares_for_as_long(alone):
    (one, fast), (other, slow) = run_ranks(2, train, CELLS[0], 12, None, slow_for_a_while)
    assert one == other == alone
    assert (fast, slow) == ([*[4] * 4, *[6] * 4, *[4] * 4], [*[4] * 4, *[2] * 4, *[4] * 4])


@pytest.mark.usefixtures("told")
def test_without_balance_all_compute_equally_many(alone):
    for found, counts in run_ranks(2, train, CELLS[0], 12, {"balance": None}, slow_for_a_while):
        assert (found, counts) == (alone, [4] * 12)


@pytest.mark.usefixtures("told")
@on_ranks(2)
def test_statistics_show_the_deal(rank):
    unknown, known = ([4, 4], [None, None], None), ([4, 4], [1.0, 2.0], 0.0)
    model = lockstep.replicate(torch.nn.Linear(1, 1), shares=8, process_group=rank.group)
    found = [lockstep.loop.statistics(model)]
    for batch in batches_of(rank, TensorDataset(torch.ones(64, 1)), 16, 8, balance="speed"):
        PACE.seconds = (nan, 1.0, 1.0, 1.0)[batch.number] * (1 + rank.rank)
        backward(model, batch)
        found.append(lockstep.loop.statistics(model))
    got = [(each.shares, each.share_seconds, each.saved_by_deal) for each in found]
    assert got == [([], [], None), unknown, known, known, ([6, 2], [1.0, 2.0], 0.25)]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # PyTorch 2.11
@on_ranks(1)
def test_a_label_of_the_profiler_has_the_deal(rank):
    model = replicated(rank, shares=2)
    with torch.profiler.profile() as profile:
        backward(model, next(iter(batches_of(rank, shares=2))))
    assert "lockstep::finish (batch 0 of epoch 0, shares 2)" in {each.name for each in profile.events()}


CASES = {
    "gloo": (2, "", {}),
    "shm": (3, "aaa", {}),
    "hosts": (4, "aabb", {}),
    "audits": (3, "", {"audits": 1}),
    "eight ranks": (8, "", {}),
}


@pytest.mark.usefixtures("at_random")
@pytest.mark.parametrize("name", [*list(CASES)[:-1], pytest.param("eight ranks", marks=pytest.mark.around)])
def test_bits_do_not_depend_on_deals(alone, name):
    world, hosts, options = CASES[name]
    found = run_ranks(world, train, CELLS[0], 12, options, hosts=hosts)
    assert {fingerprint for fingerprint, _ in found} == {alone}
    deals = list(zip(*(counts for _, counts in found), strict=True))
    assert {sum(deal) for deal in deals} == {8}
    assert len(set(deals)) > 1 or world == 8


@pytest.mark.around
@pytest.mark.usefixtures("sim", "at_random")
def test_bits_do_not_depend_on_deals_to_accelerators():
    ((wanted, _),) = run_ranks(1, train, device="sim")
    found = run_ranks(2, train, device="sim")
    assert {fingerprint for fingerprint, _ in found} == {wanted}
    assert len(set(zip(*(counts for _, counts in found), strict=True))) > 1


def with_workers(rank):
    """A training whose loader asks for shares ahead, and one without; ranks that are threads must not fork."""
    balance.choose, balance._LEAST_STEPS = choose_at_random, 1
    workers = {"num_workers": 1, "prefetch_factor": 5, "persistent_workers": True}
    return [train(rank, CELLS[0], 12, options) for options in (workers, {"balance": None})]


@pytest.mark.around
def test_loaders_have_loaded_the_shares_that_ranks_are_dealt():
    found = run_processes(2, with_workers, backend="shm")
    assert len({fingerprint for each in found for fingerprint, _ in each}) == 1
    assert len(set(zip(*(each[0][1] for each in found), strict=True))) > 1


@pytest.mark.soak
@pytest.mark.usefixtures("at_random")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cell", [CELLS[0], CELLS[7]], ids=["digits", "characters"])
@pytest.mark.parametrize(("world", "hosts"), [(2, ""), (3, "aaa"), (4, "aabb")])
def test_two_thousand_steps_with_deals_at_random(cell, world, hosts):
    ((wanted, _),) = run_ranks(1, train, cell, 2000, timeout=3000)
    found = run_ranks(world, train, cell, 2000, hosts=hosts, timeout=3000)
    assert {fingerprint for fingerprint, _ in found} == {wanted}
    assert len(set(zip(*(counts for _, counts in found), strict=True))) > 4


@pytest.mark.filterwarnings("ignore:.*what each rank had of its own is not loaded")
@pytest.mark.usefixtures("at_random")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_run_goes_on_with_another_deal(alone, before, after, tmp_path):
    run_ranks(before, train, CELLS[0], 12, None, None, tmp_path, 5)
    for found, _ in run_ranks(after, train, CELLS[0], 7, None, None, tmp_path):
        assert found == alone


@pytest.mark.usefixtures("at_random")
def test_loops_that_are_left_and_batches_that_are_left_out():
    """After an error, and in the next loop, every rank goes on."""

    def work(rank):
        model = replicated(rank, shares=4)
        rows = TensorDataset(torch.arange(64.0).view(64, 1))
        data, found = batches_of(rank, rows, 8, shuffle=True, balance="speed"), []
        for number, batch in enumerate(itertools.islice(forever(data), 30)):
            if number % 7 == 3:
                continue
            model.zero_grad()
            try:
                for (x,) in batch:
                    if number % 5 == 4 and rank.rank + 1 == rank.world:
                        raise ValueError
                    model(x).sum().backward()
            except (ValueError, PeerError):
                found.append("failed")
            else:
                found.append(model.weight.grad.item())
        for _ in range(3):
            for batch in data:
                backward(model, batch)
                break
        found.append(model.weight.grad.item())
        return found

    (wanted,) = run_ranks(1, work)
    assert wanted.count("failed") == 5
    assert run_ranks(3, work) == [wanted] * 3


# ---------------------------------------------------------------------------- by cost


class Counted(Dataset):
    """Rows of unequal length, which say who they are."""

    def __len__(self):
        return 40

    def __getitem__(self, sample):
        return torch.full((1 + sample * 7 % 11,), float(sample))


LENGTHS = [1 + sample * 7 % 11 for sample in range(40)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cost", [LENGTHS, lambda sample: LENGTHS[sample]], ids=["lengths", "function"])
def test_shares_cost_about_the_same_and_have_every_row_once(cost, padded):
    data = lockstep.shares.GlobalBatches(Counted(), 20, 4, cost=cost, padded=padded, collate_fn=list)
    plain = lockstep.shares.GlobalBatches(Counted(), 20, 4, collate_fn=list)
    for batch, other in zip(data, plain, strict=True):
        shares = list(batch)
        samples = [[int(row[0]) for row in share] for share in shares]
        assert sorted(itertools.chain(*samples)) == sorted(int(row[0]) for share in other for row in share)
        if padded:
            costs = [len(share) * max(map(len, share)) for share in shares]
            assert max(costs) <= 1.5 * sum(map(len, itertools.chain(*shares))) / 4
        else:
            costs = [sum(map(len, share)) for share in shares]
            assert max(costs) - min(costs) <= 2


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks(None, "world")
def test_gradients_by_cost_are_those_of_the_whole_batch(rank):
    model, costs = replicated(rank, shares=4), range(1, 17)
    for batch in batches_of(rank, TensorDataset(torch.arange(1.0, 17).view(16, 1)), 16, shuffle=True, cost=costs):
        for (x,) in batch:
            with lockstep.accumulate(model, weight=x.sum()):
                model(x * x).sum().backward()
    assert model.weight.grad.item() == sum(n * n for n in costs) / sum(costs)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cost": [1] * 39}, "costs of 39 samples, and a data set of 40"),
        ({"cost": [-1] * 40}, "the cost of sample 0"),
        ({"padded": True}, r"needs the cost of each sample"),
        ({"balance": "cost"}, 'balance must be "speed" or None'),
    ],
)
def test_options_that_are_refused(options, says):
    with pytest.raises(OptionError, match=says):
        lockstep.shares.GlobalBatches(Counted(), 20, 4, **options)


def test_a_state_with_other_costs_is_refused():
    made = [lockstep.shares.GlobalBatches(Counted(), 20, 4, cost=cost) for cost in (LENGTHS, LENGTHS[::-1], None)]
    made[0].load_state_dict(made[0].state_dict())
    for other in made[1:]:
        with pytest.raises(OptionError, match="with cost="):
            other.load_state_dict(made[0].state_dict())


@on_ranks(2, raises=PeerError, says="samples in each share, by cost")
def test_costs_that_differ_between_ranks_are_an_error_on_every_rank(rank):
    cost = [4, 1, 3, 2] if rank.rank else [4, 3, 2, 1]  # rows 0 and 1 are in a share, or 0 and 3
    rows = TensorDataset(torch.arange(4.0).view(4, 1))
    backward(replicated(rank, shares=2), next(iter(batches_of(rank, rows, shares=2, cost=cost))))


@on_ranks(2, raises=OptionError, says="let the loss be a sum")
def test_costs_and_a_loss_that_is_a_mean_do_not_go_together(rank):
    backward(replicated(rank, shares=4, loss="mean"), next(iter(batches_of(rank, size=16, cost=[1.0] * 16))))
