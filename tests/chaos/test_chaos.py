"""Whatever happens to one rank, at any place: no rank hangs, all others name it, and nothing is left behind."""

import random

import pytest

from chaos.training import Plan
from chaos.trials import random_plan, run_trial, table

A_FEW = [
    Plan(2, "shm", "wait", "kill", 0, 3),
    Plan(3, "shm", "forward", "raise", 1, 2, launcher_has_store=True),
    Plan(2, "shm", "after the last batch", "leave", 1, 0),
    Plan(2, "gloo", "handling", "raise", 1, 3),
    Plan(2, "gloo", "own collective", "exit", 1, 4, launcher_has_store=True),
    Plan(2, "gloo", "group", "exit", 1, 0, launcher_has_store=True),
]
MORE = [
    Plan(2, "gloo", "wait", "kill", 0, 3),
    Plan(3, "gloo", "forward", "raise", 1, 2),
    Plan(2, "gloo", "worker", "kill", 1, 4, launcher_has_store=True),
    Plan(2, "gloo", "data", "leave", 1, 3, launcher_has_store=True),
    Plan(2, "shm", "optimizer", "kill", 1, 5, launcher_has_store=True),
    Plan(2, "gloo", "tear-down", "exit", 1, 0),
]


@pytest.mark.parametrize("plan", [*A_FEW, *(pytest.param(plan, marks=pytest.mark.soak) for plan in MORE)], ids=str)
def test_a_rank_comes_to_grief(plan):
    assert run_trial(plan).problems == []


@pytest.mark.soak
def test_300_ranks_come_to_grief(record_property):
    numbers = random.Random(12)
    trials = [run_trial(random_plan(numbers)) for _ in range(300)]
    print(table(trials))
    assert [(str(trial.plan), trial.problems) for trial in trials if trial.problems] == []


@pytest.mark.soak
def test_of_16_ranks_one_comes_to_grief():
    numbers = random.Random(16)
    trials = [run_trial(random_plan(numbers, worlds=[16])) for _ in range(30)]
    print(table(trials))
    assert [(str(trial.plan), trial.problems) for trial in trials if trial.problems] == []
