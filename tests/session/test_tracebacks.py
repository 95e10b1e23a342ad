"""Errors that leave a session show the program's frames, and the library's own with LOCKSTEP_DEBUG alone."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.errors import LockstepError, OptionError
from lockstep.phases import printed_rooms
from processes import on_processes

OURS = str(Path(lockstep.__file__).parent)


def own_frames(error):
    """Return the names of the library's functions in the traceback of an error, and of those behind it."""
    found = []
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        found += [each.name for each in frames if each.filename.startswith(OURS)]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def wrong_weight(run):
    model = lockstep.replicate(torch.nn.Linear(2, 1))
    with lockstep.accumulate(model, weight=-1):
        pass


def error_of_a_session(body):
    with pytest.raises(Exception) as caught, lockstep.session(device="cpu") as run:
        body(run)
    return caught.value


def test_an_error_has_the_frames_of_the_program_alone():
    error = error_of_a_session(wrong_weight)
    assert isinstance(error, OptionError)
    names = [each.name for each in traceback.extract_tb(error.__traceback__)]
    assert "wrong_weight" in names
    assert own_frames(error) == []


def test_with_lockstep_debug_all_frames_stay(monkeypatch):
    monkeypatch.setattr("lockstep._base.debug.printed", {"rounds"})
    assert "accumulate" in own_frames(error_of_a_session(wrong_weight))
    assert printed_rooms == set()


def test_errors_of_the_program_keep_all_frames():
    def body(run):
        model = lockstep.replicate(torch.nn.Linear(2, 1))
        model.register_forward_hook(fail)
        model(torch.ones(1, 2))

    def fail(*_):
        raise KeyError("of the program")

    error = error_of_a_session(body)
    assert not isinstance(error, LockstepError)
    assert "body" in [each.name for each in traceback.extract_tb(error.__traceback__)]


@on_processes(2)
def test_an_error_of_two_ranks_has_no_frames_of_the_library(rank):
    def body(run):
        if rank.rank:
            lockstep.mean(1.0)
        else:
            lockstep.loop.agree(True, run.group)

    error = error_of_a_session(body)
    assert isinstance(error, LockstepError)
    assert own_frames(error) == []
    assert "body" in "".join(traceback.format_exception(error))
