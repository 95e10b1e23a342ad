"""`total`: denominators over all ranks; and requests to stop, which travel with what loops exchange anyway."""

from __future__ import annotations

import pytest
import torch

import lockstep
from lockstep.errors import AgreementError, OptionError
from programs.ranks import on_ranks, replicated
from small_modules import x_of

BATCHES = [
    [([1.0, 2.0, 3.0], [4.0]), ([5.0], [])],  # of rank 0: micro-batches, with what each of two losses is over
    [([6.0], [7.0, 8.0]), ([9.0, 1.0], [2.0])],
]


@on_ranks(3)
def test_totals_are_sums_over_the_ranks(rank):
    found = lockstep.loop.total({"first": rank.rank, "all": [1, torch.tensor([2, rank.rank])]}, rank.group)
    assert found["first"] == 3.0
    assert found["all"][0] == 3.0
    assert found["all"][1].tolist() == [6.0, 3.0]


@on_ranks(2)
def test_several_losses_each_with_a_denominator_of_its_own(rank):
    """The gradient of a mean over all first rows plus a mean over all second ones, in a window of two micro-batches."""
    rows = [pair for batches in BATCHES for pair in batches]
    first, second = ([x for pair in rows for x in pair[which]] for which in range(2))
    expected = sum(first) / len(first) + sum(second) / len(second)
    model = replicated(rank)
    own = BATCHES[rank.rank]
    firsts, seconds = lockstep.loop.total([sum(len(a) for a, _ in own), sum(len(b) for _, b in own)], rank.group)
    for number, (a, b) in enumerate(own):
        with lockstep.accumulate(model, last=number == len(own) - 1, weight=len(a)):
            first, second = (model(torch.tensor(rows).view(-1, 1)).sum() for rows in (a, b))
            (first + second * (firsts / max(seconds, 1))).backward()
    assert model.weight.grad.item() == pytest.approx(expected)


@on_ranks(2)
def test_what_counts_nothing_is_not_in_the_total(rank):
    model = replicated(rank)
    found = []
    for x in lockstep.batches([x_of(rank)] * (1 + rank.rank), model):
        model(x).sum().backward()
        found.append(lockstep.loop.total(1, rank.group))
    assert found == [2.0, 1.0]


total = lockstep.loop.total
REFUSED = {
    "other things": (
        [(total, 1), (total, [1, 2])],
        AgreementError,
        r"^total\(\) got counts \(a number\) on rank 0, and counts\[0\] \(a number\) in its place on rank 1",
    ),
    "no numbers": (
        [(total, "a"), (total, "a")],
        OptionError,
        r"^total\(\) got counts, a str, which has no total; pass numbers, tensors, or containers of them$",
    ),
    "a mean": (
        [(lockstep.mean, 1), (total, 1)],
        AgreementError,
        r"mean\(\) on rank 0, and total\(\) in its place on rank 1",
    ),
}


@pytest.mark.parametrize(("calls", "error", "words"), REFUSED.values(), ids=REFUSED)
@on_ranks(2)
def test_what_has_no_total_is_named(rank, calls, error, words):
    function, value = calls[rank.rank]
    with pytest.raises(error, match=words):
        function(value, group=rank.group)


# ------------------------------------------------------------------------------------------------------------- stops


def begins_a_loop(rank):
    list(lockstep.batches([1], group=rank.group))


def begins_an_evaluation(rank):
    with torch.no_grad():
        list(lockstep.batches([1], group=rank.group))


def begins_a_stream(rank):
    iter(lockstep.batches(iter([1]), group=rank.group))


EXCHANGES = {
    "a loop": begins_a_loop,
    "an evaluation": begins_an_evaluation,
    "a stream": begins_a_stream,
    "mean": lambda rank: lockstep.mean(1.0, group=rank.group),
    "total": lambda rank: lockstep.loop.total(1.0, group=rank.group),
    "agree": lambda rank: lockstep.loop.agree(False, rank.group),
}


@pytest.mark.parametrize("name", EXCHANGES)
@on_ranks(3)
def test_a_request_is_heard_without_a_backward(rank, name):
    keep = lockstep.loop.stop_when(lambda: rank.rank == 1, rank.group)
    before = lockstep.should_stop(rank.group)
    EXCHANGES[name](rank)
    assert (before, lockstep.should_stop(rank.group), keep.should_stop) == (False, True, True)


@on_ranks(2)
def test_it_is_still_heard_in_training(rank):
    model = replicated(rank)
    keep = lockstep.loop.stop_when(lambda: rank.rank == 1, rank.group)
    begins_an_evaluation(rank)
    found = [keep.should_stop]
    for _ in range(2):
        model(x_of(rank)).sum().backward()
        found.append(keep.should_stop)
    assert found == [True] * 3


@on_ranks(2)
def test_nobody_asks(rank):
    keep = lockstep.loop.stop_when(lambda: False, rank.group)
    for exchange in EXCHANGES.values():
        exchange(rank)
    assert keep.should_stop is False
