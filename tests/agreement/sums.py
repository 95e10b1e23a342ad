"""What the statuses of some ranks add up to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lockstep.distributed.reduction.report.status import ROW, Status, Sums, decode


def sums_of(statuses: Sequence[Status]) -> Sums:
    """Return what they add up to, as the row would."""
    return decode([sum(column) for column in zip(*map(ROW.encode, statuses, itertools.count()), strict=False)])
