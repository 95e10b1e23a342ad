"""Random streams of shares: a share's random numbers depend on its seed, not on the rank that computes it.

At the start of a share, all generators that programs use without naming one are seeded: PyTorch's of the CPU and of the
module's accelerators, Python's and NumPy's. After the step all have their former states.

All but those of accelerators belong to the process. So of several simultaneous steps in one process, of ranks that are
threads, only the first one seeds them.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from lockstep._base.seeds import Seed, derive_seed, generators, keep_generators

_process = threading.Lock()
"""Held by the step that seeds the generators of the process."""


@contextmanager
def random_streams(devices: Collection[torch.device]) -> Iterator[Seed]:
    """Yield a function that seeds every generator, and restore them. ``devices``: the accelerators that draw."""
    seeds: list[Seed] = []
    with ExitStack() as stack:
        for device in devices:
            if device.type != "cpu":
                module: Any = torch.get_device_module(device)
                stack.callback(module.set_rng_state, module.get_rng_state(device), device)
                seeds.append(partial(_seed_device, device))
        if _process.acquire(blocking=False):
            stack.callback(_process.release)
            keep_generators(stack)
            seeds += generators()

        def seed_all(seed: int) -> None:
            for number, each in enumerate(seeds):
                each(derive_seed(seed, number))

        yield seed_all


def _seed_device(device: torch.device, seed: int) -> None:
    module: Any = torch.get_device_module(device)
    with torch.accelerator.device_index(device.index or 0):
        module.manual_seed(seed)
