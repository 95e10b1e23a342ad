"""A network used at random, in DataParallel and, as a copy, on one device: whatever is done to both, they agree."""

from __future__ import annotations

import warnings

import pytest
import torch

from lockstep._base import tensor_state
from parity.random_programs import Factor, Pair, random_program, shortened


@pytest.fixture(scope="module")
def scripted() -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Factor())


def agree(seed: int, count: int, devices: list[torch.device], scripted: torch.nn.Module) -> None:
    """Run a random program; report one that fails by the few lines that make it."""
    found = shortened(random_program(seed, count), lambda: Pair(devices, scripted))
    if found is not None:
        program, error = found
        error.add_note(f"seed {seed}, on {[str(d) for d in devices]}:\n" + "\n".join(f"    {line}" for line in program))
        raise error


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.around) for seed in (2, 3))])
def test_random_programs(devices, scripted, seed):
    agree(seed, 25, devices(2 + seed % 2), scripted)


@pytest.mark.parametrize("seed", [4, pytest.param(5, marks=pytest.mark.around)])
def test_random_programs_where_nothing_guards_the_layout_of_tensors(devices, scripted, seed, monkeypatch):
    monkeypatch.setattr(tensor_state, "_TensorGuards", None)
    agree(seed, 25, devices(2), scripted)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 120))
def test_long_random_programs(devices, scripted, seed):
    agree(seed, 160, devices(2 + seed % 4), scripted)
