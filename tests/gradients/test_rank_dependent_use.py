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
from small_modules import one_weight, x_of
from threaded import count_collectives, run_ranks

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
ONE_LAYER = 1e-4  # MiB: room for the weight and the bias of a layer, and no more


def rows(step, rank, n=4):
    return torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def compare(rank, module, reference):
    """Gradients are those of the reference, and the same bits on every rank."""
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
            assert rank.all_equal(p.grad), name


def train(rank, make, loss, steps, cap):
    """Backward and an optimizer step, beside one process that sees what all ranks see. `loss(network, step, rank)`."""
    module = rank.make(make, seed=rank.rank)  # rank 0's values are for everybody
    lockstep.replicate(module, process_group=rank.group, bucket_cap_mb=cap)
    reference = copy.deepcopy(module)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5) for network in (module, reference)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 3 != 2)
        loss(module, step, rank.rank).backward()
        (sum(loss(reference, step, r) for r in range(rank.world)) / rank.world).backward()
        compare(rank, module, reference)
        for optimizer in optimizers:
            optimizer.step()
    lockstep.check_in_sync(module)
    return module


# ------------------------------------------------------------------------------------------- networks


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


class Deep(nn.Module):
    """Five layers, of which forward takes those listed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(5))

    def forward(self, x, chosen):
        for index in chosen:
            x = torch.tanh(self.layers[index](x))
        return x


def route(network, step, rank):
    return network(rows(step, rank, 2)).square().mean()


def exit_early(network, step, rank):
    return network(rows(step, rank), range(1 + (rank + step) % 5)).square().mean()


def drop_layers(network, step, rank):
    chance = random.Random(10 * step + rank)
    return network(rows(step, rank), [0, *(i for i in range(1, 5) if chance.random() < 0.5)]).square().mean()


def one_each(network, step, rank):
    """Each rank another layer, so each bucket of one layer gets nothing on all ranks but one."""
    return network(rows(step, rank), [(rank + step) % 5]).square().mean()


def later(network, step, rank):
    """Layer 1 is used from the third step on, layer 2 by the last rank alone, layer 4 never."""
    chosen = [0, *([1] if step >= 2 else []), *([2] if step >= 1 and rank == 1 else [])]
    return network(rows(step, rank), chosen).square().mean()


def in_turn(network, step, rank):
    return network(rows(step, rank), [step % 2]).square().mean()


def reversed_on_rank_1(network, step, rank):
    order = [0, 1, 2, 3, 4]
    return network(rows(step, rank), order[::-1] if rank == 1 else order).square().mean()


# ---------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("cap", [None, ONE_LAYER], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize(
    ("loss", "make", "world"),
    [
        (route, Experts, 3),
        (exit_early, Deep, 4),
        (drop_layers, Deep, 3),
        (one_each, Deep, 2),
        (later, Deep, 2),
        (in_turn, Deep, 2),
        (reversed_on_rank_1, Deep, 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_gradients_are_those_of_one_process(loss, make, world, cap):
    run_ranks(world, train, lambda: make().double(), loss, 6, cap)


def leave_out(rank):
    module = train(rank, lambda: Deep().double(), later, 3, ONE_LAYER)
    unused = module.layers[4].weight
    assert unused.grad is None
    unused.grad = mine = torch.full((3, 3), float(rank.rank), dtype=torch.float64)
    later(module, 3, rank.rank).backward()
    assert unused.grad is mine
    assert mine.tolist() == [[rank.rank] * 3] * 3


def test_what_no_rank_uses_is_not_touched():
    run_ranks(2, leave_out)


def count(rank, use):
    """Collectives of each step."""
    module = lockstep.replicate(rank.make(Deep).double(), process_group=rank.group, bucket_cap_mb=ONE_LAYER)
    counts = []
    for step in range(5):
        with count_collectives(rank) as seen:
            module(rows(step, rank.rank), use(rank.rank, step)).sum().backward()
        counts.append([each.name for each in seen])
    return counts


def test_a_step_costs_one_all_reduce_for_each_bucket_that_is_in_use():
    """Layers 0 and 1 on rank 0, 1 and 2 on rank 1: three of five, each a bucket of its own."""
    for counts in run_ranks(2, count, lambda rank, step: [rank, rank + 1]):
        assert counts[0].count("broadcast") == 1  # the order in which gradients arrived on rank 0
        assert counts[1:] == [["all_reduce"] * 3] * 4


def test_buckets_leave_in_the_order_in_which_gradients_came_on_rank_0():
    def planned(rank):
        module = lockstep.replicate(rank.make(Deep).double(), process_group=rank.group, bucket_cap_mb=ONE_LAYER)
        module(rows(0, 0), range(5) if rank.rank else [4, 2, 0, 1, 3]).sum().backward()
        buckets = find_replication(module).reducer.common.plan.current.buckets
        return [bucket.indices[0] // 2 for bucket in buckets]

    assert run_ranks(2, planned) == [[3, 1, 0, 2, 4]] * 2


def test_a_parameter_that_turns_up_later_costs_two_more_collectives_once():
    """Whether all ranks have a gradient to send, and the gradient."""
    for counts in run_ranks(2, count, lambda rank, step: [0, 3] if step >= 2 and rank == 1 else [0]):
        assert counts[1:] == [["all_reduce"] * n for n in (1, 3, 2, 2)]


def freeze(rank):
    """Layers are frozen and thawed between steps; the ranks agree on it."""
    module = rank.make(Deep).double()
    module.layers[0].requires_grad_(False)
    lockstep.replicate(module, process_group=rank.group, bucket_cap_mb=ONE_LAYER)
    reference = copy.deepcopy(module)
    for step, (layer, trained) in enumerate([(0, True), (1, False), (2, False), (1, True), (0, False), (2, True)]):
        for network in (module, reference):
            network.layers[layer].requires_grad_(trained)
            network.zero_grad()
        exit_early(module, step, rank.rank + 2).backward()
        (sum(exit_early(reference, step, r + 2) for r in range(rank.world)) / rank.world).backward()
        compare(rank, module, reference)


def test_frozen_and_thawed_parameters():
    run_ranks(2, freeze)


def freeze_on_one_rank(rank):
    """A layer that only rank 0 trains: the others count as zero, and get its gradient all the same."""
    module = lockstep.replicate(rank.make(Deep).double(), process_group=rank.group)
    module.layers[1].requires_grad_(rank.rank == 0)
    module(rows(0, 0), [0, 1]).sum().backward()
    return module.layers[1].weight.grad


def test_frozen_on_one_rank_only():
    local = Deep().double()
    grads = run_ranks(2, freeze_on_one_rank)
    assert torch.equal(*grads)
    assert grads[0].shape == local.layers[1].weight.shape
    assert grads[0].any()


# ------------------------------------------------------------------- a loss that reaches no parameter


def stem():
    """The first layer is frozen."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    module[0].requires_grad_(False)
    return module


