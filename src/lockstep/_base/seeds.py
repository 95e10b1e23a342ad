"""Seeds of random streams, derived from their purpose."""

import hashlib
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack

import torch

Seed = Callable[[int], object]
"""Seeds one generator."""


def derive_seed(*parts: int | str) -> int:
    """Return a number of 63 bits that depends on every part and on their order; the same in every process."""
    text = "\0".join(f"{type(part).__name__} {part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_cpu(seed: int) -> None:
    """Seed PyTorch's generator of the CPU alone; ``torch.manual_seed`` seeds those of all accelerators, too."""
    torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())


def generators() -> list[Seed]:
    """Return what seeds each generator of the process that programs use without naming one: PyTorch's of the CPU,
    Python's and NumPy's."""
    numpy = sys.modules.get("numpy")
    own: list[Seed] = [seed_cpu, random.seed]
    return own if numpy is None else [*own, lambda seed: numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])]


def keep_generators(stack: ExitStack) -> None:
    """Let ``stack`` restore these generators as they are now."""
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    stack.callback(random.setstate, random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        stack.callback(numpy.random.set_state, numpy.random.get_state())
