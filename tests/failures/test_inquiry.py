"""Which rank is late, and after how long: decided from what ranks say of themselves."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lockstep.errors import OptionError
from lockstep.failures.failure import Kind
from lockstep.failures.hosts import unreachable
from lockstep.failures.program_lines import program_frame
from lockstep.failures.progress import Progress
from lockstep.failures.stacks import Frame, Thread, own_stack
from lockstep.failures.stall import FIRST_STEPS, Deadline, StallLimits, absent, late, stalled
from lockstep.failures.whereabouts import Whereabouts, collective_of, compiles
from lockstep.session.waits_of_rank import WaitsOfRank

TORCH = torch.__path__[0]
WAITS = Whereabouts(0, 100, step=7, phase="backward", idle=61, waits_for="all_reduce, bucket 0", begun=20)
BUSY = Whereabouts(1, 101, step=7, phase="data", idle=61, begun=20)


def answer(rank, **changes):
    return dataclasses.replace(BUSY if "waits_for" not in changes else WAITS, rank=rank, **changes)


CASES = {
    "one that does not wait": ([WAITS, BUSY, answer(2, waits_for="x")], 1),
    "one that cannot answer before one that can": ([WAITS, BUSY, answer(2, answers=False, idle=0)], 2),
    "one that is stopped in a collective": ([WAITS, BUSY, answer(2, waits_for="x", stopped=True)], 2),
    "the one with fewer collectives": ([WAITS, answer(1), answer(2, begun=19)], 2),
    "the one at the earlier step": ([WAITS, answer(1, begun=None), answer(2, begun=None, step=6)], 2),
    "the one that has been there longer": ([WAITS, answer(1, idle=62), answer(2, idle=63)], 2),
    "none that goes on meanwhile": ([WAITS, answer(1, idle=0.1)], None),
    "of all that wait, the one behind": ([WAITS, answer(1, waits_for="x", begun=19)], 1),
    "of all that are equally far, the odd one": ([WAITS, answer(1, waits_for="x"), answer(2, waits_for="x")], 0),
    "none if all wait in the same": ([WAITS, answer(1, waits_for=WAITS.waits_for)], None),
}


@pytest.mark.parametrize(("answers", "rank"), CASES.values(), ids=CASES)
def test_the_late_rank_is(answers, rank):
    for ordered in (answers, answers[::-1]):
        found = late(ordered, waited=61.0)
        assert (found.rank if found is not None else None) == rank


def test_what_is_told_of_it():
    waited = "rank 0 has waited 61 s for it, longer than the limit (20 times the median step of 0.1 s, at least 60 s)"
    failure = stalled(BUSY, [WAITS, BUSY], waited)
    assert (failure.kind, failure.rank, failure.step, failure.phase) == (Kind.STALLED, 1, 7, "data")
    assert failure.summary == (
        "rank 1 makes no progress after step 7, in data: rank 0 has waited 61 s for it, longer than the limit (20 "
        "times the median step of 0.1 s, at least 60 s). Its process 101 is alive, and has been in data for 61 s"
    )
    assert "rank 0: after step 7, waits in all_reduce, bucket 0" in failure.stacks
    waits, busy = (dataclasses.replace(each, in_batches=True) for each in (WAITS, BUSY))
    failure = stalled(busy, [waits, busy], waited)
    assert failure.summary.startswith("rank 1 makes no progress at step 7, in data: ")
    assert "rank 0: at step 7, waits in all_reduce, bucket 0" in failure.stacks


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stopped": True}, "Its process 101 is stopped (SIGSTOP, Ctrl-Z or a debugger)"),
        ({"answers": False, "stack": "  File x"}, "a call into C code holds its interpreter"),
        ({"answers": False, "pid": 0}, "Its process does not answer"),
        ({"waits_for": "barrier"}, "waits in another collective: barrier"),
        (
            {"waits_for": "save()"},
            "in another collective: save(). Call save() on every rank, not under `if run.is_main`",
        ),
    ],
)
def test_its_condition_is_told(changes, said):
    found = answer(1, **changes)
    assert said in stalled(found, [WAITS, found], "rank 0 has waited").what


ABSENT = {
    "one that cannot answer": ([WAITS, BUSY, answer(2, answers=False)], 2),
    "one that is stopped": ([WAITS, BUSY, answer(2, waits_for="x", stopped=True)], 2),
    "one that does something else": ([WAITS, answer(1, begun=19), answer(2, idle=100)], 1),
    "nobody, where all wait": ([WAITS, answer(1, waits_for="x", begun=3)], None),
    "nobody whose own time has just been over": ([WAITS, answer(1, idle=100)], None),
    "nobody, where collectives are not counted": ([WAITS, answer(1, begun=None)], None),
}


@pytest.mark.parametrize(("answers", "rank"), ABSENT.values(), ids=ABSENT)
def test_the_rank_that_others_have_waited_for_in_vain_is(answers, rank):
    for ordered in (answers, answers[::-1]):
        found = absent(ordered)
        assert (found.rank if found is not None else None) == rank


def test_what_is_told_of_a_rank_that_nobody_can_ask():
    found = Whereabouts(2, 102, answers=False)
    failure = stalled(found, [WAITS, found], "rank 0 has waited for it in vain (CommunicationError: timed out)")
    assert (failure.kind, failure.rank, failure.step) == (Kind.STALLED, 2, None)
    assert failure.summary == (
        "rank 2 makes no progress: rank 0 has waited for it in vain (CommunicationError: timed out). Its process 102 "
        "does not answer: it is stopped, its host is gone, or a call into C code holds it"
    )
    found = dataclasses.replace(found, silent_host="node2")
    silent = stalled(found, [WAITS], "rank 0 has waited for it in vain (timed out)")
    assert silent.kind is Kind.UNREACHABLE
    assert silent.summary == (
        "rank 2 cannot be reached: rank 0 has waited for it in vain (timed out). Its host node2 does not answer: that "
        "host, or the network to it, is down"
    )


def test_what_is_told_of_a_host_of_which_nothing_is_heard():
    def told(answering, silent, reaching=()):
        seen = "rank 0 has heard nothing from node1 for 20 s"
        return unreachable([2, 3], "node1", seen, "node0", answering, silent, reaching)

    failure = told([], [])
    assert (failure.kind, failure.rank, failure.step) == (Kind.UNREACHABLE, 2, None)
    begin = "rank 2 cannot be reached: rank 0 has heard nothing from node1 for 20 s, where ranks 2, 3 are"
    assert failure.summary == f"{begin}: node1, node0, or the network between them is down"
    assert told(["node2"], []).summary == f"{begin}; node2 still answers node0, so that node1 or its network is down"
    assert told(["node2", "node3"], []).summary.startswith(f"{begin}; node2, node3 still answer node0, so that")
    assert told([], ["node2"]).summary == f"{begin}; node2 does not answer either: node0 is cut off"
    between = "so that the network between node0 and node1 is down"
    assert told(["node2"], [], ["node2"]).summary == f"{begin}; node2 still reaches both, {between}"
    assert told(["node2", "node3"], [], ["node3"]).summary == f"{begin}; node3 still reaches both, {between}"
    others = "so that node1, node3, or the network to them, are down"
    assert told(["node2"], ["node3"]).summary == f"{begin}; node2 still answers node0, node3 does not, {others}"
    assert str(failure.error(2)).startswith(
        "rank 2 was given up by the others, because it could not be reached: rank 0"
    )


def observed(deadline, steps, length):
    for step in range(steps):
        deadline.observe(step, step * length)


LIMITS = [
    # steps begun, length of a step, phase; the limit in seconds, and where it comes from
    (10, 0.1, "forward", 60, "20 times the median step of 0.1 s, at least 60 s"),
    (10, 7.0, "data", 140, "20 times the median step of 7 s, at least 60 s"),
    (10, 27.0, "training", 540, "20 times the median step of 27 s, at least 60 s"),
    (10, 30.0, "backward", 540, "20 times the median step of 30 s, at least 60 s, at most 540 s"),
    (10, 3600.0, "optimizer", 540, "20 times the median step of 3.6e+03 s, at least 60 s, at most 540 s"),
    (FIRST_STEPS, 0.001, "forward", 540, "the limit in the first steps"),
    (FIRST_STEPS, 3600.0, "forward", 540, "the limit in the first steps"),
    (1, 0.1, "forward", 540, "the limit in the first steps"),
    (20, 0.1, "start-up", 540, "the limit in start-up"),
    (20, 0.1, "checkpoint", 540, "the limit in checkpoint"),
    (20, 3600.0, "evaluation", 540, "the limit in evaluation"),
    (20, 0.1, "what the program calls it", 540, "the limit in what the program calls it"),
]


@pytest.mark.parametrize(("steps", "length", "phase", "seconds", "why"), LIMITS)
def test_the_limit_follows_from_the_steps_and_comes_before_the_time_out(steps, length, phase, seconds, why):
    deadline = Deadline(StallLimits(factor=20, minimum=60, timeout=600), 0.0)
    observed(deadline, steps + 1, length)
    deadline.observe(steps, steps * length + 500)  # one long step changes nothing
    assert deadline.limit(phase) == (pytest.approx(seconds), why)


@pytest.mark.parametrize("phase", ["forward", "evaluation"])
def test_the_least_limit_may_be_longer_than_the_time_out(phase):
    deadline = Deadline(StallLimits(factor=20, minimum=7200, timeout=600), 0.0)
    assert deadline.limit(phase)[0] == 7200
    observed(deadline, 10, 3600.0)
    assert deadline.limit(phase)[0] == 7200
    assert deadline.limit("forward")[1] == "20 times the median step of 3.6e+03 s, at least 7200 s"


def test_several_steps_between_two_looks_count_with_their_mean():
    deadline = Deadline(StallLimits(factor=2, minimum=0.1, timeout=600), 0.0)
    for look in range(10):
        deadline.observe(5 * look, 10.0 * look)
        deadline.observe(5 * look, 10.0 * look + 5)  # a look at which nothing has happened
    assert deadline.limit("forward")[0] == pytest.approx(4)


@pytest.mark.parametrize(("counts", "seconds"), [([0, 0, 8], 60), ([8], 60), ([0, 1, 1, 8], 60), ([0, 5], 540)])
def test_the_first_steps_are_over_when_they_have_been_made_however_fast_they_were(counts, seconds):
    deadline = Deadline(StallLimits(factor=20, minimum=60, timeout=600), 0.0)
    for look, count in enumerate(counts, 1):
        deadline.observe(count, float(look))
    assert deadline.limit("training")[0] == seconds


@pytest.mark.parametrize("begun", [0, 1])
def test_a_long_start_is_no_step(begun):
    deadline = Deadline(StallLimits(factor=20, minimum=60, timeout=600), 0.0)
    deadline.observe(begun, 400.0)
    deadline.observe(begun + 8, 401.0)
    assert deadline.limit("training")[0] == 60


def test_steps_of_an_earlier_process_are_not_made_here():
    progress = Progress("run", 0, 2)
    progress.step = 1
    progress.resume_at(5000)
    assert (progress.step, progress.steps_made) == (5000, 0)
    progress.step += 1
    assert (progress.step, progress.steps_made) == (5001, 1)
    progress.close()


@pytest.mark.parametrize("wrong", [{"factor": 0.0}, {"minimum": -1.0}, {"timeout": float("nan")}])
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        StallLimits(**wrong)


def test_a_thread_that_waits_for_other_ranks_is_told_from_one_that_does_not():
    begun, go_on = threading.Event(), threading.Event()

    def waits(where):
        begun.set()
        where()

    thread = threading.Thread(target=waits, args=(go_on.wait,))
    thread.start()
    begun.wait()
    stack = own_stack(thread.ident)
    go_on.set()
    thread.join()
    assert collective_of(stack) == ""
    assert program_frame(stack).function == "waits"
    assert not compiles(stack)
    inner = [
        Frame(f"{TORCH}/distributed/c10d_logger.py", 1, "wrapper"),
        Frame(f"{TORCH}/distributed/x.py", 1, "barrier"),
    ]
    assert collective_of(Thread(1, "", (*stack.frames[:1], *inner))) == "barrier"
    compiling = Frame(f"{TORCH}/_dynamo/convert_frame.py", 1, "compile")
    assert compiles(Thread(1, "", (*stack.frames, compiling)))


def test_a_look_at_all_threads_keeps_none_of_their_frames(monkeypatch):
    """Two threads that look at the same time are in each other's frames, and would keep what all others refer to."""
    looked: list[dict] = []
    monkeypatch.setattr(WaitsOfRank, "_look_at", lambda _, frames: looked.append(frames) or len(frames))
    with ThreadPoolExecutor(1) as other:
        assert other.submit(WaitsOfRank._look, WaitsOfRank.__new__(WaitsOfRank)).result() > 0
    assert looked == [{}]
