"""PURE: deals samples of unequal cost to ranks or shares, and shares to ranks of unequal speed.

The most expensive one decides how long a step takes. :func:`deal` adds up costs: first the most expensive sample goes
to whoever has least so far, then exchanges of one or two samples bring two parts closer to each other, until none does.
:func:`deal_padded` is for batches that are padded to their longest sample: a part costs the number of its samples times
the largest cost, so samples of similar cost go together. It finds the best deal.

The result depends on the costs and the number of parts alone: every rank comes to the same one by itself.
"""

import hashlib
import heapq
import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import isfinite, nan
from typing import Any, NamedTuple

from lockstep.errors import OptionError

Parts = list[list[int]]
"""The places of the samples of each part, in ascending order."""
NEAR_ENOUGH = 1.005
"""No more exchanges are looked for if the most expensive part costs at most so many times what it must."""
_STARTS = 8
"""Number of times that exchanges begin anew after some samples were exchanged at random: only few samples need it."""
_EXCHANGES = 100
_HALVINGS = 50
"""Number of times that the interval in which the best cost lies is halved: down to rounding."""
_OF_PAIRS = 16
"""Pairs of samples are exchanged between parts of at most so many samples."""


def deal(costs: Sequence[float], parts: int) -> Parts:
    """Deal samples to ``parts`` parts whose sums of costs are about equal: for 8 parts of three samples or more, the
    largest is at most 2 % above the best possible. No part is empty if there are enough samples."""
    best = _longest_first(costs, parts)
    goal = NEAR_ENOUGH * _least(costs, parts)
    _exchange_all(best, costs, goal)
    generator = random.Random(0)
    for _ in range(_STARTS if len(costs) > parts > 1 else 0):
        if _largest(best, costs) <= goal:
            break
        other = [list(part) for part in best]
        _shake(other, costs, generator)
        _exchange_all(other, costs, goal)
        best = min(best, other, key=lambda each: _largest(each, costs))
    return [sorted(part) for part in best]