class EarlyExit(nn.Module):
    """Rank 1 leaves after the frozen layer."""

    def __init__(self):
        super().__init__()
        self.layers = stem()

    def forward(self, x, rank):
        x = self.layers[0](x)
        return x if rank == 1 else self.layers[1](x)


def reach_nothing(rank, kind, modules):
    made = [lockstep.replicate(rank.make(EarlyExit), process_group=rank.group) for _ in range(modules)]
    for module in made:
        if kind == "hook":
            module.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    wanted = copy.deepcopy(made[0])
    for step in range(3):
        x = rows(step, rank.rank).requires_grad_()
        weight = 4.0 if kind == "weights" else None
        with contextlib.ExitStack() as stack:
            for module in made:
                stack.enter_context(lockstep.accumulate(module, weight=weight))
            sum(module(x, rank.rank).sum() for module in made).backward()
        count = rank.world * (4.0 if kind == "weights" else 1.0)
        wanted.zero_grad()
        (wanted(rows(step, 0), 0).sum() / count).backward()
        for module in made:
            compare(rank, module, wanted)
            module.zero_grad()
        if rank.rank == 1:  # alone: this accumulates into no parameter, so it is no round
            torch.autograd.grad(made[0](x, 1).sum(), x)
            made[0](x, 1).sum().backward(inputs=[x])


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "weights", "hook"])
def test_a_rank_whose_loss_reaches_no_parameter_takes_part(kind, modules):
    run_ranks(2, reach_nothing, kind, modules)


