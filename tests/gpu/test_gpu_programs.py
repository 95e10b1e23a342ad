"""Random programs on GPUs, each beside what one process in float64 makes of it: those of `fuzz/many_processes.py`.

Two ranks over NCCL where it allows them on the GPUs that there are, else over Gloo. Ranks are processes.
"""

from __future__ import annotations

import pytest
import torch

from fuzz import many_processes
from one_gpu import LIMIT, NCCL, allows_several_ranks, place_of
from processes import run_processes


def play(rank, seeds):
    torch.set_default_device(place_of(rank))
    for seed in seeds:
        program = many_processes.draw(seed, 8, worlds=(2,))
        program = program._replace(setting=program.setting._replace(processes=True, own_groups=False))
        try:
            many_processes.play_rank(rank, None, program)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {program}")
            raise


@pytest.mark.parametrize("first", [0, 8])
def test_random_programs(home, first):
    backend = NCCL if home.type == "cuda" and allows_several_ranks() else "gloo"
    run_processes(2, play, range(first, first + 8), timeout=LIMIT, backend=backend)
