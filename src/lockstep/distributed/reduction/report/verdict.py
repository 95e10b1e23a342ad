"""The verdict on a round: every rule about differences between ranks, and every message, in one file.

:func:`judge` is a pure function of what all ranks have reported (``status.py``), so all ranks get the same verdict;
only the message differs, which names the rank that reads it. All further actions depend on the verdict alone. Where no
rank is at fault, the sums of the statuses are enough; the rules read the status of each rank, which is gathered only if
the sums say that ranks differ (:attr:`Sums.name_ranks`).

To add a rule, write a function that returns a message, and add a line to :data:`_ALWAYS` or :data:`_COUNTING`. Rules
are asked in order, and the first message is used.
"""

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from lockstep.distributed.comm.group_state import BATCHES_OF_A_LOOP
from lockstep.distributed.comm.record import ranks_that_failed
from lockstep.distributed.reduction.report.status import (
    MOST_STEPS,
    UNKNOWN_STEPS,
    Called,
    Part,
    RoundReport,
    Status,
    Sums,
)
from lockstep.errors import OptionError, PeerError

NOT_HANDED_OUT = "No gradient has been handed out; every rank can go on with the next batch after zero_grad()"


class Refusal(NamedTuple):
    """The error with which the round ends on every rank."""

    kind: type[PeerError | OptionError]
    message: str

    def exception(self) -> PeerError | OptionError:
        """Return the exception; a verdict does not hold one, as that would keep the frames of its traceback alive."""
        return self.kind(self.message)


class LoopVerdict(NamedTuple):
    """The part of a round's verdict for its loop; the default is that all ranks continue."""

    stops: bool = False
    """True if some rank asks all to stop after this step."""
    skipped: bool = False
    """True if some rank skips this batch, and thereby all ranks, or if no rank has a batch."""
    some_end: bool = False
    """True if some rank has no batch after this one, or not even this one."""
    all_end: bool = False
    """True if no rank has a batch after this one."""
    ends: int = 0
    """The number of ranks that have no batch after this one."""
    going_on: Sequence[int] | None = None
    """The ranks that have a batch after this one, if the statuses have been gathered; None if all have, or none."""


class Verdict(NamedTuple):
    """How a round ends on every rank; the default is a usual round in which every parameter was used."""

    error: Refusal | None = None
    failed: bool = False
    """True if backward has failed on some rank."""
    skip: bool = False
    """True if all ranks skip the batch."""
    factor: float = 1.0
    """Factor applied to the mean: for a weighted mean, or one over the ranks that have batches."""
    changed: bool = False
    """True if a module differs from what was agreed on, on some rank: all ranks agree again."""
    used: Sequence[bool] | None = None
    """For each parameter, True if any rank has a gradient; None if all parameters have one."""
    late: Sequence[int] = ()
    """Parameters of which some rank has a late gradient, which all ranks reduce again."""
    loop: LoopVerdict = LoopVerdict()
    """The part for loops (``decisions.py``)."""
    warning: str = ""
    """What may be wrong, or not, as nobody knows; empty if there is an error."""
    drift: bool = False
    """True if ranks have told different numbers of optimizers, or values: they compare everything."""
    some_told: bool = False
    """True if some ranks have told a digest of values, and others none."""
    is_usual: bool = False
    """True if all ranks say the same without consequences: gradients are the mean, and nothing else is to be done."""

    def uses(self, index: int) -> bool:
        """Return True if any rank has a gradient of a parameter."""
        return self.used is None or self.used[index]


_USUAL = Verdict(is_usual=True)


