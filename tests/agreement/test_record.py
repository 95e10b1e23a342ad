"""What ranks tell each other by sums of zeros and ones, and as bytes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from lockstep.distributed.comm.record import FAILURE, Field, Fold, Packing, Record, ranks_that_failed


class Said(NamedTuple):
    step: int
    knows_step: bool = True
    count: int = 0


RECORD = Record(
    Field("ranks", 1, Fold.SUM, lambda said: 1),
    Field("with_step", 1, Fold.SUM, lambda said: said.knows_step),
    Field("step", 8, Fold.SAME, lambda said: said.step * said.knows_step, "with_step"),
    Field("count", 8, Fold.SUM, lambda said: said.count),
)


def told(record, said):
    rows = [record.encode(each, rank) for rank, each in enumerate(said)]
    assert {*map(len, rows)} == {record.size}
    return record.decode([sum(column) for column in zip(*rows, strict=True)])


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_ranks_that_say_the_same_do_not_differ(ranks):
    totals, differing = told(RECORD, [Said(200, count=3)] * ranks)
    assert totals == {"ranks": ranks, "with_step": ranks, "count": 3 * ranks}
    assert not differing


def test_the_fields_in_which_ranks_differ_are_named():
    assert told(RECORD, [Said(3), Said(3), Said(5)])[1] == {"step"}


def test_ranks_that_do_not_say_a_number_differ_from_nobody():
    totals, differing = told(RECORD, [Said(3), Said(0, knows_step=False), Said(3)])
    assert totals["with_step"] == 2
    assert not differing


@pytest.mark.parametrize(
    ("failed", "words"), [([], "0 ranks"), ([2], "rank 12"), ([0], "rank 10"), ([0, 2], "2 ranks")]
)
def test_the_only_rank_that_has_failed_is_named(failed, words):
    totals, _ = told(FAILURE, [rank in failed for rank in range(4)])
    assert ranks_that_failed(totals, range(10, 14)) == words


class Inner(NamedTuple):
    digest: int
    seconds: float


class Outer(NamedTuple):
    step: int
    has_failed: bool
    inner: Inner
    share: float


def test_records_of_records_are_the_same_after_they_have_traveled():
    packing = Packing(Outer)
    records = [Outer(3, True, Inner(2**64 - 1, 0.1), -1.5), Outer(0, False, Inner(0, float("inf")), 2.0)]
    packed = torch.cat([packing.pack(each) for each in records])
    assert len(packed) == 2 * packing.size
    assert packing.unpack(packed) == records
    assert type(packing.unpack(packed)[0].inner) is Inner
