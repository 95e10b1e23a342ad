"""A session over a process group that somebody else has made: it is taken as it is, and left as it is."""

from __future__ import annotations

import logging
import os
from logging.handlers import BufferingHandler

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
import sim as simulator
from lockstep.errors import AgreementError, OptionError, PeerFailure
from processes import on_processes


def gradient(run):
    model = lockstep.replicate(nn.Linear(2, 1).to(run.device))
    model(torch.full((1, 2), float(run.rank), device=run.device)).sum().backward()
    return model.weight.grad[0, 0].item()


@pytest.mark.parametrize(("world", "backend", "mean"), [(3, "gloo", 1.0), (3, "shm", 1.0), (1, "gloo", 0.0)])
@on_processes(None, "world", "backend")
def test_a_session_takes_a_group_and_leaves_it_as_it_is(rank, world, backend, mean):
    group = dist.group.WORLD
    for _ in range(2):
        with lockstep.session(timeout=60.0) as run:
            assert run.group is group
            assert (run.rank, run.world_size, run.local_rank, run.backend) == (rank.rank, world, rank.rank, backend)
            assert gradient(run) == mean
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_processes(2, "backend")
def test_a_failure_is_told_by_name(rank):
    told = "rank 0 stops, because rank 1 failed in training: ValueError: of rank 1"
    error, words = [(PeerFailure, told), (ValueError, "^of rank 1$")][rank.rank]
    with pytest.raises(error, match=words), lockstep.session(timeout=60.0) as run:
        gradient(run)
        if rank.rank == 1:
            raise ValueError("of rank 1")
        gradient(run)


OTHER_BACKEND = (
    "session(backend='shm'): the process group that exists already has the backend cpu:gloo,cuda:gloo, and stays as it "
    "is; leave backend out, or end the group before the session"
)
ALONE = "session(alone=True), but there is a process group of 2 ranks already: end it before"


@on_processes(2)
def test_what_cannot_be_changed_any_more_is_an_error(rank):
    for options, told in (({"backend": "shm"}, OTHER_BACKEND), ({"alone": True}, ALONE)):
        with pytest.raises(OptionError) as raised, lockstep.session(**options):
            pass
        assert str(raised.value) == told


@on_processes(2)
def test_options_are_compared(rank):
    told = r"session\(\): ranks differ in seed: 0 on rank 0, 1 on rank 1"
    error, words = [(PeerFailure, told), (AgreementError, f"^{told}")][rank.rank]
    with pytest.raises(error, match=words), lockstep.session(seed=rank.rank):
        pass


def accelerators(count):
    assert not isinstance(found := simulator.load(count), str), found


@on_processes(1, launched=True)
def test_the_device_that_a_group_is_bound_to_is_taken(rank):
    accelerators(2)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, device_id=torch.device("sim", 1))
    with lockstep.session() as run:
        assert str(run.device) == "sim:1"
    words = r"^session\(device='sim:0'\): the process group that exists already is bound to sim:1, and stays"
    with pytest.raises(OptionError, match=words), lockstep.session(device="sim:0"):
        pass


@on_processes(2)
def test_its_own_timeout_is_not_that_of_the_group(rank):
    told = "session(timeout=60) is not that of the process group, which exists already and keeps its own"
    records = BufferingHandler(9)
    logging.getLogger("lockstep").addHandler(records)
    for options in ({"timeout": 60.0}, {}):
        with lockstep.session(**options):
            pass
    assert [each.getMessage() for each in records.buffer] == [[told], []][rank.rank]


@on_processes(2, launched=True)
def test_the_number_on_this_host_is_found_by_asking(rank):
    """A process for each accelerator, of which the launcher has said no number on this host."""
    accelerators(2)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name)
    with lockstep.session(timeout=60.0) as run:
        assert (run.local_rank, str(run.device), gradient(run)) == (rank.rank, f"sim:{rank.rank}", 0.5)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
