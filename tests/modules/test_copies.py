"""Copies of wrappers, what is to be seen of a replicated module, and that nothing is left of either.

Copies and pickles of replicated modules are in test_kept_classes.py.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed import Replicated
from lockstep.distributed.replication.replication import find_replication
from programs.ranks import on_ranks
from small_modules import fails_in_backward
from threaded import run_ranks


class Net(nn.Module):
    """Parameters, a buffer, a hook of its own, an attribute that is a layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.path = [self.first]
        self.register_forward_hook(ignored)

    def forward(self, x):
        return self.norm(self.first(x))


def ignored(module, args, output):
    pass


def check_live(rank, module):
    """The module itself goes on as before."""
    module.zero_grad()
    module.first(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
    assert module.first.weight.grad.tolist() == [[1.5, 1.5]] * 2


@on_ranks(2)
def test_copies_of_wrappers(rank):
    wrapper = lockstep.DistributedDataParallel(Net(), process_group=rank.group)
    copied = copy.deepcopy(wrapper)
    assert type(copied) is lockstep.DistributedDataParallel
    assert copied.module is not wrapper.module
    for each in (wrapper, copied):
        each(torch.ones(2, 2)).sum()
        check_live(rank, each.module)
    with pytest.raises(lockstep.errors.NotReplicableError, match="group"):
        pickle.loads(pickle.dumps(wrapper))
    loaded = pickle.loads(pickle.dumps(wrapper.module))  # what is inside a wrapper is a plain module
    assert type(loaded) is Net
    assert not loaded.first.weight._post_accumulate_grad_hooks


@on_ranks(2)
def test_checkpoints(rank):
    """state_dict keys are those of the plain module; a wrapper's are behind `module.`, and either can be loaded."""
    plain, module = Net(), lockstep.replicate(Net(), process_group=rank.group)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in module.named_modules()] == [n for n, _ in plain.named_modules()]
    assert repr(module) == repr(plain)
    plain.load_state_dict(module.state_dict())
    wrapper = lockstep.DistributedDataParallel(Net(), process_group=rank.group)
    for state in (plain.state_dict(), {f"module.{key}": value for key, value in plain.state_dict().items()}):
        nn.init.zeros_(wrapper.module.first.weight)
        wrapper.load_state_dict(state)
        assert torch.equal(wrapper.module.first.weight, plain.first.weight)


@on_ranks(2)
def test_classes_and_attributes(rank):
    module = Net()
    names = dir(module), list(vars(module))
    assert not isinstance(module, Replicated)
    assert lockstep.replicate(module, process_group=rank.group) is module
    assert type(module) is Net
    assert isinstance(module, Replicated)
    assert not isinstance(module.first, Replicated)
    assert not isinstance(lockstep.DistributedDataParallel(Net(), process_group=rank.group), Replicated)
    assert (dir(module), list(vars(module))) == names
    assert len(vars(module)) == len(names[1])
    assert "no_sync" not in {**vars(module)}
    assert "no_sync" not in dict(vars(module))
    assert "no_sync" not in repr(vars(module))
    assert [name for name, _ in vars(module).items()] == names[1]
    module.new, module.no_sync = 3, 4  # the program's own
    assert list(vars(module)) == [*names[1], "no_sync", "new"]
    assert (copy.deepcopy(module).new, copy.deepcopy(module).no_sync) == (3, 4)
    del module.new, module.no_sync
    assert list(vars(module)) == names[1]
    assert weakref.ref(module)() is module


@on_ranks(2)
def test_what_a_module_makes_of_its_own_class_is_plain(rank):
    module = lockstep.replicate(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), process_group=rank.group)
    part = module[:1]
    assert not isinstance(part, Replicated)
    assert not hasattr(part, "no_sync")
    other = lockstep.replicate(nn.ModuleList([Net()]), process_group=rank.group)[:]
    again = lockstep.replicate(other, process_group=rank.group)
    assert isinstance(again, Replicated)


# ------------------------------------------------------------------------------------------------ leaks


def plainly(module, make):
    for _ in range(3):
        module(torch.ones(2, 2)).sum().backward()


def with_hooks(module, make):
    module.register_comm_hook({"module": module}, lambda state, bucket: bucket.buffer())
    module.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    module(torch.ones(2, 2)).sum().backward()


def without_use(module, make):
    pass


def with_a_graph_alive(module, make):
    """Forward without backward, and gradients that pile up."""
    with module.no_sync():
        module(torch.ones(2, 2)).sum().backward()
    module(torch.ones(2, 2)).sum()


def after_a_failure(module, make):
    with contextlib.suppress(ArithmeticError):
        fails_in_backward(module.first(torch.ones(2, 2))).sum().backward()
    module(torch.ones(2, 2)).sum().backward()


def in_pairs(module, make):
    other = make()
    (module(torch.ones(2, 2)).sum() + other(torch.ones(2, 2)).sum()).backward()


USES = [plainly, with_hooks, without_use, with_a_graph_alive, after_a_failure, in_pairs]


@pytest.mark.parametrize(
    ("make", "use"),
    [(lockstep.DistributedDataParallel, plainly), *((lockstep.replicate, use) for use in USES)],
    ids=["wrapped", *(use.__name__ for use in USES)],
)
def test_nothing_is_left_of_a_module(make, use):
    meeting = threading.Barrier(2, timeout=60)

    def used(rank):
        model = make(Net(), process_group=rank.group)
        use(model, lambda: make(Net(), process_group=rank.group))
        module = getattr(model, "module", model)
        watched = {"model": model, "module": module, "parameter": module.first.weight}
        return {name: weakref.ref(each) for name, each in watched.items()}

    def forget(rank):
        watched = used(rank)
        meeting.wait()  # both ranks are done; then one thread collects
        if rank.rank == 0:
            gc.collect()
        meeting.wait()
        return [name for name, reference in watched.items() if reference() is not None]

    assert run_ranks(2, forget) == [[], []]


def use_a_group(rank):
    module = lockstep.replicate(Net(), process_group=rank.group)
    module(torch.ones(2, 2)).sum().backward()
    return weakref.ref(rank.group), weakref.ref(module)


def test_nothing_is_left_of_a_group():
    references = run_ranks(2, use_a_group)
    gc.collect()
    assert [reference() for pair in references for reference in pair] == [None] * 4


def test_buckets_of_an_earlier_plan_are_gone_without_a_search_for_garbage():
    def train(rank):
        module = lockstep.replicate(Net(), process_group=rank.group)
        common = find_replication(module).reducer.common
        earlier = [weakref.ref(bucket) for bucket in common.buckets.in_order]
        for _ in range(2):  # after the first step the plan is made anew
            module.zero_grad()
            module(torch.ones(2, 2)).sum().backward()
        return len(earlier), [bucket() for bucket in earlier if bucket() is not None]

    gc.disable()
    try:
        assert run_ranks(2, train) == [(1, [])] * 2
    finally:
        gc.enable()


def test_memory_of_the_process_does_not_grow():
    """About as many tensors after forty steps as after ten; the other rank's come and go meanwhile."""

    def train(rank):
        module = lockstep.replicate(Net(), process_group=rank.group)
        counts = []
        for step in range(40):
            module.zero_grad(set_to_none=step % 2 == 0)
            module(torch.ones(2, 2)).sum().backward()
            if step in (9, 39) and rank.rank == 0:
                counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
            rank.gather(torch.zeros(1))  # the other rank waits
        return counts

    before, after = run_ranks(2, train)[0]
    assert after - before < 15
