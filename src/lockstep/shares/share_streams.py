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
    with ExitStack() as stack:
        seeds = [stack.enter_context(_torch_stream())]
        seeds += [stack.enter_context(_device_stream(device)) for device in devices if device.type != "cpu"]
        if _process.acquire(blocking=False):
            stack.callback(_process.release)
            seeds += [stack.enter_context(_python_stream())]
            if "numpy" in sys.modules:
                seeds += [stack.enter_context(_numpy_stream(sys.modules["numpy"].random))]

        def seed_all(seed: int) -> None:
            for number, each in enumerate(seeds):
                each(derive_seed(seed, number))

        yield seed_all


@contextmanager
def _torch_stream() -> Iterator[Seed]:
    if threading.current_thread() is threading.main_thread():
        before = torch.random.get_rng_state()
        try:
            yield torch.default_generator.manual_seed
        finally:
            torch.random.set_rng_state(before)
    else:
        own = torch.Generator()
        with drawing_from(own):
            yield own.manual_seed


@contextmanager
def _device_stream(device: torch.device) -> Iterator[Seed]:
    module = torch.get_device_module(device)
    before = module.get_rng_state(device)

    def seed_device(seed: int) -> None:
        with torch.accelerator.device_index(device.index or 0):
            module.manual_seed(seed)

    try:
        yield seed_device
    finally:
        module.set_rng_state(before, device)


@contextmanager
def _python_stream() -> Iterator[Seed]:
    before = random.getstate()
    try:
        yield random.seed
    finally:
        random.setstate(before)


@contextmanager
def _numpy_stream(generator: Any) -> Iterator[Seed]:
    before = generator.get_state()
    try:
        yield lambda seed: generator.seed([seed & 0xFFFFFFFF, seed >> 32])
    finally:
        generator.set_state(before)
