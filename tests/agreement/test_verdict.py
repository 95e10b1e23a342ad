"""What follows from what ranks say in a round: a row for each rule."""

from __future__ import annotations

import random

import pytest

from agreement.sums import sums_of
from lockstep.distributed.reduction.report.status import (
    MOST_STEPS,
    UNKNOWN_STEPS,
    Called,
    Part,
    RoundReport,
    Status,
)
from lockstep.distributed.reduction.report.verdict import LoopVerdict, Refusal, Verdict, judge, judge_loops
from lockstep.errors import OptionError, PeerError

TRAINING, EVALUATION, OTHERWISE, UNKNOWN = (each.value for each in Called)
NOT_HANDED_OUT = "No gradient has been handed out; every rank can go on with the next batch after zero_grad()"


def says(part=Part.FULL, **fields):
    return Status(**{"round": 5, "part": part, "called": TRAINING, "through": 1, **fields})


USUAL = says()
SILENT = says(called=0, through=0)
PADDING, JOINED, SKIPS, FAILED = map(says, (Part.PADDING, Part.JOINED, Part.SKIPS, Part.FAILED))


def weighs(weight, **fields):
    return says(weighted=True, weight=float(weight), **fields)


def through(called, forwards=1, unused_forwards=0, **fields):
    return says(called=called, through=forwards, unused_forwards=unused_forwards, **fields)


def verdict_of(*statuses, rank=0, ranks=None, divisor=None, used=None, late=()):
    """Return the verdict on statuses that have been gathered; where none has to be named, the sums give the same."""
    report = RoundReport(used, late, sums_of(statuses), statuses)
    others = ranks or range(len(statuses)), divisor or len(statuses)
    verdict = judge(report, rank, *others)
    if not report.sums.name_ranks:
        alone = judge(report._replace(statuses=()), rank, *others)
        assert alone == verdict._replace(loop=verdict.loop._replace(going_on=None))
    return verdict


def summary_of(verdict):
    """Return what differs from a usual one, without what tests below look at in detail."""
    usual = verdict._replace(loop=LoopVerdict())
    return {name: value for name, value in usual._asdict().items() if value != Verdict._field_defaults[name]}


