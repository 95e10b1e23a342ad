"""Digests of tensors' bits, computed where the tensors lie: whether replicas are still equal, in one pass over them.

A digest is a sum, modulo 2**64, of the tensors' bits, eight bytes at a time, each times an odd number that depends on
its place. So a single bit that flips always changes it: by a power of two below 2**64 times an odd number. Values that
change places do, too, but for a chance of about 2**-60. It is no digest against somebody who means to deceive.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.distributed.dtensors import local_part

_ROW = 1 << 16
"""Numbers of eight bytes that are summed together: their factors stay in a processor's cache."""
_BLOCK = 1 << 22
"""The same where products take memory of their own."""
_SMALL_BYTES = 1 << 16
"""Tensors smaller than this are put side by side first: one by one, each would take longer than its values."""
_FACTOR, _OFFSET = 0x5851F42D4C957F2D, 0x14057B7EF767814F
BYTES = 8
"""The size of a digest."""


class Look:
    """What tensors hold at one moment: digests, and copies of what is small."""

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._sums: dict[int, Tensor] = {}  # of large ones, by number
        self._flats: list[tuple[Tensor, list[int], list[int]]] = []  # small ones: numbers, and elements of each
        small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        flat = [_flat(tensor) for tensor in tensors]
        for number, tensor in enumerate(flat):
            if tensor.nbytes >= _SMALL_BYTES:
                self._sums[number] = _sum(_lanes(tensor))
            elif tensor.nbytes:
                small.setdefault((tensor.dtype, tensor.device), []).append(number)
        for numbers in small.values():
            parts = [flat[number] for number in numbers]
            self._flats.append((torch.cat(parts), numbers, [part.numel() for part in parts]))

    @torch.no_grad()
    def digest(self, device: torch.device) -> Tensor:
        """The digest of all together: one number of eight bytes."""
        sums = [*self._sums.values(), *(_sum(_lanes(flat)) for flat, _, _ in self._flats)]
        if not sums:
            return torch.ones((), dtype=torch.int64, device=device)
        together = torch.stack([each.to(device) for each in sums])
        return (together * _factors(len(sums), device)).sum()

    @torch.no_grad()
    def each(self) -> list[int]:
        """A digest of each tensor; 0 for an empty one."""
        found = [0] * self._count
        for number, value in self._sums.items():
            found[number] = int(value)
        for flat, numbers, sizes in self._flats:
            for number, part in zip(numbers, flat.split(sizes), strict=True):
                found[number] = int(_sum(_lanes(part)))
        return found


def _flat(tensor: Tensor) -> Tensor:
    """The elements of this rank's part of a tensor, one after the other."""
    local = local_part(tensor).detach()
    if local.layout is not torch.strided:
        return torch.empty(0)
    return local.contiguous().view(-1)


def _lanes(flat: Tensor) -> Tensor:
    """The bits of a tensor of one dimension, as numbers of eight bytes; zeros at the end if there are too few."""
    data = flat.view(torch.uint8)
    rest = -data.numel() % BYTES
    if rest or data.storage_offset() % BYTES:
        padded = torch.zeros(data.numel() + rest, dtype=torch.uint8, device=data.device)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int64)


def _sum(lanes: Tensor) -> Tensor:
    """The sum of numbers times odd factors."""
    whole = lanes.numel() // _ROW * _ROW
    factors = _factors(_ROW, lanes.device)
    total = (lanes[whole:] * factors[: lanes.numel() - whole]).sum()
    if whole:
        rows = _row_sums(lanes[:whole].view(-1, _ROW), factors)
        total = total + (rows * _factors(len(rows), lanes.device)).sum()
    return total


def _row_sums(rows: Tensor, factors: Tensor) -> Tensor:
    if rows.is_cpu:
        return torch.mv(rows, factors)
    return torch.cat([(block * factors).sum(1) for block in rows.split(_BLOCK // _ROW)])


@lru_cache(maxsize=32)
def _factors(count: int, device: torch.device) -> Tensor:
    """Odd numbers, no two alike."""
    with torch.inference_mode(False):
        places = torch.arange(1, count + 1, dtype=torch.int64, device=device)
        return (places * _FACTOR + _OFFSET) | 1
