"""The page that says how far a rank has come: read by others, whatever its process does."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
import torch

from lockstep.errors import InspectionError
from lockstep.failures import proc
from lockstep.failures.progress import NAME, Page, Phase, Progress, page_of, pages_of
from processes import in_child, run_processes

pytestmark = pytest.mark.skipif(not proc.available(), reason="needs Linux")


@pytest.fixture
def progress():
    page = Progress("digits", 1, 3)
    yield page
    page.close()


def read(pid=0):
    """Return what the pages of a process say, by default of this one, as others would read them; other tests' are left
    out."""
    snapshots = [page.read() for page in pages_of(pid or os.getpid())]
    return [seen for seen in snapshots if seen.run == "digits"]


def test_what_is_written_can_be_read(progress):
    before = time.monotonic()
    progress.step = 7
    progress.current_phase = Phase.BACKWARD
    [seen] = read()
    assert (seen.run, seen.rank, seen.world, seen.pid) == ("digits", 1, 3, os.getpid())
    assert (seen.step, seen.phase) == (7, "backward")
    assert seen.started < before < seen.changed < time.monotonic()
    assert seen.describe() == "rank 1, after step 7, in backward"
    progress.begin_batch()
    assert read()[0].describe() == "rank 1, at step 8, in backward"


def test_a_rank_that_waits_says_what_for(progress):
    with progress.waiting("all_reduce, bucket 3"):
        [seen] = read()
    assert seen.waits_for == "all_reduce, bucket 3"
    assert seen.describe() == "rank 1, before its first step, in start-up, waiting for all_reduce, bucket 3"
    assert read()[0].waits_for == ""
    progress.current_phase = Phase.FORWARD
    assert read()[0].describe() == "rank 1, in forward"  # steps may not be counted


def test_phases_are_nested_and_may_have_any_name(progress):
    progress.current_phase = "forward"
    with progress.phase("x" * 30 + "é"):  # there is room for 31 bytes, and é takes two
        assert read()[0].phase == progress.current_phase == "x" * 30
        with progress.phase(Phase.CHECKPOINT):
            assert read()[0].phase == "checkpoint"
        assert read()[0].phase == "x" * 30
        inside = time.monotonic()
    [seen] = read()
    assert seen.phase == "forward"
    assert seen.changed > inside


def test_an_exception_leaves_the_phase_in_which_it_was_raised(progress):
    with pytest.raises(KeyError), progress.phase("evaluation"):
        raise KeyError
    assert progress.read().phase == "evaluation"


def test_several_ranks_of_one_process_have_a_page_each(progress):
    other = Progress("digits", 0, 3)
    other.step = 4
    assert [(seen.rank, seen.step) for seen in read()] == [(0, 4), (1, 0)]
    page = page_of(os.getpid(), "digits", 0)
    other.close()
    assert [seen.rank for seen in read()] == [1]
    assert page.read().step == 4  # who has mapped it keeps it
    assert page_of(os.getpid(), "digits", 2) is None
    assert page_of(os.getpid(), "letters", 1) is None


def test_a_mapped_page_takes_no_descriptor(progress):
    before = os.listdir("/proc/self/fd")
    page = page_of(os.getpid(), "digits", 1)
    assert os.listdir("/proc/self/fd") == before
    progress.step = 5
    assert page.read().step == 5


def test_after_the_end_nothing_is_left_and_writing_is_still_allowed():
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        progress = Progress("digits", 0, 1)
        progress.close()
        progress.step = 3
        progress.close()
    assert os.listdir("/proc/self/fd") == before
    assert progress.read().step == 3


def test_a_process_without_a_page_and_one_that_is_not_there():
    assert read(os.getppid()) == []
    with pytest.raises(InspectionError, match="no process 4194305"):
        pages_of(4194305)  # more than Linux ever gives


def test_a_page_of_another_version_is_refused(progress):
    progress._words[1] = 99
    page = Page(proc.shared_memories(os.getpid(), NAME)[0][1])
    with pytest.raises(InspectionError, match="format 99"):
        page.read()


def test_a_forked_process_is_not_the_rank(progress):
    progress.step = 1

    def child():
        progress.step = 99
        return 0 if [progress.step, len(read()), len(read(os.getppid()))] == [99, 0, 1] else 1

    assert in_child(child) == 0
    assert [seen.step for seen in read()] == [1]


def page_after_a_kill(rank):
    progress = Progress("digits", rank.rank, 2)
    pid = int(rank.gather(torch.tensor([os.getpid()]))[1])
    with progress.phase(Phase.OPTIMIZER):
        progress.step = 12
        rank.gather(torch.zeros(1))  # rank 1 is where it will be killed
        page = page_of(pid, "digits", 1)
        rank.gather(torch.zeros(1))
        if rank.rank == 1:
            os.kill(pid, 9)
        with contextlib.suppress(InspectionError):  # somebody else has noticed its end before
            while not proc.status_of(pid).ended:
                time.sleep(0.001)
        return page.read().describe()


def test_a_page_outlives_its_process():
    outcomes = run_processes(2, page_after_a_kill, errors=True)
    assert outcomes[0].result == "rank 1, after step 12, in optimizer"
    assert outcomes[1].returncode == -9
