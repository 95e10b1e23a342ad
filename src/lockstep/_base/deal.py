"""PURE: deals samples of unequal cost to ranks or shares, and shares to ranks of unequal speed.

The most expensive one decides how long a step takes. :func:`deal` adds up costs: the most expensive sample goes to
whoever has least so far, and so on.
:func:`deal_padded` is for batches that are padded to their longest sample: a part costs the number of its samples times
the largest cost, so samples of similar cost go together. It finds the best deal.

The result depends on the costs and the number of parts alone: every rank comes to the same one by itself.
"""

import hashlib
import heapq
from array import array
from collections.abc import Callable, Sequence
from math import isfinite, nan
from typing import Any, NamedTuple

from lockstep.errors import OptionError

Parts = list[list[int]]
"""The places of the samples of each part, in ascending order."""
_HALVINGS = 50
"""Number of times that the interval in which the best cost lies is halved: down to rounding."""


def deal(costs: Sequence[float], parts: int) -> Parts:
    """Deal samples to ``parts`` parts whose sums of costs are about equal; no part is empty without need.

    The most expensive sample goes to the part that has least so far, and so on. The largest part costs at most 4/3 of
    the best possible (Graham, 1969); docs/slow_rank.md says what was measured.
    """
    dealt: Parts = [[] for _ in range(parts)]
    sums = [(0.0, 0, part) for part in range(parts)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        total, count, part = heapq.heappop(sums)
        dealt[part].append(place)
        heapq.heappush(sums, (total + costs[place], count + 1, part))
    return [sorted(part) for part in dealt]


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
