"""Whatever fails, and wherever: the ranks that are started again end the run as if nothing had happened."""

from __future__ import annotations

import random

import pytest

from chaos.restarted import Failure
from chaos.restarts import Plan, Start, judge, measure, random_plan, run_plan
from hosts.network import missing

pytestmark = pytest.mark.soak


def test_20_runs_whose_ranks_hosts_launchers_and_links_fail():
    if reason := missing():
        pytest.skip(reason)
    calls, fingerprint = measure()
    for seed in range(20):
        plan = random_plan(random.Random(seed))
        assert run_plan(plan, calls, fingerprint).problems == [], (seed, str(plan))


def test_the_judge_sees_lost_steps_repeated_samples_and_other_bits():
    plan = Plan("shm", False, False, (Start((2,), (Failure("rank", "training", 0, 0.5),)),))

    def event(what, attempt, **more):
        return {"what": what, "attempt": attempt, "rank": 0, "at": 0.0, **more}

    events = [event("from", 0, step=0), *(event("step", 0, step=step, rows=[step]) for step in (1, 2, 3))]
    events += [event("fails", 0, kind="rank", victim=0, region="training"), event("from", 1, step=1)]
    events += [event("step", 1, step=2, rows=[1]), event("end", 1, step=20, fingerprint="other")]
    assert judge(plan, events, "right").problems == [
        "other at the end",
        "epoch 0: 2 samples, of which 2 times one",
        "start 1 goes on after [1], 3 done, 2 were kept",
    ]
