"""Ranks that use different parameters: experts, early exits, dropped layers. Without a flag, as one process would."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.reduction.autograd import engine
from lockstep.distributed.reduction.autograd.graph import reach_of
from lockstep.distributed.replication.replication import find_replication
from programs.networks import Applying, Deep
from programs.ranks import clear, on_ranks, replicated, rows, same_as_one_process, same_gradients, scalars_of
from small_modules import StopInBackward, filled, one_weight, x_of
from threaded import count_collectives, run_ranks

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
ONE_LAYER = 1e-4  # MiB: room for the weight and the bias of a layer, and no more


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def deep():
    return Deep().double()


class Experts(nn.Module):
    """Each row goes to one of four experts; most batches leave some of them out."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(3, 4)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(1).max(1)
        parts = [expert(x[chosen == i]) for i, expert in enumerate(self.experts) if (chosen == i).any()]
        order = torch.cat([(chosen == i).nonzero().flatten() for i in range(4)])
        return torch.cat(parts) * weights[order, None]


def dropped(step, rank):
    chance = random.Random(10 * step + rank)
    return [0, *(i for i in range(1, 5) if chance.random() < 0.5)]


def later(step, rank):
    """Layer 1 is used from the third step on, layer 2 by the last rank alone, layer 4 never."""
    return [0, *([1] if step >= 2 else []), *([2] if step >= 1 and rank == 1 else [])]


USES = {
    "early exits": lambda step, rank: range(1 + (rank + step) % 5),
    "dropped layers": dropped,
    # So each bucket of one layer gets nothing on all ranks but one.
    "each rank another layer": lambda step, rank: [(rank + step) % 5],
    "later": later,
    "in turn": lambda step, rank: [step % 2],
    "reversed on rank 1": lambda step, rank: [4, 3, 2, 1, 0] if rank == 1 else [0, 1, 2, 3, 4],
}


def loss_of(uses):
    return lambda module, step, rank: module(rows(step, rank, 4, 3), uses(step, rank)).square().mean()


@pytest.mark.parametrize("cap", [None, ONE_LAYER], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize(
    ("use", "world"),
    [
        ("experts", 3),
        ("early exits", 4),
        ("dropped layers", 3),
        ("each rank another layer", 2),
        ("later", 2),
        ("in turn", 2),
        ("reversed on rank 1", 2),
    ],
)
@on_ranks(None, "world")
def test_gradients_are_those_of_one_process(rank, use, cap):
    make, loss = deep, loss_of(USES.get(use))
    if use == "experts":
        make, loss = Experts().double, lambda module, step, r: module(rows(step, r, 2, 3)).square().mean()
    module = rank.make(make, seed=rank.rank)  # rank 0's values are for everybody
    lockstep.replicate(module, process_group=rank.group, bucket_cap_mb=cap)
    same_as_one_process(rank, module, loss, 6, optimizer=sgd, **CLOSE)


@on_ranks(2)
def test_what_no_rank_uses_is_not_touched(rank):
    module = replicated(rank, deep, bucket_cap_mb=ONE_LAYER)
    same_as_one_process(rank, module, loss_of(later), 3, optimizer=sgd, **CLOSE)
    unused = module.layers[4].weight
    assert unused.grad is None
    unused.grad = mine = torch.full((3, 3), float(rank.rank), dtype=torch.float64)
    loss_of(later)(module, 3, rank.rank).backward()
    assert unused.grad is mine
    assert mine.tolist() == [[rank.rank] * 3] * 3


def collectives_of_steps(rank, use):
    """The names of the collectives of each step."""
    module, counts = replicated(rank, deep, bucket_cap_mb=ONE_LAYER), []
    for step in range(5):
        with count_collectives(rank) as seen:
            module(rows(step, rank.rank), use(step)).sum().backward()
        counts.append([each.name for each in seen])
    return counts


@on_ranks(2)
def test_a_step_costs_one_all_reduce_for_each_bucket_that_is_in_use(rank):
    """Layers 0 and 1 on rank 0, 1 and 2 on rank 1: three of five, each a bucket of its own."""
    counts = collectives_of_steps(rank, lambda step: [rank.rank, rank.rank + 1])
    assert counts[0].count("broadcast") == 1  # the order in which gradients arrived on rank 0
    assert counts[1:] == [["all_reduce"] * 3] * 4


@on_ranks(2)
def test_buckets_leave_in_the_order_in_which_gradients_came_on_rank_0(rank):
    module = replicated(rank, deep, bucket_cap_mb=ONE_LAYER)
    module(rows(0, 0), range(5) if rank.rank else [4, 2, 0, 1, 3]).sum().backward()
    buckets = find_replication(module).reducer.common.plan.current.buckets
    assert [bucket.indices[0] // 2 for bucket in buckets] == [3, 1, 0, 2, 4]


@on_ranks(2)
def test_a_parameter_that_turns_up_later_costs_two_more_collectives_once(rank):
    """Whether all ranks have a gradient to send, and the gradient."""
    counts = collectives_of_steps(rank, lambda step: [0, 3] if step >= 2 and rank.rank == 1 else [0])
    assert counts[1:] == [["all_reduce"] * n for n in (1, 3, 2, 2)]


@on_ranks(2)
def test_frozen_and_thawed_parameters(rank):
    """Layers are frozen and thawed between steps; the ranks agree on it."""
    module = rank.make(deep)
    module.layers[0].requires_grad_(False)
    lockstep.replicate(module, process_group=rank.group, bucket_cap_mb=ONE_LAYER)
    changes = [(0, True), (1, False), (2, False), (1, True), (0, False), (2, True)]

    def change(each, step):
        layer, trained = changes[step]
        each.layers[layer].requires_grad_(trained)

    same_as_one_process(rank, module, loss_of(lambda step, r: range(1 + (r + 2 + step) % 5)), 6, change=change, **CLOSE)


@on_ranks(2)
def test_frozen_on_one_rank_only(rank):
    """A layer that only rank 0 trains: the others count as zero, and get its gradient all the same."""
    module = replicated(rank, deep)
    module.layers[1].requires_grad_(rank.rank == 0)
    module(rows(0, 0), [0, 1]).sum().backward()
    grad = module.layers[1].weight.grad
    assert grad.shape == (3, 3)
    assert grad.any()
    assert rank.all_equal(grad)


# ------------------------------------------------------------------- a loss that reaches no parameter


def early_exit():
    """The first layer is frozen, and rank 1 leaves behind it."""
    layers = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)).double()
    forward = lambda m, x, rank: m.layers[0](x) if rank == 1 else m.layers(x)  # noqa: E731
    return Applying(forward, (), layers=layers)


