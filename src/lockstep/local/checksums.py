"""A number that tells whether the bits of tensors are the same as before, computed where they are.

Each element's bits, taken as a whole number, are multiplied by a random weight of their place and summed, modulo 2**64.
So equal bits have equal sums, and other bits - other values, or the same in another order - have another sum but for a
chance of about one in 2**32.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # elements that are weighted at a time: bounds the memory that it takes
_SEED = 5381


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over strided tensors of one dtype and device, which stays there: an int64 tensor without dimensions."""
    flat = (
        tensors[0].detach().reshape(-1) if len(tensors) == 1 else torch.cat([t.detach().reshape(-1) for t in tensors])
    )
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_WHOLE[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, part in enumerate(bits.split(_CHUNK)):
        total = total * 31 + (part * _weights(part.device)[: len(part)]).sum() + number
    return total


@lru_cache(maxsize=64)
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers of 63 bits, one for each place."""
    generator = torch.Generator().manual_seed(_SEED)
    numbers = torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator, dtype=torch.int64, device="cpu")
    return (numbers * 2 + 1).to(device)
