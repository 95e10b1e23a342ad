"""Modules on groups of their own, in one backward pass that goes through them in another order on another rank."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import PeerError
from small_modules import fails_in_backward
from threaded import run_ranks

TIMEOUT = timedelta(seconds=5)


def groups_of(rank, store, members):
    """One group for each entry of `members`, a list of ranks; None where this rank is not among them."""
    groups = []
    for number, ranks in enumerate(members):
        if rank.rank not in ranks:
            groups.append(None)
            continue
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        prefix = dist.PrefixStore(f"group {number}", store)
        groups.append(dist.ProcessGroupGloo(prefix, ranks.index(rank.rank), len(ranks), options))
    return groups


def layers():
    """Three layers, so that there are three buckets."""
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    for layer in module:
        nn.init.eye_(layer.weight)
    return module


def each_alone(modules, x, rank=0):
    """The engine goes first through what was called last."""
    return sum(module(x).sum() for module in modules)


def through(module, x, chosen):
    for index in chosen:
        x = module[index](x)
    return x.sum()


def branches(modules, x, rank):
    """One rank leaves out the last layer, whose bucket is the first: it sends everything at the end."""
    return sum(through(module, x, [0, 1] if (rank + at) % 2 else [0, 1, 2]) for at, module in enumerate(modules))


def future_hook(group, bucket):
    """Communicates by itself, and not at once."""
    work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def tensor_hook(group, bucket):
    """Only transforms."""
    return bucket.buffer().clone()


def in_orders_of_their_own(rank, store, hook, init_sync, branch):
    modules = [layers(), layers()]
    for module, group in zip(modules, groups_of(rank, store, [[0, 1], [0, 1]]), strict=True):
        lockstep.replicate(module, process_group=group, bucket_cap_mb=1e-5, init_sync=init_sync)
        if hook is not None:
            module.register_comm_hook(group, hook)
    seen = []
    for step in range(4):
        for module in modules:
            module.zero_grad()
        x = torch.full((1, 2), rank.rank + 1.0)
        ordered = modules if (rank.rank + step) % 2 else modules[::-1]
        (branches if branch else each_alone)(ordered, x, rank.rank).backward()
        seen.append([module[0].weight.grad[0, 0].item() for module in modules])
    return seen


@pytest.mark.parametrize("branch", [False, True], ids=["alike", "branches"])
@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("hook", [None, future_hook, tensor_hook])
def test_modules_on_groups_of_their_own_in_another_order_on_each_rank(hook, init_sync, branch):
    store = dist.HashStore()
    for seen in run_ranks(2, in_orders_of_their_own, store, hook, init_sync, branch):
        assert seen == [[1.5, 1.5]] * 4


def in_a_ring(rank, store):
    """Each rank has two modules, one with each neighbour; they are used in an order of each rank's own."""
    pairs = [[0, 1], [1, 2], [0, 2]]
    groups = groups_of(rank, store, pairs)
    modules = [group and lockstep.replicate(layers(), process_group=group) for group in groups]
    mine = [module for module in modules if module is not None]
    seen = []
    for step in range(3):
        for module in mine:
            module.zero_grad()
        each_alone(mine if (rank.rank + step) % 2 else mine[::-1], torch.full((1, 2), rank.rank + 1.0)).backward()
        seen.append([module[0].weight.grad[0, 0].item() for module in mine])
    return seen


def test_groups_of_some_ranks():
    first, second, third = run_ranks(3, in_a_ring, dist.HashStore())
    assert (first, second, third) == ([[1.5, 2.0]] * 3, [[1.5, 2.5]] * 3, [[2.5, 2.0]] * 3)


def failing(rank, store):
    """A pass that fails on one rank, between its modules; then all go on."""
    modules = [lockstep.replicate(layers(), process_group=group) for group in groups_of(rank, store, [[0, 1], [0, 1]])]
    seen = []
    for step in range(3):
        for module in modules:
            module.zero_grad()
        x = torch.full((1, 2), rank.rank + 1.0, requires_grad=True)
        ordered = modules if rank.rank else modules[::-1]
        try:
            each_alone(ordered, fails_in_backward(x, error=ValueError) if step == 1 and rank.rank else x).backward()
        except (ValueError, PeerError) as error:
            seen.append(type(error).__name__)
        else:
            seen.append([module[0].weight.grad[0, 0].item() for module in modules])
    return seen


def test_a_failure_is_told_on_every_group():
    first, second = run_ranks(2, failing, dist.HashStore())
    assert first == [[1.5, 1.5], "PeerError", [1.5, 1.5]]
    assert second == [[1.5, 1.5], "ValueError", [1.5, 1.5]]


@pytest.mark.parametrize("shares", [None, 2])
def test_a_module_stays_with_the_default_group_over_which_it_was_replicated(shares):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        model = lockstep.replicate(nn.Linear(1, 1), shares=shares)
    finally:
        dist.destroy_process_group()
    assert lockstep.replicate.state(model).process_group is group


def drops_the_other_module_in_a_pass(rank, store):
    """Return what becomes of the group of a module that is dropped while a pass goes through another one."""
    groups = groups_of(rank, store, [[0, 1], [0, 1]])
    other, model = (lockstep.replicate(layers(), process_group=group) for group in groups)
    group, owned, seen = weakref.ref(groups[0]), [groups.pop(0), other], []
    del other

    def drop(gradient):
        owned.clear()
        gc.collect()
        seen.append(group() is None)

    loss = model(torch.ones(1, 2)).sum()
    loss.register_hook(drop)
    loss.backward()
    return seen


def test_a_pass_keeps_no_group_that_it_does_not_go_through():
    """Else the thread of the pass would destroy it, and wait for ranks that wait for this one."""
    assert run_ranks(2, drops_the_other_module_in_a_pass, dist.HashStore()) == [[True]] * 2
