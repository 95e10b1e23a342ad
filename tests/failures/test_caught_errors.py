"""A rank that catches its own error and goes on with its next batch: an error on all ranks, with and without a session.

Otherwise its next batch would be paired with the others' last one: as many backward passes, of different batches.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import PeerError
from processes import on_processes


def goes_on(rank, batches, failing):
    """Rank 1 fails in its second batch and catches that; returns what each rank is told, and at which batch."""
    model = lockstep.replicate(nn.Linear(2, 1))
    for number, x in enumerate(batches):
        try:
            if (rank.rank, number, failing) == (1, 1, "data"):
                raise ValueError("bad batch")
            output = model(x)
            if (rank.rank, number, failing) == (1, 1, "loss"):
                raise ValueError("no loss")
            output.sum().backward()
        except ValueError:
            continue
        except PeerError as error:
            return type(error), str(error), number
    return None


def check(rank, told):
    kind, message, number = told
    assert kind is PeerError
    assert message.startswith(f"rank {rank.rank}: ")
    assert f"rank {1 - rank.rank}" in message
    assert number == 1 + rank.rank  # the same round


@pytest.mark.parametrize(("backend", "failing"), [("gloo", "data"), ("shm", "loss")])
@on_processes(2, launched=True)
def test_a_rank_that_goes_on_after_its_own_error_is_told_apart_in_a_session(rank, backend, failing):
    with lockstep.session(backend=backend, timeout=60.0) as run:
        check(rank, goes_on(rank, run.batches([torch.ones(1, 2)] * 4), failing))


@pytest.mark.parametrize(("backend", "watched", "failing"), [("gloo", True, "loss"), ("shm", False, "data")])
@on_processes(2, "backend")
def test_a_rank_that_goes_on_after_its_own_error_is_told_apart_without_one(rank, watched, failing):
    with lockstep.watch() if watched else contextlib.nullcontext():
        check(rank, goes_on(rank, lockstep.batches([torch.ones(1, 2)] * 4, group=rank.group), failing))
