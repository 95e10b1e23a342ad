"""Modules on groups of their own, in one backward pass that goes through them in another order on another rank."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import PeerError
from programs.ranks import clear, on_ranks
from small_modules import fails_in_backward
from threaded import new_gloo_group

BOTH = [0, 1], [0, 1]


def groups_of(rank, store, members=BOTH):
    """One group for each list of ranks in `members` that has this one."""
    return [
        new_gloo_group(dist.PrefixStore(f"group {number}", store), ranks.index(rank.rank), len(ranks), 5)
        for number, ranks in enumerate(members)
        if rank.rank in ranks
    ]


def layers():
    """Three layers, so that there are three buckets."""
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    for layer in module:
        nn.init.eye_(layer.weight)
    return module


def replicas(groups, **options):
    return [lockstep.replicate(layers(), process_group=group, **options) for group in groups]


def backward(rank, modules, step, leaves_out=False, spoil=lambda x: x):
    """Modules in an order of this rank's; the engine goes first through what was called last. Return the gradients.

    One rank may leave out the last layer, whose bucket is the first: it sends everything at the end.
    """
    clear(*modules)
    x = spoil(torch.full((1, 2), rank.rank + 1.0, requires_grad=True))
    ordered = modules if (rank.rank + step) % 2 else modules[::-1]
    outs = [module[: 2 if leaves_out and (rank.rank + at) % 2 else 3](x) for at, module in enumerate(ordered)]
    sum(out.sum() for out in outs).backward()
    return [module[0].weight.grad[0, 0].item() for module in modules]


def future_hook(group, bucket):
    """Communicates by itself, and not at once."""
    work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def tensor_hook(group, bucket):
    """Only transforms."""
    return bucket.buffer().clone()


@pytest.mark.parametrize("leaves_out", [False, True], ids=["alike", "branches"])
@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("hook", [None, future_hook, tensor_hook])
@on_ranks(2)
def test_modules_on_groups_of_their_own_in_another_order_on_each_rank(rank, store, hook, init_sync, leaves_out):
    groups = groups_of(rank, store)
    modules = replicas(groups, bucket_cap_mb=1e-5, init_sync=init_sync)
    for module, group in zip(modules, groups, strict=True):
        if hook is not None:
            module.register_comm_hook(group, hook)
    for step in range(4):
        assert backward(rank, modules, step, leaves_out) == [1.5, 1.5]


@on_ranks(3)
def test_groups_of_some_ranks(rank, store):
    """In a ring: each rank has two modules, one with each neighbour; they are used in an order of each rank's own."""
    modules = replicas(groups_of(rank, store, ([0, 1], [1, 2], [0, 2])))
    for step in range(3):
        assert backward(rank, modules, step) == [[1.5, 2.0], [1.5, 2.5], [2.5, 2.0]][rank.rank]


@on_ranks(2)
def test_a_failure_is_told_on_every_group(rank, store):
    """A pass that fails on one rank, when it has gone through its modules; then all go on."""
    modules = replicas(groups_of(rank, store))
    assert backward(rank, modules, 0) == [1.5, 1.5]
    with pytest.raises(ValueError if rank.rank else PeerError):
        backward(rank, modules, 0, spoil=lambda x: fails_in_backward(x, rank.rank == 1, ValueError))
    assert backward(rank, modules, 0) == [1.5, 1.5]


@pytest.mark.parametrize("shares", [None, 2])
def test_a_module_stays_with_the_default_group_over_which_it_was_replicated(shares):
    groups, models = [], []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            groups.append(dist.group.WORLD)
            models.append(lockstep.replicate(nn.Linear(1, 1), shares=shares))
            kept = lockstep.replicate.state(models[0]).process_group  # the first one's, also while there is the second
        finally:
            dist.destroy_process_group()
        assert kept is groups[0]
    assert [lockstep.replicate.state(model).process_group for model in models] == groups
    assert groups[0] is not groups[1]


@on_ranks(2)
def test_a_pass_keeps_no_group_that_it_does_not_go_through(rank, store):
    """Else the thread of the pass would destroy it, and wait for ranks that wait for this one."""
    groups = groups_of(rank, store)
    other, model = replicas(groups)
    group, owned, seen = weakref.ref(groups[0]), [groups.pop(0), other], []
    del other

    def drop(gradient):
        owned.clear()
        gc.collect()
        seen.append(group() is None)

    loss = model(torch.ones(1, 2)).sum()
    loss.register_hook(drop)
    loss.backward()
    assert seen == [True]
