"""Ranks, hosts and links fail while several hosts train: every rank says which, within the promise."""

from __future__ import annotations

import random

import pytest

from hosts.trials import BETWEEN, PAUSE, Plan, judge, random_plan, run

pytestmark = pytest.mark.hosts

TWO, THREE, FOUR = (2, 2), (1, 1, 1), (1, 1, 1, 1)

ROWS = [
    Plan(TWO, "kill", 3),
    Plan(TWO, "kill", 0, "gloo"),
    Plan(TWO, "kill", 2, launcher="torchrun"),
    Plan((2, 3), "kill host", 1),  # one rank that no other host can see
    Plan(THREE, "kill host", 0, "gloo"),
    Plan(TWO, "raise", 3),
    Plan(THREE, "raise", 0, "gloo"),
    Plan(TWO, "exit 0", 3),
    Plan(THREE, "exit 0", 1, "gloo"),
    Plan(TWO, "cable", 1),
    Plan(TWO, "cable", 0, "gloo"),
    Plan(THREE, "cable", 0),
    Plan(THREE, "cable", 1, "gloo"),
    Plan((2, 2, 1), "cable", 1, launcher="torchrun"),
    Plan(TWO, "cable", 0, "gloo", launcher="torchrun"),
    Plan(TWO, "input", 1),
    Plan(THREE, "input", 0, "gloo"),
    Plan(TWO, "output", 0, "gloo"),
    Plan(THREE, "output", 1),
    Plan(THREE, BETWEEN, 0, other=1),
    Plan((2, 1, 2), BETWEEN, 1, "gloo", other=2),
    Plan(FOUR, BETWEEN, 0, other=2, stall_minimum=60.0),  # no neighbours in the ring
    Plan(FOUR, BETWEEN, 1, "gloo", other=3, launcher="torchrun", stall_minimum=60.0),
    Plan(TWO, "stop", 3),
    Plan(THREE, "stop", 0, "gloo"),
    Plan(THREE, "stop", 1, "gloo"),
    Plan((2,), "stop", 0),
    Plan(TWO, "stop host", 1),
    Plan(THREE, "stop host", 0),
    Plan(TWO, "cable", 1, step=-1, timeout=20.0),
    Plan(THREE, "cable", 0, "gloo", step=-1, seconds=0.5, timeout=20.0),
]


@pytest.mark.parametrize("plan", ROWS, ids=str)
def test_a_failure(plan, tmp_path):
    assert judge(plan, run(plan, tmp_path)) == []


@pytest.mark.parametrize("late", [1, 3])
def test_a_start_in_which_the_last_rank_of_a_host_connects_late(late, tmp_path):
    """Where it listens only its host can reach it."""
    told = run(Plan(TWO, "none", 0, late=late), tmp_path)
    assert [each.type for each in told] == [""] * 4, told


@pytest.mark.parametrize(("backend", "how"), [("shm", "replicate"), ("gloo", "replicate"), ("gloo", "reference")])
def test_without_a_session_the_groups_time_out_ends_the_wait(backend, how, tmp_path):
    plan = Plan(THREE, "cable", 0, backend, how, timeout=8.0)
    for told in run(plan, tmp_path):
        assert told.seconds is not None
        assert told.seconds < plan.promise
        assert told.type


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_pause_of_the_network_that_is_shorter_than_the_limit_changes_nothing(backend, tmp_path):
    folders = [tmp_path / name for name in ("undisturbed", "paused")]
    for folder in folders:
        folder.mkdir()
    undisturbed = run(Plan(TWO, "none", 0, backend), folders[0])
    plan = Plan(TWO, PAUSE, 1, backend, link_timeout=12.0, seconds=6.0)
    paused = run(plan, folders[1], patience=60.0)
    assert [told.type for told in paused] == [""] * 4, paused
    assert undisturbed[0].digest
    assert {told.digest for told in undisturbed + paused} == {undisturbed[0].digest}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(300))
def test_300_failures(seed, tmp_path):
    plan = random_plan(random.Random(seed))
    assert judge(plan, run(plan, tmp_path)) == [], str(plan)
