"""Programs of all languages of this folder are right; and one that fails is made shorter."""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import pytest

from fuzz import many_processes
from fuzz.many_processes import Setting
from fuzz.programs import SEEDS, Program, check, numbers
from lockstep.distributed.reduction.module.drift import DriftWatch

SOAK = int(os.environ.get("LOCKSTEP_FUZZ_PROGRAMS", "2000"))


def marked(language: str, device: str, seed: int, *marks: Any) -> Any:
    return pytest.param(
        language,
        device,
        seed,
        marks=[*(getattr(pytest.mark, each) for each in SEEDS[language].get("marks", ())), *marks],
    )


def check_one(request: pytest.FixtureRequest, language: str, device: str, seed: int, **options: Any) -> Program:
    if device:
        request.getfixturevalue("sim")
    return check(importlib.import_module(f"fuzz.{language}"), seed, device=device, **options)


@pytest.mark.parametrize(
    ("language", "device", "seed"),
    [
        marked(language, device, seed, *marks)
        for language, told in SEEDS.items()
        for which, device, marks in (("quick", "", ()), ("around", "", (pytest.mark.around,)), ("sim", "sim", ()))
        for seed in numbers(told[which])
    ],
)
def test_short_programs(request, language, device, seed):
    check_one(request, language, device, seed, length=SEEDS[language]["length"])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("language", "device", "first"),
    [
        marked(language, device, first)
        for language, told in SEEDS.items()
        for device in ("", "sim")[: 1 + bool(told["sim"])]
        for first in range(10_000, 10_000 + SOAK, 100)
    ],
)
def test_many_programs(request, language, device, first):
    """Says how many lines have run: ``-rP`` shows it."""
    played = [check_one(request, language, device, first + n, **SEEDS[language]["soak"]) for n in range(100)]
    print(f"100 programs, {sum(len(each.lines) for each in played)} lines: all right")


@pytest.mark.soak
@pytest.mark.parametrize("first", range(50_000, 50_000 + SOAK // 20, 10))
def test_programs_of_many_ranks(first):
    for seed in range(first, first + 10):
        check(many_processes, seed, length=8, worlds=(5, 16))


# ------------------------------------------------------------------------------------- what finds faults


DRIFT = (
    "use.backward([[F(1, (0, 1, 2))], [F(2, (0, 1))]])",
    "use.step()",
    "use.drop_grad(0, 2, [1])",
    "use.backward([[F(3, (0,))], [F(4, (0,))]])",
    "use.step()",
)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_program_whose_ranks_drift_apart_is_named(backend):
    many_processes.play(Program(Setting(2, backend), DRIFT))


def test_it_is_an_error_if_nothing_is_raised(monkeypatch):
    monkeypatch.setattr(DriftWatch, "compares", property(lambda watch: False, lambda watch, value: None), raising=False)
    monkeypatch.setattr(many_processes, "DRIFT_STEPS", 3)
    with pytest.raises(AssertionError, match="have drifted apart, and nothing was raised in 3 steps"):
        many_processes.play(Program(Setting(2), DRIFT))


class Counting(NamedTuple):
    """A language whose programs fail where they hold three numbers."""

    fails: frozenset[int]

    def draw(self, seed: int, length: int) -> Program:
        return Program(seed, tuple(range(length)))

    def play(self, program: Program) -> None:
        if self.fails <= {*program.lines}:
            raise ValueError("all there")


def test_a_program_that_fails_is_made_shorter(capsys):
    assert check(Counting(frozenset({40})), 5, length=9) == Program(5, tuple(range(9)))
    with pytest.raises(ValueError, match="all there") as error:
        check(Counting(frozenset({0, 6, 17})), 5, length=20)
    assert error.value.__notes__ == ["seed 5: play(Program(5, (\n    0,\n    6,\n    17,\n)))"]
    assert "now made shorter" in capsys.readouterr().out
