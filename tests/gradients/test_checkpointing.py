"""Activation checkpointing, reentrant or not: nested, one layer twice, whole modules, branches. Without a flag."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from threaded import count_collectives, run_ranks

# Of the reentrant kind. For all tests, since the filters are not a thread's own.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


def recompute(call, *args, reentrant):
    return checkpoint(call, *args, use_reentrant=reentrant, preserve_rng_state=False)


class Layers(nn.Module):
    """Four layers; subclasses say how they are recomputed."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def run(self, call, *args):
        return recompute(call, *args, reentrant=self.reentrant)


class Each(Layers):
    def forward(self, x, rank):
        for layer in self.layers:
            x = self.run(layer, x).tanh()
        return x


class Twice(Layers):
    """A layer more than once: recomputed each time, and once outside of any checkpoint."""

    def forward(self, x, rank):
        x = self.layers[0](x)
        for index in (1, 1, 0, 2, 1):
            x = self.run(self.layers[index], x).tanh()
        return x


class Nested(Layers):
    def inner(self, x):
        return self.run(self.layers[1], self.layers[0](x)).tanh()

    def outer(self, x):
        return self.layers[3](self.run(self.inner, self.layers[2](x)))

    def forward(self, x, rank):
        return self.run(self.outer, x)


class Branching(Layers):
    """Which layer is recomputed depends on the rank; layer 0 is used by all, at both ends."""

    def forward(self, x, rank):
        x = self.run(self.layers[0], x).tanh()
        x = self.run(self.layers[1 + rank], x).tanh()
        return self.run(self.layers[0], x)


class InSegments(Layers):
    """Part of the layers alone, with an early exit on rank 1."""

    def forward(self, x, rank):
        x = self.run(lambda y: self.layers[1](self.layers[0](y)).tanh(), x)
        return x if rank == 1 else self.layers[3](self.layers[2](x))


def inputs(step, rank, wants_grad):
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
    return x.requires_grad_(wants_grad)


def train(rank, kind, reentrant, wants_grad, cap, from_outside=False):
    """Steps beside one process. Returns the collectives of the last one."""
    module = lockstep.replicate(
        rank.make(lambda: kind(reentrant).double()), process_group=rank.group, bucket_cap_mb=cap
    )
    reference = copy.deepcopy(module)
    reference.reentrant = False
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, reference)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with count_collectives(rank) as seen:
            for part in range(2):  # two micro-batches
                x = inputs(10 * step + part, rank.rank, wants_grad)
                with lockstep.accumulate(module, last=part == 1):
                    call = (lambda *a: recompute(module, *a, reentrant=reentrant)) if from_outside else module
                    call(x, rank.rank).square().mean().backward()
        for part in range(2):
            parts = [reference(inputs(10 * step + part, r, False), r).square().mean() for r in range(rank.world)]
            (sum(parts) / rank.world).backward()
        for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-14)
                assert rank.all_equal(p.grad), name
        for optimizer in optimizers:
            optimizer.step()
    return len(seen)


@pytest.mark.parametrize("cap", [None, 1e-4], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", [Each, Twice, Nested, Branching, InSegments])
def test_gradients_are_those_of_one_process(kind, reentrant, cap):
    run_ranks(2, train, kind, reentrant, True, cap)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", [Each, Nested])
def test_a_module_checkpointed_from_outside(kind, reentrant):
    run_ranks(2, train, kind, reentrant, True, 1e-4, True)


def test_inputs_that_need_no_gradient():
    run_ranks(2, train, Twice, False, False, None)


def test_a_layer_recomputed_twice_costs_no_collective_of_its_own_in_the_end():
    """One for each of the three layers that are in use, and at most one for what turned out to be late."""
    for count in run_ranks(2, train, Twice, True, True, 1e-4):
        assert count <= 4
    for count in run_ranks(2, train, Each, True, True, 1e-4):
        assert count == 4


class Parts(Layers):
    """Never called itself: its layers are, by another method."""

    def parts(self, x, count):
        for index in range(count):
            x = self.run(self.layers[index], x).tanh()
        return x


def call_parts(rank, reentrant, counts):
    module = lockstep.replicate(rank.make(lambda: Parts(reentrant).double()), process_group=rank.group)
    reference = copy.deepcopy(module)
    for step in range(3):
        module.zero_grad()
        reference.zero_grad()
        module.parts(inputs(step, rank.rank, True), counts[rank.rank]).square().mean().backward()
        parts = [reference.parts(inputs(step, r, True), counts[r]).square().mean() for r in range(rank.world)]
        (sum(parts) / rank.world).backward()
        for (name, p), q in zip(module.named_parameters(), reference.named_parameters(), strict=True):
            assert (p.grad is None) == (q[1].grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("counts", [(3, 3), (2, 3), (1, 4)])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_layers_recomputed_past_forward_of_the_module(reentrant, counts):
    run_ranks(2, call_parts, reentrant, counts)


def count_parts(rank):
    module = lockstep.replicate(rank.make(lambda: Parts(True).double()), process_group=rank.group)
    for _ in range(3):  # the plan adapts in the first ones
        module.zero_grad()
        with count_collectives(rank) as seen:
            module.parts(inputs(0, rank.rank, True), 3).square().mean().backward()
    return len(seen)


def test_reentrant_passes_inside_of_a_pass_are_one_round():
    assert run_ranks(2, count_parts) == [1, 1]


def train_in_a_hook(rank):
    module = lockstep.replicate(rank.make(lambda: nn.Linear(3, 1).double()), process_group=rank.group)
    found = []

    def step(grad):
        with torch.enable_grad():
            module(inputs(0, rank.rank, False)).sum().backward()
        found.append(module.weight.grad.clone())

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(step)
    y.backward()
    return found[0]


def test_a_backward_in_a_hook_of_another_is_a_round_of_its_own():
    wanted = sum(inputs(0, r, False).sum(0, keepdim=True) for r in range(2)) / 2
    for got in run_ranks(2, train_in_a_hook):
        torch.testing.assert_close(got, wanted)
