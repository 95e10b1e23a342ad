"""What a difference means, in tables: measured ratios on the left, the cause on the right."""

from __future__ import annotations

import pytest
import torch

from lockstep.check.diagnosis import SECTIONS, Surroundings, diagnose
from lockstep.check.measuring import Comparison, Facts, compare, distance, factor_between, weights_of_ranks
from lockstep.check.rows import (
    count_rows,
    digests_of,
    parse_split,
    period_of,
    rows_of_rank,
    rows_taken_wrongly,
    take_rows,
)
from lockstep.errors import OptionError, StructureError

TWO = Surroundings(ranks=2)
FOUR = Surroundings(ranks=4)


def facts(ratios=(None, None), alike=True, difference=0.5, **known):
    return Facts("w", difference, tuple(ratios), alike, **known)


GRADIENTS = [
    (facts((2.0, 2.0), own_factor=2.0), TWO, "summed"),
    (facts((4.0,) * 4, own_factor=4.0), FOUR, "summed"),
    (facts((0.25,) * 4, own_factor=0.25), FOUR, "averaged-twice"),
    (facts((0.5, 0.5), own_factor=1.0), TWO, "own-factor"),
    (facts((4.0, 4.0), own_factor=1.0), TWO, "own-factor"),
    (facts((3.0, 3.0)), TWO, "own-factor"),
    (facts((2.0, 2.0)), TWO, "summed"),
    (facts((0.5, 0.5)), TWO, "averaged-twice"),
    (facts(own_factor=2.0), TWO, "summed"),
    (facts(alike=False, is_own=True), TWO, "not-synchronised"),
    (facts((0.0, None), alike=False), TWO, "not-synchronised"),
    (facts(of_one=0), TWO, "not-synchronised"),
    (facts(own_factor=1.0), Surroundings(ranks=2, weights=(0.25, 0.75)), "mean-of-means"),
    (facts(own_factor=1.0), Surroundings(ranks=2, scaled=(0.1, 0.3), weights=(0.25, 0.75)), "clipped-before"),
    (facts(own_factor=1.0), Surroundings(ranks=2, batch_norms=("norm",)), "batch-statistics"),
    (facts(own_factor=1.0), Surroundings(ranks=2, batch_norms=("n",), weights=(0.2, 0.8)), "mean-of-means"),
    (facts(own_factor=1.0), Surroundings(ranks=2, weights=(0.25, 0.25)), "own-factor"),
    (facts(own_factor=1.0), Surroundings(ranks=2, adds_earlier=True), "earlier-gradients"),
    (facts(own_factor=1.0), TWO, "whole-batch-loss"),
    (facts(), TWO, "other-gradients"),
    (facts(difference=1e-8), TWO, "rounding"),
]


@pytest.mark.parametrize(("found", "around", "cause"), GRADIENTS)
def test_causes_of_gradients(found, around, cause):
    assert diagnose(Comparison("gradients", 0, 1, 0.5, (found,)), around).cause == cause


OTHERS = [
    ("weights", None, facts(alike=False), "initial-weights"),
    ("weights", 0, facts(alike=False), "drift"),
    ("weights", 1, facts((2.0, 2.0)), "learning-rate"),
    ("weights", 1, facts(), "other-steps"),
    ("buffers", 1, facts(), "only-buffers"),
]


@pytest.mark.parametrize(("kind", "step", "found", "cause"), OTHERS)
def test_causes_of_weights_and_buffers(kind, step, found, cause):
    finding = diagnose(Comparison(kind, step, 3, 0.5, (found,)), TWO)
    assert finding.cause == cause
    assert finding.section.endswith(SECTIONS[cause])


def test_a_part_of_the_tensors_that_is_not_synchronised_is_named():
    found = Comparison("gradients", 2, 5, 0.5, (facts(alike=False, is_own=True),))
    assert "w of 5 tensors are not synchronised" in diagnose(found, TWO).text
    assert "no gradient is synchronised" in diagnose(Comparison("gradients", 2, 1, 0.5, found.differing), TWO).text


AMOUNTS = [
    (facts((2.0, 2.0)), "is 2 times that of one process on every rank"),
    (facts((0.0, 0.0)), "is 0 on every rank"),
    (facts((1.0, 3.0), alike=False), "(1 on rank 0, 3 on rank 1)"),
    (facts(difference=0.123), "by 0.12 of its norm"),
]


@pytest.mark.parametrize(("found", "words"), AMOUNTS)
def test_how_far_a_tensor_is_off_is_said_in_words(found, words):
    assert words in diagnose(Comparison("gradients", 0, 1, 0.5, (found,)), TWO).text


# -------------------------------------------------------------------------------------------------- measuring


def test_distances_are_relative_to_the_norm():
    want = torch.tensor([3.0, 4.0])
    assert distance(want, want) == 0
    assert distance(torch.tensor([3.0, 9.0]), want) == 1
    assert distance(torch.tensor([float("nan"), 4.0]), want) == float("inf")
    assert distance(torch.tensor([float("inf"), 4.0]), torch.tensor([float("inf"), 4.0])) == 0
    assert distance(torch.ones(3), want) == float("inf")
    assert distance(torch.full((2,), 1e-18), torch.full((2,), 2e-18), scale=1.0) < 1e-14
    assert distance(torch.ones(2), torch.zeros(2)) == float("inf")
    assert distance(torch.eye(2).to_sparse(), torch.eye(2)) == 0


