"""Random programs on GPUs, each beside what one process in float64 makes of it: those of `fuzz/many_processes.py`.

Two ranks over NCCL where it allows them on the GPUs that there are, else over Gloo. Ranks are processes.
"""

from __future__ import annotations

import pytest
import torch

from fuzz import many_processes as fuzz
from one_gpu import LIMIT, NCCL, allows_several_ranks, place_of
from processes import run_processes


def play(rank, seeds):
    torch.set_default_device(place_of(rank))
    for seed in seeds:
        program, setting = fuzz.draw(seed, 8, (2,))
        setting = setting._replace(processes=True, own_groups=False)
        try:
            fuzz._play(rank, None, program, setting)
        except AssertionError as error:
            error.add_note(f"program {seed}: {setting}\n{program}")
            raise


@pytest.mark.parametrize("first", [0, 8])
def test_random_programs(home, first):
    backend = NCCL if home.type == "cuda" and allows_several_ranks() else "gloo"
    run_processes(2, play, range(first, first + 8), timeout=LIMIT, backend=backend)
