"""Random streams of shares: a share's random numbers depend on its seed, not on the rank that computes it.

At the start of a share, all generators that programs use without naming one are seeded: PyTorch's of the CPU and of the
module's accelerators, Python's and NumPy's. After the step all have their former states.

Python's and NumPy's belong to the process. So does PyTorch's of the CPU, but a thread can be given one of its own; so a
step outside the main thread draws from its thread's generator, and ranks that are threads do not disturb each other
there. Of several simultaneous steps in one process, only the first one seeds Python's and NumPy's.
"""

import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from lockstep.local.random_streams import drawing_from
from lockstep.seeds import derive_seed

Seed = Callable[[int], object]
_process = threading.Lock()
"""Held by the step that seeds the generators of the process."""


@contextmanager
def random_streams(devices: Collection[torch.device]) -> Iterator[Seed]:
    """Yield a function that seeds every generator, and restore them. ``devices``: the accelerators that draw."""
    seeds: list[Seed] = []
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.callback(torch.random.set_rng_state, torch.random.get_rng_state())
            seeds.append(torch.default_generator.manual_seed)
        else:
            own = torch.Generator()
            stack.enter_context(drawing_from(own))
            seeds.append(own.manual_seed)
        for device in devices:
            if device.type != "cpu":
                module: Any = torch.get_device_module(device)
                stack.callback(module.set_rng_state, module.get_rng_state(device), device)
                seeds.append(partial(_seed_device, device))
        if _process.acquire(blocking=False):
            stack.callback(_process.release)
            stack.callback(random.setstate, random.getstate())
            seeds.append(random.seed)
            if "numpy" in sys.modules:
                numbers = sys.modules["numpy"].random
                stack.callback(numbers.set_state, numbers.get_state())
                seeds.append(lambda seed: numbers.seed([seed & 0xFFFFFFFF, seed >> 32]))

        def seed_all(seed: int) -> None:
            for number, each in enumerate(seeds):
                each(derive_seed(seed, number))

        yield seed_all


def _seed_device(device: torch.device, seed: int) -> None:
    module: Any = torch.get_device_module(device)
    with torch.accelerator.device_index(device.index or 0):
        module.manual_seed(seed)