def reach_nothing_of_what_is_new(rank, modules, when):
    """On every rank other parameters stand in the module than the ranks have agreed on."""
    made = [lockstep.replicate(EarlyExit(), process_group=rank.group) for _ in range(modules)]
    seen = []
    for _ in range(2):
        losses = (
            []
            if when == "before forward"
            else [module(rows(0, 0).requires_grad_(), rank.rank).sum() for module in made]
        )
        for module in made:
            state = {name: value.clone() for name, value in module.state_dict().items()}
            module.load_state_dict(state, assign=True)
            module.zero_grad()
        losses = losses or [module(rows(0, 0).requires_grad_(), rank.rank).sum() for module in made]
        sum(losses).backward()
        seen += [module.layers[1].bias.grad for module in made]
    return [None if grad is None else grad.item() for grad in seen]


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("when", ["before forward", "after forward"])
def test_a_rank_whose_loss_reaches_no_parameter_takes_part_when_all_are_new(modules, when):
    grad = rows(0, 0).shape[0] / 2 if when == "before forward" else None  # that of the old ones
    assert run_ranks(2, reach_nothing_of_what_is_new, modules, when) == [[grad] * modules * 2] * 2


def unfrozen_as_new(rank):
    """What is trained is new: nothing was when the ranks agreed."""
    module = EarlyExit().requires_grad_(False)
    lockstep.replicate(module, process_group=rank.group)
    module.layers[1] = nn.Linear(3, 1).double()
    nn.init.ones_(module.layers[1].weight)
    nn.init.ones_(module.layers[1].bias)
    module(rows(0, 0).requires_grad_(), rank.rank).sum().backward()
    return module.layers[1].bias.grad.item()


def test_a_rank_whose_loss_reaches_no_parameter_takes_part_when_a_new_one_is_the_first_that_is_trained():
    assert run_ranks(2, unfrozen_as_new) == [rows(0, 0).shape[0] / 2] * 2


def all_fail(rank, modules):
    """Backward fails on every rank before it has reached anything, and would have on one of them alone."""
    made = [lockstep.replicate(EarlyExit(), process_group=rank.group) for _ in range(modules)]
    loss = sum(module(rows(0, 0).requires_grad_(), rank.rank).sum() for module in made)
    loss.register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    sum(module(rows(0, 0).requires_grad_(), rank.rank).sum() for module in made).backward()
    return [module.layers[1].bias.grad.item() for module in made]


@pytest.mark.parametrize("modules", [1, 2])
def test_a_rank_whose_loss_reaches_no_parameter_takes_part_in_what_fails_everywhere(modules):
    assert run_ranks(2, all_fail, modules) == [[rows(0, 0).shape[0] / 2] * modules] * 2


def unused_with_a_gradient_of_its_own(rank, shape):
    """The second parameter's gradient is made another on each rank, and no backward comes to it any more."""
    model = lockstep.replicate(nn.ParameterList([torch.ones(1), torch.ones(shape)]), process_group=rank.group)
    seen = []
    for _ in range(3):
        model.zero_grad()
        (model[0].sum() + model[1].sum()).backward()
        model[1].grad.mul_(rank.rank + 2.0)
        model[0].sum().backward()
        seen.append(model[1].grad.unique().tolist())
    return seen


@pytest.mark.parametrize("shape", [(1,), (1024, 1100)], ids=["with others", "alone"])
def test_what_a_rank_has_made_of_an_unused_gradient_stays(shape):
    assert run_ranks(2, unused_with_a_gradient_of_its_own, shape) == [[[2.0]] * 3, [[3.0]] * 3]