# ---------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("statuses", "rank", "words"),
    [
        # Backward has failed on a rank.
        ([USUAL, USUAL, FAILED], 0, "rank 0: backward failed on rank 2 in round 5; that rank's own error says why. "),
        ([USUAL, USUAL, FAILED], 2, "rank 2: backward failed on rank 2 in round 5; that rank's own error says why. "),
        ([USUAL, FAILED, FAILED], 0, f"failed on rank 1 in round 5; that rank's own error says why. {NOT_HANDED_OUT}"),
        # A rank is in another round.
        ([USUAL, says(round=6)], 0, "rank 0 is in its synchronised backward number 5, but rank 1 is 1 ahead: ranks "),
        ([USUAL, says(round=3)], 0, "rank 0 is in its synchronised backward number 5, but rank 1 is 2 behind: ranks "),
        ([USUAL, says(round=6)], 1, "rank 1 is in its synchronised backward number 6, but rank 0 is 1 behind: ranks "),
        ([USUAL, says(round=20)], 0, "but rank 1 is 15 ahead: "),
        ([says(round=65), USUAL], 0, "rank 0 is in its synchronised backward number 65, but rank 1 is 60 behind: "),
        ([USUAL, says(round=5 + 2**32)], 0, "but rank 1 is 4294967296 ahead: "),
        ([says(round=5), says(round=8)], 0, "Let every rank run backward for every batch, or use join()"),
        # A rank is at another batch of its loop.
        ([says(batch=14), says(batch=14), says(batch=16)], 0, "rank 0: rank 2 is 2 ahead of this rank in the batches"),
        ([says(batch=0), says(batch=1), says(batch=0)], 1, "rank 1: rank 0 is 1 behind this rank in the batches of it"),
        ([says(batch=3), says(batch=18)], 0, "rank 0: rank 1 is 15 ahead of this rank in the batches of its loop, in "),
        ([says(batch=3), says(batch=33)], 1, "rank 1: rank 0 is 30 behind this rank in the batches of its loop, in ro"),
        (
            [says(batch=3), says(batch=4)],
            0,
            f"different batches would be mixed. {NOT_HANDED_OUT}. Let the rank that leav",
        ),
        # Ranks are in different backward passes.
        (
            [through(OTHERWISE), SILENT, through(TRAINING)],
            1,
            "rank 1: ranks 0 and 2 are not in the same backward pass (number 5 that synchronises): on rank 0 it went "
            "through no output of the module's forward (a submodule, another method, or the wrapped module was called)"
            f", on rank 2 through the module's forward in training mode. {NOT_HANDED_OUT}. Let every rank run",
        ),
        (
            [through(TRAINING), through(EVALUATION)],
            0,
            "on rank 0 it went through the module's forward in training mode, on rank 1 through the module's forward "
            f"in evaluation mode. {NOT_HANDED_OUT}. If one rank has evaluated the module, call model.train() there "
            "after it. ",
        ),
        (
            [through(TRAINING | EVALUATION), through(OTHERWISE)],
            0,
            "on rank 0 it went through the module's forward in training and evaluation mode, on rank 1 through no outp",
        ),
        (
            [through(TRAINING, steps=1), through(TRAINING, 1, 1, steps=0)],
            0,
            "since the last one, rank 0 has left out no forwards, rank 1 1 forward (in training mode, raised or witho",
        ),
        (
            [through(TRAINING, 20, 16, steps=2), through(TRAINING, 20, 2)],
            0,
            "since the last one, rank 0 has left out 16 forwards, rank 1 2 forwards (in training mode",
        ),
        # Optimizers have made other numbers of steps.
        (
            [says(steps=1), says(steps=0), says(steps=1)],
            2,
            "rank 2: ranks 1 and 0 are not in the same step of the training: since their last synchronised backward "
            "(number 4), optimizers have made no steps on this module's parameters on rank 1, and 1 step on rank 0. "
            "Rank 1 has run one backward more, or one step less, and gradients of different steps would be mixed. "
            f"{NOT_HANDED_OUT}. Let every rank run the same backward passes and steps; put a backward that is for one "
            "rank alone under no_sync(), or take its gradients with torch.autograd.grad. If weights may differ by now, "
            "check_in_sync() tells",
        ),
        ([says(steps=1), says(steps=2)], 0, "1 step on this module's parameters on rank 0, and 2 steps on rank 1. Ra"),
        ([says(steps=MOST_STEPS), says(steps=7)], 0, "7 steps on this module's parameters on rank 1, and at least 254"),
        ([says(steps=3), PADDING], 0, "no steps on this module's parameters on rank 1, and 3 steps on rank 0"),
        # The first rule that finds something speaks.
        ([says(batch=0, round=4), says(Part.FAILED, batch=1)], 0, "rank 0: backward failed on rank 1 in round 4;"),
        ([says(batch=0), says(batch=1, round=6)], 0, "but rank 1 is 1 ahead: ranks have not run the same number"),
        ([through(TRAINING, batch=0), through(OTHERWISE, batch=1)], 0, "rank 0: rank 1 is 1 ahead of this rank"),
        ([weighs(1), through(OTHERWISE)], 0, "rank 0: ranks 0 and 1 are not in the same backward pass"),
        ([through(TRAINING), through(OTHERWISE, steps=1)], 0, "ranks 0 and 1 are not in the same backward pass"),
        ([through(TRAINING), through(OTHERWISE, part=Part.SKIPS)], 0, "ranks 0 and 1 are not in the same backward"),
    ],
)
def test_ranks_that_cannot_reduce_together(statuses, rank, words):
    error = verdict_of(*statuses, rank=rank).error
    assert error is not None
    assert error.kind is PeerError
    assert type(error.exception()) is PeerError
    assert str(error.exception()) == error.message
    assert words in error.message
    assert sums_of(statuses).name_ranks


