"""A session that is told nothing but what its launcher says, whatever hosts call themselves; without any option."""

from __future__ import annotations

import pytest

from hosts.network import NAMES
from hosts.trials import Plan, events_of, run

pytestmark = pytest.mark.hosts

KNOWN = [names for names in NAMES if names != "none"]
"""Where a host knows its own name, by which the others meet it."""


def trains(tmp_path, launcher, names, master=""):
    """All ranks of two hosts train to the end by shm, have the same weights, and know their number on their host."""
    told = run(Plan((2, 1), "none", 0, "", launcher=launcher), tmp_path, names, master)
    assert [each.type for each in told] == ["", "", ""], told
    assert len({each.digest for each in told}) == 1
    began = [next(event for event in events_of(tmp_path, rank) if event["what"] == "in") for rank in range(3)]
    assert [(event["backend"], event["local_rank"]) for event in began] == [("shm", 0), ("shm", 1), ("shm", 0)]


@pytest.mark.parametrize("names", NAMES)
def test_ranks_that_know_no_number_on_their_host(names, tmp_path):
    trains(tmp_path, "bare", names)


@pytest.mark.parametrize("names", KNOWN)
def test_slurm(names, tmp_path):
    trains(tmp_path, "slurm", names)


@pytest.mark.parametrize("names", KNOWN)
def test_open_mpi(names, tmp_path):
    trains(tmp_path, "open mpi", names, master="node0")


@pytest.mark.parametrize("names", ["good", "debian"])
def test_the_launcher_of_the_examples(names, tmp_path):
    trains(tmp_path, "launch.py", names, master="node0")
