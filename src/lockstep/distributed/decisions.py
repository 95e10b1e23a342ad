"""What ranks decide together without a collective: to stop, to leave a batch out; which batch they are at.

Each rank says it of its own loop in the report of its next round (``reduction/report.py``). All ranks read the same
report, so all know in the same step.
"""

from typing import NamedTuple

_STOPS, _SKIPS, _IDLE = 1, 2, 4
_BATCHES = 31  # 8 * (batch % 31) + flags <= 247: exact even in bfloat16


class LoopStatus(NamedTuple):
    """What one rank says of its loop."""

    batch: int = 0
    """Which batch it is at; 0 if nobody counts them."""
    stops: bool = False
    """Whether all ranks are to stop after this step."""
    skips: bool = False
    """Whether all ranks are to leave this batch out."""
    idle: bool = False
    """Whether it has run out of batches, and contributes nothing."""

    def encode(self) -> int:
        """As it travels: a whole number below 256, with the last bits of the batch's number."""
        return 8 * batch_code(self.batch) + self.stops * _STOPS + self.skips * _SKIPS + self.idle * _IDLE

    @classmethod
    def decode(cls, code: int) -> "LoopStatus":
        """What :meth:`encode` gave."""
        batch, flags = divmod(code, 8)
        return cls(batch, bool(flags & _STOPS), bool(flags & _SKIPS), bool(flags & _IDLE))


def batch_code(number: int) -> int:
    """The part of a batch's number that travels."""
    return number % _BATCHES