several = pytest.mark.parametrize("modules", [1, 2])
BIAS = 4 / 2
"""The mean of the bias's gradient, which of four rows on rank 0 is 4."""


def exits(rank, modules, x=None):
    x = rows(0, 0, 4, 3) if x is None else x
    return [module(x.requires_grad_(), rank.rank).sum() for module in modules]


def of_bias(modules):
    grads = [module.layers[1].bias.grad for module in modules]
    return [None if grad is None else grad.item() for grad in grads]


@several
@pytest.mark.parametrize("kind", ["plain", "weights", "hook"])
@on_ranks(2)
def test_a_rank_whose_loss_reaches_no_parameter_takes_part(rank, kind, modules):
    made = [replicated(rank, early_exit) for _ in range(modules)]
    if kind == "hook":
        for module in made:
            module.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    wanted = copy.deepcopy(made[0])
    weight = 4.0 if kind == "weights" else None
    for step in range(3):
        clear(*made, wanted)
        x = rows(step, rank.rank, 4, 3)
        with contextlib.ExitStack() as stack:
            for module in made:
                stack.enter_context(lockstep.accumulate(module, weight=weight))
            sum(exits(rank, made, x)).backward()
        (wanted(rows(step, 0, 4, 3), 0).sum() / rank.world / (weight or 1.0)).backward()
        for module in made:
            same_gradients(rank, module, wanted, **CLOSE)
        if rank.rank == 1:  # alone: this accumulates into no parameter, so it is no round
            torch.autograd.grad(made[0](x, 1).sum(), x)
            made[0](x, 1).sum().backward(inputs=[x])


@several
@pytest.mark.parametrize("when", ["before forward", "after forward"])
@on_ranks(2)
def test_a_rank_whose_loss_reaches_no_parameter_takes_part_when_all_are_new(rank, modules, when):
    """On every rank other parameters stand in the module than the ranks have agreed on."""
    made = [replicated(rank, early_exit) for _ in range(modules)]
    for _ in range(2):
        losses = exits(rank, made) if when == "after forward" else []  # which are of the old ones
        for module in made:
            state = {name: value.clone() for name, value in module.state_dict().items()}
            module.load_state_dict(state, assign=True)
            module.zero_grad()
        sum(losses or exits(rank, made)).backward()
        assert of_bias(made) == [None if losses else BIAS] * modules


