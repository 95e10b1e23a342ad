"""Which ranks wait for each other for ever: a table, and random programs whose ends are known."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest

from deadlock_programs import run_to_the_end, some_program
from lockstep._base.texts import IN_LOOP, LEFT_LOOP
from lockstep.failures.deadlock import advice, could_be_stuck, describe, differ, explain, stuck
from lockstep.failures.whereabouts import Wait, Whereabouts


def wait(group, number, *needed, kind="all_reduce", exact=True):
    return Wait(group, number, kind, needed, exact, f"{kind}() {number} of {group}")


def rank(*waits, left=False, **launched):
    return Whereabouts(-1, waits=waits, launched=launched, seconds=1.0, has_left=left)


BOTH = (0, 1)
A5, B2, C1 = wait("a", 5, *BOTH), wait("b", 2, *BOTH), wait("c", 1, *BOTH)
OF_THREE = wait("a", 5, 0, 1, 2)  # needs all of them
CASES = {
    # what each rank waits for, and how many collectives of each group it has launched; which ranks are stuck
    "two ranks in two groups": ({0: rank(A5, a=5, b=1), 1: rank(B2, a=4, b=2)}, {0, 1}),
    "a rank that computes": ({0: rank(A5, a=5)}, set()),
    "a rank that has launched it": ({0: rank(A5, a=5, b=1), 1: rank(B2, a=5, b=2)}, set()),
    "a group that the other does not name": ({0: rank(A5, a=5, b=1), 1: rank(B2, b=2)}, set()),
    "one group, and one number, but two kinds": (
        {0: rank(A5, a=5), 1: rank(wait("a", 5, *BOTH, kind="barrier"), a=5)},
        {0, 1},
    ),
    "one collective that both are in": ({0: rank(A5, a=5), 1: rank(A5, a=5)}, set()),
    "a rank that has left": ({0: rank(A5, a=5), 1: rank(a=4, left=True)}, {0}),
    "a rank that has left after it has launched it": ({0: rank(A5, a=5), 1: rank(a=5, left=True)}, set()),
    "three in a circle": (
        {
            0: rank(wait("a", 1, 0, 1), a=1, c=0),
            1: rank(wait("b", 1, 1, 2), a=0, b=1),
            2: rank(wait("c", 1, 2, 0), b=0, c=1),
        },
        {0, 1, 2},
    ),
    "a third that waits for the two": (
        {0: rank(OF_THREE, a=5, b=1), 1: rank(B2, a=4, b=2), 2: rank(OF_THREE, a=5)},
        {0, 1, 2},
    ),
    "two, while a third computes": ({0: rank(OF_THREE, a=5, b=1), 1: rank(B2, a=4, b=2)}, {0, 1}),
    "one that waits for a third as well, and the third computes": (
        {0: rank(OF_THREE, a=5, c=1), 1: rank(wait("b", 2, 1, 2), a=4, b=2)},
        set(),
    ),
    "two threads, one of which can go on": ({0: rank(A5, C1, a=5, b=1, c=1), 1: rank(B2, a=4, b=2, c=1)}, set()),
    "two threads that both wait for ever": ({0: rank(A5, C1, a=5, b=1, c=1), 1: rank(B2, a=4, b=2, c=0)}, {0, 1}),
    "a source that needs nobody": ({0: rank(wait("a", 5), a=5, b=1), 1: rank(B2, a=4, b=2)}, set()),
    "a number with messages that is one behind": (
        {0: rank(wait("a", 5, *BOTH, exact=False), a=5, b=1), 1: rank(B2, a=4, b=2)},
        {0, 1},
    ),
    "a number with messages that is not comparable": (
        {0: rank(wait("a", 9, *BOTH, exact=False), a=9, b=1), 1: rank(B2, a=4, b=2)},
        set(),
    ),
}
for reports, _ in CASES.values():
    reports.update({number: replace(each, rank=number) for number, each in reports.items()})


@pytest.mark.parametrize(("reports", "expected"), CASES.values(), ids=CASES)
def test_stuck_are(reports, expected):
    assert stuck(reports) == expected
    assert all(could_be_stuck(each, reports) for each in expected)
    sent = {each: Whereabouts.of_fields(asdict(report)) for each, report in reports.items()}
    assert sent == reports


@pytest.mark.parametrize("number", [1_000, pytest.param(20_000, marks=pytest.mark.around)])
def test_random_programs_give_no_alarm_while_a_rank_can_go_on_and_all_alarms_when_none_can(number):
    rng = random.Random(0)
    ended = never = 0
    while min(ended, never) < number:
        ranks = some_program(rng)
        for_ever = run_to_the_end(ranks.copy(), rng)
        while ranks.step(rng):
            if rng.random() < 0.7:
                continue
            found = stuck(ranks.reports())
            assert found <= for_ever
            ended += len(ranks.waiting() - for_ever)
            never += len(found)
        found = stuck(ranks.reports())
        assert found == for_ever if ranks.sees_all() else found <= for_ever
        never += len(found)


def test_what_is_told():
    reports, found = CASES["two ranks in two groups"]
    assert explain(found, reports) == (
        "ranks 0, 1 wait for each other in different collectives, and can never go on:\n"
        "  rank 0 has waited for 1.0 s in all_reduce() 5 of a, without rank 1\n"
        "  rank 1 has waited for 1.0 s in all_reduce() 2 of b, without rank 0\n"
        "Call all_reduce() on every rank, as often and in the same order: not under `if run.is_main`, nor under any "
        "other condition that differs between ranks (`run.agree(flag)` makes it the same). If one rank has a batch "
        "more or less, loop over `run.batches(loader)`; if it leaves out a batch that fails, put "
        "`lockstep.loop.skip_on(ValueError)` around the batch in place of `try`, and all ranks leave it out"
    )
    waits = (Wait("a", 1, "mean", (0, 1), what="mean()", place="line 8 of train.py"),)
    report = Whereabouts(0, waits=waits, launched={"a": 1}, seconds=1.26)
    assert describe([0], {0: report}) == "  rank 0 has waited for 1.3 s in mean(), called from line 8 of train.py"
    later = replace(report, step=5)
    assert describe([0], {0: later}).startswith("  rank 0, after step 5, has waited for 1.3 s in mean()")
    assert describe([0], {0: replace(later, in_batches=True)}).startswith("  rank 0 has waited for 1.3 s in mean()")
    assert Whereabouts.of_fields(json.loads(json.dumps(asdict(later)))) == later


def test_what_is_told_of_calls_that_differ():
    place = "line 8 of train.py, in main: `lockstep.mean(x)`"
    answers = {
        0: Whereabouts(0, step=3, waits_for="mean()", place=place),
        1: Whereabouts(1, step=3, in_batches=True, waits_for="save()"),
    }
    assert differ(answers, [2, 1, 0]).splitlines()[:-1] == [
        f"  rank 0 in mean(), after step 3, called from {place}",
        "  rank 1 in save()",
        "  rank 2 in another collective",
    ]
    assert "Call mean() and save() on every rank" in differ(answers, [0, 1])


def test_ranks_that_loop_over_batches_are_not_told_to():
    both = [f"backward(){IN_LOOP}", "mean()"]
    assert advice(both).startswith("Call backward() and mean() on every rank")
    assert "run.batches" not in advice(both)
    assert "run.agree(flag): break" in advice([both[0], f"batches(){LEFT_LOOP} after 3 of 6 batches"])
    after_all_have_left = [f"{call}(){LEFT_LOOP} after 2 of 6 batches" for call in ("batches", "save")]
    assert advice(after_all_have_left).startswith("Call batches() and save() on every rank")
    assert "not under `if run.is_main`" in advice(after_all_have_left)
    assert advice(after_all_have_left).endswith("), and run as many epochs on every rank")
