"""The time-out of a group ends a wait: who has waited in vain has not failed, but the rank that did not come."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError, PeerFailure
from processes import run_processes

TIMEOUT = 4.0


def waits_in_vain(rank, backend, release):
    """Rank 1 is somewhere else from its fourth step on, until the others have been told; returns what each was told."""
    try:
        with lockstep.session(backend=backend, timeout=TIMEOUT, stall_factor=None) as run:
            model = lockstep.replicate(nn.Linear(2, 1))
            for _ in run.batches(range(10)):
                if (rank.rank, run.step) == (1, 4):
                    os.read(os.open(release, os.O_RDWR), 1)
                model(torch.ones(1, 2)).sum().backward()
    except PeerFailure as failure:
        if rank.rank == 0:
            os.write(os.open(release, os.O_RDWR), b"x")
        return failure.rank, str(failure)
    return None


@pytest.mark.around
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_rank_that_did_not_come_is_named_not_one_that_waited(backend, tmp_path):
    release = tmp_path / "release"
    os.mkfifo(release)
    told = run_processes(3, waits_in_vain, backend, release, launched=True)
    for rank in (0, 2):
        named, message = told[rank]
        assert named == 1
        assert message.startswith(f"rank {rank} stops, because rank 1 makes no progress at step 4, in ")
        reason = message.partition("has waited for it in vain (")[2].partition("). Its process")[0]
        assert reason.startswith("the process group is aborted: rank 1 did not answer within 4 s")
        assert "in waits_in_vain" in message  # its stack


@pytest.mark.parametrize("wrong", [0.0, 0.5, float("nan")])
def test_a_link_timeout_that_no_connection_can_have_is_refused(wrong):
    for call in ("session", "watch"):
        with pytest.raises(OptionError, match=rf"{call}\(\): link_timeout is .*, expected a number of seconds of at l"):
            getattr(lockstep, call)(link_timeout=wrong)
