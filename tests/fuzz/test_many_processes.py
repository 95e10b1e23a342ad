"""Random programs of replicated modules beside one process in float64: right, or an error by name on every rank."""

import os

import pytest

from fuzz import many_processes
from fuzz.many_processes import HARMLESS, Setting, draw, find_failure, play
from lockstep.distributed.reduction.module.drift import DriftWatch

pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in HARMLESS]

SOAK = int(os.environ.get("LOCKSTEP_FUZZ_PROGRAMS", "2000"))


QUICK = (*range(4), 25)  # 25: gradients come again after their bucket has left


@pytest.mark.parametrize("seeds", [QUICK, pytest.param(range(4, 24), marks=pytest.mark.around)])
@pytest.mark.numpy
def test_short_programs_are_right_or_refused_by_name(seeds):
    for each in seeds:
        failure = find_failure(each, length=5)
        assert failure is None, str(failure)


DRIFT = """
use.backward([[F(1, (0, 1, 2))], [F(2, (0, 1))]])
use.step()
use.drop_grad(0, 2, [1])
use.backward([[F(3, (0,))], [F(4, (0,))]])
use.step()
"""


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_program_whose_ranks_drift_apart_is_named(backend):
    play(DRIFT, Setting(2, backend))


def test_it_is_an_error_if_nothing_is_raised(monkeypatch):
    monkeypatch.setattr(DriftWatch, "compares", property(lambda watch: False, lambda watch, value: None), raising=False)
    monkeypatch.setattr(many_processes, "DRIFT_STEPS", 3)
    with pytest.raises(AssertionError, match="have drifted apart, and nothing was raised in 3 steps"):
        play(DRIFT, Setting(2))


def test_short_programs_on_accelerators(sim):
    for each in range(100, 103):
        failure = find_failure(each, length=5, device="sim")
        assert failure is None, str(failure)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["cpu", "sim"], indirect=True)
@pytest.mark.parametrize("seed", range(10_000, 10_000 + SOAK, 100))
def test_programs_are_right_or_refused_by_name(seed, kind):
    """Says how many programs and operations have run: ``-rP`` shows it."""
    device, operations = "" if kind == "cpu" else kind, 0
    for each in range(seed, seed + 100):
        failure = find_failure(each, length=10, worlds=(2, 3, 4), device=device)
        assert failure is None, str(failure)
        operations += len(draw(each, length=10, worlds=(2, 3, 4), device=device)[0].splitlines())
    print(f"100 programs, {operations} operations: all right")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50_000, 50_000 + SOAK // 20, 10))
def test_programs_of_many_ranks_are_right_or_refused_by_name(seed):
    for each in range(seed, seed + 10):
        failure = find_failure(each, length=8, worlds=(5, 16))
        assert failure is None, str(failure)
