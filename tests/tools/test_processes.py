"""Ranks as processes: they meet, fail, die and are gone afterwards as `processes` promises."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from processes import Outcome, RankEndedError, RankError, on_processes, run_processes
from threaded import Rank, count_collectives


class Pair(NamedTuple):
    """Something to send that only this module knows."""

    left: object
    right: object


class Special(Exception):
    """An error that survives pickling."""


class Stubborn(Exception):
    """An error that does not."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def total(rank: Rank) -> float:
    value = torch.tensor([float(rank.rank + 1)])
    dist.all_reduce(value)
    return value.item()


def on_accelerators(rank: Rank) -> tuple:
    value = torch.tensor([float(rank.rank + 1)])
    return value.device, total(rank), rank.gather(value)[1].item()


def test_each_rank_has_an_accelerator(sim):
    results = run_processes(2, on_accelerators, device="sim")

    assert results == [(torch.device("sim", rank), 3.0, 2.0) for rank in range(2)]


def meet(rank: Rank, extra: Pair) -> tuple:
    assert (dist.get_rank(), dist.get_world_size()) == (rank.rank, rank.world)
    return rank.rank, os.getpid(), total(rank), Pair(rank.gather(torch.tensor(rank.rank)), extra)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_by_rank_and_collectives_reach_every_rank(world):
    results = run_processes(world, meet, Pair(torch.ones(2), "a"))

    assert [result[0] for result in results] == list(range(world))
    assert len({os.getpid(), *(result[1] for result in results)}) == world + 1
    assert {result[2] for result in results} == {world * (world + 1) / 2}
    for *_, pair in results:
        assert pair.left == [torch.tensor(r) for r in range(world)]
        assert torch.equal(pair.right.left, torch.ones(2))
        assert pair.right.right == "a"
    assert not dist.is_initialized()


def surroundings(rank: Rank) -> tuple:
    return torch.get_num_threads(), threading.active_count(), torch.rand(()).item(), random.random()


def test_ranks_run_one_thread_each_with_the_same_random_numbers():
    one, other = run_processes(2, surroundings)

    assert one[:2] == (1, 1)
    assert other == one


def warn(rank: Rank) -> None:
    warnings.warn("careful", stacklevel=1)


def test_warnings_are_errors_in_a_rank_too():
    with pytest.raises(UserWarning, match="careful"):
        run_processes(1, warn)


def groups(rank: Rank) -> tuple[int, int]:
    alone = dist.new_group([rank.rank], use_local_synchronization=True)
    with count_collectives(rank) as seen:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(5), group=alone)
    return alone.size(), [numel for _, numel, _ in seen]


def test_ranks_can_make_groups_and_count_collectives():
    assert run_processes(2, groups) == [(1, [3, 5])] * 2