def judge(report: RoundReport, rank: int, ranks: Sequence[int], divisor: float) -> Verdict:
    """Return the verdict on a report.

    ``rank``: the group rank that reads it; ``ranks``: the names of all ranks in messages; ``divisor``: the number of
    ranks that the mean has been divided by so far.
    """
    sums, statuses = report.sums, report.statuses
    if sums is None:
        return _USUAL if report.used is None else _USUAL._replace(used=report.used)
    rules = _ALWAYS if sums.skips else (*_ALWAYS, *_COUNTING)
    error, warning = None, ""
    if statuses:
        case = _Case(_columns(statuses), statuses[rank], ranks[rank], ranks)
        error = _find_error(case, rules)
        warning = "" if error or sums.skips else _forwards_left_out(case)
    elif sums.failed:  # it has ended its process, and could not give its status
        who = ranks_that_failed(sums._asdict(), ranks)
        message = f"rank {ranks[rank]}: backward failed on {who}; the error there says why. {NOT_HANDED_OUT}"
        error = Refusal(PeerError, message)
    return Verdict(
        error=error,
        failed=sums.failed > 0,
        skip=sums.skips > 0,
        factor=_factor(sums, statuses, divisor),
        changed=sums.changed > 0,
        used=report.used,
        late=report.late,
        loop=judge_loops(sums, statuses),
        warning=warning,
        drift=sums.drift,
        some_told=sums.with_values not in (0, sums.ranks),
    )


def judge_loops(sums: Sums, statuses: Sequence[Status] = ()) -> LoopVerdict:
    """Return the part of the verdict that concerns loops."""
    return LoopVerdict(
        stops=sums.stops > 0,
        skipped=sums.skips > 0 or sums.padding == sums.ranks,
        some_end=sums.ends > 0 or sums.padding > 0,
        all_end=sums.ends == sums.ranks,
        ends=sums.ends,
        going_on=[rank for rank, status in enumerate(statuses) if not status.ends] or None if sums.ends else None,
    )


def _columns(statuses: Sequence[Status]) -> Any:
    """Return a status whose fields are tuples with the values of all ranks, to avoid a Python loop over ranks."""
    return Status._make(zip(*statuses, strict=True))


def _factor(sums: Sums, statuses: Sequence[Status], divisor: float) -> float:
    if sums.weighted:
        total = math.fsum(status.weight for status in statuses) if sums.with_odd_weight else sums.weight
        return divisor / total if total else 0.0
    # Joined ranks are in the divisor already (``CommonState.set_participants``).
    active = sums.ranks - sums.padding
    return divisor / active if 0 < active < sums.ranks else 1.0


class _Case(NamedTuple):
    """The input of a rule."""

    all_of: Any
    """See :func:`_columns`."""
    own: Status
    me: int
    """The number of this rank in messages."""
    ranks: Sequence[int]
    """The numbers of all ranks in messages."""


def _find_error(case: _Case, rules: "Sequence[_Rule]") -> Refusal | None:
    for kind, rule in rules:
        message = rule(case)
        if message:
            return Refusal(kind, message)
    return None


def _failed(case: _Case) -> str:
    if Part.FAILED not in case.all_of.part:
        return ""
    other = case.ranks[case.all_of.part.index(Part.FAILED)]
    return (
        f"rank {case.me}: backward failed on rank {other} in round {case.own.round}; that rank's own error says why. "
        f"{NOT_HANDED_OUT}"
    )


def _in_other_rounds(case: _Case) -> str:
    other, ahead = _first_other(case.all_of.round, case.own.round)
    if not ahead:
        return ""
    distance = f"{ahead} ahead" if ahead > 0 else f"{-ahead} behind"
    return (
        f"rank {case.me} is in its synchronised backward number {case.own.round}, but rank {case.ranks[other]} is "
        f"{distance}: ranks have not run the same number of them, and gradients of different steps would be mixed. Let "
        "every rank run backward for every batch, or use join()"
    )


