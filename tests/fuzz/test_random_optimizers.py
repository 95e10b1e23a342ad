"""Random programs that train with optimizers, and are right: nothing that watches for drift raises an alarm."""

import os

import pytest

from fuzz.optimizers import draw, play

SOAK = int(os.environ.get("LOCKSTEP_FUZZ_PROGRAMS", "2000"))


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.around)])
def test_no_false_alarm(seeds):
    for seed in seeds:
        play(draw(seed, rounds=16))


def test_no_false_alarm_on_accelerators(sim):
    for seed in range(100, 103):
        play(draw(seed, rounds=12, device="sim"))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1000 + SOAK, 100))
def test_no_false_alarm_in_many(seed):
    for each in range(seed, seed + 100):
        play(draw(each, rounds=24))
