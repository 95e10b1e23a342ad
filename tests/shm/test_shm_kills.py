"""Ranks that are killed, at every point of a loop and of a group's life: the others say so at once; nothing stays."""

from __future__ import annotations

import random
import signal
import statistics
from pathlib import Path

import pytest

from shm.dying import POINTS, TIMEOUT, Kill, run_kills, slowness

SECONDS = 1.0  # from the death of a rank to the errors of the others, mostly, where each process has a core

# Once all have met: before, another host cannot know.
ON_TWO_HOSTS = ["after a time", "exchanges", "reduces", "has reduced", "puts", "leaves a child"]


def plan(number, hosts, points, seed):
    """Kills of random ranks, at points that all come equally often."""
    rng = random.Random(seed)
    chosen = [points[i % len(points)] for i in range(number)]
    rng.shuffle(chosen)
    return [
        Kill(i, rng.randrange(len(hosts)), point, rng.randrange(10 if points is ON_TWO_HOSTS else 1, 40), hosts)
        for i, point in enumerate(chosen)
    ]


def check(kills):
    """Run them, and look what the others have seen."""
    before = shared_memory()
    slow = slowness()
    seen_by_all = run_kills(kills)
    took = []
    for kill, dead, code, seen in seen_by_all:
        assert code == -signal.SIGKILL, (kill, seen)
        assert len(seen) == len(kill.hosts) - 1
        for one in seen:
            assert one.error == "CommunicationError", (kill, one)
            assert f"rank {kill.victim} has " in one.text, (kill, one)
            assert one.when - dead < TIMEOUT / 2, (kill, one)  # on no machine is it the time-out that ends the wait
            took.append(one.when - dead)
            assert one.left == [], (kill, one)
    assert statistics.median(took) < SECONDS * max(slow, slowness())
    assert shared_memory() <= before


def shared_memory():
    """Return what is there, but for the folder of snapshots, which tests beside this one use."""
    return {each for each in Path("/dev/shm").iterdir() if not each.name.startswith("lockstep-")}


@pytest.mark.alone
@pytest.mark.parametrize("points", [POINTS[::9], pytest.param(POINTS, marks=pytest.mark.around)], ids=["few", "all"])
def test_the_others_say_which_rank_was_killed_and_nothing_stays(points):
    check(plan(len(points), "aaa", points, 0))


@pytest.mark.around
@pytest.mark.alone
def test_the_others_say_which_rank_was_killed_on_another_host():
    check(plan(4, "abab", ON_TWO_HOSTS, 2))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_kills(seed):
    check(plan(50, "aaaa"[seed % 3 :], POINTS, 10 + seed))


@pytest.mark.soak
def test_fifty_kills_on_two_hosts():
    check(plan(50, "abab", ON_TWO_HOSTS, 20))