def _at_other_batches(case: _Case) -> str:
    other, ahead = _first_other(case.all_of.batch, case.own.batch)
    if not ahead:
        return ""
    distance = f"{ahead} ahead of" if ahead > 0 else f"{-ahead} behind"
    if Part.SKIPS in case.all_of.part:
        skipping = case.ranks[case.all_of.part.index(Part.SKIPS)]
        return (
            f"rank {case.me}: rank {case.ranks[other]} is {distance} this rank in the batches of its loop, in round "
            f"{case.own.round}, and rank {skipping} leaves out its batch. {NOT_HANDED_OUT}. If a step has several "
            "batches, call skip_batch(), or use skip_on(), inside accumulate() or no_sync(), so that the batch that "
            "synchronises tells the others"
        )
    if abs(ahead) >= BATCHES_OF_A_LOOP // 2:
        return (
            f"rank {case.me}: rank {case.ranks[other]} is in another loop over lockstep.batches(), or in none, in "
            f"round {case.own.round}, and gradients of different batches would be mixed. {NOT_HANDED_OUT}. Let all "
            "ranks begin and leave their loops together"
        )
    return (
        f"rank {case.me}: rank {case.ranks[other]} is {distance} this rank in the batches of its loop, in round "
        f"{case.own.round}: a rank has gone on with its next batch without a backward that synchronises for the last "
        "one (an error that it has caught, `continue`, an accumulate(last=) that is True at another batch: the length "
        "of lockstep.batches() is the same on all ranks, that of a loader is not), and gradients of different batches "
        "would be mixed. "
        f"{NOT_HANDED_OUT}. Let the rank that leaves out a batch call skip_batch(), and all iterate "
        "over lockstep.batches(); if a batch has several backwards, put each into a skip_on() of its own"
    )


def _first_other(numbers: Sequence[int], own: int) -> tuple[int, int]:
    """Return the first rank whose number differs from this one's, and the difference; 0, 0 if all are equal."""
    if numbers.count(own) == len(numbers):
        return 0, 0
    return next((rank, number - own) for rank, number in enumerate(numbers) if number != own)


def _in_other_passes(case: _Case) -> str:
    """Compare the passes of ranks that ran one. Ranks that have left out other forwards may have only looked at what
    the module gives: it is an error if optimizers have made other steps as well."""
    found = _find_passes(case, _other_calls)
    has_other_calls = found is not None
    if found is None and len({*case.all_of.steps} - {UNKNOWN_STEPS}) > 1:
        found = _find_passes(case, _other_forwards)
    if found is None:
        return ""
    one, other, difference = found
    called = case.all_of.called[one] | case.all_of.called[other]
    in_both_modes = has_other_calls and all(called & mode.value for mode in _MODES)
    train = "If one rank has evaluated the module, call model.train() there after it. " if in_both_modes else ""
    return (
        f"rank {case.me}: ranks {case.ranks[one]} and {case.ranks[other]} are not in the same backward pass (number "
        f"{case.own.round} that synchronises): {difference}. {NOT_HANDED_OUT}. {train}Let every rank "
        "run the same backward passes; put one that is for one rank alone under no_sync(), or take its "
        "gradients with torch.autograd.grad, and a forward that is not trained on under torch.no_grad()"
    )


def _forwards_left_out(case: _Case) -> str:
    """Return what is to be thought of ranks that have left out other forwards, and are in step otherwise."""
    found = None if any(case.all_of.weighted) else _find_passes(case, _other_forwards)
    if found is None:
        return ""
    return (
        f"rank {case.me}: {found[2]}. If it was a forward for a log, or an evaluation, nothing is wrong: put it under "
        "torch.no_grad(). If a rank has skipped a batch after its forward (a loss that is not finite, an error that it "
        "has caught, `continue`), the ranks are at different batches now, and it will end before the others: call "
        "lockstep.loop.skip_batch() in its place, or iterate over lockstep.batches(). This is said once"
    )


_Pass = tuple[int, int, int]


