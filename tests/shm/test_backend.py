"""`shm` for the CPU beside another backend: "cpu:shm,cuda:gloo" stands for "cpu:shm,cuda:nccl", which needs a GPU."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.errors import CommunicationError, PeerFailure
from lockstep.shm.backend import BackendShm
from processes import on_processes, run_processes

BOTH = "cpu:shm,cuda:gloo"
pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15), reason="PyTorch takes backends in Python from 2.15 on"
)


@on_processes(3, backend=BOTH)
def test_collectives_on_the_cpu_are_those_of_shm(rank):
    group, world, me = dist.group.WORLD, rank.world, rank.rank
    assert isinstance(group._get_backend(torch.device("cpu")), BackendShm)
    for count in (4, 300_000):  # in one exchange, and in chunks
        x = torch.full((count,), me + 1.0)
        dist.all_reduce(x)
        assert x.unique().tolist() == [6.0]
        gathered = [torch.empty(count) for _ in range(world)]
        dist.all_gather(gathered, torch.full((count,), float(me)))
        assert [each.unique().tolist() for each in gathered] == [[0.0], [1.0], [2.0]]
        whole = torch.empty(world * count)
        dist.all_gather_into_tensor(whole, torch.full((count,), float(me)))
        assert whole.equal(torch.cat(gathered))
        part = torch.empty(count)
        dist.reduce_scatter_tensor(part, torch.ones(world * count))
        assert part.unique().tolist() == [3.0]
        dist.broadcast(part.fill_(float(me)), 2)
        assert part.unique().tolist() == [2.0]
        work = dist.all_reduce(part, async_op=True)
        work.get_future().wait()
        assert part.unique().tolist() == [6.0]
        dist.gather(part.fill_(float(me)), gathered if me == 0 else None, dst=0)
        assert gathered[2].unique().tolist() == [2.0]
    to_all = torch.empty(world)
    dist.all_to_all_single(to_all, torch.arange(3.0) + 10 * me)
    assert to_all.tolist() == [me, 10 + me, 20 + me]
    if me == 0:
        dist.send(torch.ones(2), 1)
    if me == 1:
        dist.recv(to_all[:2], 0)
        assert to_all.tolist() == [1.0, 1.0, 21.0]
    dist.barrier()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": each} for each in range(world)]
    pair = dist.new_group([0, 2])
    if me != 1:
        x = torch.ones(2)
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [2.0, 2.0]


@on_processes(2, backend=BOTH)
def test_training_is_that_of_ddp(rank):
    found = []
    for wrap in (DistributedDataParallel, lockstep.replicate):
        torch.manual_seed(3)
        model = wrap(nn.Sequential(nn.Linear(64, 3000), nn.Tanh(), nn.Linear(3000, 4)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank.rank))
            model(rows).square().mean().backward()
            optimizer.step()
        lockstep.check_in_sync(model)
        found.append([each.detach().clone() for each in model.parameters()])
    torch.testing.assert_close(*found)


def until_killed(rank):
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError, match="rank 1 has died"):
        dist.all_reduce(x)


def test_a_killed_rank_is_named():
    outcomes = run_processes(3, until_killed, backend=BOTH, errors=True)
    assert [each.returncode for each in outcomes] == [0, -signal.SIGKILL, 0], outcomes


@on_processes(3, backend=BOTH, group_timeout=60.0)
def test_a_session_ends_the_group_when_a_rank_raises(rank):
    with pytest.raises(ValueError if rank.rank == 1 else PeerFailure), lockstep.session() as run:
        assert run.backend == BOTH
        model = lockstep.replicate(nn.Linear(2, 2))
        for step in range(4):
            if rank.rank == 1 and step == 2:
                raise ValueError("a bad batch")
            model(torch.ones(1, 2)).sum().backward()
    if rank.rank != 1:
        with pytest.raises(CommunicationError, match="has been destroyed"):
            dist.all_reduce(torch.ones(1))
