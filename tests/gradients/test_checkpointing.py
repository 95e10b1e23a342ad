"""Activation checkpointing, reentrant or not: nested, one layer twice, whole modules, branches. Without a flag."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from programs.ranks import on_ranks, replicated, rows, same_as_one_process, same_gradients
from threaded import count_collectives

# Of the reentrant kind. For all tests, since the filters are not a thread's own.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


reentrant_or_not = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def recompute(call, *args, reentrant):
    return checkpoint(call, *args, use_reentrant=reentrant, preserve_rng_state=False)


class Layers(nn.Module):
    """Four layers; `kind(module, x, rank)` says how forward recomputes them."""

    def __init__(self, reentrant, kind=None):
        super().__init__()
        self.reentrant, self.kind = reentrant, kind
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def run(self, call, *args):
        return recompute(call, *args, reentrant=self.reentrant)

    def forward(self, x, rank):
        return self.kind(self, x, rank)


def each(m, x, rank):
    return parts(m, x, 4)


def parts(m, x, count):
    for index in range(count):
        x = m.run(m.layers[index], x).tanh()
    return x


def twice(m, x, rank):
    """A layer more than once: recomputed each time, and once outside of any checkpoint."""
    x = m.layers[0](x)
    for index in (1, 1, 0, 2, 1):
        x = m.run(m.layers[index], x).tanh()
    return x


def nested(m, x, rank):
    def inner(x):
        return m.run(m.layers[1], m.layers[0](x)).tanh()

    def outer(x):
        return m.layers[3](m.run(inner, m.layers[2](x)))

    return m.run(outer, x)


def branching(m, x, rank):
    """Which layer is recomputed depends on the rank; layer 0 is used by all, at both ends."""
    x = m.run(m.layers[0], x).tanh()
    x = m.run(m.layers[1 + rank], x).tanh()
    return m.run(m.layers[0], x)


def in_segments(m, x, rank):
    """Part of the layers alone, with an early exit on rank 1."""
    x = m.run(lambda y: m.layers[1](m.layers[0](y)).tanh(), x)
    return x if rank == 1 else m.layers[3](m.layers[2](x))


def inputs(step, rank, wants_grad=True):
    return rows(step, rank, 2, 3).requires_grad_(wants_grad)


def train(rank, kind, reentrant, cap, wants_grad=True, from_outside=False):
    """Steps of two micro-batches beside one process. Returns how many collectives the last one took."""
    module = replicated(rank, lambda: Layers(reentrant, kind).double(), bucket_cap_mb=cap)
    reference = copy.deepcopy(module)
    reference.reentrant = False
    call = (lambda *args: recompute(module, *args, reentrant=reentrant)) if from_outside else module
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, reference)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with count_collectives(rank) as seen:
            for part in range(2):
                with lockstep.accumulate(module, last=part == 1):
                    call(inputs(10 * step + part, rank.rank, wants_grad), rank.rank).square().mean().backward()
        for part in range(2):
            parts = [reference(inputs(10 * step + part, r, False), r).square().mean() for r in range(rank.world)]
            (sum(parts) / rank.world).backward()
        same_gradients(rank, module, reference)
        for optimizer in optimizers:
            optimizer.step()
    return len(seen)


@pytest.mark.parametrize("cap", [None, 1e-4], ids=["one bucket", "many buckets"])
@reentrant_or_not
@pytest.mark.parametrize("kind", [each, twice, nested, branching, in_segments])
@on_ranks(2)
def test_gradients_are_those_of_one_process(rank, kind, reentrant, cap):
    train(rank, kind, reentrant, cap)


@reentrant_or_not
@pytest.mark.parametrize("kind", [each, nested])
@on_ranks(2)
def test_a_module_checkpointed_from_outside(rank, kind, reentrant):
    train(rank, kind, reentrant, 1e-4, from_outside=True)


@on_ranks(2)
def test_inputs_that_need_no_gradient(rank):
    train(rank, twice, False, None, wants_grad=False)


@on_ranks(2)
def test_a_layer_recomputed_twice_costs_no_collective_of_its_own_in_the_end(rank):
    """One for each of the three layers that are in use, and at most one for what turned out to be late."""
    assert train(rank, twice, True, 1e-4) <= 4
    assert train(rank, each, True, 1e-4) == 4


@pytest.mark.parametrize("counts", [(3, 3), (2, 3), (1, 4)])
@reentrant_or_not
@on_ranks(2)
def test_layers_recomputed_past_forward_of_the_module(rank, reentrant, counts):
    module = replicated(rank, lambda: Layers(reentrant).double())
    same_as_one_process(rank, module, lambda m, step, r: parts(m, inputs(step, r), counts[r]).square().mean())


@on_ranks(2)
def test_reentrant_passes_inside_of_a_pass_are_one_round(rank):
    module = replicated(rank, lambda: Layers(True).double())
    for _ in range(3):  # the plan adapts in the first ones
        module.zero_grad()
        with count_collectives(rank) as seen:
            parts(module, inputs(0, rank.rank), 3).square().mean().backward()
    assert len(seen) == 1
