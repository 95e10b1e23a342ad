"""The signals that ask a session to stop are the program's to choose."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.errors import OptionError, PeerFailure
from lockstep.session.stop_requests import StopRequests
from processes import be_launched, run_processes


def trains(rank, port, number, times):
    """One rank gets a signal in its third step; the step at which each has stopped."""
    dist.destroy_process_group()
    be_launched(rank, port)
    with lockstep.session(timeout=60.0, stop_signals=(signal.SIGTERM, signal.SIGUSR1)) as run:
        model = lockstep.replicate(nn.Linear(1, 1))
        for _ in run.batches(range(10)):
            if (rank.rank, run.step) == (1, 3):
                for _ in range(times):
                    os.kill(os.getpid(), number)
                    time.sleep(0.6)
            model(torch.ones(1, 1)).sum().backward()
            if run.should_stop:
                return run.step
        return 0


@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGUSR1, 3), pytest.param(signal.SIGTERM, 1, marks=pytest.mark.around)]
)
def test_all_ranks_stop_at_a_chosen_signal_however_often_it_comes_as_a_notice(number, times):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = run_processes(2, trains, store.port, number, times)
    assert first == second
    assert first in (3, 4)


def evaluates(rank, port):
    """One rank gets a signal in an evaluation, after which all take a mean; none has trained yet."""
    dist.destroy_process_group()
    be_launched(rank, port)
    with lockstep.session(timeout=60.0) as run, torch.no_grad():
        before = run.should_stop
        for _ in run.batches(range(3 + rank.rank)):
            if rank.rank:
                signal.raise_signal(signal.SIGTERM)
                time.sleep(0.1)
        during = run.should_stop
        lockstep.mean(1.0)
        return before, during, run.should_stop


def test_a_request_in_an_evaluation_is_heard_at_its_end():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_processes(2, evaluates, store.port) == [(False, False, True)] * 2


def interrupted(rank):
    dist.destroy_process_group()
    with lockstep.session(stop_signals=[signal.SIGUSR1]) as run:
        assert not run.should_stop
        signal.raise_signal(signal.SIGINT)


def test_others_do_what_they_always_do():
    [outcome] = run_processes(1, interrupted, errors=True)
    assert isinstance(outcome.error, KeyboardInterrupt) or outcome.returncode in (1, -signal.SIGINT, 130)
    assert "training stops" not in outcome.stderr


@pytest.mark.parametrize(
    ("signals", "said"),
    [
        ([signal.SIGKILL], r"session\(\): stop_signals has SIGKILL, which no program can take over"),
        (
            [1000],
            r"session\(\): stop_signals has what is no signal \(1000 is not a valid Signals\); give signal.SIGUSR1",
        ),
        (signal.SIGUSR1, r"session\(\): stop_signals has what is no signal"),
        (["SIGUSR1"], r"session\(\): stop_signals has what is no signal"),
    ],
)
def test_what_cannot_be_a_signal_is_refused(signals, said):
    with pytest.raises(OptionError, match=said):
        lockstep.session(stop_signals=signals)


class Slow(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        time.sleep(0.05)
        return float(index)


def notifies_workers(rank):
    """A scheduler sends its notice to all processes of a job step, those of the loaders included."""
    dist.destroy_process_group()
    with lockstep.session(stop_signals=[signal.SIGUSR1]) as run, torch.no_grad():
        assert not run.should_stop
        found = []
        for x in run.batches(DataLoader(Slow(), num_workers=1, batch_size=1)):
            for process in [*multiprocessing.active_children(), multiprocessing.current_process()]:
                os.kill(process.pid, signal.SIGUSR1)
            found.append(x.item())
        return found


@pytest.mark.around
def test_workers_of_loaders_do_not_notice():
    assert run_processes(1, notifies_workers) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


def ended_by_its_launcher(rank, port):
    """The launcher's SIGTERM comes when the session has just put back the handlers of before."""
    dist.destroy_process_group()
    be_launched(rank, port)
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    end = StopRequests.end

    def ended(requests):
        end(requests)
        signal.raise_signal(signal.SIGTERM)

    with (
        mock.patch.object(StopRequests, "end", ended),
        contextlib.suppress(ZeroDivisionError, PeerFailure),
        lockstep.session(backend="gloo", device="cpu", timeout=60.0) as run,
    ):
        assert not run.should_stop  # signals are taken over from here on
        _ = 1 / 0
    return "said why"


def test_a_rank_says_why_it_ends_before_its_launcher_ends_it():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_processes(2, ended_by_its_launcher, store.port) == ["said why"] * 2
