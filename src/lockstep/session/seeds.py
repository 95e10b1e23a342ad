"""Random streams: one that is the same on all ranks, and one for each rank; both follow from one seed."""

import hashlib
import random
import sys

import torch


def stream_seed(seed: int, stream: str) -> int:
    """The seed of a stream, by its name; streams of other names or seeds have nothing in common with it."""
    return int.from_bytes(hashlib.sha256(f"{seed} {stream}".encode()).digest()[:8], "little") >> 1


def seed_this_rank(seed: int, rank: int) -> None:
    """Seed the generators of PyTorch, Python and, if it is imported, NumPy, otherwise on each rank.

    So that augmentation and dropout differ among ranks.
    """
    own = stream_seed(seed, f"rank {rank}")
    torch.manual_seed(own)  # of the accelerators, too
    random.seed(own)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own % 2**32)


def generator(seed: int, stream: str) -> torch.Generator:
    """A generator on the CPU, at the beginning of a stream."""
    return torch.Generator().manual_seed(stream_seed(seed, stream))
