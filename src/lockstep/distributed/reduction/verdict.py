"""The verdict on a round: every rule about ranks that differ, and every message, in one file.

:func:`judge` is a pure function of the statuses of all ranks (``status.py``), so all come to the same verdict; only its
message names the rank that reads it. All that is done then is a function of the verdict alone.

A new rule about ranks that differ is a function here that returns a message, and one line in :data:`_ALWAYS` or
:data:`_COUNTING`, in the order in which rules are asked: the first that finds something speaks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lockstep.distributed.reduction.decisions import LoopVerdict
from lockstep.distributed.reduction.passes import Called
from lockstep.distributed.reduction.status import Part, Report, Status
from lockstep.errors import OptionError, PeerError

NOT_HANDED_OUT = "No gradient has been handed out; every rank can go on with the next batch after zero_grad()"


class Refusal(NamedTuple):
    """The error that the round ends with on every rank."""

    kind: type[PeerError | OptionError]
    message: str

    def exception(self) -> PeerError | OptionError:
        """Return the exception to raise; a verdict holds none, which would hold the frames that it went through."""
        return self.kind(self.message)


class Verdict(NamedTuple):
    """Says how a round ends on every rank; by default as a usual one in which every parameter was used."""

    error: Refusal | None = None
    failed: bool = False
    """Backward has failed on some rank."""
    skip: bool = False
    """All ranks leave out the batch."""
    factor: float = 1.0
    """The mean is to be multiplied by it: for one over weights, or over the ranks that have batches."""
    changed: bool = False
    """Some rank's module is not what was agreed on: all agree anew."""
    drifted: bool = False
    """Parameters were changed on some rank while a gradient was only its own: all compare them."""
    used: Sequence[bool] | None = None
    """For each parameter, True if any rank has a gradient; None: all have."""
    late: Sequence[int] = ()
    """Parameters that some rank has a late gradient of: all reduce those again."""
    digests: Sequence[bytes] = ()
    """Each rank's digest of its values, where they differ."""
    loop: LoopVerdict = LoopVerdict()
    """For the loop (``decisions.py``)."""
    is_usual: bool = False
    """All ranks say the same, and that has no consequences: gradients are the mean, and no more."""

    def uses(self, index: int) -> bool:
        """Return whether any rank has a gradient of a parameter."""
        return self.used is None or self.used[index]


def judge(report: Report, rank: int, ranks: Sequence[int], divisor: float) -> Verdict:
    """Return the verdict on a report, as rank ``rank`` of the group reads it; messages name each rank by its number in
    ``ranks``. The mean that the verdict's factor turns into another is one over ``divisor`` ranks.
    """
    if not report.statuses:
        return Verdict(used=report.used, is_usual=True)
    all_of = _columns(report.statuses)
    skip = Part.SKIPS in all_of.part
    said = _Said(all_of, report.statuses[rank], ranks[rank], ranks)
    return Verdict(
        error=_find_error(said, _ALWAYS if skip else (*_ALWAYS, *_COUNTING)),
        failed=Part.FAILED in all_of.part,
        skip=skip,
        factor=_factor(all_of, divisor),
        changed=any(all_of.changed),
        drifted=any(all_of.drifted),
        used=report.used,
        late=report.late,
        digests=report.digests,
        loop=judge_loops(report.statuses),
    )


def judge_loops(statuses: Sequence[Status]) -> LoopVerdict:
    """Return the part of the verdict that loops are to know."""
    all_of = _columns(statuses)
    padding = all_of.part.count(Part.PADDING)
    return LoopVerdict(
        stops=any(all_of.stops),
        skipped=Part.SKIPS in all_of.part or padding == len(all_of.part),
        some_end=any(all_of.ends) or padding > 0,
        all_end=all(all_of.ends),
        going_on=[rank for rank, ends in enumerate(all_of.ends) if not ends] or None,
    )


def _columns(statuses: Sequence[Status]) -> Any:
    """Return a status whose fields have those of all ranks, as tuples, so that no Python runs for each rank."""
    return Status._make(zip(*statuses, strict=True))


def _factor(all_of: Any, divisor: float) -> float:
    if any(all_of.weighted):
        total = sum(all_of.weight)
        return divisor / total if total else 0.0
    ranks = len(all_of.part)
    active = ranks - all_of.part.count(Part.PADDING)
    return divisor / active if 0 < active < ranks else 1.0


class _Said(NamedTuple):
    """All that a rule may look at."""

    all_of: Any
    """See :func:`_columns`."""
    own: Status
    me: int
    """This rank's number in messages."""
    ranks: Sequence[int]
    """Each rank's."""


def _find_error(said: _Said, rules: "Sequence[_Rule]") -> Refusal | None:
    for kind, rule in rules:
        message = rule(said)
        if message:
            return Refusal(kind, message)
    return None


