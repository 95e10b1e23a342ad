"""A loss that reaches no trained parameter has a weight, too, and a block without any."""

from __future__ import annotations

import threading

import pytest
import torch

import lockstep
from lockstep.errors import OptionError, PeerError
from programs.networks import Applying
from programs.ranks import on_ranks
from small_modules import fails_in_backward, one_weight


def trained_and_frozen():
    """Two layers, whose gradients are their inputs."""
    forward = lambda m, x, frozen=False: (m.frozen if frozen else m.trained)(x)  # noqa: E731
    return Applying(forward, (), trained=one_weight(), frozen=one_weight().requires_grad_(False)).double()


def rows(value=1.0):
    return torch.full((1, 1), value, dtype=torch.float64, requires_grad=True)


def net(rank, wrap=False, **options):
    make = lockstep.DistributedDataParallel if wrap else lockstep.replicate
    return make(trained_and_frozen(), process_group=rank.group, **options)


def grad(model):
    found = getattr(model, "module", model).trained.weight.grad
    return None if found is None else found.item()


def through_forward(model):
    return model(rows(), frozen=True)


def past_forward(model):
    return getattr(model, "module", model).frozen(rows())


def past_the_module(model):
    return rows() * 2


ways = pytest.mark.parametrize("way", [through_forward, past_forward, past_the_module], ids=lambda way: way.__name__)


def without_gradient(model, weight, way=through_forward):
    with lockstep.accumulate(model, last=False, weight=weight):
        way(model).sum().backward()


def last(model, weight=1, value=1.0):
    with lockstep.accumulate(model, weight=weight):
        model(rows(value)).sum().backward()


# -------------------------------------------------------------------------------------------- counted


@ways
@pytest.mark.parametrize("wrap", [False, True], ids=["replicated", "wrapped"])
@on_ranks(2)
def test_it_counts(rank, way, wrap):
    model = net(rank, wrap)
    if rank.rank:
        without_gradient(model, 2, way)
    last(model)
    first = grad(model)
    model.zero_grad()
    last(model)  # it has been taken along
    assert (first, grad(model)) == (0.5, 1.0)  # (1 + 1) / (1 + 1 + 2), (1 + 1) / (1 + 1)


@ways
@pytest.mark.parametrize("first", [False, True])
@on_ranks(2)
def test_it_counts_beside_gradients_that_accumulate(rank, way, first):
    model = net(rank)
    for nothing in (first, not first):
        if nothing:
            without_gradient(model, 3, way)
        else:
            with lockstep.accumulate(model, last=False, weight=1):
                model(rows(4.0)).sum().backward()
    last(model)
    assert grad(model) == 1.0  # 2 * (4 + 1) / 2 * (3 + 1 + 1)


@on_ranks(2)
def test_it_counts_in_the_backward_that_synchronises(rank):
    model, seen = net(rank), []
    for _ in range(2):
        if rank.rank:
            with lockstep.accumulate(model, weight=2):
                through_forward(model).sum().backward()
        else:
            last(model, 1, 3.0)
        seen.append(grad(model))
        model.zero_grad()
    assert seen == [1.0, 1.0]  # 3 / (1 + 2)


@on_ranks(2)
def test_it_counts_once_however_many_backwards_are_in_its_block(rank):
    model = net(rank)
    with lockstep.accumulate(model, weight=2):
        past_forward(model).sum().backward()
        past_forward(model).sum().backward()
        model(rows()).sum().backward()
    assert grad(model) == 0.5


@on_ranks(2)
def test_where_several_modules_are_weighed_each_counts_its_own(rank):
    one, other = net(rank), net(rank)
    with lockstep.accumulate(one, last=False, weight=1), lockstep.accumulate(other, last=False, weight=3):
        one(rows(), frozen=True).sum().backward()
    for model in (one, other):
        last(model)
    assert (grad(one), grad(other)) == (0.5, 0.25)


@on_ranks(2)
def test_a_block_counts_whatever_happens_in_it(rank):
    model = net(rank)
    with lockstep.accumulate(model, last=False, weight=1):
        pass
    with lockstep.accumulate(model, last=False, weight=1):
        model(rows(), frozen=True)
        x = rows()
        torch.autograd.grad(model(x, frozen=True).sum(), x)
    past_forward(model).sum().backward()
    last(model)
    assert grad(model) == 1 / 3


@ways
@pytest.mark.parametrize("synchronises", [False, True])
@on_ranks(2)
def test_a_block_does_not_count_if_its_backward_has_failed(rank, way, synchronises):
    """Wherever the graph leads; the program goes on."""
    model = net(rank)
    with lockstep.accumulate(model, last=synchronises, weight=100), pytest.raises(ArithmeticError):
        fails_in_backward(way(model)).sum().backward()
    last(model)
    assert grad(model) == 1.0


@on_ranks(2)
def test_a_block_counts_if_a_backward_of_another_thread_has_failed(rank):
    def fails():
        with pytest.raises(ArithmeticError):
            fails_in_backward(rows()).sum().backward()

    model = net(rank)
    with lockstep.accumulate(model, last=False, weight=1):
        other = threading.Thread(target=fails)
        other.start()
        other.join()
    last(model)
    assert grad(model) == 0.5


@on_ranks(2)
def test_a_module_that_this_ranks_backward_does_not_reach(rank):
    """Of two on one group: what the block counts is told in the round that the other rank's backward is."""
    one, other = net(rank), net(rank)
    with lockstep.accumulate(one, weight=1), lockstep.accumulate(other, weight=3):
        loss = one(rows())
        (loss if rank.rank else loss + other(rows(6.0))).sum().backward()
    assert (grad(one), grad(other)) == (1.0, 1.0)


@on_ranks(2)
def test_a_module_that_has_no_round_counts_nothing_afterwards(rank):
    """All of it is frozen, or no rank comes to it, in the block that synchronises."""
    model, seen = net(rank), []
    for frozen in (True, False):
        model.trained.requires_grad_(not frozen)
        with lockstep.accumulate(model, weight=100):
            (model(rows()) if frozen else past_the_module(model)).sum().backward()
        model.trained.requires_grad_(True)
        model(rows()).sum().backward()  # without a weight
        seen.append(grad(model))
        model.zero_grad()
        last(model)
        seen.append(grad(model))
        model.zero_grad()
    assert seen == [1.0] * 4


# ------------------------------------------------------------------------------------------- given up


@on_ranks(2)
def test_it_goes_with_a_round_that_fails(rank):
    model = net(rank)
    without_gradient(model, 3)
    loss = fails_in_backward(model(rows()), fails=rank.rank == 1)
    with lockstep.accumulate(model, weight=1), pytest.raises(ArithmeticError if rank.rank else PeerError):
        loss.sum().backward()
    last(model)
    assert grad(model) == 1.0


@on_ranks(2)
def test_it_goes_with_a_batch_that_is_left_out(rank):
    model = net(rank)
    if rank.rank:
        without_gradient(model, 2)
        lockstep.loop.skip_batch(model)
    else:
        last(model)
    left_out = grad(model)
    last(model)
    assert (left_out, grad(model)) == (None, 1.0)


@on_ranks(2)
def test_it_is_not_mixed_with_losses_that_have_no_weight(rank):
    model = net(rank)
    without_gradient(model, 1)
    with pytest.raises(OptionError, match="this backward pass has no weight, an earlier one"):
        model(rows()).sum().backward()
    last(model)
    assert grad(model) == 1.0
