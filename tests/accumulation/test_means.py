"""Exact means of a program's own numbers over unequal shards."""

from __future__ import annotations

import collections
import math
import random

import pytest
import torch

import lockstep
from lockstep.errors import AgreementError, OptionError
from programs.ranks import on_ranks, replicated
from small_modules import x_of
from threaded import count_collectives, run_ranks

Score = collections.namedtuple("Score", "right total")


def of_rows(rank, rows):
    own = rows[rank.rank :: rank.world]
    values = {
        "mean": sum(own) / len(own) if own else math.nan,
        "squares": [torch.tensor([float(x) ** n for x in own] or [math.nan]).double().mean() for n in (1, 2)],
        "first": Score(sum(x > 0 for x in own) / max(1, len(own)), 7),
        "many": torch.full((70,), sum(own) / max(1, len(own)), dtype=torch.float64),
    }
    with count_collectives(rank) as seen:
        found = lockstep.mean(values, weight=len(own), group=rank.group)
    return found, [each.name for each in seen]


@pytest.mark.parametrize("count", [2, 7, 100])
@pytest.mark.parametrize("hosts", ["", "aaa"])
def test_means_over_all_rows(count, hosts):
    numbers = random.Random(count)
    rows = [numbers.randrange(-1000, 1000) for _ in range(count)]
    for found, sent in run_ranks(3, of_rows, rows, hosts=hosts):
        assert found["mean"] == pytest.approx(sum(rows) / count, rel=1e-15)
        got = [float(each) for each in found["squares"]]
        assert got == pytest.approx([sum(rows) / count, sum(x * x for x in rows) / count], rel=1e-14)
        assert found["first"].right == pytest.approx(sum(x > 0 for x in rows) / count)
        assert found["first"].total == 7
        assert found["many"].shape == (70,)
        assert hosts or sent == ["all_reduce", "all_reduce"]


@on_ranks(2)
def test_what_comes_back(rank):
    number = rank.rank + 1
    given = (number, float(number), number == 1, torch.tensor(number), torch.tensor([[number]], dtype=torch.bfloat16))
    number, float_, flag, integer, half = lockstep.mean(given, weight=number, group=rank.group)
    assert (number, float_, flag) == (5 / 3, 5 / 3, 1 / 3)
    assert integer.dtype == torch.float64
    assert integer.item() == 5 / 3
    assert half.dtype == torch.bfloat16
    assert half.shape == (1, 1)


def test_whole_numbers_are_exact():
    big = 2**51 + 1
    assert run_ranks(2, lambda rank: lockstep.mean(big, group=rank.group)) == [big, big]


@pytest.mark.parametrize("hosts", ["", "aa"])
@on_ranks(2, "hosts")
def test_nothing_to_count_on_any_rank(rank):
    assert lockstep.mean({}, weight=0, group=rank.group) == {}
    many = torch.ones(100)
    with pytest.raises(OptionError, match=r"of values\['loss'\] and 1 more: the weights of all 2 .* to 0, so"):
        lockstep.mean({"loss": 1.0, "many": many}, weight=0, group=rank.group)
    with pytest.raises(OptionError, match="the weights of all 2 ranks add up to inf"):
        lockstep.mean(1.0, weight=1.7e308, group=rank.group)
    assert lockstep.mean(1.0 + rank.rank, group=rank.group) == 1.5


def test_nothing_to_count_on_one_rank():
    means = run_ranks(
        2, lambda rank: lockstep.mean(math.nan if rank.rank else 3, weight=1 - rank.rank, group=rank.group)
    )
    assert means == [3, 3]


GIVEN = {
    "a name": (
        {"a": 1},
        {"b": 1},
        r"values\['a'\] \(a number\) on rank 0, and values\['b'\] \(a number\) in its place",
    ),
    "a shape": (
        torch.ones(2),
        torch.ones(3),
        r"tensor of shape \(2,\)\) on rank 0, and values \(a tensor of shape \(3,",
    ),
    "a number": ([1], [1, 2], r"nothing on rank 0, and values\[1\] \(a number\) in its place on rank 1"),
    "a kind": (1.0, "a word", "values .a str, which has no mean. in its place on rank 1"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_ranks_that_give_different_things_are_told(name):
    *given, words = GIVEN[name]
    for error in run_ranks(2, lambda rank: lockstep.mean(given[rank.rank], group=rank.group), errors=True):
        assert isinstance(error, AgreementError)
        with pytest.raises(AgreementError, match=words):
            raise error


@pytest.mark.parametrize("weight", [-1, math.inf, math.nan, torch.ones(2), None, [1, 2]], ids=repr)
def test_weights_that_are_none(weight):
    with pytest.raises(OptionError, match=r"got a weight of .*, expected a finite number, 0 or more"):
        run_ranks(2, lambda rank: lockstep.mean(1.0, weight=weight, group=rank.group))
    for error in run_ranks(
        2, lambda rank: lockstep.mean(1.0, weight=(1, weight)[rank.rank], group=rank.group), errors=True
    ):
        assert isinstance(error, AgreementError)


def test_what_has_no_mean():
    for value in ("a word", 1j, torch.ones(1, dtype=torch.complex64), None):
        with pytest.raises(OptionError, match=r"mean\(\) got values, a .*, which has no mean"):
            run_ranks(1, lambda rank, value=value: lockstep.mean(value, group=rank.group))


@on_ranks(2)
def test_a_batch_that_counts_nothing(rank):
    model = replicated(rank)
    turns, seen = lockstep.batches([x_of(rank)] * (1 + rank.rank), model), []
    for x in turns:
        model(x).sum().backward()
        seen.append(lockstep.mean(math.nan if turns.is_padding else rank.rank, weight=5, group=rank.group))
    assert [*seen, lockstep.mean(rank.rank, weight=5, group=rank.group)] == [0.5, 1.0, 0.5]


def on_an_accelerator(rank, sim):
    """The copies to the host that a mean of five values and a weight makes."""
    values = {
        "loss": torch.tensor(rank.rank + 1.0),
        "right": [torch.ones(3), torch.tensor(4)],
        "number": 2,
        "rows": 3.0,
    }
    weight = torch.tensor(rank.rank + 1)
    lockstep.mean(values, weight=weight, group=rank.group)
    sim.reset_copies()
    found = lockstep.mean(values, weight=weight, group=rank.group)
    copies = sim.copies()[str(rank.device), "cpu"].calls
    return found, copies


def test_values_on_an_accelerator_and_their_weight_are_read_with_one_copy(sim):
    ((found, copies),) = run_ranks(1, on_an_accelerator, sim, device="sim")
    assert copies == 1
    assert found["loss"].device == found["right"][0].device == torch.device("sim:0")
    assert (found["loss"].item(), found["right"][1].item(), found["number"], found["rows"]) == (1, 4, 2, 3)
    (first, _), (second, _) = run_ranks(2, on_an_accelerator, sim, device="sim")
    assert first["loss"].item() == second["loss"].item() == pytest.approx(5 / 3)
