"""Options of a session that have to be the same on all ranks: one that differs is an error by name on every rank."""

from __future__ import annotations

import dataclasses

import pytest

import lockstep
from lockstep.errors import AgreementError, PeerFailure
from lockstep.session.start import OF_EACH_RANK, SessionOptions
from processes import run_processes

OTHERS = {
    "backend": ("shm", "gloo"),
    "timeout": (60.0, 61.0),
    "seed": (0, 2),
    "stall_factor": (20.0, None),
    "stall_minimum": (60.0, 6.0),
    "link_timeout": (20.0, 30.0),
}


def starts(rank, given):
    """Return what a session raises, by the options of all ranks."""
    try:
        with lockstep.session(**({"timeout": 60.0} | given[rank.rank])) as run:
            return run.agree(False)
    except Exception as error:
        return type(error), str(error)


def started(*given):
    return run_processes(len(given), starts, given, launched=True)


def test_every_option_is_compared_or_may_differ():
    options = {field.name for field in dataclasses.fields(SessionOptions)}
    assert options == OTHERS.keys() | OF_EACH_RANK


@pytest.mark.parametrize("name", OTHERS)
def test_one_that_differs_is_named_on_every_rank(name):
    usual, other = OTHERS[name]
    told = started({name: usual}, {name: usual}, {name: other})
    assert [kind for kind, _ in told] == [PeerFailure, PeerFailure, AgreementError]
    for _, message in told:
        assert f"session(): ranks differ in {name}: {usual} on rank 0, {other} on rank 2; give it the same" in message
    assert "rank 0 stops, because rank 2 failed before its first step, in start-up: " in told[0][1]


def test_what_may_differ_and_what_is_equal():
    given = {"device": "cpu", "time_limit": 3600, "timeout": 60}, {"device": None, "timeout": 60.0}
    assert started(*given) == [False, False]