@on_ranks(2)
def test_a_rank_whose_loss_reaches_no_parameter_takes_part_when_a_new_one_is_the_first_that_is_trained(rank):
    """What is trained is new: nothing was when the ranks agreed."""
    module = replicated(rank, lambda: early_exit().requires_grad_(False))
    module.layers[1] = filled(nn.Linear(3, 1).double())
    sum(exits(rank, [module])).backward()
    assert of_bias([module]) == [BIAS]


@several
@on_ranks(2)
def test_a_rank_whose_loss_reaches_no_parameter_takes_part_in_what_fails_everywhere(rank, modules):
    """Backward fails on every rank before it has reached anything, and would have on one of them alone."""
    made = [replicated(rank, early_exit) for _ in range(modules)]
    loss = sum(exits(rank, made))
    loss.register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    sum(exits(rank, made)).backward()
    assert of_bias(made) == [BIAS] * modules


# ------------------------------------------------------------- unused gradients, sparse and late ones


@pytest.mark.parametrize("shape", [(1,), (1024, 1100)], ids=["with others", "alone"])
@on_ranks(2)
def test_what_a_rank_has_made_of_an_unused_gradient_stays(rank, shape):
    """The second parameter's gradient is made another on each rank, and no backward comes to it any more."""
    module = replicated(rank, lambda: nn.ParameterList([torch.ones(1), torch.ones(shape)]))
    for _ in range(3):
        module.zero_grad()
        (module[0].sum() + module[1].sum()).backward()
        module[1].grad.mul_(rank.rank + 2.0)
        module[0].sum().backward()
        assert module[1].grad.unique().tolist() == [rank.rank + 2.0]


def with_rows():
    return nn.ModuleList([one_weight(), nn.Embedding(4, 1, sparse=True)])


def rows_of(module):
    grad = module[1].weight.grad
    return None if grad is None else grad.to_dense().flatten().tolist()


def use_rows(rank, module, embedding=True):
    loss = module[0](x_of(rank)).sum()
    return loss + module[1](torch.tensor([0, rank.rank])).sum() if embedding else loss


@on_ranks(2)
def test_what_a_rank_has_made_of_an_unused_sparse_gradient_stays(rank):
    """The embedding's gradient is made another on each rank, and no backward comes to it any more."""
    module, factor = replicated(rank, with_rows), rank.rank + 2.0
    for _ in range(2):
        module.zero_grad()
        use_rows(rank, module).backward()
        module[1].weight.grad = module[1].weight.grad * factor
        use_rows(rank, module, embedding=False).backward()
        assert rows_of(module) == [1.5 * factor, 0.5 * factor, 0.0, 0.0]


@pytest.mark.parametrize("only", [False, True], ids=["all", "inputs"])
@on_ranks(2)
def test_a_pass_past_forward_whose_gradients_are_all_undefined_on_a_rank(rank, only):
    module = replicated(rank)
    for step in range(4):
        module.zero_grad()
        loss = StopInBackward.apply(module.weight, rank.rank == step % 2).sum() * (step + 1)
        loss.backward(**({"inputs": [module.weight]} if only else {}))
        assert module.weight.grad.item() == (step + 1) / 2


@pytest.mark.parametrize("past_forward", [False, True])
def test_graphs_of_other_modules_are_searched_only_where_passes_go_past_forward(past_forward, monkeypatch):
    searched = []
    monkeypatch.setattr(engine, "_observers", [])  # those of modules that other tests have left
    monkeypatch.setattr(engine, "reach_of", lambda given: searched.append(given) or reach_of(given))

    def call(rank):
        module = replicated(rank)
        scalars_of(module, loss=module(x_of(rank)).sum())
        if past_forward:
            module.weight.sum().backward()
        one_weight()(x_of(rank)).sum().backward()

    run_ranks(1, call)
    assert len(searched) == past_forward


@on_ranks(2)
def test_gradients_that_came_late_together_are_used_each_on_its_own(rank):
    """Two parameters come late, in one collective. Then one is used, and the gradient of the other is each rank's."""
    module = replicated(rank, lambda: nn.ParameterList(torch.ones(2, dtype=torch.float64) for _ in range(3)))
    for used in (1, 1, 3):
        sum(parameter.sum() for parameter in module[:used]).backward()
    module[2].grad.mul_(rank.rank + 2.0)
    sum(parameter.sum() for parameter in module[:2]).backward()
    assert [parameter.grad[0].item() for parameter in module] == [4.0, 2.0, rank.rank + 2.0]