def test_a_factor_is_found_where_there_is_one():
    want = torch.tensor([1.0, 2.0])
    assert factor_between(3 * want, want, 1e-6) == pytest.approx(3)
    assert factor_between(0 * want, want, 1e-6) == 0
    assert factor_between(torch.tensor([2.0, 1.0]), want, 1e-6) is None
    assert factor_between(want, 0 * want, 1e-6) is None


def test_the_weights_of_ranks():
    own = [{"a": torch.randn(5), "b": torch.randn(3)} for _ in range(3)]
    want = {name: 0.5 * own[0][name] + 0.2 * own[1][name] + 0.3 * own[2][name] for name in "ab"}
    assert weights_of_ranks(want, own, 1e-5) == pytest.approx((0.5, 0.2, 0.3), abs=1e-5)
    assert weights_of_ranks({name: each.square() for name, each in want.items()}, own, 1e-5) is None
    assert weights_of_ranks(want, [{**own[0], "b": None}, *own[1:]], 1e-5) is None


def test_a_tensor_that_one_side_lacks_counts_as_zero():
    one, missing = {"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(2), "b": None}
    (found,) = compare("gradients", 0, one, [missing, one], 1e-6).differing
    assert (found.name, found.alike, found.ratios) == ("b", False, (0.0, 1.0))
    (found,) = compare("gradients", 0, missing, [one, one], 1e-6).differing
    assert found.difference > 1
    (found,) = compare("gradients", 0, {"a": torch.ones(2)}, [one, one], 1e-6).differing
    assert found.name == "b"


def test_what_each_rank_computes_alone():
    own = [{"a": torch.tensor([1.0, 0.0])}, {"a": torch.tensor([0.0, 1.0])}]
    want, mean = {"a": torch.tensor([0.2, 0.8])}, {"a": torch.tensor([0.5, 0.5])}
    (found,) = compare("gradients", 0, want, [mean, mean], 1e-6, own).differing
    assert (found.own_factor, found.is_own, found.of_one) == (1.0, False, None)
    (found,) = compare("gradients", 0, want, own, 1e-6, own).differing
    assert (found.is_own, found.alike) == (True, False)
    (found,) = compare("gradients", 0, want, [own[1], own[1]], 1e-6, own).differing
    assert found.of_one == 1


# ------------------------------------------------------------------------------------------------------- rows

SPLITS = [
    ("even", 8, [[0, 1, 2], [3, 4, 5], [6, 7]]),
    ("even", 2, [[0], [1], []]),
    ("strided", 5, [[0, 3], [1, 4], [2]]),
    ("6,1,1", 8, [[0, 1, 2, 3, 4, 5], [6], [7]]),
    ("1,0,1", 4, [[0, 1], [], [2, 3]]),
]


@pytest.mark.parametrize(("text", "count", "rows"), SPLITS)
def test_rows_of_ranks(text, count, rows):
    split = parse_split(text, 3)
    assert [list(rows_of_rank(count, split, rank, 3)) for rank in range(3)] == rows


def test_a_split_that_makes_no_sense_is_refused():
    for text in ("odd", "0,0", "1,x", "-1,2"):
        with pytest.raises(OptionError, match="there is no split"):
            parse_split(text, 2)
    with pytest.raises(OptionError, match="one for each rank"):
        parse_split("1,2", 3)


def test_nested_batches_are_divided_by_rows():
    batch = {"x": torch.arange(6).view(3, 2), "names": "kept", "scale": torch.tensor(2.0), "y": [torch.arange(3)]}
    part = take_rows(batch, "even", 1, 2, False)
    assert part["x"].tolist() == [[4, 5]]
    assert (part["names"], part["scale"], part["y"][0].tolist()) == ("kept", 2.0, [2])
    assert take_rows(["a", "b", "c"], "strided", 0, 2, True) == ["a", "c"]
    with pytest.raises(StructureError, match=r"batch\[0\] has 2, batch\[1\] has 3"):
        count_rows((torch.ones(2), torch.ones(3)))
    with pytest.raises(StructureError, match="without a tensor that has rows"):
        count_rows({"name": "x"})


def test_rows_that_are_taken_wrongly():
    assert rows_taken_wrongly("abcd", ["ab", "cd"]) == (0, 0, 0)
    assert rows_taken_wrongly("abcd", ["ab", "ab"]) == (2, 2, 0)
    assert rows_taken_wrongly("abcd", ["ab", "cx"]) == (0, 1, 1)
    assert rows_taken_wrongly("aabb", ["ab", "ab"]) == (0, 0, 0)


def test_rows_have_digests_of_their_values():
    x, y = torch.randn(3, 2), torch.arange(3)
    assert digests_of((x, y)) == [*digests_of((x[:1], y[:1])), *digests_of((x[1:], y[1:]))]
    assert len(set(digests_of((x, y)))) == 3
    assert digests_of((x[:1], y[:1])) != digests_of((x[:1], y[1:2]))
    assert digests_of([{"a": x[0]}, {"a": x[0]}], True) == digests_of([{"a": x[0].clone()}], True) * 2
    assert digests_of("text") == []


PERIODS = [
    (["ab", "cd", "ab", "cd"], 2),
    (["ab", "cd", "ef", "ab", "cd"], 3),
    (["ab", "cd", "ab"], None),
    (["ab", "cd", "cd", "ab"], None),
    (["ab", "ab", "ab"], None),
    (["ab", "cd"], None),
    ([], None),
]


@pytest.mark.parametrize(("steps", "period"), PERIODS)
def test_the_period_of_batches(steps, period):
    assert period_of(steps) == period
