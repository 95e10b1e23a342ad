"""PURE: which ranks wait for each other for ever, and the message that says so.

A rank takes part in a collective once it has launched it, whether it waits for it or not. A wait can never end if the
collective needs ranks that have not launched it, and all of these have left, or are in waits that can never end
themselves. What is not known counts as launched: a group that a rank does not name may be used by threads, or by calls,
that nobody sees. So several groups, pipelines, and ranks that still compute give no alarm.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep._base.texts import IN_LOOP, LEFT_LOOP, ranks_in_words


@dataclass(frozen=True)
class Wait:
    """One thread of a rank that waits for other ranks in a collective."""

    group: str
    """The name of the group, the same on all ranks."""
    number: int
    """The number of the collective on this group."""
    kind: str
    """The kind of collective, if it is known; ranks in different kinds of one number are not in the same collective."""
    needed: tuple[int, ...]
    """The ranks without which it cannot end, numbered as all ranks are."""
    exact: bool = True
    """False if messages between two ranks are counted, too, so that numbers may differ between the ranks. Then a rank
    has not launched the collective only if it is exactly one behind."""
    what: str = ""
    """The collective in words."""
    place: str = ""
    """The line of the program that this thread is at."""


@dataclass(frozen=True)
class WaitReport:
    """What one rank tells the others when it has waited for a second."""

    waits: tuple[Wait, ...] = ()
    """Of each thread that could launch collectives one. Empty if the rank does not wait, or is done."""
    launched: Mapping[str, int] = field(default_factory=dict)
    """For each group the number of the last collective that the rank has launched; without the groups in which another
    thread could launch the next one."""
    seconds: float = 0.0
    """For how long it has waited."""
    has_left: bool = False
    """True if it will launch nothing more."""
    steps: str = ""
    """How many steps its optimizer has made, in words; empty if they are not counted."""

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> "WaitReport":
        """Rebuild a report from its fields as JSON has them."""
        waits = tuple(Wait(**{**each, "needed": tuple(each["needed"])}) for each in fields["waits"])
        return cls(waits, dict(fields["launched"]), fields["seconds"], fields["has_left"], fields["steps"])

    def fields(self) -> dict[str, Any]:
        """Return the report as JSON can have it."""
        return asdict(self)


def missing(wait: Wait, rank: int, reports: Mapping[int, WaitReport]) -> set[int]:
    """Return the ranks that a wait of ``rank`` needs and that have certainly not launched its collective."""
    return {each for each in wait.needed if each != rank and _is_missing(wait, reports.get(each, _UNKNOWN))}


_UNKNOWN = WaitReport()


def _is_missing(wait: Wait, of_other: WaitReport) -> bool:
    launched = of_other.launched.get(wait.group)
    if launched is None:
        return False
    if launched >= wait.number:
        same = [each for each in of_other.waits if (each.group, each.number) == (wait.group, wait.number)]
        return any(each.kind and wait.kind and each.kind != wait.kind for each in same)
    return wait.exact or launched == wait.number - 1


def stuck(reports: Mapping[int, WaitReport]) -> frozenset[int]:
    """Return the ranks that can never go on: the largest set of ranks whose waits lack only ranks of the set, or ranks
    that have left."""
    left = _left(reports)
    found = {rank for rank, report in reports.items() if report.waits}
    while True:
        free = {rank for rank in found if not _is_stuck(rank, reports, found | left)}
        if not free:
            return frozenset(found)
        found -= free


def could_be_stuck(rank: int, reports: Mapping[int, WaitReport]) -> bool:
    """Return False if a look at one rank shows that :func:`stuck` does not contain it."""
    return _is_stuck(rank, reports, {each for each, other in reports.items() if other.waits} | _left(reports))


def _left(reports: Mapping[int, WaitReport]) -> set[int]:
    return {rank for rank, report in reports.items() if report.has_left}


def _is_stuck(rank: int, reports: Mapping[int, WaitReport], gone: Collection[int]) -> bool:
    waits = reports.get(rank, _UNKNOWN).waits
    return bool(waits) and all(_is_for_ever(wait, rank, reports, gone) for wait in waits)


def _is_for_ever(wait: Wait, rank: int, reports: Mapping[int, WaitReport], gone: Collection[int]) -> bool:
    lacks = missing(wait, rank, reports)
    return bool(lacks) and lacks.issubset(gone)


# ------------------------------------------------------------------------------------------------------ in words


def describe(found: Collection[int], reports: Mapping[int, WaitReport]) -> str:
    """Return who waits where."""
    return "\n".join(f"  {line}" for rank in sorted(found) for line in _waits_of(rank, reports))


def explain(found: Collection[int], reports: Mapping[int, WaitReport]) -> str:
    """Return that ranks wait for each other for ever, where they wait, and what to do."""
    head = f"{ranks_in_words(found)} wait for each other in different collectives, and can never go on:"
    what_to_do = advice(wait.what for rank in found for wait in reports[rank].waits)
    return "\n".join([head, describe(found, reports), what_to_do])


def advice(collectives: Iterable[str]) -> str:
    """Return what to do about ranks that are in different collectives, which are given in words."""
    texts = list(collectives)
    have_left = [LEFT_LOOP in text for text in texts]
    if any(have_left) and not all(have_left):
        return "To leave the loop on all ranks at the same batch, ask `if run.agree(flag): break` on every rank"
    without_loops = (text.replace(IN_LOOP, "").replace(LEFT_LOOP, "") for text in texts)
    calls = sorted(set(re.findall(r"\b\w+\(\)", "\n".join(without_loops))))
    in_loop = any(IN_LOOP in text or LEFT_LOOP in text for text in texts)
    by_batches = (
        ". If one rank has a batch more or less, loop over `run.batches(loader)`; if it leaves out a batch that fails, "
        "put `lockstep.loop.skip_on(ValueError)` around the batch in place of `try`, and all ranks leave it out"
    )
    if "batches()" in calls or in_loop:
        by_batches = ", and run as many epochs on every rank" if "batches()" in calls else ""
    return (
        f"Call {' and '.join(calls) or 'each collective'} on every rank, as often and in the same order: not under "
        "`if run.is_main`, nor under any other condition that differs between ranks (`run.agree(flag)` makes it the "
        f"same){by_batches}"
    )


def _waits_of(rank: int, reports: Mapping[int, WaitReport]) -> list[str]:
    report = reports[rank]
    lines = []
    for wait in report.waits:
        lacks = missing(wait, rank, reports)
        to_come = f", without {ranks_in_words(lacks)}" if lacks else ""
        at = f", called from {wait.place}" if wait.place else ""
        who = f"rank {rank}{report.steps and f', {report.steps},'}"
        lines.append(f"{who} has waited for {report.seconds:.1f} s in {wait.what}{to_come}{at}")
    return lines
