"""PURE: which ranks wait for each other for ever, which calls differ, and the messages that say so.

A rank takes part in a collective once it has launched it, whether it waits for it or not. A wait can never end if the
collective needs ranks that have not launched it, and all of these have left, or are in waits that can never end
themselves. What is not known counts as launched: a group that a rank does not name may be used by threads, or by calls,
that nobody sees. So several groups, pipelines, and ranks that still compute give no alarm.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from lockstep._base.texts import IN_LOOP, LEFT_LOOP, ranks_in_words
from lockstep.failures.whereabouts import Wait, Whereabouts

ByRank = Mapping[int, Whereabouts]
"""The answers of some ranks, by rank."""


def missing(wait: Wait, rank: int, answers: ByRank) -> set[int]:
    """Return the ranks that a wait of ``rank`` needs and that have certainly not launched its collective."""
    others = (answers[each] for each in wait.needed if each != rank and each in answers)
    return {each.rank for each in others if _is_missing(wait, each)}


def _is_missing(wait: Wait, other: Whereabouts) -> bool:
    launched = other.launched.get(wait.group)
    if launched is None:
        return False
    if launched >= wait.number:
        same = [each for each in other.waits if (each.group, each.number) == (wait.group, wait.number)]
        return any(each.kind and wait.kind and each.kind != wait.kind for each in same)
    return wait.exact or launched == wait.number - 1


def stuck(answers: ByRank) -> frozenset[int]:
    """Return the ranks that can never go on: the largest set of ranks whose waits lack only ranks of the set, or ranks
    that have left."""
    left = {rank for rank, each in answers.items() if each.has_left}
    found = {rank for rank, each in answers.items() if each.waits}
    while free := {rank for rank in found if not _is_stuck(rank, answers, found | left)}:
        found -= free
    return frozenset(found)


def could_be_stuck(rank: int, answers: ByRank) -> bool:
    """Return False if a look at one rank shows that :func:`stuck`, which looks at all, does not contain it."""
    return _is_stuck(rank, answers, {each for each, other in answers.items() if other.waits or other.has_left})


def _is_stuck(rank: int, answers: ByRank, gone: Collection[int]) -> bool:
    waits = answers[rank].waits if rank in answers else ()
    lacks = (missing(wait, rank, answers) for wait in waits)
    return bool(waits) and all(each and each.issubset(gone) for each in lacks)


# ------------------------------------------------------------------------------------------------------ in words


def describe(found: Collection[int], answers: ByRank) -> str:
    """Return who waits where."""
    lines = []
    for rank in sorted(found):
        who = f"rank {rank}{answers[rank].steps and f', {answers[rank].steps},'}"
        for wait in answers[rank].waits:
            lacks = missing(wait, rank, answers)
            to_come = f", without {ranks_in_words(lacks)}" if lacks else ""
            at = f"{to_come}{_called_from(wait.place)}"
            lines.append(f"  {who} has waited for {answers[rank].seconds:.1f} s in {wait.what}{at}")
    return "\n".join(lines)


def explain(found: Collection[int], answers: ByRank) -> str:
    """Return that ranks wait for each other for ever, where they wait, and what to do."""
    head = f"{ranks_in_words(found)} wait for each other in different collectives, and can never go on:"
    what_to_do = advice(wait.what for rank in found for wait in answers[rank].waits)
    return "\n".join([head, describe(found, answers), what_to_do])


def differ(answers: ByRank, ranks: Iterable[int]) -> str:
    """Return which calls ``ranks`` are in that have noticed together that theirs are not the same, and what to do."""
    unknown = Whereabouts(-1, waits_for="another collective")
    found = {rank: answers.get(rank, unknown) for rank in sorted(ranks)}
    calls = {rank: f"in {each.waits_for}{each.steps and f', {each.steps}'}" for rank, each in found.items()}
    lines = [f"  rank {rank} {calls[rank]}{_called_from(each.place)}" for rank, each in found.items()]
    return "\n".join([*lines, advice(calls.values())])


def _called_from(place: str) -> str:
    return f", called from {place}" if place else ""


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
