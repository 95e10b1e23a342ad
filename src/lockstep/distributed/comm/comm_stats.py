"""Statistics of one module's collectives: bytes, seconds hidden by backward, and the step_times of this rank. PURE.

The step_times is how long a rank works by itself in each round, which tells a late rank from those that wait for it.
"""

from collections import deque
from itertools import islice
from statistics import median

from torch import Tensor


class CommStats:
    """Counts what one module sends."""

    __slots__ = ("bytes_reduced", "hidden_seconds", "step_times")

    def __init__(self) -> None:
        self.bytes_reduced = 0
        """Bytes of this rank's tensors that have gone into all-reduces."""
        self.hidden_seconds = 0.0
        """From the first collective of each round to the end of backward: time in which backward hid them."""
        self.step_times = StepTimes()

    def reduces(self, tensor: Tensor) -> None:
        """Note that an all-reduce of a tensor begins; of a sparse one the values count (test_a_sparse_bucket)."""
        self.bytes_reduced += tensor._values().nbytes if tensor.is_sparse else tensor.nbytes

    def waits(self, begun: float | None, now: float) -> None:
        """Note that a round is waited for from ``now`` on, of which the first collective had ``begun`` before, if any
        has."""
        self.step_times.waits(now)
        if begun is not None:
            self.hidden_seconds += now - begun


RECENT = 16
"""Rounds whose median is the step_times now."""
KEPT = 256
"""Rounds that are remembered, the recent ones included."""


class StepTimes:
    """Notes, for one module on this rank, how long it takes from the end of one wait to the beginning of the next.

    That is the rank's own work: data, forward, backward and optimizer. Medians, so that a validation or a checkpoint
    now and then does not count.
    """

    __slots__ = ("_ended", "_own")

    def __init__(self) -> None:
        self._own: deque[float] = deque(maxlen=KEPT)
        self._ended: float | None = None

    def waits(self, now: float) -> None:
        """Note that this rank begins to wait for a round, at a moment in seconds."""
        if self._ended is not None:
            self._own.append(now - self._ended)

    def has_waited(self, now: float) -> None:
        """Note that the round is over."""
        self._ended = now

    @property
    def recent(self) -> float | None:
        """Seconds a round, the median of the last 16; None before the second round."""
        return median(islice(reversed(self._own), RECENT)) if self._own else None

    @property
    def before(self) -> float | None:
        """Seconds a round, the median of those before the last 16; None if there are none."""
        return median(islice(self._own, len(self._own) - RECENT)) if len(self._own) > RECENT else None