def sparse(rank):
    model = nn.ModuleList([one_weight(), nn.Embedding(4, 1, sparse=True)])
    return lockstep.replicate(model, process_group=rank.group)


def rows_of(model):
    grad = model[1].weight.grad
    return None if grad is None else grad.to_dense().flatten().tolist()


def sparse_and_late(rank):
    """The embedding has no place in the plan when it is used, once."""
    model, seen = sparse(rank), []
    for turn in range(4):
        model.zero_grad()
        loss = model[0](x_of(rank)).sum()
        (loss + model[1](torch.tensor([0, rank.rank])).sum() if turn == 2 else loss).backward()
        seen.append(rows_of(model))
    return seen


def test_a_late_sparse_gradient_is_a_mean():
    assert run_ranks(2, sparse_and_late) == [[None, None, [1.5, 0.5, 0.0, 0.0], None]] * 2


def sparse_and_unused(rank):
    """The embedding's gradient is made another on each rank, and no backward comes to it any more."""
    model, seen = sparse(rank), []
    for _ in range(2):
        model.zero_grad()
        (model[0](x_of(rank)).sum() + model[1](torch.tensor([0, rank.rank])).sum()).backward()
        model[1].weight.grad = model[1].weight.grad * (rank.rank + 2.0)
        model[0](x_of(rank)).sum().backward()
        seen.append(rows_of(model))
    return seen


def test_what_a_rank_has_made_of_an_unused_sparse_gradient_stays():
    assert run_ranks(2, sparse_and_unused) == [[[3.0, 1.0, 0.0, 0.0]] * 2, [[4.5, 1.5, 0.0, 0.0]] * 2]


class Stop(torch.autograd.Function):
    """Gives its input no gradient if it ``stops``, not even zeros."""

    @staticmethod
    def forward(ctx, x, stops):
        ctx.stops = stops
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None if ctx.stops else grad, None


@pytest.mark.parametrize("keywords", [{}, {"inputs": True}], ids=["all", "inputs"])
def test_a_pass_past_forward_whose_gradients_are_all_undefined_on_a_rank(keywords):
    def call(rank):
        module, seen = lockstep.replicate(one_weight(1.0), process_group=rank.group), []
        weight = next(module.parameters())
        for step in range(4):
            module.zero_grad()
            loss = Stop.apply(weight, rank.rank == step % 2).sum() * (step + 1)
            loss.backward(**({"inputs": [weight]} if keywords else {}))
            seen.append(weight.grad.item())
        return seen

    assert run_ranks(2, call) == [[0.5, 1.0, 1.5, 2.0]] * 2


@pytest.mark.parametrize("past_forward", [False, True])
def test_graphs_of_other_modules_are_searched_only_where_passes_go_past_forward(past_forward, monkeypatch):
    searched = []
    monkeypatch.setattr(engine, "_observers", [])  # those of modules that other tests have left
    monkeypatch.setattr(engine, "reach_of", lambda given: searched.append(given) or reach_of(given))

    def call(rank):
        module = lockstep.replicate(one_weight(), process_group=rank.group)
        module(x_of(rank)).sum().backward()
        if past_forward:
            module.weight.sum().backward()
        one_weight()(x_of(rank)).sum().backward()

    run_ranks(1, call)
    assert len(searched) == past_forward


def late_and_then_unused(rank):
    """Two parameters come late, in one collective. Then one is used, and the gradient of the other is each rank's."""
    module = nn.ParameterList(torch.ones(2, dtype=torch.float64) for _ in range(3))
    lockstep.replicate(module, process_group=rank.group)
    for used in (1, 1, 3):
        sum(parameter.sum() for parameter in module[:used]).backward()
    module[2].grad.mul_(rank.rank + 2.0)
    sum(parameter.sum() for parameter in module[:2]).backward()
    return [parameter.grad[0].item() for parameter in module]


def test_gradients_that_came_late_together_are_used_each_on_its_own():
    assert run_ranks(2, late_and_then_unused) == [[4.0, 2.0, 2.0], [4.0, 2.0, 3.0]]
