"""An error that all ranks raise is raised by none of them before every rank knows of it."""

from __future__ import annotations

import threading

import pytest

import lockstep
from lockstep.checkpoints.files import FileSystem
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.resuming import Resuming
from lockstep.checkpoints.saving import Saving
from lockstep.errors import AgreementError, CheckpointError
from threaded import run_ranks


class OneSlow(Ranks):
    """Of these the first one takes a moment to get what it has been told; in it, the other one would go on."""

    def __init__(self, rank, other_has_raised):
        super().__init__(rank.group)
        self._other_has_raised = other_has_raised
        self.knew_first = False

    def tell(self, value, what):
        told = super().tell(value, what)
        if self.rank == 0 and what != "an error of all ranks":
            self.knew_first = not self._other_has_raised.wait(0.1)
        return told


def fail(ranks, path):
    ranks.together("save()", lambda: 1 / ranks.rank)


def differ(ranks, path):
    ranks.check_equal("save()", [{"rank": rank} for rank in ranks.tell(ranks.rank, "rank")])


def save_different_values(ranks, path):
    Saving(path, FileSystem(), ranks, 0).begin({"epoch": ranks.rank}, 1, 0)


def resume_what_is_torn(ranks, path):
    Resuming(path, ranks, None).resume({})


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (fail, CheckpointError),
        (differ, AgreementError),
        (save_different_values, AgreementError),
        (resume_what_is_torn, CheckpointError),
    ],
)
def test_an_error_of_all_ranks_waits_for_the_slowest_one(call, kind, tmp_path):
    (lockstep.save(tmp_path, x=1) / "x.pt").unlink()
    raised = threading.Event()

    def call_on(rank):
        ranks = OneSlow(rank, raised)
        with pytest.raises(kind):
            call(ranks, tmp_path)
        if rank.rank == 1:
            raised.set()
        return ranks.knew_first

    assert run_ranks(2, call_on)[0]
