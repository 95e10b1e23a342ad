"""Comparisons of the numbers of all ranks by a sum over the ranks, whose size does not depend on how many there are.

PURE. Each rank adds the bits of its number, as zeros and ones. All ranks have the same number if and only if each bit
adds up to 0 or to the number of ranks. Sums of ones are exact in a dtype up to :func:`counts_exactly`.
"""

from collections.abc import Iterable, Sequence
from operator import mul

import torch

_ZERO_OR_ONE = bytes.maketrans(b"01", b"\0\1")
_PLACE_VALUES = [1 << place for place in reversed(range(128))]


def bits_of(number: int, count: int) -> bytes:
    """Return a number's lowest bits, the highest of them first, as bytes of 0 or 1.

    Example:
        >>> list(bits_of(6, 4))
        [0, 1, 1, 0]
    """
    return format(number, f"0{count}b").encode().translate(_ZERO_OR_ONE)


def are_alike(sums: Iterable[float], ranks: float) -> bool:
    """Return True if ``ranks`` ranks have added the same bits.

    Example:
        >>> are_alike([0.0, 3.0, 3.0, 0.0], 3)
        True
    """
    return {0, ranks}.issuperset(sums)


def total_of(sums: Sequence[float]) -> int:
    """Return the total of the numbers of which each bit has been added up; at most 128 bits.

    Example:
        >>> total_of([0.0, 2.0, 1.0])  # 2 + 3
        5
    """
    return sum(map(mul, map(int, sums), _PLACE_VALUES[-len(sums) :]))


def counts_exactly(dtype: torch.dtype, ranks: int) -> bool:
    """Return True if sums of so many ones are exact in a dtype."""
    return ranks <= 2 / torch.finfo(dtype).eps
