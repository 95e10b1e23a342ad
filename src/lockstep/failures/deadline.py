"""PURE: how long ranks wait for one that makes no progress, before that is a failure."""

import statistics
from collections import deque
from dataclasses import dataclass

from lockstep.errors import OptionError
from lockstep.failures.where import OF_A_STEP

FIRST_STEPS = 5
"""Steps that are given the patience of the start: kernels are chosen, caches are filled, modules are compiled."""
EARLY = 0.9
"""The part of a time-out after which ranks ask who is late, however long their steps are."""


@dataclass(frozen=True)
class StallLimits:
    """When a rank is late.

    In a step: after ``factor`` times the median step, but at least ``minimum`` seconds, and at most :attr:`patience`.
    During the first steps, while something is compiled, and in every other phase (start-up, a checkpoint, an
    evaluation, what the program names): after that.
    """

    factor: float = 20.0
    minimum: float = 60.0
    timeout: float = 600.0
    """Seconds after which a collective fails anyway; that blames nobody, or whoever has waited."""

    def __post_init__(self) -> None:
        for name in ("factor", "minimum", "timeout"):
            value = getattr(self, name)
            if not value > 0:
                raise OptionError(f"the limit of a stall has {name}={value!r}, expected a number above 0")

    @property
    def patience(self) -> float:
        """The longest limit in seconds, unless ``minimum`` is more: it leaves time to ask the ranks where they are."""
        return EARLY * self.timeout


class Deadline:
    """The limit that holds now, from how long the steps of this rank have taken; :meth:`observe` it now and then."""

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._count = 0
        self._since: float | None = None
        self._lengths: deque[float] = deque(maxlen=64)

    def observe(self, count: int, now: float) -> None:
        """Note how many steps the rank has begun; those between two looks count with their mean length.

        Where nobody counts steps, collectives are counted instead: they take less time, but no limit is that short.
        """
        if self._since is not None and count > self._count:
            self._lengths.append((now - self._since) / (count - self._count))
        if self._since is None or count != self._count:
            self._since, self._count = now, count

    def seconds(self, phase: str) -> float:
        """How long others may wait for a rank that is in a phase."""
        if phase not in OF_A_STEP or self._count <= FIRST_STEPS or not self._lengths:
            return max(self._limits.patience, self._limits.minimum)
        of_steps = self._limits.factor * statistics.median(self._lengths)
        return max(self._limits.minimum, min(of_steps, self._limits.patience))

    def explain(self, phase: str) -> str:
        """Where :meth:`seconds` comes from, for a message."""
        if phase not in OF_A_STEP:
            return f"the limit in {phase}"
        if self._count <= FIRST_STEPS or not self._lengths:
            return "the limit in the first steps"
        median = statistics.median(self._lengths)
        factor, least, most = self._limits.factor, self._limits.minimum, self._limits.patience
        at_most = f", at most {most:g} s" if factor * median > most > least else ""
        return f"{factor:g} times the median step of {median:.3g} s, at least {least:g} s{at_most}"
