"""How long a rank works by itself in each round: the medians, and what is left out."""

from __future__ import annotations

import pytest

from lockstep.distributed.comm.comm_stats import KEPT, RECENT, CommStats
from lockstep.loop.statistics import TrainingStatistics


def paced(*seconds, waits=5.0):
    """The pace of a rank that worked for so long in each round and then waited."""
    pace, now = CommStats(), 0.0
    pace.waited(now, now, None)  # what was before the first round is not known
    for each in seconds:
        now += each
        pace.waited(now, now + waits, None)
        now += waits
    return pace


def test_waiting_is_no_work_and_before_the_second_round_nothing_is_known():
    assert paced().recent is None
    assert paced(2.0).recent == 2.0
    assert paced(2.0).before is None
    assert paced(*[2.0] * RECENT).before is None


def test_a_rank_that_becomes_slow_is_told_from_one_that_always_was():
    became_slow = paced(*[1.0] * 30, *[3.0] * RECENT)
    assert (became_slow.recent, became_slow.before) == (3.0, 1.0)
    always = paced(*[3.0] * 30, *[3.0] * RECENT)
    assert (always.recent, always.before) == (3.0, 3.0)


def test_a_pause_now_and_then_does_not_count():
    assert paced(1.0, 1.0, 90.0, 1.0, 1.0).recent == 1.0


def test_what_was_long_ago_is_forgotten():
    assert paced(*[9.0] * 300, *[1.0] * KEPT).before == 1.0


def test_slower_than_the_others_and_than_before():
    seen = TrainingStatistics(own_seconds=[1.0, 3.0, 1.0], own_seconds_before=[1.0, 1.5, None])
    assert seen.slower_than_others == pytest.approx([0.5, 3.0, 0.5])
    assert seen.slower_than_before == [1.0, 2.0, None]
    alone = TrainingStatistics(own_seconds=[1.0], own_seconds_before=[None])
    assert (alone.slower_than_others, alone.slower_than_before) == ([None], [None])
    unknown = TrainingStatistics(own_seconds=[None, 1.0], own_seconds_before=[None, 0.0])
    assert (unknown.slower_than_others, unknown.slower_than_before) == ([None, None], [None, None])