def deal_padded(costs: Sequence[float], parts: int) -> Parts:
    """Deal samples to ``parts`` parts of which each costs the number of its samples times the largest cost, so that the
    most expensive part is as cheap as possible. No part is empty if there are enough samples.

    The first part has the most expensive samples, and so on: there is always a best deal of this kind, since the most
    expensive sample that the last parts must take is the cheapest then.
    """
    order = sorted(range(len(costs)), key=lambda place: -costs[place])
    falling = [costs[place] for place in order]
    low, high = 0.0, len(falling) * max(falling, default=0.0)
    ends = _cut(falling, parts, high) or []
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = _cut(falling, parts, middle)
        low, high, ends = (middle, high, ends) if found is None else (low, middle, found)
    begins = [0, *ends[:-1]]
    return [sorted(order[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def _cut(falling: Sequence[float], parts: int, bound: float) -> list[int] | None:
    """Return the end of each part of samples with falling costs, None if some part would cost more than ``bound``."""
    ends, begin = [], 0
    for part in range(parts):
        left = len(falling) - begin
        most = max(min(left, 1), left - (parts - part - 1))  # the parts after it get a sample each
        fits = most if not left or not falling[begin] else min(most, int(bound / falling[begin] + 1e-9))
        begin += max(fits, min(left, 1))
        ends.append(begin)
        if left and fits < 1:
            return None
    return ends if begin == len(falling) else None


# ------------------------------------------------------------------------------------- sums of costs


def _longest_first(costs: Sequence[float], parts: int) -> Parts:
    """Deal the most expensive sample to the part with the smallest sum so far, and so on."""
    dealt: Parts = [[] for _ in range(parts)]
    sums = [(0.0, 0, part) for part in range(parts)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        total, count, part = heapq.heappop(sums)
        dealt[part].append(place)
        heapq.heappush(sums, (total + costs[place], count + 1, part))
    return dealt


def _least(costs: Sequence[float], parts: int) -> float:
    """Return a bound below which no deal comes: of the ``k * parts + 1`` largest costs, some part has ``k + 1``."""
    falling = sorted(costs, reverse=True)
    of_largest = [sum(falling[k * parts - k : k * parts + 1]) for k in range(-(-len(costs) // parts))]
    return max(sum(costs) / parts, *of_largest, 0.0)


def _sum(part: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[place] for place in part)


def _largest(parts: Parts, costs: Sequence[float]) -> float:
    return max(_sum(part, costs) for part in parts)


class _Exchange(NamedTuple):
    """Samples that an expensive part gives, and those that it takes."""

    error: float
    """The difference from an exchange after which both parts cost the same."""
    given: tuple[int, ...]
    taken: tuple[int, ...]


def _exchange_all(parts: Parts, costs: Sequence[float], goal: float) -> None:
    """Exchange samples between two parts until the most expensive part costs at most ``goal``, or nothing helps."""
    for _ in range(_EXCHANGES):
        sums = [_sum(part, costs) for part in parts]
        if max(sums) <= goal:
            return
        found = next(_exchanges(parts, sums, costs), None)
        if found is None:
            return
        heavy, light, (_, given, taken) = found
        parts[heavy] = [place for place in parts[heavy] if place not in given] + list(taken)
        parts[light] = [place for place in parts[light] if place not in taken] + list(given)


def _exchanges(parts: Parts, sums: Sequence[float], costs: Sequence[float]) -> Iterator[tuple[int, int, _Exchange]]:
    """Yield two parts and the best exchange between them, those that differ most first."""
    ranked = sorted(range(len(parts)), key=lambda part: sums[part])
    for heavy in reversed(ranked):
        for light in ranked:
            if sums[light] < sums[heavy]:
                found = _best_exchange(parts[heavy], parts[light], sums[heavy] - sums[light], costs)
                if found is not None:
                    yield heavy, light, found


def _best_exchange(heavy: list[int], light: list[int], gap: float, costs: Sequence[float]) -> _Exchange | None:
    """Return the exchange after which two parts, whose sums differ by ``gap`` now, differ least; None if none helps."""
    takes = sorted((_sum(few, costs), few) for few in _few(light))
    sums, best = [total for total, _ in takes], None
    for given in _few(heavy):
        moved = _sum(given, costs)
        nearest = bisect_left(sums, moved - gap / 2)
        for total, taken in takes[max(0, nearest - 1) : nearest + 1]:
            helps = 1e-6 * gap < moved - total < (1 - 1e-6) * gap  # not by rounding alone
            error = abs(moved - total - gap / 2)
            if helps and len(heavy) + len(taken) > len(given) and (best is None or error < best.error):
                best = _Exchange(error, given, taken)
    return best


def _few(part: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield no sample of a part, each one, and, of a small part, each two."""
    for count in range(3 if len(part) <= _OF_PAIRS else 2):
        yield from combinations(part, count)


def _shake(parts: Parts, costs: Sequence[float], generator: random.Random) -> None:
    """Exchange one sample of the most expensive part with each of three others."""
    heavy = max(range(len(parts)), key=lambda part: _sum(parts[part], costs))
    others = [part for part in range(len(parts)) if part != heavy]
    for other in generator.sample(others, min(3, len(others))):
        a, b = generator.randrange(len(parts[heavy])), generator.randrange(len(parts[other]))
        parts[heavy][a], parts[other][b] = parts[other][b], parts[heavy][a]


# ------------------------------------------------------------------------------------ shares to ranks

Deal = tuple[int, ...]
"""The number of shares of each rank. Rank 0 has the first ones, rank 1 those after them, and so on."""


def equal_deal(shares: int, world: int) -> Deal:
    """Deal equally many shares to each rank, or one more to the first ones: 8 to three ranks as 3, 3 and 2."""
    each, more = divmod(shares, world)
    return tuple(each + (rank < more) for rank in range(world))


def deal_by_speed(shares: int, seconds: Sequence[float]) -> Deal:
    """Deal shares to ranks on which a share takes so many seconds, so that the slowest is ready as soon as possible; at
    least one to each rank, if there are enough."""
    world = len(seconds)
    counts = [int(shares >= world)] * world
    for _ in range(shares - sum(counts)):
        counts[min(range(world), key=lambda rank: (counts[rank] + 1) * seconds[rank])] += 1
    return tuple(counts)


def slowest(deal: Deal, seconds: Sequence[float]) -> float:
    """Return the seconds that the slowest rank needs for its shares."""
    return max(count * each for count, each in zip(deal, seconds, strict=True))


class Dealt(NamedTuple):
    """How shares are dealt to the ranks, and how long a share takes on each."""

    deal: Deal
    seconds: Sequence[float]
    """Seconds of a share by rank; NaN if not known."""

    @property
    def saved(self) -> float:
        """The part of the slowest rank's time that the deal saves, beside an equal one; NaN if not known."""
        if not all(map(isfinite, self.seconds)):
            return nan
        equal = slowest(equal_deal(sum(self.deal), len(self.deal)), self.seconds)
        return 1 - slowest(self.deal, self.seconds) / equal if equal else 0.0


# ----------------------------------------------------------------------------------- what samples cost


def costs_of(given: Any, samples: int | None, caller: str) -> Sequence[float]:
    """Return the cost of each sample: ``given`` are numbers, a function of the sample's number, or the samples.

    Of samples that are sequences - lists, strings, tensors - the cost is the length. Raises :class:`OptionError`.
    """
    if callable(given) and not hasattr(given, "__getitem__"):
        of: Callable[[int], Any] = given
    elif not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        raise OptionError(
            f"{caller}: costs are a sequence with one number for each sample, or a function of the sample's number; "
            f"got {type(given).__name__}"
        )
    elif samples is not None and len(given) != samples:
        raise OptionError(f"{caller}: got costs of {len(given)} samples, and a data set of {samples}; give one each")
    else:
        of = given.tolist().__getitem__ if hasattr(given, "tolist") else given.__getitem__
    number = len(given) if samples is None else samples
    return array("d", (_cost(of(sample), sample, caller) for sample in range(number)))


def digest_of(costs: Sequence[float]) -> str:
    """Return a text that is another one for other costs."""
    return hashlib.blake2b(array("d", costs).tobytes(), digest_size=8).hexdigest()


def _cost(value: Any, sample: int, caller: str) -> float:
    if isinstance(value, str | list | bytes) or getattr(value, "ndim", 0) > 0:
        return float(len(value))
    try:
        cost = float(value)
    except (TypeError, ValueError):
        cost = -1.0
    if not isfinite(cost) or cost < 0:
        raise OptionError(
            f"{caller}: the cost of sample {sample} is a finite number, 0 or more, or a sequence whose length it is, "
            f"got {value!r:.100} of type {type(value).__name__}; give the costs as numbers, such as "
            "[len(tokens) for tokens, label in dataset]"
        )
    return cost
