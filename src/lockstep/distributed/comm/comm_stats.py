"""PURE: statistics of one module's collectives: bytes, seconds hidden by backward, and this rank's step times.

A step time is the time that this rank works by itself in a round; it tells a slow rank from those that wait for it.
"""

from collections import deque
from itertools import islice
from statistics import median

from torch import Tensor


class CommStats:
    """Counts the collectives of one module."""

    __slots__ = ("bytes_reduced", "hidden_seconds", "step_times")

    def __init__(self) -> None:
        self.bytes_reduced = 0
        """Bytes of this rank's tensors that were all-reduced."""
        self.hidden_seconds = 0.0
        """Seconds from the first collective of each round to the end of backward: communication that backward hid."""
        self.step_times = StepTimes()

    def reduces(self, tensor: Tensor) -> None:
        """Count a tensor that is all-reduced; of a sparse one, its values (test_a_sparse_bucket)."""
        self.bytes_reduced += tensor._values().nbytes if tensor.is_sparse else tensor.nbytes

    def waits(self, begun: float | None, now: float) -> None:
        """Note that this rank waits for a round from ``now`` on; ``begun``: when its first collective began, if any."""
        self.step_times.waits(now)
        if begun is not None:
            self.hidden_seconds += now - begun


RECENT = 16
"""Number of rounds in the present median."""
KEPT = 256
"""Number of rounds that are remembered, including the recent ones."""


class StepTimes:
    """Records, for one module on this rank, the time from the end of one wait to the start of the next.

    That is the rank's own work: data, forward, backward and optimizer. Medians exclude an occasional validation or
    checkpoint.
    """

    __slots__ = ("_ended", "_own")

    def __init__(self) -> None:
        self._own: deque[float] = deque(maxlen=KEPT)
        self._ended: float | None = None

    def waits(self, now: float) -> None:
        """Note that this rank starts to wait for a round, at a time in seconds."""
        if self._ended is not None:
            self._own.append(now - self._ended)

    def has_waited(self, now: float) -> None:
        """Note that the round is over."""
        self._ended = now

    @property
    def recent(self) -> float | None:
        """Seconds per round, the median of the last 16; None before the second round."""
        return median(islice(reversed(self._own), RECENT)) if self._own else None

    @property
    def before(self) -> float | None:
        """Seconds per round, the median of those before the last 16; None if there are none."""
        return median(islice(self._own, len(self._own) - RECENT)) if len(self._own) > RECENT else None