def bytes_back(rank: Rank, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def test_results_may_be_large():
    assert [len(result) for result in run_processes(2, bytes_back, 10_000_000)] == [10_000_000] * 2


def test_only_functions_of_a_module_can_be_run():
    with pytest.raises(TypeError, match="not defined at module level"):
        run_processes(1, lambda rank: None)


def wait_for_rank_0(rank: Rank) -> str:
    if rank.rank == 0:
        return "done"
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_a_rank_that_returns_keeps_its_connections_until_the_others_have():
    assert "Timed out" in run_processes(2, wait_for_rank_0, group_timeout=0.5)[1]  # not: connection closed


# ------------------------------------------------------------------------------------------ errors


def fail(rank: Rank) -> None:
    raise Special("broken")


def test_an_error_that_every_rank_raises_is_raised_as_it_is():
    with pytest.raises(
        Special, match=r"^broken\nraised by rank \d of 3; rank \d: Special; rank \d: Special$"
    ) as caught:
        run_processes(3, fail)

    assert "in fail" in str(caught.value.__cause__)


def fail_alone(rank: Rank) -> float:
    if rank.rank == 1:
        print("before the end", file=sys.stderr)
        raise Special("broken")
    return total(rank)


def test_the_error_that_comes_first_is_raised_and_not_what_follows_from_it():
    with pytest.raises(Special, match="broken\nraised by rank 1 of 2; rank 0: RuntimeError") as caught:
        run_processes(2, fail_alone)

    assert "rank 1 wrote:\nbefore the end\n" in str(caught.value.__cause__)


def test_outcomes_tell_how_each_rank_ended():
    zero, one = run_processes(2, fail_alone, errors=True)

    assert (zero.rank, zero.returncode, zero.result) == (0, 1, None)
    assert type(zero.error) is RuntimeError  # the connection is closed, since the other process has ended
    assert (one.rank, one.returncode, one.result) == (1, 1, None)
    assert type(one.error) is Special
    assert one.stderr == "before the end\n"


def stubborn(rank: Rank) -> None:
    raise Stubborn(1, 2)


def test_an_error_that_cannot_be_sent_is_told():
    with pytest.raises(RankError, match=r"^Stubborn: 1 and 2\n"):
        run_processes(1, stubborn)


def unsendable(rank: Rank) -> object:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank():
    with pytest.raises((AttributeError, RankError), match=r"lambda.*\nraised by rank 0"):
        run_processes(1, unsendable)


# ------------------------------------------------------------------------------------------- death


def die(rank: Rank, number: int) -> float:
    if rank.rank == 1:
        print("about to die", flush=True)
        os.kill(os.getpid(), number)
    return total(rank)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_is_killed(number):
    zero, one, two = run_processes(3, die, number, errors=True)

    assert one.returncode == -number
    assert isinstance(one.error, RankEndedError)
    assert one.stderr == "about to die\n"
    assert {zero.returncode, two.returncode} == {1}
    assert {type(zero.error), type(two.error)} == {RuntimeError}
    with pytest.raises(RankEndedError, match=f"rank 1 ended with exit code -{number:d}\n"):
        run_processes(3, die, number)


def test_a_rank_that_crashes_says_where():
    _, one = run_processes(2, die, signal.SIGSEGV, errors=True)

    assert one.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in one.stderr
    assert " in die\n" in one.stderr


def leave(rank: Rank, how: str) -> str:
    total(rank)
    if rank.rank == 0:
        os._exit(3) if how == "now" else sys.exit(3)
    return "fine"


@pytest.mark.parametrize("how", ["now", "in order"])
def test_a_rank_that_leaves_with_an_exit_code(how):
    zero, one = run_processes(2, leave, how, errors=True)

    assert zero.returncode == 3
    assert isinstance(zero.error, RankEndedError)
    assert one == Outcome(1, "fine", None, 0, "")


def hang_here(rank: Rank) -> None:
    if rank.rank == 0:
        print(f"pid {os.getpid()}", flush=True)
        threading.Event().wait()


def test_a_rank_that_hangs_is_ended_and_shown():
    with pytest.raises(TimeoutError, match=r"(?s)rank 0: .*pid \d+.*in hang_here.*rank 1: done") as caught:
        run_processes(2, hang_here, timeout=1)

    pid = int(str(caught.value).split("pid ")[1].split()[0])
    assert not Path(f"/proc/{pid}").exists()
    assert not multiprocessing.active_children()


def stop(rank: Rank) -> None:
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_cannot_end_itself_is_killed(monkeypatch):
    monkeypatch.setattr("processes.GRACE", 0.5)

    with pytest.raises(TimeoutError, match="rank 0: rank 0 ended with exit code -9"):
        run_processes(2, stop, timeout=1)

    assert not multiprocessing.active_children()


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = len(os.listdir("/proc/self/fd"))

    for function in (total, fail_alone):
        run_processes(2, function, errors=True)

    assert not multiprocessing.active_children()
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == files


@on_processes(2, group_timeout=5.0)
def each_process(rank, failing):
    assert rank.rank != failing


def test_a_test_of_processes_can_fail():
    each_process(failing=None)
    with pytest.raises(AssertionError) as caught:
        each_process(failing=1)
    assert "failing = 1" in str(caught.value.__cause__)
