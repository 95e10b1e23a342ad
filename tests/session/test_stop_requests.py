"""SIGINT and SIGTERM are heard at once, whatever the main thread does, and leave everything as it was."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep._base.loader_workers import workers_protected
from lockstep.session import stop_requests
from lockstep.session.stop_requests import StopRequests
from processes import in_child, on_processes, run_processes

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs POSIX signals")
BOTH = [signal.SIGINT, signal.SIGTERM]
KEPT = []


@contextlib.contextmanager
def taken_over(**options):
    requests = StopRequests(**options)
    requests.take_over()
    try:
        yield requests
    finally:
        requests.end()


@contextlib.contextmanager
def restored():
    """Afterwards the handlers are those of before."""
    handlers = [signal.getsignal(number) for number in BOTH]
    try:
        yield
    finally:
        for number, handler in zip(BOTH, handlers, strict=True):
            signal.signal(number, handler)


def wait_until(true):
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def heard(rank, number):
    """In a process of its own: a signal comes while the main thread waits in a collective, in C."""
    store = dist.HashStore()
    with taken_over(name="rank 0") as requests:
        assert requests.requested is None

        def looks():
            os.kill(os.getpid(), number)
            wait_until(lambda: requests.requested)
            store.set("requested", requests.requested)

        thread = threading.Thread(target=looks)
        thread.start()
        store.wait(["requested"])  # no Python runs here before it is set
        thread.join()
    return requests.requested


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_is_a_request_at_once_even_while_the_main_thread_waits_in_c(number):
    [outcome] = run_processes(1, heard, number, errors=True)
    assert outcome.result == signal.Signals(number).name
    assert f"rank 0 has received {signal.Signals(number).name}: training stops" in outcome.stderr


def sent_again(rank, number, times):
    requests = StopRequests(name="rank 0")
    requests.take_over()
    stop_requests._AT_ONCE = 0.0
    store = dist.HashStore()

    def sends():
        for sent in range(times):
            os.kill(os.getpid(), number)
            wait_until(lambda: len(requests._arrivals) > sent)  # noqa: B023 - it is called here
        store.set("sent", "")

    threading.Thread(target=sends, daemon=True).start()
    try:
        store.wait(["sent"])
        time.sleep(30)
    except KeyboardInterrupt:
        return "interrupted"


def test_a_second_sigint_interrupts():
    assert run_processes(1, sent_again, signal.SIGINT, 2) == ["interrupted"]


@pytest.mark.parametrize(("number", "times"), [(signal.SIGTERM, 2), (signal.SIGINT, 3)])
def test_a_signal_that_comes_again_and_again_ends_the_process_even_while_it_waits_in_c(number, times):
    [outcome] = run_processes(1, sent_again, number, times, errors=True)
    assert outcome.returncode == 128 + number
    assert "ends at once" in outcome.stderr


def test_the_same_signal_from_a_terminal_and_a_launcher_is_one_request():
    with taken_over() as requests:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        wait_until(lambda: requests.requested)
    assert requests.requested == "SIGINT"


def state():
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return [signal.getsignal(number) for number in BOTH], fd, threading.active_count(), os.listdir("/proc/self/fd")


def test_until_it_is_taken_over_and_after_the_end_all_is_as_it_was():
    before = state()
    for _ in range(2):
        requests = StopRequests()
        assert state() == before
        requests.take_over()
        requests.take_over()
        assert state()[:2] != before[:2]
        requests.end()
        requests.end()
        assert state() == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_the_program_had_installed_still_works_and_is_put_back():
    called = []
    read, written = socket.socketpair()
    written.setblocking(False)
    with read, written, restored():
        for number in BOTH:
            signal.signal(number, lambda number, _: called.append(number))
        signal.set_wakeup_fd(written.fileno())
        try:
            before = state()
            with taken_over() as requests:
                signal.raise_signal(signal.SIGTERM)
                assert called == [signal.SIGTERM]
                assert read.recv(1) == bytes([signal.SIGTERM])
                wait_until(lambda: requests.requested == "SIGTERM")
            assert state() == before
        finally:
            signal.set_wakeup_fd(-1)


def test_what_the_program_installs_meanwhile_stays_and_what_it_ignores_stays_ignored():
    with restored():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with taken_over():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            signal.signal(signal.SIGTERM, wait_until)
        assert signal.getsignal(signal.SIGTERM) is wait_until


def in_thread(function):
    """Call it in another thread, and return what it returns."""
    with ThreadPoolExecutor(thread_name_prefix="second") as pool:
        return pool.submit(function).result()


def test_another_thread_cannot_take_over_and_says_so():
    requests, before = StopRequests(name="rank 3"), state()

    def takes_over():
        with pytest.warns(RuntimeWarning, match="rank 3 cannot take over SIGINT and SIGTERM in thread 'second_0'"):
            requests.take_over()
        requests.take_over()  # said once

    in_thread(takes_over)
    assert requests.requested is None
    assert state() == before
    requests.end()


def test_ended_by_another_thread_signals_do_what_they_did_as_soon_as_one_comes():
    before = state()
    requests = StopRequests()
    requests.take_over()
    in_thread(requests.end)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert state() == before
    assert requests.requested is None


def test_a_time_limit_is_a_request_and_the_first_reason_counts():
    requests = StopRequests(time_limit=0.05)
    assert requests.requested is None
    wait_until(lambda: requests.requested)
    assert requests.requested == "the time limit of 0.05 s"
    requests.request("the program")
    assert requests.requested == "the time limit of 0.05 s"
    asked = StopRequests(time_limit=1000)
    asked.request("the program")
    assert asked.requested == "the program"


def test_a_forked_process_does_as_it_did_and_its_parent_hears_nothing():
    with taken_over() as requests:
        sockets = requests._sockets

        def child(number):
            try:
                if signal.pthread_sigmask(signal.SIG_BLOCK, ()) or any(each.fileno() >= 0 for each in sockets):
                    return 9
                os.kill(os.getpid(), number)
                return 1
            except KeyboardInterrupt:
                return 2

        for number in BOTH:
            assert in_child(lambda number=number: child(number)) == (2 if number == signal.SIGINT else -number)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        assert requests.requested is None
        signal.raise_signal(signal.SIGTERM)  # heard after all that the children have sent
        wait_until(lambda: requests.requested)
        assert requests.requested == "SIGTERM"


class Numbers(Dataset):
    """Numbers; a worker that is asked for a certain one holds the interpreter and never comes back."""

    def __init__(self, stuck=-1):
        self.stuck = stuck

    def __len__(self):
        return 200

    def __getitem__(self, index):
        if index == self.stuck:
            ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
        return index


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
@on_processes(1)
def test_loader_workers_outlive_a_signal_to_all(rank, method):
    os.setpgid(0, 0)  # the signal is for this process and its workers alone
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method)
    batches = iter(lockstep.batches(loader))
    seen = next(batches).tolist()
    with taken_over() as requests:  # as run.should_stop does, inside of the loop
        pids = [worker.pid for worker in multiprocessing.active_children()]
        for number in BOTH:
            os.killpg(0, number)
        wait_until(lambda: requests.requested)
        seen += torch.cat(list(batches)).tolist()
    assert seen == list(range(200))
    assert [os.path.exists(f"/proc/{pid}") for pid in pids] == [False, False]


def ends_with_a_stuck_worker(rank):
    with workers_protected():
        batches = iter(DataLoader(Numbers(stuck=1), num_workers=2))
    next(batches)
    pid = batches._workers[1].pid
    KEPT.append(batches)  # to the end of the program
    return pid


@pytest.mark.around
def test_a_stuck_worker_does_not_keep_the_program_from_ending():
    [pid] = run_processes(1, ends_with_a_stuck_worker)
    assert not os.path.exists(f"/proc/{pid}")
