"""How samples of unequal cost are dealt."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from lockstep._base.deal import costs_of, deal, deal_by_speed, deal_padded, digest_of, equal_deal, slowest
from lockstep.errors import OptionError


def cost(parts, costs):
    return max(sum(costs[place] for place in part) for part in parts)


def padded_cost(parts, costs):
    return max(len(part) * max((costs[place] for place in part), default=0) for part in parts)


def best(costs, parts, value):
    """The least cost of all deals there are."""
    return min(
        value([[place for place, part in enumerate(of) if part == each] for each in range(parts)], costs)
        for of in itertools.product(range(parts), repeat=len(costs))
    )


@pytest.mark.parametrize("function", [deal, deal_padded])
@pytest.mark.parametrize(
    ("costs", "parts"), [([], 1), ([], 3), ([4], 3), ([0, 0, 0], 2), ([1, 1, 1, 1], 4), ([7, 1, 1], 2), ([5, 0, 0], 3)]
)
def test_every_sample_is_dealt_once_and_no_part_is_empty_without_need(function, costs, parts):
    dealt = function(costs, parts)
    assert sorted(itertools.chain(*dealt)) == list(range(len(costs)))
    assert len(dealt) == parts
    assert sum(map(bool, dealt)) == min(len(costs), parts)


def test_a_deal_by_hand():
    assert deal([9, 1, 1, 7, 1, 1], 2) == [[0, 4], [1, 2, 3, 5]]
    assert deal_padded([8, 2, 2, 2, 2, 1], 2) == [[0], [1, 2, 3, 4, 5]]


def test_few_samples_are_dealt_as_well_as_possible():
    rng = random.Random(3)
    for _ in range(60):
        costs = [float(rng.randint(0, 9)) for _ in range(rng.randint(1, 7))]
        parts = rng.randint(1, 3)
        assert padded_cost(deal_padded(costs, parts), costs) == best(costs, parts, padded_cost)
        assert cost(deal(costs, parts), costs) <= (4 / 3) * best(costs, parts, cost)


def test_more_samples_are_dealt_as_evenly_as_the_documentation_says():
    """docs/slow_rank.md. No deal is below the mean of the parts."""
    for each, at_most in ((8, 1.03), (32, 1.003)):
        rng = random.Random(each)
        above = []
        for _ in range(100):
            costs = [rng.lognormvariate(4, 0.8) for _ in range(8 * each)]
            above.append(cost(deal(costs, 8), costs) / max(sum(costs) / 8, *costs))
        assert sum(above) / len(above) <= at_most


def test_the_result_depends_on_the_costs_alone():
    costs = [random.Random(1).lognormvariate(5, 0.8) for _ in range(50)]
    random.seed(0)
    first = deal(costs, 7)
    random.seed(1)
    assert deal(costs, 7) == first


# ---------------------------------------------------------------------------- shares to ranks


@pytest.mark.parametrize(
    ("shares", "seconds", "dealt"),
    [
        (8, [1, 1], (4, 4)),
        (8, [1, 2], (6, 2)),  # as soon ready as 5 and 3, and less work
        (8, [2, 1], (3, 5)),
        (16, [1, 2], (11, 5)),
        (8, [1, 1, 1], (3, 3, 2)),
        (8, [2, 1, 1], (2, 3, 3)),
        (8, [1, 100], (7, 1)),
        (2, [5, 1], (1, 1)),
        (2, [5, 1, 1], (0, 1, 1)),
        (1, [1], (1,)),
    ],
)
def test_shares_are_dealt_by_speed(shares, seconds, dealt):
    assert deal_by_speed(shares, seconds) == dealt


def test_the_slowest_rank_is_ready_as_soon_as_possible():
    rng = random.Random(4)
    for _ in range(100):
        seconds = [rng.uniform(0.5, 5) for _ in range(rng.randint(1, 4))]
        shares = rng.randint(len(seconds), 9)
        counts = itertools.product(range(1, shares + 1), repeat=len(seconds))
        best = min(slowest(each, seconds) for each in counts if sum(each) == shares)
        assert slowest(deal_by_speed(shares, seconds), seconds) == best


def test_equal_deals_differ_by_one_at_most():
    assert equal_deal(8, 3) == (3, 3, 2)
    assert equal_deal(2, 3) == (1, 1, 0)


# ---------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    "given",
    [
        [3, 1, 2],
        (3.0, 1.0, 2.0),
        torch.tensor([3, 1, 2]),
        np.array([3, 1, 2]),
        ["abc", "a", "ab"],
        [[7, 7, 7], [7], [7, 7]],
        [torch.zeros(3), torch.zeros(1, 9), torch.zeros(2)],
        lambda sample: [3, 1, 2][sample],
    ],
    ids=["list", "tuple", "tensor", "array", "texts", "tokens", "tensors", "function"],
)
def test_costs_may_be_given_as(given):
    assert list(costs_of(given, 3, "f()")) == [3, 1, 2]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1, -1, 1], "sample 1 is a finite number"),
        ([1, float("nan"), 1], "sample 1"),
        ([1, 2], "costs of 2 samples, and a data set of 3"),
        ([{"tokens": [1]}] * 3, "of type dict"),
        ([([1, 2], 0)] * 3, "of type tuple"),
        (iter([1, 2, 3]), "one number for each sample"),
    ],
)
def test_other_costs_are_refused(given, says):
    with pytest.raises(OptionError, match=says):
        costs_of(given, 3, "f()")


def test_a_digest_tells_costs_apart():
    assert digest_of([1, 2]) == digest_of([1.0, 2.0]) != digest_of([2, 1])
