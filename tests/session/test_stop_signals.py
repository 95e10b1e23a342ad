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
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.errors import OptionError, PeerFailure
from lockstep.session import stop_requests
from lockstep.session.stop_requests import StopRequests
from processes import on_processes, run_processes


def trains(rank, number, times):
    """One rank gets a signal in its third step; the step at which each has stopped."""
    stop_requests._AT_ONCE = 0.0
    with lockstep.session(timeout=60.0, stop_signals=(signal.SIGTERM, signal.SIGUSR1)) as run:
        model = lockstep.replicate(nn.Linear(1, 1))
        for _ in run.batches(range(10)):
            if (rank.rank, run.step) == (1, 3):
                for _ in range(times):
                    os.kill(os.getpid(), number)
                    time.sleep(0.05)
            model(torch.ones(1, 1)).sum().backward()
            if run.should_stop:
                return run.step
        return 0


@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGUSR1, 3), pytest.param(signal.SIGTERM, 1, marks=pytest.mark.around)]
)
def test_all_ranks_stop_at_a_chosen_signal_however_often_it_comes_as_a_notice(number, times):
    first, second = run_processes(2, trains, number, times, launched=True)
    assert first == second
    assert first in (3, 4)


@on_processes(2, launched=True)
def test_a_request_in_an_evaluation_is_heard_at_its_end(rank):
    """One rank gets a signal in an evaluation, after which all take a mean; none has trained yet."""
    with lockstep.session(timeout=60.0) as run, torch.no_grad():
        assert not run.should_stop
        for _ in run.batches(range(3 + rank.rank)):
            if rank.rank:
                signal.raise_signal(signal.SIGTERM)
                time.sleep(0.1)
        assert not run.should_stop
        lockstep.mean(1.0)
        assert run.should_stop


def interrupted(rank):
    with lockstep.session(stop_signals=[signal.SIGUSR1]) as run:
        assert not run.should_stop
        signal.raise_signal(signal.SIGINT)


def test_others_do_what_they_always_do():
    [outcome] = run_processes(1, interrupted, errors=True, launched=True)
    assert isinstance(outcome.error, KeyboardInterrupt) or outcome.returncode in (1, -signal.SIGINT, 130)
    assert "training stops" not in outcome.stderr


NO_SIGNAL = "what is no signal"


@pytest.mark.parametrize(
    ("signals", "said"),
    [
        ([signal.SIGKILL], "SIGKILL, which no program can take over"),
        ([1000], rf"{NO_SIGNAL} \(1000 is not a valid Signals\); give signal.SIGUSR1"),
        (signal.SIGUSR1, NO_SIGNAL),
        (["SIGUSR1"], NO_SIGNAL),
    ],
)
def test_what_cannot_be_a_signal_is_refused(signals, said):
    with pytest.raises(OptionError, match=rf"session\(\): stop_signals has {said}"):
        lockstep.session(stop_signals=signals)


class Slow(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        time.sleep(0.05)
        return float(index)


@pytest.mark.around
@on_processes(1, launched=True)
def test_workers_of_loaders_do_not_notice(rank):
    """A scheduler sends its notice to all processes of a job step, those of the loaders included."""
    with lockstep.session(stop_signals=[signal.SIGUSR1]) as run, torch.no_grad():
        assert not run.should_stop
        found = []
        for x in run.batches(DataLoader(Slow(), num_workers=1, batch_size=1)):
            for process in [*multiprocessing.active_children(), multiprocessing.current_process()]:
                os.kill(process.pid, signal.SIGUSR1)
            found.append(x.item())
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@on_processes(2, launched=True)
def test_a_rank_says_why_it_ends_before_its_launcher_ends_it(rank):
    """The launcher's SIGTERM comes when the session has just put back the handlers of before."""
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
