"""PURE: assigns the elements of parameters to the ranks that step on them. No tensor is touched in this file.

If an optimizer updates element by element, its parameters are laid end to end and cut into equal ranges, one for each
rank. If it needs whole parameters, they are assigned one by one, the most costly first, each to the rank with the least
work so far.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

ALIGNED = 128
"""Parameters are cut at multiples of this many elements from their begin.

So what a kernel computes in whole vectors, and what element by element, is the same as in the whole parameter.
"""


class Piece(NamedTuple):
    """Some elements of a parameter, in the order in which they lie in memory."""

    number: int
    """The number of the parameter."""
    start: int
    stop: int


def cut_evenly(numels: Sequence[int], world: int) -> list[list[Piece]]:
    """Return, for each rank, its range of parameters laid end to end: the same number of elements for each, but for the
    last ranks, which get what is left, and up to ``ALIGNED`` elements where a cut is moved.

    Equal ranges, of a multiple of ``ALIGNED`` elements, lie at equal distances within a parameter. So the pieces of
    many ranks are copied at once (``streams.py``).

    Example:
        >>> [[tuple(piece) for piece in pieces] for pieces in cut_evenly([100, 300], 2)]
        [[(0, 0, 100), (1, 0, 128)], [(1, 128, 300)]]
    """
    begins = [0, *accumulate(numels)]
    elements_a_rank = -(-begins[-1] // (world * ALIGNED)) * ALIGNED
    cuts = [_aligned(begins, min(rank * elements_a_rank, begins[-1])) for rank in range(world)] + [begins[-1]]
    return [list(_within(begins, start, stop)) for start, stop in pairwise(cuts)]


def _aligned(begins: Sequence[int], cut: int) -> int:
    """Move a cut to the nearest multiple of ``ALIGNED`` elements within its parameter, or to the parameter's end."""
    number = bisect_right(begins, cut)
    if number == len(begins):
        return cut
    begin, end = begins[number - 1], begins[number]
    return min(end, begin + round((cut - begin) / ALIGNED) * ALIGNED)


def _within(begins: Sequence[int], start: int, stop: int) -> Iterator[Piece]:
    for number in range(bisect_right(begins, start) - 1, len(begins) - 1):
        begin, end = begins[number], begins[number + 1]
        if begin >= stop:
            return
        if max(begin, start) < min(end, stop):
            yield Piece(number, max(begin, start) - begin, min(end, stop) - begin)


def share_out(costs: Sequence[float], world: int) -> list[list[int]]:
    """Return, for each rank, the numbers of the entries that it gets: the most costly first, each to the rank that has
    the least so far."""
    loads, shares = [0.0] * world, [[] for _ in range(world)]  # type: tuple[list[float], list[list[int]]]
    for number in sorted(range(len(costs)), key=lambda each: -costs[each]):
        rank = loads.index(min(loads))
        loads[rank] += costs[number]
        shares[rank].append(number)
    return [sorted(each) for each in shares]


def matrix_cost(shape: Sequence[int]) -> float:
    """Return the cost of an update that multiplies a matrix by itself, as Newton-Schulz iterations do; for a vector,
    its length."""
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return float(numel)
    rows = shape[0]
    return float(numel) * min(rows, numel // rows)


class Block(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def blocks_of(shape: Sequence[int], start: int, stop: int) -> list[Block]:
    """Return the rectangular parts, in order, of the elements ``start`` to ``stop`` of a contiguous tensor.

    Example:
        >>> blocks_of((3, 4), 2, 8)
        [Block(offsets=(0, 2), sizes=(1, 2)), Block(offsets=(1, 0), sizes=(1, 4))]
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [Block((start,), (stop - start,)) if shape else Block((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return _in_row(shape, start // row, start, stop)
    blocks = _in_row(shape, first - 1, start, first * row) if start < first * row else []
    if first < last:
        blocks.append(Block((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return blocks + (_in_row(shape, last, last * row, stop) if last * row < stop else [])


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Block]:
    begin = row * math.prod(shape[1:])
    inner = blocks_of(shape[1:], start - begin, stop - begin)
    return [Block((row, *each.offsets), (1, *each.sizes)) for each in inner]
