"""Digests: fast ones of the bits of tensors, computed on their device, and a strong one of texts.

The fast digest is a sum, modulo 2**64, over the tensors' bits, eight bytes at a time: each word times an odd number,
plus its upper half times another one. These factors depend on the place and look random, so a single flipped bit always
changes the sum. The upper half is there for the signs: a flipped highest bit changes the first product by 2**63,
whatever the factor is, so two of them would cancel out. Other changes are missed with a probability of about 2**-64, or
2**-32 if only the highest bits of each four bytes change. It does not protect against deliberate deception; the strong
digest, SHA-256, does. Files of checkpoints and :func:`lockstep.shares.fingerprint` have the strong one in full.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lockstep._base.inner_tensors import as_bytes, inner_tensors

_ROW = 1 << 16
"""Number of eight-byte words that are summed together: their factors stay in a processor's cache."""
_CACHED_ROWS, _BLOCK_ROWS = 8, 64
"""Number of rows that are processed at once, on the CPU and elsewhere: intermediate results take memory."""
_SMALL_BYTES = 1 << 16
"""Tensors smaller than this are concatenated first: one by one, each would take longer than its values are worth."""
BYTES = 8
"""Size of a fast digest, in bytes."""
_IN_ROW, _UPPER, _OF_ROWS, _OF_TENSORS = range(4)
"""Sets of factors, by use: with a common set, values that change places between a row and a column would leave the
sum as it was."""


def text_digest(text: str, bits: int = 63) -> int:
    """Return the first ``bits`` bits of a text's SHA-256, as a number."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()) >> (256 - bits)


class Digests:
    """Digests of tensors at one moment; small tensors are copied, and summed when a digest is asked for."""

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
        """Return one digest of all tensors together: a number of eight bytes."""
        sums = [*self._sums.values(), *(_sum(_lanes(flat)) for flat, _, _ in self._flats)]
        if not sums:
            return torch.ones((), dtype=torch.int64, device=device)
        together = torch.stack([each.to(device) for each in sums])
        return (together * _factors(len(sums), device, _OF_TENSORS)).sum()

    @torch.no_grad()
    def each(self) -> list[int]:
        """Return a digest of each tensor; 0 for a tensor without elements."""
        found = [0] * self._count
        for number, value in self._sums.items():
            found[number] = int(value)
        for flat, numbers, sizes in self._flats:
            for number, part in zip(numbers, flat.split(sizes), strict=True):
                found[number] = int(_sum(_lanes(part)))
        return found


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of this rank's part of a tensor, in one dimension; bytes if they lie in several tensors."""
    if tensor.is_sparse:
        tensor = tensor.detach().coalesce()
    inner = [each.resolve_conj().resolve_neg() for each in inner_tensors(tensor)]
    return inner[0].contiguous().view(-1) if len(inner) == 1 else torch.cat([as_bytes(each) for each in inner])


def _lanes(flat: Tensor) -> Tensor:
    """Return the bits of a one-dimensional tensor as eight-byte words, padded with zeros."""
    data = flat.view(torch.uint8)
    rest = -data.numel() % BYTES
    if rest or data.storage_offset() % BYTES:
        padded = torch.zeros(data.numel() + rest, dtype=torch.uint8, device=data.device)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int64)


_NUMBERS = {1: torch.uint8, 2: torch.int16}


def slice_digest(flat: Tensor) -> Tensor:
    """Return a number of 64 bits of the bits of a one-dimensional tensor whose elements lie one after the other, in two
    or three operations: each four bytes, or less if the elements are smaller, times an odd number."""
    numbers = flat.view(_NUMBERS.get(flat.dtype.itemsize, torch.int32))
    if flat.is_cpu:
        return torch.dot(numbers.long(), _cpu_factors(len(numbers)))
    return (numbers * _factors(len(numbers), flat.device, _IN_ROW)).sum()


@lru_cache(maxsize=64)
def _cpu_factors(count: int) -> Tensor:
    return _factors(count, torch.device("cpu"), _IN_ROW)


def _sum(lanes: Tensor) -> Tensor:
    """Return the digest of at least one word; their number counts too, so that zeros do not give 0."""
    whole = lanes.numel() // _ROW * _ROW
    factors, upper = _factors(_ROW, lanes.device, _IN_ROW), _factors(_ROW, lanes.device, _UPPER)
    rest = lanes[whole:]
    total = (rest * factors[: len(rest)] + (rest >> 32) * upper[: len(rest)]).sum() + lanes.numel()
    if whole:
        sums = _row_sums(lanes[:whole].view(-1, _ROW), factors, upper)
        total = total + (sums * _factors(len(sums), lanes.device, _OF_ROWS)).sum()
    return total


def _row_sums(rows: Tensor, factors: Tensor, upper: Tensor) -> Tensor:
    if rows.is_cpu:
        return torch.cat([torch.mv(r, factors) + torch.mv(r >> 32, upper) for r in rows.split(_CACHED_ROWS)])
    return torch.cat([(r * factors).addcmul_(r >> 32, upper).sum(1) for r in rows.split(_BLOCK_ROWS)])


def _factors(count: int, device: torch.device, of: int) -> Tensor:
    """Return odd numbers that look random."""
    return _table(1 << (count - 1).bit_length(), device, of)[:count]


@lru_cache(maxsize=64)
def _table(count: int, device: torch.device, of: int) -> Tensor:
    """Return odd numbers: SplitMix64 of their places.

    An arithmetic series would not do: +1, -2, +1 at three places in a row, a difference that counts in a histogram may
    well have, would add up to nothing.
    """
    with torch.inference_mode(False):
        numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device) + (of << 40)
        numbers = numbers * _signed(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            numbers = (numbers ^ (numbers >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
        return numbers ^ (numbers >> 31 & (1 << 33) - 1) | 1


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
