"""``lockstep stacks``: what it prints of runs on this host, its exit codes, and what it says of other processes."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import sys
import time
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

import lockstep
import lockstep_command
from lockstep.cli.main import main
from lockstep.failures import proc
from lockstep.failures.progress import Phase, Progress
from lockstep.failures.stacks import answering
from processes import run_processes

pytestmark = pytest.mark.skipif(not proc.available(), reason="needs Linux")


@contextlib.contextmanager
def in_a_session(run, rank=0, world=1):
    progress = Progress(run, rank, world)
    with answering():
        yield progress
    progress.close()


def shown(capsys, *arguments):
    code = main(["stacks", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_this_process_is_shown_with_rank_step_and_phase(capsys):
    with in_a_session("letters", 1, 4) as progress:
        progress.step = 12
        progress.current_phase = Phase.BACKWARD
        with progress.waiting("all_reduce, bucket 3"):
            code, out, err = shown(capsys, os.getpid())
    assert (code, err) == (0, "")
    out = re.sub(r"\d+\.\d s\b", "T s", out)
    head, _, frames = out.partition("\n")
    assert head.startswith(
        f"run letters, rank 1 of 4 (process {os.getpid()}), after step 12, in backward, waits for other ranks in "
        "all_reduce, bucket 3, for T s: line "
    )
    assert "of " + __file__ in head
    assert "rank 1, the program's own frames, innermost last:" in frames
    assert "in test_this_process_is_shown_with_rank_step_and_phase" in frames
    assert "_pytest" not in frames
    assert "All threads, and the frames of libraries: --all" in frames


def test_all_threads_and_frames_of_libraries_are_shown_if_asked_for(capsys):
    with in_a_session("letters", 1, 4):
        code, out, err = shown(capsys, os.getpid(), "--all")
    assert (code, err) == (0, "")
    assert "(rank 1 trains here), innermost frame last:" in out
    marked = [line for line in out.splitlines() if line.startswith(">")]
    assert len(marked) == 2  # one frame: where it is, and the line of code
    assert "in shown" in marked[0]
    assert "_pytest" in out


def ranks_that_wait(rank, run):
    """Rank 1 waits for ever, rank 2 is stopped; rank 0 looks at the run."""
    pids = [int(each) for each in rank.gather(torch.tensor([os.getpid()]))]
    with in_a_session(run, rank.rank, rank.world) as progress:
        progress.step = 7
        rank.gather(torch.zeros(1))
        if rank.rank == 1:
            time.sleep(1000)
        if rank.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        while not proc.status_of(pids[2]).stopped:
            time.sleep(0.001)
        code = main(["stacks", run, "--seconds", "60"])
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)
    return code


def test_all_processes_of_a_run_are_shown_and_those_that_cannot_show_their_stacks():
    run = f"run of {os.getpid()}"
    outcome = run_processes(3, ranks_that_wait, run, errors=True)[0]
    assert outcome.result == 1
    lines = outcome.stderr.splitlines()
    found = [next(line for line in lines if line.startswith(f"run {run}, rank {rank} of 3")) for rank in range(3)]
    assert "after step 7, in start-up, for" in found[0]
    assert "time.sleep(1000)" in found[1]
    assert "is stopped" in found[2]
    assert "rank 1, the program's own frames, innermost last:" in lines


def one_sleeps(rank, run):
    """Rank 1 waits for nobody, the others for it; rank 0 looks at the run."""
    pids = [int(each) for each in rank.gather(torch.tensor([os.getpid()]))]
    with in_a_session(run, rank.rank, rank.world) as progress:
        with progress.waiting("backward()") if rank.rank != 1 else contextlib.nullcontext():
            rank.gather(torch.zeros(1))
            if rank.rank:
                time.sleep(1000)
            main(["stacks", run, "--seconds", "60"])
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)


def test_the_rank_that_others_wait_for_comes_first():
    run = f"run of {os.getpid()} that waits"
    lines = run_processes(3, one_sleeps, run, errors=True)[0].stderr.splitlines()
    heads = [line.partition(" of 3 (")[0] for line in lines if line.startswith(f"run {run}")]
    assert heads == [f"run {run}, rank {rank}" for rank in (1, 0, 2)]


OWN = f"letters of {os.getpid()}"  # other processes of the tests have runs, too


def test_an_unknown_process_and_an_unknown_run(capsys):
    code, out, err = shown(capsys, 4194305)
    assert (code, out, err) == (1, "", "lockstep: there is no process 4194305 on this host; it may have ended\n")
    with in_a_session(OWN):
        code, out, err = shown(capsys, "no such run")
    assert (code, out) == (1, "")
    assert "this user has no run 'no such run' on this host. Runs on this host: " in err
    assert f"{OWN} (rank 0: process {os.getpid()})" in err


def test_a_process_without_a_session_and_one_that_has_ended(capsys):
    with in_a_session("letters"):
        code, out, err = shown(capsys, os.getppid())
    assert (code, out) == (1, "")
    assert f"process {os.getppid()} has no session of lockstep. Runs on this host: " in err
    child = os.fork()
    if child == 0:
        os._exit(0)
    while not proc.status_of(child).ended:
        time.sleep(0.001)
    assert f"process {child} has ended" in shown(capsys, child)[2]
    os.waitpid(child, 0)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only the superuser can be somebody else")
def test_a_process_of_another_user(tmp_path):
    with in_a_session("letters"), open(tmp_path / "said", "w+") as said:
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            sys.stderr = said
            code = main(["stacks", str(os.getppid())])
            said.flush()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        said.seek(0)
        assert "belongs to another user" in said.read()


def test_without_a_target_the_runs_are_listed(capsys):
    with in_a_session(OWN, 0, 2), in_a_session(OWN, 1, 2):
        code, out, _ = shown(capsys)
    assert code == 0
    assert f"{OWN} (rank 0: process {os.getpid()}, rank 1: process {os.getpid()})" in out


def test_a_wrong_call_is_told_from_a_failure(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["stack"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "lockstep: there is no 'stack': did you mean stacks?; see lockstep --help\n"
    with pytest.raises(SystemExit) as caught:
        main(["trace", "traces"])
    assert caught.value.code == 2
    assert "there is no 'trace' any more: record the ranks with torch.profiler" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_its_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lockstep {lockstep.__version__}, PyTorch {torch.__version__}\n"


def test_it_can_be_called_as_a_module_and_as_a_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lockstep", "stacks", "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("lockstep", run_name="__main__")
    assert caught.value.code == 0
    assert "usage: lockstep stacks" in capsys.readouterr().out
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"lockstep": "lockstep_command:main"}
    for installed in entry_points(group="console_scripts", name="lockstep"):
        assert installed.load() is lockstep_command.main