def _find_passes(case: _Case, differ: Callable[[_Pass, _Pass], str]) -> tuple[int, int, str] | None:
    """Return the first two ranks of the group whose passes differ, and the difference in words."""
    passes = list(zip(case.all_of.called, case.all_of.through, case.all_of.unused_forwards, strict=True))
    kinds = [each for each in dict.fromkeys(passes) if each[0]]
    for place, theirs in enumerate(kinds):
        for those in kinds[:place]:
            if difference := differ(those, theirs):
                one, other = passes.index(those), passes.index(theirs)
                return one, other, difference.format(case.ranks[one], case.ranks[other])
    return None


def _other_calls(a: _Pass, b: _Pass) -> str:
    if a[0] & b[0] or (a[0] | b[0]) & Called.UNKNOWN.value:
        return ""
    return f"on rank {{}} it went through {_describe(a[0])}, on rank {{}} through {_describe(b[0])}"


def _other_forwards(a: _Pass, b: _Pass) -> str:
    (_, through, unused_forwards), (_, other_through, other_unused) = a, b
    if through != other_through or not through or unused_forwards == other_unused:  # may be terms of one loss
        return ""
    return (
        f"since the last one, rank {{}} has left out {_count(unused_forwards)}, rank {{}} "
        f"{_count(other_unused)} (in training mode, raised or without a backward through it)"
    )


def _describe(called: int) -> str:
    if called == Called.OTHERWISE.value:
        return "no output of the module's forward (a submodule, another method, or the wrapped module was called)"
    modes = [word for mode, word in _MODES.items() if called & mode.value]
    return f"the module's forward in {' and '.join(modes)} mode"


_MODES = {Called.TRAINING: "training", Called.EVALUATION: "evaluation"}


def _count(forwards: int) -> str:
    return f"{forwards or 'no'} forward{'s' if forwards != 1 else ''}"


def _at_other_steps(case: _Case) -> str:
    """Compare the steps of optimizers on ranks that know how many there were."""
    counts = [(rank, n) for rank, n in zip(case.ranks, case.all_of.steps, strict=True) if n != UNKNOWN_STEPS]
    fewest, most = min(counts, key=_second, default=(0, 0)), max(counts, key=_second, default=(0, 0))
    if fewest[1] == most[1]:
        return ""
    return (
        f"rank {case.me}: ranks {fewest[0]} and {most[0]} are not in the same step of the training: since their last "
        f"synchronised backward (number {case.own.round - 1}), optimizers have made {_steps(fewest[1])} on this "
        f"module's parameters on rank {fewest[0]}, and {_steps(most[1])} on rank {most[0]}. Rank {fewest[0]} has run "
        f"one backward more, or one step less, and gradients of different steps would be mixed. {NOT_HANDED_OUT}. Let "
        "every rank run the same backward passes and steps; put a backward that is for one rank alone under no_sync(), "
        "or take its gradients with torch.autograd.grad. If weights may differ by now, check_in_sync() tells"
    )


_second = itemgetter(1)


def _steps(count: int) -> str:
    number = f"at least {count}" if count == MOST_STEPS else f"{count or 'no'}"
    return f"{number} step{'s' if count != 1 else ''}"


def _without_weight(case: _Case) -> str:
    if not any(case.all_of.weighted):
        return ""
    for other, part, weighted in zip(case.ranks, case.all_of.part, case.all_of.weighted, strict=True):
        if not weighted and part not in (Part.PADDING, Part.JOINED):
            return (
                f"rank {other} gave no weight in round {case.own.round}, others did; give one on every rank, 0 where "
                "there is nothing to count"
            )
    return ""


_Rule = tuple[type[PeerError | OptionError], Callable[[_Case], str]]
_ALWAYS: Sequence[_Rule] = (
    (PeerError, _failed),
    (PeerError, _in_other_rounds),
    (PeerError, _at_other_batches),
    (PeerError, _in_other_passes),
    (PeerError, _at_other_steps),
)
_COUNTING: Sequence[_Rule] = ((OptionError, _without_weight),)  # where no rank leaves out the batch
