"""A rank that makes no progress, in whatever way, is named on every rank, with the place at which it is."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import select
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import PeerFailure, StalledError
from lockstep.failures import channel, proc
from lockstep.failures.inquiry import Inquirer
from lockstep.failures.stall import FIRST_STEPS
from lockstep.session import watch
from processes import run_processes

pytestmark = pytest.mark.skipif(not proc.available(), reason="needs Linux")

# Each comes back when the file, which is a pipe, is written to.


def is_stopped(release):
    os.kill(os.getpid(), signal.SIGSTOP)


def runs_for_ever(release):
    pipe = os.open(release, os.O_RDWR)
    all(not select.select([pipe], [], [], 0)[0] for _ in itertools.repeat(None))  # in this line at any moment


def holds_the_interpreter(release):
    pipe = os.open(release, os.O_RDWR)
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)


def waits_for_a_lock(release):
    lock = threading.Lock()
    lock.acquire()
    pipe = os.open(release, os.O_RDWR)
    threading.Thread(target=lambda: os.read(pipe, 1) and lock.release(), daemon=True).start()
    lock.acquire()


def loads_slowly(release):
    def collate(_):
        os.read(os.open(release, os.O_RDWR), 1)

    next(iter(torch.utils.data.DataLoader([1], collate_fn=collate)))


def is_in_another_collective(release):
    dist.monitored_barrier(group=OTHER[0])  # of which nobody knows which ranks it needs: see test_deadlocks.py


OTHER = []


def train(rank, stuck, release, whose, minimum):
    """Rank 1 gets stuck in a step; what each rank is told."""
    channel.FAREWELL_SECONDS = 0.1  # for which the other rank, which knows, waits for it in vain
    pids = [int(each) for each in rank.gather(torch.tensor([os.getpid()]))]
    OTHER.append(dist.new_group(backend="gloo"))
    model = lockstep.replicate(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    try:
        with lockstep.watch(stall_factor=2, stall_minimum=minimum[rank.rank]):
            for step in range(1000):
                time.sleep(0.01)
                if step == 30 and rank.rank == 1:
                    stuck(release)
                if whose == "lockstep":
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()
                else:
                    dist.all_reduce(torch.ones(1))
    except PeerFailure as failure:
        if rank.rank == 0:
            release_rank_1(release, pids[1])
        return type(failure), str(failure), failure.rank, failure.stacks
    return None


def release_rank_1(release, pid):
    os.kill(pid, signal.SIGCONT)
    dist.destroy_process_group(OTHER.pop())  # as the end of a program does
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(os.open(release, os.O_WRONLY | os.O_NONBLOCK), b"x")


def told(stuck, tmp_path, backend, whose, minimum=(1.0, 1.0)):
    """Return what both ranks are told."""
    release = tmp_path / "release"
    os.mkfifo(release)
    outcomes = run_processes(2, train, stuck, str(release), whose, minimum, backend=backend, errors=True)
    assert outcomes[0].result, outcomes[0].error.__cause__
    kind, message, rank, stacks = outcomes[0].result
    assert (kind, rank) == (PeerFailure, 1), message
    assert "rank 0 stops, because rank 1 makes no progress" in message
    assert "rank 0 has waited" in message
    assert "longer than the limit (2 times the median step of" in message
    assert "rank 0: " in stacks
    assert f"line {line_of('.sum().backward()' if whose == 'lockstep' else 'dist.all_reduce')} of {__file__}" in stacks
    assert outcomes[1].result, outcomes[1].error.__cause__
    kind, own, rank, _ = outcomes[1].result
    assert (kind, rank) == (StalledError, 1)
    assert "rank 1 was given up by the others, because it made no progress" in own
    return message


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


CASES = [
    (is_stopped, "is stopped (SIGSTOP, Ctrl-Z or a debugger)", ""),
    (runs_for_ever, "is alive, and has been in training for", "select.select([pipe]"),
    (holds_the_interpreter, "a call into C code holds its interpreter", "PyDLL(None).read"),
    (loads_slowly, "is alive, and has been in data for", "os.read(os.open(release"),
]
MORE = [
    (*CASES[0], "gloo"),
    (waits_for_a_lock, "is alive, and has been in training for", "lock.acquire()", "shm"),
]


@pytest.mark.parametrize(
    ("stuck", "condition", "line", "backend"),
    [*((*case, "shm") for case in CASES), *(pytest.param(*case, marks=pytest.mark.around) for case in MORE)],
)
def test_a_rank_that_makes_no_progress_is_named_with_its_place(stuck, condition, line, backend, tmp_path):
    message = told(stuck, tmp_path, backend, "lockstep")
    assert condition in message
    assert line in message
    assert stuck is is_stopped or f"in {stuck.__name__}" in message or stuck is loads_slowly


@pytest.mark.parametrize("asks_first", [0, pytest.param(1, marks=pytest.mark.around)])
def test_a_rank_that_waits_in_another_collective_is_named(asks_first, tmp_path):
    minimum = (0.9, 1.3) if asks_first == 0 else (1.3, 0.9)  # the one that is late finds itself, and says nothing
    message = told(is_in_another_collective, tmp_path, "gloo", "lockstep", minimum)
    assert "waits in another collective: monitored_barrier" in message
    assert "in is_in_another_collective" in message


def test_it_is_found_in_waits_that_are_the_programs_own(tmp_path):
    assert "in runs_for_ever" in told(runs_for_ever, tmp_path, "shm", "its own")


def evaluates(rank, name, decided):
    """Rank 1 stays in a phase until rank 0, which waits for it, has decided if that is too long."""
    decide = Inquirer._is_too_late

    def decide_and_say(*args):
        verdict = decide(*args)
        decided.write_text("yes" if verdict else "no")  # until rank 1 reads it
        return verdict

    Inquirer._is_too_late = decide_and_say
    model = lockstep.replicate(nn.Linear(2, 2))
    with lockstep.watch(stall_factor=2, stall_minimum=0.3) as watch:
        for step in range(FIRST_STEPS + 5):
            if step == FIRST_STEPS + 3 and rank.rank == 1:
                with watch.channel.progress.phase(name):
                    verdict = decided.read_text()
            model(torch.ones(1, 2)).sum().backward()
    return verdict if rank.rank == 1 else ""


@pytest.mark.parametrize("name", ["evaluation", "data"])
def test_a_phase_with_a_name_may_take_longer_and_one_of_a_step_may_not(name, tmp_path):
    os.mkfifo(tmp_path / "decided")
    first, second = run_processes(2, evaluates, name, tmp_path / "decided", backend="shm", errors=True)
    if name == "evaluation":
        assert (first.result, second.result) == ("", "no")
    else:
        assert "rank 1 makes no progress" in str(first.error)


def stops_at_once(rank, timeout):
    """Rank 1 stops in its second step, where nothing is known of how long steps take."""
    channel.FAREWELL_SECONDS = 0.1
    watch.END_SECONDS = timeout
    pids = [int(each) for each in rank.gather(torch.tensor([os.getpid()]))]
    model = lockstep.replicate(nn.Linear(2, 2))
    try:
        with lockstep.watch(stall_minimum=0.5):
            for step in range(3):
                if (step, rank.rank) == (1, 1):
                    os.kill(os.getpid(), signal.SIGSTOP)
                model(torch.ones(1, 2)).sum().backward()
    except PeerFailure as failure:
        if rank.rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        return type(failure), str(failure)


@pytest.mark.around  # waits for most of a time-out; the limit by itself: test_inquiry.py
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_stops_in_its_first_steps_is_named_before_the_time_out(backend):
    outcomes = run_processes(2, stops_at_once, 5.0, backend=backend, group_timeout=5.0, errors=True)
    first, second = (each.result for each in outcomes)
    assert first[0] is PeerFailure
    assert "rank 1 makes no progress" in first[1]
    assert "longer than the limit (the limit in the first steps)" in first[1]
    assert second[0] is StalledError
