"""``backward(create_graph=True)``: it reduces as any other backward does, and what it gives has no graph."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.distributed.reduction import reducer
from programs.ranks import on_ranks, replicated
from threaded import run_ranks

OURS = "ignore:backward.create_graph=True. went through a replicated module"
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
    pytest.mark.filterwarnings(OURS),
]


class Layers(nn.Module):
    """Of a width; summed, so that the last bias has a constant gradient, and others have a graph."""

    def __init__(self, width, count=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(x) if layer is self.layers[-1] else torch.tanh(layer(x))
        return self.layers[-1](x)


class Checkpointed(Layers):
    """Of which reentrant checkpointing runs two layers in a pass of their own, one of them twice: without a graph."""

    def forward(self, x):
        for layer in (self.layers[0], self.layers[1], self.layers[1]):
            x = checkpoint(layer, x, use_reentrant=True)
        return super().forward(x)


class Rows(nn.Module):
    """A sparse gradient and a dense one."""

    def __init__(self, width):
        super().__init__()
        self.rows, self.last = nn.Embedding(7, width, sparse=True), nn.Linear(width, width)

    def forward(self, x):
        return self.last(self.rows(x.abs().long() % 7)).square()


def halve(state, bucket):
    return bucket.buffer() / 2


KINDS = {
    "one bucket": (lambda: Layers(5), {}, None),
    "several buckets": (lambda: Layers(5), {"bucket_cap_mb": 1e-5}, None),
    "a bucket of parts": (lambda: Layers(192), {}, None),
    "large gradients": (lambda: Layers(130, 2), {}, None),
    "sparse gradients": (lambda: Rows(5), {}, None),
    "communication hooks": (lambda: Layers(5), {"bucket_cap_mb": 1e-4}, halve),
    "passes inside of the pass": (lambda: Checkpointed(192), {}, None),
}


def in_a_row(rank, make, options, hook, create_graph):
    """The gradients of six backward passes, some of which pile up."""
    module, found = replicated(rank, make, **options), []
    width = next(module.parameters()).shape[1]
    if hook:
        module.register_comm_hook(None, hook)
    for step in range(6):
        x = torch.linspace(-3, 3, 2 * width).view(2, width) + step + rank.rank
        module(x.requires_grad_(isinstance(module, Layers))).sum().backward(create_graph=create_graph)
        grads = [parameter.grad for parameter in module.parameters()]
        assert not any(grad.requires_grad or grad.grad_fn for grad in grads)
        found += [grad.coalesce().to_dense() if grad.is_sparse else grad.clone() for grad in grads]
        if step % 3:
            module.zero_grad()
    return found


@pytest.mark.usefixtures("alone_from_64_kib")
@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize(("make", "options", "hook"), KINDS.values(), ids=KINDS)
def test_gradients_are_those_of_a_pass_without_and_have_no_graph(make, options, hook, hosts):
    with_graph, without = (run_ranks(2, in_a_row, make, options, hook, each, hosts=hosts) for each in (True, False))
    for of_rank in with_graph:
        # What comes in several pieces is added in another order.
        tolerance = {} if make is KINDS["passes inside of the pass"][0] else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(of_rank, without[0], **tolerance)


def test_the_graph_of_this_ranks_gradients_is_freed():
    """Autograd's own gradient refers to its parameter: a cycle, of which it warns."""

    def call(rank):
        module = replicated(rank, lambda: Layers(5))
        outputs = []
        module.layers[-1].register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
        for _ in range(3):
            module(torch.ones(2, 5)).square().sum().backward(create_graph=True)
        return [each() for each in outputs]

    gc.disable()
    try:
        assert run_ranks(2, call) == [[None] * 3] * 2
    finally:
        gc.enable()


def test_a_warning_names_what_stays_differentiable_once():
    """In each process; the ranks of this test are threads of one."""
    reducer._warn_of_graph.cache_clear()

    def call(rank):
        modules = [replicated(rank, lambda: Layers(5)) for _ in range(2)]
        for create_graph in (False, True, True):
            for module in modules:
                module(torch.ones(2, 5)).sum().backward(create_graph=create_graph)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(1, call)
    (told,) = [str(each.message) for each in caught if "replicated module" in str(each.message)]
    assert "lockstep.loop.mean_over_ranks(), which stays differentiable" in told


@on_ranks(2)
def test_nothing_is_differentiated_through_reduced_gradients(rank):
    module = replicated(rank, lambda: Layers(5))
    module(torch.ones(2, 5)).square().sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        sum(p.grad.square().sum() for p in module.parameters()).backward()


@on_ranks(2)
def test_what_piles_up_under_no_sync_is_reduced_later(rank):
    modules = [replicated(rank, lambda: Layers(5)) for _ in range(2)]
    x = torch.linspace(-1, 1, 10).view(2, 5) + rank.rank
    for _ in range(3):
        for module, create_graph in zip(modules, (True, False), strict=True):
            with module.no_sync():
                module(x).square().sum().backward(create_graph=create_graph)
            module(2 * x).square().sum().backward()
        for one, other in zip(*(module.parameters() for module in modules), strict=True):
            assert not one.grad.requires_grad
            assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("change", ["replaced", "inserted"])
@on_ranks(2)
def test_gradients_of_new_parameters(rank, change):
    """A layer is put in before the round, in which the ranks agree on it."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    lockstep.replicate(module, process_group=rank.group)
    x = torch.linspace(-1, 1, 4).view(2, 2) + rank.rank
    module(x).square().sum().backward()
    layer = rank.make(lambda: nn.Linear(2, 2))
    if change == "replaced":
        module[0] = layer
    else:
        module.insert(0, layer)  # its parameters have the numbers that others have had
    found = []
    for create_graph in (True, False):
        module.zero_grad()
        module(x).square().sum().backward(create_graph=create_graph)
        assert not any(p.grad.requires_grad for p in module.parameters())
        found.append([p.grad.clone() for p in module.parameters()])
    torch.testing.assert_close(*found)


@on_ranks(2)
def test_a_rank_that_has_run_out(rank):
    """Its batch counts nothing."""
    module = lockstep.replicate(nn.Linear(1, 1, bias=False), process_group=rank.group)
    seen = []
    for batch in lockstep.batches([torch.full((1, 1), float(n)) for n in range(1, 4 - rank.rank)], module):
        module(batch).sum().backward(create_graph=True)
        seen.append((module.weight.grad.item(), module.weight.grad.requires_grad))
        module.zero_grad()
    assert seen == [(1.0, False), (2.0, False), (3.0, False)]
