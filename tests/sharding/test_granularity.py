"""The table of optimizers: what it says of each class has the bits of the optimizer that is not cut, with all options.

A cut is stepped as a rank does it: by an optimizer over views of a parameter's memory, or over some of the parameters.
"""

from __future__ import annotations

import abc
import itertools

import pytest
import torch
from torch import nn

from lockstep.errors import OptionError, PeerError, ShardingError, UnknownOptimizerError
from lockstep.sharding import shard_optimizer
from lockstep.sharding.granularity import TABLE, granularity_of
from lockstep.sharding.optimizer import shards_of
from lockstep.sharding.partition import cut_evenly
from programs.ranks import on_ranks
from sharded_runs import adamw, begun, equal, made, replicated, train, values, without_sharding_too

OFF_AND_ON = (False, True)
ONE_BY_ONE, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
DECAY, BOTH, ALL = (0, 0.01), (ONE_BY_ONE, FOREACH), (ONE_BY_ONE, FOREACH, FUSED)
ADAM = {"amsgrad": OFF_AND_ON, "maximize": OFF_AND_ON, "weight_decay": DECAY}
USUAL = {"maximize": OFF_AND_ON, "weight_decay": DECAY}
OPTIONS = {
    "ASGD": (BOTH, {**USUAL, "t0": (3, 1e6)}),
    "Adadelta": (BOTH, USUAL),
    "Adagrad": (ALL, {**USUAL, "lr_decay": (0, 0.1), "initial_accumulator_value": (0, 0.1)}),
    "Adam": (ALL, {**ADAM, "decoupled_weight_decay": OFF_AND_ON, "lr": (0.01, torch.tensor(0.01))}),
    "AdamW": (ALL, ADAM),
    "Adamax": (BOTH, USUAL),
    "NAdam": (BOTH, {**USUAL, "decoupled_weight_decay": OFF_AND_ON}),
    "RAdam": (BOTH, {**USUAL, "decoupled_weight_decay": OFF_AND_ON}),
    "RMSprop": (BOTH, {**USUAL, "momentum": (0, 0.9), "centered": OFF_AND_ON}),
    "Rprop": (BOTH, {"maximize": OFF_AND_ON}),
    "SGD": (ALL, {**USUAL, "momentum": (0, 0.9), "dampening": (0, 0.1), "nesterov": OFF_AND_ON}),
}
TENSOR_OPTIONS = {
    "Adafactor": (BOTH, {"maximize": OFF_AND_ON, "weight_decay": DECAY, "eps": ((None, 1e-3), (1e-9, 1e-2))}),
    "Muon": (({},), {"nesterov": OFF_AND_ON, "adjust_lr_fn": (None, "match_rms_adamw"), "weight_decay": DECAY}),
}


def products(values_of):
    return [dict(zip(values_of, row, strict=True)) for row in itertools.product(*values_of.values())]


def combinations(name, way):
    return [each for row in products(OPTIONS[name][1]) if is_allowed(each := {**row, **way})]


def is_allowed(options):
    """PyTorch refuses the others."""
    if options.get("nesterov") and "momentum" in options:
        return options["momentum"] and not options["dampening"]
    return not (isinstance(options.get("lr"), torch.Tensor) and options.get("foreach"))


def gradients(shape, steps, dtype):
    """Of all magnitudes from 1e-8 to 1e8, with zeros."""
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        magnitudes = 10 ** (16 * torch.rand(shape, generator=generator, dtype=torch.float64) - 8)
        grad = torch.randn(shape, generator=generator, dtype=torch.float64) * magnitudes
        grad[torch.rand(shape, generator=generator) < 0.1 * (step % 3)] = 0
        yield grad.to(dtype)


def bits_of(optimizer, tensors):
    """The weights and what belongs to their elements, end to end."""
    found = [torch.cat([each.detach() for each in tensors])]
    states = [optimizer.state[each] for each in tensors]
    names = [name for name, value in states[0].items() if isinstance(value, torch.Tensor) and value.dim()]
    return [*found, *(torch.cat([state[name] for state in states]) for name in names)]


def cut_and_whole(kind, options, numel, world, steps, dtype=torch.float32):
    start = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole, other = start.clone().requires_grad_(), start.clone()
    pieces = [slice(piece.start, piece.stop) for rank in cut_evenly([numel], world) for piece in rank]
    views = [other[each] for each in pieces]
    plain, cuts = kind([whole], **options), [kind([view], **options) for view in views]
    for grad in gradients((numel,), steps, dtype):
        whole.grad = grad.clone()
        plain.step()
        for view, optimizer, piece in zip(views, cuts, pieces, strict=True):
            view.grad = grad[piece]
            optimizer.step()
    merged = [bits_of(optimizer, [view]) for optimizer, view in zip(cuts, views, strict=True)]
    return bits_of(plain, [whole]), [torch.cat(each) for each in zip(*merged, strict=True)]


ELEMENTWISE = [pytest.param(name, way, id=f"{name} {way}") for name, (ways, _) in OPTIONS.items() for way in ways]


@pytest.mark.parametrize(("name", "way"), ELEMENTWISE)
def test_an_optimizer_that_may_be_cut_gives_a_slice_the_bits_that_it_has_within_the_whole(name, way):
    for options in combinations(name, way):
        found = cut_and_whole(getattr(torch.optim, name), options, 1021, 3, 8)
        assert equal(*found), options


