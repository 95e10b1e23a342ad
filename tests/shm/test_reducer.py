"""The library's own reducer on `shm`: buckets in memory of the group, and what hooks may do with them."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep
from lockstep.distributed.comm.group_state import state_of
from lockstep.shm import one_host
from programs.ranks import on_ranks, replicated
from threaded import run_ranks


def network():
    return nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))


def train(rank, group=None):
    model = rank.make(network)
    lockstep.replicate(model, process_group=group or rank.group)
    for step in range(3):
        model.zero_grad()
        model(torch.randn(4, 300, generator=rank.generator(step))).sum().backward()
    return model


def test_buckets_lie_in_memory_of_the_group_and_are_reduced_in_place(monkeypatch):
    ways = []
    in_place = one_host.OneHost._reduce_in_place
    monkeypatch.setattr(
        one_host.OneHost, "_reduce_in_place", lambda self, *given: (ways.append(self.rank), in_place(self, *given))
    )

    def call(rank):
        model = train(rank)
        pool = state_of(rank.group).companion._runtime.staging.pool
        assert all(pool.locate(p.grad) is not None for p in model.parameters())
        return [p.grad.clone() for p in model.parameters()]

    first, second = run_ranks(2, call, hosts="aa")
    assert sorted(set(ways)) == [0, 1]
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
@pytest.mark.parametrize("megabytes", [25, 0.4])  # one bucket, which carries the report, or several
@on_ranks(3, "hosts")
def test_gradients_are_the_mean_over_the_ranks(rank, megabytes):
    inputs = [torch.randn(4, 300, generator=torch.Generator().manual_seed(each)) for each in range(3)]
    model = rank.make(network)
    plain = copy.deepcopy(model).double()
    lockstep.replicate(model, process_group=rank.group, bucket_cap_mb=megabytes)
    model(inputs[rank.rank]).sum().backward()
    sum(plain(x.double()).sum() / rank.world for x in inputs).backward()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), wanted.grad, rtol=1e-5, atol=1e-6)


def resizes(state, bucket):
    buffer = bucket.buffer()
    buffer.resize_(buffer.numel() + 10).resize_(buffer.numel() - 10)
    return default_hooks.allreduce_hook(state, bucket)


@on_ranks(2, hosts="aa")
def test_a_communication_hook_may_resize_its_buffer_as_powersgd_does(rank):
    model = replicated(rank, network)
    model.register_comm_hook(rank.group, resizes)
    model(torch.ones(4, 300)).sum().backward()
    assert all(rank.all_equal(p.grad) for p in model.parameters())


@on_ranks(2, hosts="aa")
def test_an_error_of_the_group_keeps_its_words(rank):
    model = train(rank)
    if rank.rank == 1:
        rank.group.shutdown()
        return
    with pytest.raises(lockstep.errors.CommunicationError, match="rank 1 has left the process group"):
        model(torch.ones(4, 300)).sum().backward()