def _backward_failed(said: _Said) -> str:
    if Part.FAILED not in said.all_of.part:
        return ""
    other = said.ranks[said.all_of.part.index(Part.FAILED)]
    return (
        f"rank {said.me}: backward failed on rank {other} in round {said.own.round}; that rank's own error says why. "
        f"{NOT_HANDED_OUT}"
    )


def _in_other_rounds(said: _Said) -> str:
    other, ahead = _first_other(said.all_of.round, said.own.round)
    if not ahead:
        return ""
    distance = f"{ahead} ahead" if ahead > 0 else f"{-ahead} behind"
    return (
        f"rank {said.me} is in its synchronised backward number {said.own.round}, but rank {said.ranks[other]} is "
        f"{distance}: ranks have not run the same number of them, and gradients of different steps would be mixed. Let "
        "every rank run backward for every batch, or use join()"
    )


def _at_other_batches(said: _Said) -> str:
    other, ahead = _first_other(said.all_of.batch, said.own.batch)
    if not ahead:
        return ""
    distance = f"{ahead} ahead of" if ahead > 0 else f"{-ahead} behind"
    return (
        f"rank {said.me}: rank {said.ranks[other]} is {distance} this rank in the batches of its loop, in round "
        f"{said.own.round}: a rank has gone on with its next batch without a backward that synchronises for the last "
        "one (an error that it has caught, `continue`), and gradients of different batches would be mixed. "
        f"{NOT_HANDED_OUT}. Let the rank that leaves out a batch call skip_batch(), and all iterate "
        "over lockstep.batches()"
    )


def _first_other(numbers: Sequence[int], own: int) -> tuple[int, int]:
    """Return the first rank that has another number than this one, and how far it is ahead; 0 if none has."""
    if numbers.count(own) == len(numbers):
        return 0, 0
    return next((rank, number - own) for rank, number in enumerate(numbers) if number != own)


def _in_other_passes(said: _Said) -> str:
    """Ranks that are in no pass of their own do not count; forwards do not where a rank may leave out a batch."""
    passes = list(zip(said.all_of.called, said.all_of.through, said.all_of.unused_forwards, strict=True))
    compare_forwards = not any(said.all_of.weighted)
    kinds = [each for each in dict.fromkeys(passes) if each[0]]
    for place, theirs in enumerate(kinds):
        for those in kinds[:place]:
            if difference := _difference(those, theirs, compare_forwards):
                another, other = said.ranks[passes.index(those)], said.ranks[passes.index(theirs)]
                return (
                    f"rank {said.me}: ranks {another} and {other} are not in the same backward pass (number "
                    f"{said.own.round} that synchronises): {difference.format(another, other)}. "
                    f"{NOT_HANDED_OUT}. Let every rank "
                    "run the same backward passes; put one that is for one rank alone under no_sync(), or take its "
                    "gradients with torch.autograd.grad, and a forward that is not trained on under torch.no_grad()"
                )
    return ""


def _difference(a: tuple[int, int, int], b: tuple[int, int, int], compare_forwards: bool) -> str:
    """Return what shows that the passes of two ranks are different ones, with a place for the number of each."""
    (called, through, unused_forwards), (other, other_through, other_unused) = a, b
    if not called & other and not (called | other) & Called.UNKNOWN.value:
        return f"on rank {{}} it went through {_describe(called)}, on rank {{}} through {_describe(other)}"
    if compare_forwards and through == other_through and through and unused_forwards != other_unused:
        return (
            f"since the one before, rank {{}} has left out {_count(unused_forwards)}, rank {{}} "
            f"{_count(other_unused)} (in training mode, raised or without a backward through it: a batch was skipped)"
        )
    return ""


def _describe(called: int) -> str:
    if called == Called.OTHERWISE.value:
        return "no output of the module's forward (a submodule, another method, or the wrapped module was called)"
    modes = [word for mode, word in _MODES.items() if called & mode.value]
    return f"the module's forward in {' and '.join(modes)} mode"


_MODES = {Called.TRAINING: "training", Called.EVALUATION: "evaluation"}


def _count(forwards: int) -> str:
    return f"{forwards or 'no'} forward{'s' if forwards != 1 else ''}"


def _without_weight(said: _Said) -> str:
    if not any(said.all_of.weighted):
        return ""
    for other, part, weighted in zip(said.ranks, said.all_of.part, said.all_of.weighted, strict=True):
        if not weighted and part not in (Part.PADDING, Part.JOINED):
            return (
                f"rank {other} gave no weight in round {said.own.round}, others did; give one on every rank, 0 where "
                "there is nothing to count"
            )
    return ""


_Rule = tuple[type[PeerError | OptionError], Callable[[_Said], str]]
_ALWAYS: Sequence[_Rule] = (
    (PeerError, _backward_failed),
    (PeerError, _in_other_rounds),
    (PeerError, _at_other_batches),
    (PeerError, _in_other_passes),
)
_COUNTING: Sequence[_Rule] = ((OptionError, _without_weight),)  # where no rank leaves out the batch
