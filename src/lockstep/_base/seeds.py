"""Seeds of random streams, derived from their purpose."""

import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """Return a number of 63 bits that depends on every part and on their order; the same in every process."""
    text = "\0".join(f"{type(part).__name__} {part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_cpu(seed: int) -> None:
    """Seed PyTorch's generator of the CPU alone; ``torch.manual_seed`` seeds those of all accelerators, too."""
    torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
