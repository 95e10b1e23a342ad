"""PURE: which rank keeps the others waiting for too long, according to the answers of all, and the message about it."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import OptionError
from lockstep.failures.failure import Failure, Kind
from lockstep.failures.progress import PHASES_OF_A_STEP
from lockstep.failures.whereabouts import Whereabouts

FIRST_STEPS = 5
"""Number of steps that have the longer limit of the start: kernels are chosen, caches filled, modules compiled."""
EARLY = 0.9
"""Ranks ask which one is late after this part of a time-out, however long their steps are."""


@dataclass(frozen=True)
class StallLimits:
    """The limits after which a rank is late.

    Within a step: ``factor`` times the median step, but at least ``minimum`` seconds, and at most :attr:`patience`. In
    the first steps, while something is compiled, and in every other phase (start-up, a checkpoint, an evaluation, any
    that the program names): :attr:`patience`.
    """

    factor: float = 20.0
    minimum: float = 60.0
    timeout: float = 600.0
    """Seconds after which a collective fails anyway; that error blames no rank, or the one that has waited."""

    def __post_init__(self) -> None:
        for name in ("factor", "minimum", "timeout"):
            value = getattr(self, name)
            if not value > 0:
                raise OptionError(f"the limit of a stall has {name}={value!r}, expected a number above 0")

    @property
    def patience(self) -> float:
        """The longest limit in seconds, unless ``minimum`` is more; it leaves time to ask the ranks where they are."""
        return EARLY * self.timeout


class Deadline:
    """The present limit, from how long the steps of this rank have taken; call :meth:`observe` regularly, from ``now``
    on, at which it has made no step."""

    def __init__(self, limits: StallLimits, now: float) -> None:
        self._limits = limits
        self._count = 0
        self._since = self._observed = now
        self._lengths: deque[float] = deque(maxlen=64)

    def observe(self, count: int, now: float) -> None:
        """Record how many steps the rank has begun; steps between two calls count with their mean length.

        If steps are not counted, collectives are counted instead: they take less time, but no limit is that short.
        """
        if count > max(self._count, 1):
            begin = self._since if self._count else self._observed  # the first step came after the last call
            self._lengths.append((now - begin) / (count - self._count))
        if count != self._count:
            self._since = now
            self._count = count
        self._observed = now

    def limit(self, phase: str) -> tuple[float, str]:
        """Return how many seconds others may wait for a rank that is in a phase, and why, for a message."""
        factor, least, most = self._limits.factor, self._limits.minimum, self._limits.patience
        if phase not in PHASES_OF_A_STEP:
            return max(least, most), f"the limit in {phase}"
        if self._count <= FIRST_STEPS:
            return max(least, most), "the limit in the first steps"
        median = statistics.median(self._lengths)
        at_most = f", at most {most:g} s" if factor * median > most > least else ""
        why = f"{factor:g} times the median step of {median:.3g} s, at least {least:g} s{at_most}"
        return max(least, min(factor * median, most)), why


def late(answers: Sequence[Whereabouts], waited: float) -> Whereabouts | None:
    """Return the rank for which another one has ``waited`` that many seconds; None if it cannot be determined.

    It is a rank that does not wait for others; of several, one that cannot even answer, else the one that is furthest
    behind. A rank that proceeds from step to step meanwhile does not count. If all wait, it is the one that is furthest
    behind, while others are in a later collective; None if all are in the same.
    """
    counted = all(each.begun is not None for each in answers)

    def behind(each: Whereabouts) -> tuple[bool, int, int, float]:
        return each.answers and not each.stopped, (each.begun or 0) if counted else 0, each.step or 0, -each.idle

    busy = [each for each in answers if not each.waits_for or each.stopped]
    if busy:
        return min((each for each in busy if not each.answers or each.idle > waited / 2), key=behind, default=None)
    first, last = min(answers, key=behind), max(answers, key=behind)
    if behind(first)[1:3] != behind(last)[1:3]:
        return first
    return _odd_one_out(answers)


def absent(answers: Sequence[Whereabouts]) -> Whereabouts | None:
    """Return the rank that others have waited for until their time-out; None if it cannot be determined.

    It is a rank that cannot answer; else one that does not wait and has begun fewer collectives than another one. (A
    rank whose own time-out is just over does not wait any more, either, but has begun as many.)
    """
    silent = [each for each in answers if not each.answers or each.stopped]
    most = max((each.begun for each in answers if each.begun is not None), default=0)
    elsewhere = [each for each in answers if not each.waits_for and each.begun is not None and each.begun < most]
    return min(silent or elsewhere, key=lambda each: (each.begun or 0, each.step or 0, -each.idle), default=None)


def _odd_one_out(answers: Sequence[Whereabouts]) -> Whereabouts | None:
    """Return one of equally advanced ranks that waits for something that most others do not wait for."""
    waits = [each.waits_for for each in answers]
    rarest = min(answers, key=lambda each: waits.count(each.waits_for))
    return rarest if waits.count(rarest.waits_for) < len(answers) else None


def stalled(found: Whereabouts, answers: Sequence[Whereabouts], what: str) -> Failure:
    """Return the failure to report if others have waited for ``found``; ``what`` says who, and for how long."""
    others = "\n".join(each.line() for each in sorted(answers, key=lambda each: each.rank) if each.rank != found.rank)
    stack = found.stack or "  no stack: " + ("it is stopped" if found.stopped else "it could not be asked")
    stacks = f"{stack}\n\nThe other ranks:\n{others}"
    kind = Kind.UNREACHABLE if found.silent_host else Kind.STALLED
    what += f". {_condition(found)}"
    calls = {each.waits_for for each in answers if each.waits_for.endswith("()")}  # such as save()
    if calls and {each.waits_for for each in answers} != calls:
        what += f". Call {min(calls)} on every rank, not under `if run.is_main`"
    return Failure(found.rank, kind, found.step, found.phase, what, stacks=stacks, in_batches=found.in_batches)


def _condition(found: Whereabouts) -> str:
    process = f"Its process {found.pid}" if found.pid else "Its process"
    if found.stopped:
        return f"{process} is stopped (SIGSTOP, Ctrl-Z or a debugger); `kill -CONT` lets it go on"
    if found.silent_host:
        return f"Its host {found.silent_host} does not answer: that host, or the network to it, is down"
    if not found.answers and found.stack:
        return f"{process} is alive, but a call into C code holds its interpreter and does not come back"
    if not found.answers:
        return f"{process} does not answer: it is stopped, its host is gone, or a call into C code holds it"
    if found.waits_for:
        return f"{process} is alive, and waits in another collective: {found.waits_for}"
    return f"{process} is alive, and has been in {found.phase} for {found.idle:.0f} s"
