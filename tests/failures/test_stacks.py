"""A process shows its stacks whatever it is doing, and goes on as if nobody had asked."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.errors import InspectionError
from lockstep.failures import proc
from lockstep.failures.stacks import NAME, _able, answering, ask, no_collection, own_stack
from processes import in_child, on_processes, run_processes

pytestmark = pytest.mark.skipif(not proc.available(), reason="needs Linux")


def runs_for_ever():
    while True:
        pass


class EndsItsThread:
    """Garbage from the beginning, whose collection ends a thread, as that of a process group does."""

    def __init__(self):
        self.kept_by = self
        self.event = threading.Event()
        self.thread = threading.Thread(target=waits_deep_down, args=(30, self.event))
        self.thread.start()

    def __del__(self):
        self.event.set()
        self.thread.join()


def waits_deep_down(calls, event):
    if calls:
        waits_deep_down(calls - 1, event)
    else:
        event.wait()


def holds_the_interpreter():
    here, _there = os.pipe()
    ctypes.PyDLL(None).read(here, ctypes.create_string_buffer(1), 1)


def waits_for_itself():
    lock = threading.Lock()
    with lock:
        lock.acquire()


def sleeps():
    time.sleep(1000)


def pid_of(rank, other):
    return int(rank.gather(torch.tensor([os.getpid()]))[other])


def asked_while_stuck(rank, stuck):
    """Return what rank 0 is told of rank 1, which does not come back."""
    pid = pid_of(rank, 1)
    if rank.rank == 1:
        with answering():
            rank.gather(torch.zeros(1))
            stuck()
    rank.gather(torch.zeros(1))
    try:
        return repeated(lambda: ask(pid, 30).threads[0].innermost(1), stuck.__name__)  # not in what it calls before
    except InspectionError as error:
        return str(error)
    finally:
        os.kill(pid, signal.SIGKILL)


def repeated(call, text):
    """Return what a call returns when there is a text in it, which may take a moment."""
    deadline = time.monotonic() + 30
    while text not in (answer := call()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return answer


@pytest.mark.parametrize("stuck", [runs_for_ever, holds_the_interpreter, waits_for_itself, sleeps])
def test_a_process_that_is_stuck_shows_where(stuck):
    told = run_processes(2, asked_while_stuck, stuck, errors=True)[0].result
    *_, place, line = told.splitlines()
    assert f"in {stuck.__name__}" in place
    assert f'File "{__file__}"' in place
    assert line.strip() in ("while True:", "pass", "lock.acquire()", "time.sleep(1000)") or "PyDLL" in line


@on_processes(2)
def test_a_stopped_process_is_said_to_be_stopped_and_goes_on_when_it_is_continued(rank):
    pid = pid_of(rank, 1)
    if rank.rank == 1:
        with answering():
            rank.gather(torch.zeros(1))
            os.kill(pid, signal.SIGSTOP)
            rank.gather(torch.zeros(1))
        return
    rank.gather(torch.zeros(1))
    while not proc.status_of(pid).stopped:
        time.sleep(0.001)
    with pytest.raises(InspectionError, match=r"is stopped.*kill -CONT"):
        ask(pid)
    os.kill(pid, signal.SIGCONT)
    rank.gather(torch.zeros(1))


@pytest.mark.around
@on_processes(2)
def test_a_process_that_is_asked_goes_on_undisturbed(rank):
    """Rank 1 is busy with a bit of everything that waits in the system, and is asked all the time."""
    pid = pid_of(rank, 1)
    if rank.rank == 0:
        rank.gather(torch.zeros(1))
        for _ in range(50):
            assert "goes_on_undisturbed" in str(ask(pid, 60))
        rank.gather(torch.zeros(1))
        return
    with answering():
        rank.gather(torch.zeros(1))
        assert [batch.sum().item() for batch in DataLoader(torch.ones(64), batch_size=4, num_workers=2)] == [4.0] * 16
        began = time.monotonic()
        time.sleep(0.3)
        assert time.monotonic() - began >= 0.3
        here, there = os.pipe()
        threading.Timer(0.2, os.write, (there, b"x")).start()
        assert os.read(here, 1) == b"x"
        assert not threading.Event().wait(0.2)
        rank.gather(torch.zeros(1))


def test_this_process_shows_its_own():
    ready, done = threading.Event(), threading.Event()

    def helper_waits():
        ready.set()
        done.wait()

    thread = threading.Thread(target=helper_waits, name="a helper")
    thread.start()
    try:
        ready.wait()
        with answering():
            asked = ask(os.getpid())
        assert asked.threads[0].ident == threading.main_thread().ident
        for found in (asked.of(thread.ident), own_stack(thread.ident)):
            assert any(frame.function == "helper_waits" for frame in found.frames)
        own = own_stack(threading.main_thread().ident)
        assert "this_process_shows" in own.innermost(2)
        assert "outer frames" in own.innermost(2)
    finally:
        done.set()
        thread.join()


def test_afterwards_all_is_as_it_was():
    own, descriptors = proc.status_of(os.getpid()), os.listdir("/proc/self/fd")
    for _ in range(2):
        with answering(), answering():
            assert proc.status_of(os.getpid()).caught != own.caught
            with answering():
                assert ask(os.getpid()).threads
            assert ask(os.getpid()).threads
        with pytest.raises(InspectionError, match="no session"):
            ask(os.getpid())
    assert proc.status_of(os.getpid()).caught == own.caught
    assert os.listdir("/proc/self/fd") == descriptors


def test_signals_that_the_program_catches_are_left_to_it(tmp_path):
    highest = signal.SIGRTMAX - 8
    seen = []
    signal.signal(highest, lambda *_: seen.append("python"))
    with open(tmp_path / "own", "w+") as own:
        faulthandler.register(highest - 1, file=own)
        try:
            with answering():
                assert ask(os.getpid()).threads
                signal.raise_signal(highest)
                signal.raise_signal(highest - 1)
        finally:
            faulthandler.unregister(highest - 1)
            signal.signal(highest, signal.SIG_DFL)
        own.seek(0)
        assert "most recent call first" in own.read()
    assert seen == ["python"]


def test_a_forked_process_neither_answers_nor_writes_in_its_parents_name():
    with answering():
        number = int(proc.shared_memories(os.getpid(), NAME)[0][0].rpartition("-")[2])

        def child():
            with pytest.raises(InspectionError, match="has no session"):
                ask(os.getpid())
            with answering():
                assert ask(os.getpid()).threads[0].frames[-1].function == "_ask"
            return int(proc.status_of(os.getpid()).catches(number))

        assert in_child(child) == 0
        assert ask(os.getpid()).threads


def test_who_cannot_be_asked_is_told_apart():
    with pytest.raises(InspectionError, match="no process 4194305"):
        ask(4194305)
    with pytest.raises(InspectionError, match=f"process {os.getppid()} has no session"):
        ask(os.getppid())
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(InspectionError, match=f"process {child.pid} has ended; its parent has not noticed yet"):
            _able(child.pid)  # while it was asked


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only the superuser can be somebody else")
def test_a_process_of_another_user_cannot_be_asked():
    def child():
        os.setuid(65534)
        with pytest.raises(InspectionError, match="belongs to another user"):
            ask(os.getppid())
        return 0

    with answering():
        assert in_child(child) == 0


@on_processes(2)
def test_several_may_ask_at_once(rank):
    """Rank 1 runs no Python meanwhile: faulthandler crashes now and then as it reads the stacks of threads that run."""
    pid = pid_of(rank, 1)
    with answering():
        rank.gather(torch.zeros(1))
        if rank.rank == 0:
            with ThreadPoolExecutor(4) as askers:
                told = list(askers.map(lambda _: ask(pid, 60), range(20)))
        rank.gather(torch.zeros(1))
    found = [[thread.frames[0].function for thread in stacks.threads] for stacks in told] if rank.rank == 0 else "fine"
    assert found == [[["<module>"]] * 20, "fine"][rank.rank]


@on_processes(1, timeout=20.0)
def test_a_collection_that_ends_the_thread_whose_stack_is_read(rank):
    gc.collect()
    for allocations in range(80):  # so that a collection begins at each of the frames
        gc.disable()
        ident = EndsItsThread().thread.ident
        gc.set_threshold(gc.get_count()[0] + allocations)
        gc.enable()
        own_stack(ident)
        gc.collect()
    assert gc.isenabled()


@on_processes(1)
def test_collections_are_after_a_look_what_they_were_before(rank):
    with no_collection, no_collection:
        # such as a worker of a DataLoader, begun while another thread looks
        assert in_child(lambda: not gc.isenabled()) == 0
    assert gc.isenabled()
    gc.disable()
    with no_collection:
        pass
    assert not gc.isenabled()
