"""PURE: which samples each share of each batch has, whatever the world size."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch

from lockstep.seeds import derive_seed

Last = Literal["drop", "smaller"]
LASTS: tuple[Last, ...] = ("drop", "smaller")


def order_of(samples: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the order of the samples in an epoch."""
    if not shuffle:
        return list(range(samples))
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(samples, generator=generator, device="cpu").tolist()


def batches_in(samples: int, batch_size: int, last: Last) -> int:
    """Return the number of batches in an epoch."""
    return samples // batch_size if last == "drop" else -(-samples // batch_size)


def split(samples: Sequence[int], shares: int) -> list[Sequence[int]]:
    """Return the samples of each share, in order; sizes differ by at most one, and empty shares are left out."""
    each, more = divmod(len(samples), shares)
    ends = [share * each + min(share, more) for share in range(shares + 1)]
    parts = [samples[begin:end] for begin, end in pairwise(ends)]
    return [part for part in parts if part]