@pytest.mark.parametrize(
    "statuses",
    [
        [says(part) for part in (Part.FULL, Part.JOINED, Part.FULL)],
        [through(OTHERWISE)] * 2,
        [through(TRAINING), through(TRAINING | EVALUATION)],
        [through(TRAINING), through(UNKNOWN), through(EVALUATION | UNKNOWN)],
        [through(TRAINING), SILENT],  # in no backward pass of its own
        [through(TRAINING, 1), through(TRAINING, 7)],  # sequences of different lengths
        [through(TRAINING, 1, 1), through(TRAINING, 2, 0)],  # a term of the loss that was left out
        [through(OTHERWISE, 0, 1), through(OTHERWISE, 0, 0)],
        [through(TRAINING, 1, 1, weighted=True), through(TRAINING, 1, 0, weighted=True)],
        [says(steps=2), says(steps=2)],
        [says(steps=2), says(steps=UNKNOWN_STEPS), says(Part.PADDING, steps=2)],
        [says(steps=UNKNOWN_STEPS), says(steps=UNKNOWN_STEPS)],
    ],
    ids=str,
)
def test_ranks_that_may_be_in_the_same_pass(statuses):
    assert verdict_of(*statuses)[:1] == (None,)
    assert not verdict_of(*statuses).warning


def test_a_forward_that_a_rank_has_left_out_may_be_a_batch_or_none():
    statuses = [through(TRAINING), through(TRAINING, 1, 1)]
    assert sums_of(statuses).name_ranks
    verdict = verdict_of(*statuses)
    assert verdict.error is None
    assert verdict.warning.startswith("rank 0: since the last one, rank 0 has left out no forwards, rank 1 1 forward")
    assert "If it was a forward for a log, or an evaluation, nothing is wrong" in verdict.warning
    assert "If a rank has skipped a batch after its forward" in verdict.warning


def test_whatever_is_an_error_is_seen_in_the_sums():
    draw = random.Random(0)
    fields = {
        "round": [5, 5, 5, 6],
        "batch": [1, 1, 1, 2],
        "part": list(Part),
        "weighted": [False, True],
        "called": [0, TRAINING, TRAINING, EVALUATION, UNKNOWN],
        "through": [1, 2],
        "unused_forwards": [0, 0, 1],
        "steps": [1, 1, 0, UNKNOWN_STEPS],
    }
    errors = 0
    for _ in range(3000):
        varied = draw.sample(list(fields), draw.randint(0, 3))
        usual = {name: draw.choice(values) for name, values in fields.items()}
        statuses = [
            Status(**{**usual, **{name: draw.choice(fields[name]) for name in varied}})
            for _ in range(draw.choice([2, 3, 5]))
        ]
        found = verdict_of(*statuses).error
        assert found is None or sums_of(statuses).name_ranks, statuses
        errors += found is not None
    assert 500 < errors < 2500


def test_ranks_are_named_as_those_of_the_default_group():
    error = verdict_of(says(round=5), says(round=6), ranks=[7, 9]).error
    assert error.message.startswith("rank 7 is in its synchronised backward number 5, but rank 9 is 1 ahead")
    error = verdict_of(through(TRAINING), through(OTHERWISE), ranks=[7, 9]).error
    assert error.message.startswith("rank 7: ranks 7 and 9 are not in the same backward pass")


def test_a_weight_is_given_by_every_rank_that_counts():
    message = "rank 9 gave no weight in round 5, others did; give one on every rank, 0 where there is nothing to count"
    assert verdict_of(weighs(1), PADDING, JOINED, USUAL, ranks=[0, 3, 6, 9]).error == Refusal(OptionError, message)
    assert verdict_of(weighs(1), PADDING, JOINED).error is None
    assert verdict_of(weighs(1), SKIPS, USUAL).error is None  # the batch counts nothing


