"""Killed ranks that torchrun starts again: they meet anew, and go on from the memory of their host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.errors import CommunicationError
from lockstep.session.meeting import part_of_incarnation
from threaded import run_ranks

PROGRAM = Path(__file__).with_name("restarted.py")


def launch(folder, processes, kills, *options):
    """Which process started from which step, and the fingerprint and the step at the end."""
    command = ["torchrun", "--standalone", "--nproc-per-node", str(processes), "--max-restarts", "3", str(PROGRAM)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:], str(folder), ",".join(map(str, kills)), *options],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    starts = [int(step) for step in re.findall(r"from step (\d+)", done.stdout)]
    # A rank that stops for a killed one skips the search for garbage, since the launcher waits for it; or the launcher
    # ends it before it has printed that.
    assert re.findall(r"ends (as always|soon)", done.stdout).count("as always") == processes
    return starts, re.findall(r"fingerprint (\w+) after step (\d+)", done.stdout)


@pytest.mark.soak  # half a minute; tests/examples/test_digits.py kills processes of the example in each run
def test_killed_ranks_go_on_where_they_were(tmp_path):
    _, wanted = launch(tmp_path / "undisturbed", 1, [])
    starts, found = launch(tmp_path / "killed", 2, [7, 11, 18])
    assert starts == [0, 6, 10, 17]  # nothing but the step in which a rank was killed is computed twice
    assert found == wanted
    assert not list(Path("/dev/shm").glob("lockstep-*/killed-*"))


def test_a_rank_that_is_killed_while_a_snapshot_gets_its_marker(tmp_path):
    _, wanted = launch(tmp_path / "undisturbed", 1, [])
    starts, found = launch(tmp_path / "killed", 2, [11], "marker")
    assert starts == [0, 10]
    assert found == wanted


def test_processes_that_were_started_again_do_not_meet_those_before_them():
    """Of these, one has not come before it was killed, and the others wait for it; then all are started."""
    store, together = dist.HashStore(), threading.Barrier(3)

    def meet(rank, comes, token):
        if not comes[rank.rank]:
            together.wait()
            return None
        with part_of_incarnation(store, rank.rank, 3, 20.0) as part:
            if rank.rank == 0:
                part.set("token", token)
            told = part.get("token").decode()
            together.wait()
            return told

    assert run_ranks(3, meet, [True, True, False], "first") == ["first", "first", None]
    assert run_ranks(3, meet, [True, True, True], "second") == ["second"] * 3
    assert run_ranks(3, meet, [True, True, True], "third") == ["third"] * 3


def test_rank_0_serves_a_process_that_comes_after_one_of_its_number_was_killed(store):
    came = threading.Event()
    store.set("of rank 1", "killed")

    def rank_0():
        with part_of_incarnation(store, 0, 2, 20.0):
            assert came.wait(20)

    with ThreadPoolExecutor() as pool:
        served = pool.submit(rank_0)
        store.wait(["killed"])  # it has its token, and does not ask for it
        with part_of_incarnation(store, 1, 2, 20.0):
            came.set()
        served.result()


def test_rank_0_does_not_come():
    told = pytest.raises(CommunicationError, match=r"rank 1: rank 0 of 2 has not come within 0.1 s")
    with told, part_of_incarnation(dist.HashStore(), 1, 2, 0.1):
        raise AssertionError
