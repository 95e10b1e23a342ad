"""Deals shares to ranks by the time that a share takes on each.

Each rank reports, at the end of each step, the median time of a share in its last steps, and how many batches ahead of
training its loader has asked for. From these reports alone all ranks come to the same decision. It applies from the
first batch that no rank's loader can have asked for yet, so that every rank has loaded the shares that it is dealt.

A deal changes only if the slowest rank is expected to gain :data:`GAIN`: noise moves no shares. Every rank keeps one
share at least, for a rank without one could not be measured any more.
"""

from collections import deque
from collections.abc import Collection, Sequence
from math import isnan, nan
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from lockstep._base.deal import Deal, deal_by_speed, equal_deal, slowest

GAIN = 0.05
"""Part of a step's time that another deal has to save."""
_STEPS = 5
"""Number of steps whose median is reported."""
_LEAST_STEPS = 3
"""Number of steps before the first report."""


class Pace(NamedTuple):
    """A rank's report."""

    seconds: float = nan
    """Seconds of a share: NaN if not known yet."""
    ahead: int = 0
    """Number of batches after this one of which the rank's loader may have asked for shares."""


class ShareClock:
    """Measures how long a share takes on this rank: the median of its last steps.

    Of a step's shares the last is not counted, except if it is the only one: it may wait for other ranks, to which it
    sends gradients. Loading counts. On an accelerator, the time is that of the accelerator; nothing waits for it, so it
    may be known some steps later.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_STEPS)
        self._pending: deque[tuple[Any, Any, int]] = deque(maxlen=_STEPS)
        self._begin: Any = None
        self._device: torch.device | None = None

    def begin(self, devices: Collection[torch.device]) -> None:
        """Begin a step, of modules on these devices."""
        accelerators = sorted(str(device) for device in devices if device.type != "cpu")
        self._device = torch.device(accelerators[0]) if accelerators else None
        self._begin = self._now()

    def end(self, shares: int) -> None:
        """End what is measured of a step: the first ``shares`` shares."""
        self._pending.append((self._begin, self._now(), shares))

    def _now(self) -> Any:
        if self._device is None:
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """Return the median seconds of a share in the last steps, or NaN."""
        while self._pending and all(map(_is_over, self._pending[0][:2])):
            begin, end, shares = self._pending.popleft()
            took = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
            self._recent.append(took / shares)
        return median(self._recent) if len(self._recent) >= _LEAST_STEPS else nan


def _is_over(moment: Any) -> bool:
    return isinstance(moment, float) or bool(moment.query())


class Balance:
    """The deals of the batches of one :class:`~lockstep.shares.GlobalBatches`: the same on every rank.

    Batches are numbered through all epochs.
    """

    def __init__(self) -> None:
        self._since: list[tuple[int, Sequence[float] | None]] = [(0, None)]
        """From which batch on shares are dealt by these seconds; None: equally many to each rank."""
        self._asked_for = -1

    def deal(self, batch: int, shares: int, world: int) -> Deal:
        """Return the deal of a batch."""
        seconds = next(seconds for since, seconds in reversed(self._since) if since <= batch)
        return equal_deal(shares, world) if seconds is None else deal_by_speed(shares, seconds)

    def ask_for(self, batch: int) -> None:
        """Note that this rank's loader asks for shares of a batch."""
        self._asked_for = batch

    def ahead(self, batch: int) -> int:
        """Return how many batches after this one the loader may have asked for."""
        return max(0, self._asked_for - batch)

    def decide(self, batch: int, deal: Deal, paces: Sequence[Pace]) -> None:
        """Change the deal of later batches if that is worth it, after a batch with these reports of all ranks."""
        if self._since[-1][0] > batch or any(isnan(pace.seconds) for pace in paces):
            return
        seconds = choose(deal, [pace.seconds for pace in paces])
        if seconds is not None:
            since = batch + 2 + max(pace.ahead for pace in paces)  # the next step is agreed on already
            self._since = [self._since[-1], (since, seconds)]


def choose(deal: Deal, seconds: Sequence[float]) -> Sequence[float] | None:
    """Return the seconds by which shares are dealt from now on; None if the deal is good enough."""
    best = deal_by_speed(sum(deal), seconds)
    return seconds if slowest(best, seconds) < (1 - GAIN) * slowest(deal, seconds) else None