# ---------------------------------------------------------------------------------- what follows otherwise


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([USUAL, USUAL], {}),
        ([USUAL, says(called=0, through=0)], {}),
        ([USUAL, SKIPS], {"skip": True}),
        ([USUAL, says(changed=True)], {"changed": True}),
        ([weighs(3), weighs(5)], {"factor": 0.25}),
        ([weighs(4), JOINED, weighs(2)], {"factor": 0.5}),  # one that has run out counts nothing
        ([weighs(4), PADDING, weighs(2)], {"factor": 0.5}),
        ([weighs(0), weighs(0)], {"factor": 0.0}),
        ([USUAL, PADDING, USUAL], {"factor": 1.5}),  # and a mean over all becomes one over the others
        ([PADDING, PADDING, PADDING], {}),
        ([USUAL, JOINED], {}),  # which join() divides by itself
    ],
    ids=str,
)
def test_what_all_ranks_do(statuses, expected):
    for rank in range(len(statuses)):
        assert summary_of(verdict_of(*statuses, rank=rank)) == expected


def test_a_failure_is_told_to_the_loop_whatever_else_is_wrong():
    verdict = verdict_of(says(round=4), FAILED)
    assert verdict.failed
    assert not verdict_of(says(round=4), USUAL).failed


def test_a_rank_that_has_failed_and_left_is_named():
    def error_of(*statuses):
        return judge(RoundReport(None, (), sums_of(statuses)), 0, [4, 5, 6], 3.0).error.message

    assert error_of(USUAL, USUAL, FAILED).startswith("rank 4: backward failed on rank 6; the error there says why. ")
    assert error_of(USUAL, FAILED, FAILED).startswith("rank 4: backward failed on 2 ranks; the error there")


def test_means_are_over_the_ranks_that_sums_are_divided_by():
    assert verdict_of(weighs(3), weighs(5), divisor=4.0).factor == 0.5
    assert verdict_of(USUAL, PADDING, USUAL, divisor=6.0).factor == 3.0
    assert verdict_of(USUAL, JOINED, divisor=1.0).factor == 1.0


def test_ranks_that_say_the_same_as_ever():
    assert judge(RoundReport([True, False]), 1, range(2), 2.0) == Verdict(used=[True, False], is_usual=True)
    assert judge(RoundReport(None), 1, range(2), 2.0).uses(7)
    assert not verdict_of(USUAL, USUAL).is_usual


def test_who_uses_what_is_handed_on():
    verdict = verdict_of(USUAL, USUAL, used=[True, False], late=[0])
    assert (verdict.used, verdict.late) == ([True, False], [0])
    assert [verdict.uses(index) for index in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([USUAL, USUAL, USUAL], {}),
        ([USUAL, says(stops=True), USUAL], {"stops": True}),
        ([says(ends=True), USUAL, USUAL], {"some_end": True, "ends": 1, "going_on": [1, 2]}),
        ([says(Part.PADDING, ends=True), USUAL, USUAL], {"some_end": True, "ends": 1, "going_on": [1, 2]}),
        ([PADDING, USUAL, USUAL], {"some_end": True}),  # in a loop around this one
        ([says(ends=True)] * 2, {"some_end": True, "all_end": True, "ends": 2}),
        ([SKIPS, USUAL], {"skipped": True}),
        ([says(Part.PADDING, ends=True)] * 2, {"some_end": True, "all_end": True, "skipped": True, "ends": 2}),
        ([FAILED, says(stops=True)], {"stops": True}),
    ],
    ids=str,
)
def test_what_loops_are_to_know(statuses, expected):
    assert judge_loops(sums_of(statuses), statuses) == LoopVerdict(**expected)
    assert verdict_of(*statuses).loop == LoopVerdict(**expected)