@pytest.mark.soak
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "way"), ELEMENTWISE)
def test_the_same_at_many_sizes(name, way, dtype, threads):
    """In 60 steps; 300,007 and 999,983 elements are stepped by several intra-op threads, which divide a whole tensor at
    other places than a slice."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for options in combinations(name, way):
            for numel, world in ((1, 2), (127, 2), (129, 2), (4097, 5), (65_537, 3)):
                found = cut_and_whole(getattr(torch.optim, name), options, numel, world, 60, dtype)
                assert equal(*found), (numel, options)
        for numel in (300_007, 999_983):  # with the last, which are all that can be on
            found = cut_and_whole(getattr(torch.optim, name), options, numel, 3, 60, dtype)
            assert equal(*found), (numel, options)
    finally:
        torch.set_num_threads(before)


def alone_and_among_others(kind, options, shapes, steps):
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    together, apart = [[each.clone().requires_grad_() for each in start] for _ in range(2)]
    plain, alone = kind(together, **options), [kind([each], **options) for each in apart]
    for grads in zip(*(gradients(shape, steps, torch.float32) for shape in shapes), strict=True):
        for one, other, grad in zip(together, apart, grads, strict=True):
            one.grad, other.grad = grad.clone(), grad.clone()
        plain.step()
        for each in alone:
            each.step()
    states = [list(plain.state[one].values()) for one in together]
    return [together, states], [apart, [list(o.state[e].values()) for o, e in zip(alone, apart, strict=True)]]


@pytest.mark.parametrize("steps", [4, pytest.param(60, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, (ways, _) in TENSOR_OPTIONS.items() for way in ways])
def test_an_optimizer_that_needs_whole_parameters_gives_one_alone_the_bits_that_it_has_among_others(name, way, steps):
    shapes = [(1, 1), (7, 129), (64, 33), (7, 129)] + ([(1000, 999)] if steps == 60 else [])
    for options in products(TENSOR_OPTIONS[name][1]):
        found = alone_and_among_others(getattr(torch.optim, name), {**options, **way}, shapes, steps)
        assert equal(*found), options


def test_the_table_has_the_optimizers_of_pytorch():
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    names = {each.__name__ for each in kinds if issubclass(each, torch.optim.Optimizer)} - {"Optimizer"}
    assert names <= set(TABLE)
    assert {name for name, found in TABLE.items() if found == "element"} == set(OPTIONS)


# ------------------------------------------------------------------------------------- whose step is known


class Own(abc.ABC, torch.optim.SGD):
    """Steps as SGD does."""


class WithAStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class WithAnotherGroup(torch.optim.Adam):
    def _init_group(self, group, *lists):
        return super()._init_group(group, *lists)


class AdamWithTheName(torch.optim.Optimizer):
    def step(self, closure=None):
        pass


AdamWithTheName.__name__ = "Adam"


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (torch.optim.AdamW, None, "element"),
        (torch.optim.AdamW, "tensor", "tensor"),
        (torch.optim.Muon, None, "tensor"),
        (Own, None, "element"),
        (WithAStep, "element", "element"),
        (AdamWithTheName, "tensor", "tensor"),
    ],
)
def test_how_fine_an_optimizer_is_cut(kind, given, expected):
    assert granularity_of(kind, given) == expected


@pytest.mark.parametrize(
    ("kind", "given", "error", "words"),
    [
        (WithAStep, None, UnknownOptimizerError, r"test_granularity\.WithAStep, .*\"tensor\" gives .*a norm"),
        (WithAnotherGroup, None, UnknownOptimizerError, "does not know the step"),
        (AdamWithTheName, None, UnknownOptimizerError, "does not know the step"),
        (torch.optim.Muon, "element", OptionError, "Muon needs whole parameters"),
        (torch.optim.LBFGS, "tensor", ShardingError, "LBFGS works on all parameters at once"),
        (torch.optim.AdamW, "row", OptionError, "granularity is 'row', and can be 'element' or 'tensor'"),
    ],
)
def test_optimizers_that_are_not_cut_so(kind, given, error, words):
    with pytest.raises(error, match=words):
        granularity_of(kind, given)


def test_a_class_whose_step_a_program_has_replaced_is_not_known(monkeypatch):
    monkeypatch.setattr(torch.optim.RMSprop, "step", lambda self, closure=None: None)
    with pytest.raises(UnknownOptimizerError, match=r"does not know the step of torch\.optim"):
        granularity_of(torch.optim.RMSprop, None)


@without_sharding_too(2)
def test_a_class_without_a_step_of_its_own_is_sharded_and_keeps_its_class(rank, sharded):
    model, optimizer = begun(rank, lambda p: Own(p, lr=0.1, momentum=0.9), sharded=sharded, steps=3)
    assert type(optimizer) is Own
    assert repr(optimizer).startswith("Own (\nParameter Group 0\n")
    return values(model)


@without_sharding_too(2)
def test_an_optimizer_that_is_known_on_one_rank_alone_is_an_error_on_both_and_the_right_call_works(rank, sharded):
    model = replicated(rank)
    optimizer = (WithAStep if rank.rank else torch.optim.AdamW)(model.parameters())
    if sharded:
        words = r"does not know the step of .*test_granularity\.WithAStep"
        with pytest.raises(UnknownOptimizerError if rank.rank else PeerError, match=words):
            shard_optimizer(optimizer)
        shard_optimizer(optimizer, granularity="element")
    train(rank, model, optimizer, range(1))
    return values(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_half_precision_is_not_cut_on_the_cpu(rank, dtype):
    """ASGD's average of 300,007 elements, stepped by three threads, differed in a slice."""
    model = replicated(rank, lambda: nn.Linear(37, 50).to(dtype))
    placement = shards_of(made(adamw, model, True)).placement
    assert [each.is_whole for each in placement.placed] == [True, True]
    assert [len(pieces) for pieces in placement.by_rank] == [1, 1]
