"""`LOCKSTEP_DEBUG`: what it prints, and that it refuses rooms that do not exist."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep._base import debug
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.resuming import Resuming
from lockstep.checkpoints.saving import FileSystem, Saving
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import OptionError
from lockstep.phases import Phases
from lockstep.sharding.optimizer import shards_of
from lockstep.shm import ProcessGroupShm

PROGRAM = """
import torch, lockstep, torch.distributed as dist
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
model = lockstep.replicate(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
"""


def run(rooms: str) -> str:
    environment = {**os.environ, "LOCKSTEP_DEBUG": rooms, "RANK": "0"}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True).stderr


def test_rooms_that_are_named_are_printed():
    lines = run("rounds, shm").splitlines()
    assert any(
        " rank 0 lockstep.rounds: lockstep::collective (all_reduce, bucket 1 of 1, round 1): " in x for x in lines
    )
    assert any(" rank 0 lockstep.shm: all_reduce, collective " in line for line in lines)
    assert "lockstep" not in run("session")


@pytest.fixture
def rooms_as_before():
    yield
    for room in debug.printed:
        debug.log_of(room).handlers.clear()
        debug.log_of(room).setLevel(logging.NOTSET)
    debug.printed.clear()


def test_a_phase_is_printed_with_the_error_that_ends_it(rooms_as_before, caplog):
    debug.print_rooms("local")
    with pytest.raises(KeyError), Phases("local").phase("forward", "the second", replica=1):
        raise KeyError
    with Phases().phase("collect"):
        pass
    (record,) = caplog.records
    assert record.name == "lockstep.local"
    assert record.getMessage().startswith("lockstep::forward (replica 1, the second): ")
    assert record.getMessage().endswith(" ms, ended by KeyError")


def test_all_rooms(rooms_as_before):
    debug.print_rooms("all")
    assert debug.printed == set(debug.ROOMS)


def test_a_room_that_does_not_exist_is_an_error():
    with pytest.raises(OptionError, match=r"LOCKSTEP_DEBUG: there is no room 'round'; did you mean rounds\?"):
        debug.print_rooms("shm,round")
    assert debug.printed == set()


def test_the_documentation_lists_every_room():
    page = (Path(__file__).parents[2] / "docs" / "logging.md").read_text()
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == sorted(debug.ROOMS)


# ------------------------------------------------------------------------------- what a debugger shows


def test_what_one_meets_in_a_debugger_shows_its_state(tmp_path):
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    assert repr(Collectives(group, Phases())).startswith("Collectives(rank 0 of 1, ProcessGroupGloo, companion: ")
    model = lockstep.replicate(torch.nn.Linear(2, 1), process_group=group)
    optimizer = lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert (
        repr(shards_of(optimizer))
        == "Shards(SGD, step 1, Placement(rank 0 of 1, 2 of 2 pieces by element of 2 parameters))"
    )
    sampler = lockstep.loop.BalancedSampler([3, 1, 2], batch_size=3)
    assert repr(sampler) == "BalancedSampler(3 samples, epoch 0, batch 0)"
    resumable = lockstep.ResumableSampler(torch.utils.data.SequentialSampler(range(3)))
    assert repr(resumable) == "ResumableSampler(SequentialSampler, epoch 0, 0 samples consumed)"
    replicas = lockstep.local.ReplicaSet(torch.nn.Linear(2, 1), [torch.device("cpu")] * 2)
    assert repr(replicas) == "ReplicaSet(Linear on cpu, cpu; built 0 times)"
    ranks = Ranks(group)
    assert repr(Saving(tmp_path, FileSystem(), ranks)) == f"Saving({tmp_path}, number 0, step None, rank 0)"
    assert repr(Resuming(tmp_path, ranks)) == f"Resuming({tmp_path}, number 0, rank 0, whole: [])"


def test_a_group_on_shared_memory_shows_whether_it_is_in_use():
    group = ProcessGroupShm(dist.HashStore(), 0, 1)
    group.barrier().wait()
    assert repr(group) == "ProcessGroupShm(rank 0 of ranks [0], 1 collectives begun)"
    group.shutdown()
    assert repr(group).startswith("ProcessGroupShm(rank 0 of ranks [0], ended: ")
