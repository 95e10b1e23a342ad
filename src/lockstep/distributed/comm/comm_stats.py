"""Counts the collectives of one module, and measures the step times of this rank."""

from collections import deque
from itertools import islice
from statistics import median

RECENT = 16
"""Number of rounds in the present median of step times."""


KEPT = 256
"""Number of rounds whose step times are remembered, including the recent ones."""


class CommStats:
    """Counts the collectives of one module, and records this rank's step times.

    A step time is the time from the end of one wait to the start of the next: the rank's own work, which is data,
    forward, backward and optimizer. It tells a slow rank from those that wait for it. Medians exclude an occasional
    validation or checkpoint.
    """

    __slots__ = ("_ended", "_step_times", "bytes_reduced", "hidden_seconds")

    def __init__(self) -> None:
        self.bytes_reduced = 0
        """Bytes of this rank's tensors that were all-reduced."""
        self.hidden_seconds = 0.0
        """Seconds from the first collective of each round to the end of backward: communication that backward hid."""
        self._step_times: deque[float] = deque(maxlen=KEPT)
        self._ended: float | None = None

    def waited(self, since: float, until: float, begun: float | None) -> None:
        """Note that this rank has waited for a round; ``begun``: when its first collective began, if any."""
        if self._ended is not None:
            self._step_times.append(since - self._ended)
        if begun is not None:
            self.hidden_seconds += since - begun
        self._ended = until

    def has_waited(self, now: float) -> None:
        """Note that the round, of which more was to come, is over."""
        self._ended = now

    @property
    def recent(self) -> float | None:
        """Seconds per step, the median of the last 16; None before the second round."""
        return median(islice(reversed(self._step_times), RECENT)) if self._step_times else None

    @property
    def before(self) -> float | None:
        """Seconds per step, the median of those before the last 16; None if there are none."""
        count = len(self._step_times) - RECENT
        return median(islice(self._step_times, count)) if count > 0 else None
