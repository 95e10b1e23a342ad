"""Optimizers of other classes than PyTorch's: they step on parameters as they are, and keep what they have."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import lockstep
from lockstep.errors import AgreementError, LayoutError, OptionError, PeerError, ShardingError
from lockstep.sharding import ShardedOptimizer, full_state_dict, shard_optimizer
from lockstep.sharding.optimizer import shards_of
from programs.ranks import on_ranks
from sharded_runs import adamw, backward, begun, equal, made, network, replicated, train, values, without_sharding_too
from tensor_classes import Packed
from threaded import run_ranks


class Base(torch.optim.Optimizer):
    """Updates each parameter by a method."""

    def __init__(self, params, lr=0.01, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p, grad, state, group):
        p.sub_(group["lr"] * grad)


def both(make, granularity, world=2, steps=6, net=network, width=37):
    """The weights and the state of all ranks, without sharding and with it."""

    def trained(rank, sharded):
        model, optimizer = begun(rank, make, sharded=sharded, granularity=granularity, net=net)
        for step in range(steps):
            optimizer.zero_grad()
            backward(rank, model, step, width)
            optimizer.step()
        return values(model), full_state_dict(optimizer, all_ranks=True)["state"]

    return run_ranks(world, trained, False), run_ranks(world, trained, True)


class OnSphere(nn.Parameter):
    """Rows of norm one."""


class SphereSGD(Base):
    def update(self, p, grad, state, group):
        if isinstance(p, OnSphere):
            grad = grad - (grad * p).sum(-1, keepdim=True) * p
        p.sub_(group["lr"] * getattr(p, "rate", 1) * grad)
        if isinstance(p, OnSphere):
            p.div_(p.norm(dim=-1, keepdim=True))


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.prototypes = OnSphere(functional.normalize(torch.randn(6, 130), dim=-1))
        self.linear = nn.Linear(37, 130)
        self.linear.weight.rate = 3

    def forward(self, x):
        return self.linear(x) @ self.prototypes.T


class BySize(Base):
    """Keeps its state in blocks from 4,096 elements on."""

    def update(self, p, grad, state, group):
        square = state.get("square", torch.zeros_like(p)) * 0.9 + grad.square() * 0.1
        if p.numel() >= 4096 and p.numel() % 256 == 0:
            top = square.reshape(-1, 256).amax(1, keepdim=True).clamp(min=1e-12)
            square = ((square.reshape(-1, 256) / top * 255).round() / 255 * top).reshape(p.shape)
        state["square"] = square
        p.sub_(group["lr"] * grad / (square.sqrt() + 1e-3))


class Late(Base):
    """Orthogonalises matrices from the third step on."""

    def update(self, p, grad, state, group):
        state["count"] = state.get("count", 0) + 1
        if state["count"] >= 3 and grad.dim() == 2:
            left, _, right = torch.linalg.svd(grad, full_matrices=False)
            grad = left @ right
        p.sub_(group["lr"] * grad)


class Counting(Base):
    """Counts its steps in an attribute, and in its group."""

    def __init__(self, params):
        super().__init__(params, count=0)
        self.t = 0

    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            group["count"] += 2
        super().step()

    def update(self, p, grad, state, group):
        p.sub_(grad / (self.t + group["count"]))


class Replacing(Base):
    """Gives each parameter new memory, and has new state in each step."""

    def update(self, p, grad, state, group):
        state["last"] = grad * 2
        p.data = p.data - group["lr"] * state["last"]


class Whole(Base):
    """Keeps a number that belongs to no parameter, and state that is no tensor."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step()

    def update(self, p, grad, state, group):
        state.setdefault("shapes", []).append(list(p.shape))
        state.setdefault("row", torch.zeros(len(p))).add_(grad.reshape(len(p), -1).sum(1))
        p.sub_(group["lr"] * grad / self.state["steps"])


def blocks():
    return nn.Sequential(nn.Linear(37, 128), nn.Tanh(), nn.Linear(128, 64))


@pytest.mark.parametrize(
    ("kind", "net"),
    [
        *((SphereSGD, Prototypes), (BySize, blocks), (Late, network), (Counting, network)),
        *((Replacing, network), (Whole, network)),
    ],
)
def test_whole_parameters_are_the_parameters_themselves(kind, net):
    plain, sharded = both(kind, "tensor", net=net)
    assert equal([weights for weights, _ in plain], [weights for weights, _ in sharded])
    for (_, expected), (_, found) in zip(plain, sharded, strict=True):
        assert expected.keys() == found.keys()
        assert all(equal(expected[key], found[key]) for key in expected)


class FewBits(Base):
    """Keeps its state as integers and a scale, as torchao's optimizers do."""

    def update(self, p, grad, state, group):
        square = grad.square() + (state["square"].whole() if state else 0)
        scale = square.max() / 255
        state["square"] = Packed((square / scale).round().to(torch.uint8), scale)
        p.sub_(group["lr"] * grad / (square.sqrt() + 1e-3))


def test_state_of_a_class_with_operations_of_its_own():
    with torch.serialization.safe_globals([Packed]):
        plain, sharded = both(FewBits, "tensor")
    assert equal([weights for weights, _ in plain], [weights for weights, _ in sharded])
    whole = [{number: each["square"].whole() for number, each in state.items()} for _, state in plain + sharded]
    assert len(whole[0]) == 6
    assert all(equal(each, whole[0]) for each in whole)


@pytest.mark.parametrize("kind", [Counting, Base])
def test_slices(kind):
    assert equal(*both(kind, "element", world=3))


def test_a_parameter_of_another_class_or_with_attributes_is_not_cut():
    assert equal(*both(SphereSGD, "element", net=Prototypes))


def test_attributes_are_those_of_the_optimizer_that_steps():
    def counted(rank):
        _, optimizer = begun(rank, Counting, granularity="tensor", steps=5)
        held = sum(each.numel() for each in shards_of(optimizer).placement.tensors.values())
        return optimizer.t, optimizer.param_groups[0]["count"], len(optimizer.param_groups[0]["params"]), held

    found = run_ranks(2, counted)
    assert [each[:3] for each in found] == [(5, 10, 6)] * 2
    assert sum(held for *_, held in found) == sum(each.numel() for each in network().parameters())


# --------------------------------------------------------------------------- train() and eval()


class ScheduleFree(Base):
    """Keeps two sequences of weights; ``eval()`` has the average of one in the parameters."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, training=True, count=0)

    @torch.no_grad()
    def eval(self):
        self._switch(False)

    @torch.no_grad()
    def train(self):
        self._switch(True)

    def _switch(self, training):
        for group in self.param_groups:
            if group["training"] != training:
                group["training"] = training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], 1 - 1 / 0.9 if not training else 1 - 0.9)

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
        super().step()

    def update(self, p, grad, state, group):
        z = state.setdefault("z", p.clone())
        p.lerp_(z, 1 / group["count"]).sub_(grad, alpha=0.01)
        z.sub_(grad, alpha=group["lr"])


@pytest.mark.parametrize("granularity", ["tensor", "element"])
@pytest.mark.parametrize("hosts", ["", "aaa"])
@without_sharding_too(3, "hosts")
def test_methods_that_switch_the_weights_run_on_each_ranks_part(rank, sharded, granularity):
    model, optimizer = begun(rank, ScheduleFree, sharded=sharded, granularity=granularity)
    seen = []
    optimizer.train()
    for step in range(4):
        train(rank, model, optimizer, range(step, step + 1))
        optimizer.eval()
        seen.append(values(model))
        optimizer.eval()
        lockstep.check_in_sync(model)
        optimizer.train()
        seen.append(values(model))
    return seen, full_state_dict(optimizer, all_ranks=True)


@on_ranks(2)
def test_ranks_that_do_different_things_are_an_error_on_both(rank):
    model, optimizer = begun(rank, ScheduleFree, granularity="tensor", steps=1)
    before = values(model)
    with pytest.raises(AgreementError, match=r"differ in what they do .*: step 2 on rank 0, eval\(\) on rank 1"):
        optimizer.eval() if rank.rank else optimizer.step()
    assert equal(before, values(model))
    optimizer.eval()


# ----------------------------------------------------------------- what is stepped has been reduced


def of_one_rank_alone(rank, model):
    loss = model(torch.randn(4, 37, generator=rank.generator(1))).square().mean()
    parameters = list(model.parameters())
    for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = grad


def on_one_rank(change):
    return lambda rank, model: change(model) if rank.rank == 1 else None


OTHERS = {
    "of one rank alone": (of_one_rank_alone, "0.weight"),
    "halved on one rank": (on_one_rank(lambda model: model[2].bias.grad.mul_(0.5)), "2.bias"),
    "negated on one rank": (on_one_rank(lambda model: model[4].weight.grad.neg_()), "4.weight"),
    "one element on one rank": (on_one_rank(lambda model: model[4].bias.grad[0].add_(1e-6)), "4.bias"),
}


@pytest.mark.parametrize(("change", "name"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("granularity", [None, "tensor"])
@without_sharding_too(2)
def test_gradients_that_are_not_the_same_on_all_ranks_are_an_error_on_all(rank, sharded, change, name, granularity):
    model, optimizer = begun(rank, sharded=sharded, granularity=granularity, steps=2)
    if sharded:
        before = values(model)
        optimizer.zero_grad()
        backward(rank, model, 5)
        change(rank, model)
        with pytest.raises(ShardingError, match=rf"gradient of parameter {name} on rank 1 is not that on rank 0"):
            optimizer.step()
        assert equal(before, values(model))
    train(rank, model, optimizer, range(2, 4))
    return values(model)


@without_sharding_too(2)
def test_gradients_that_all_ranks_change_alike_are_stepped(rank, sharded):
    model, optimizer = begun(rank, sharded=sharded)
    for step in range(3):
        optimizer.zero_grad()
        backward(rank, model, step)
        nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        model[2].weight.grad = model[2].weight.grad.t().contiguous().t() * 2
        optimizer.step()
    return values(model)


# ------------------------------------------------------------------------------------ refused by name


class Noisy(Base):
    def update(self, p, grad, state, group):
        p.add_(torch.randn_like(p))


class AdaptsToAll(Base):
    """Has the largest gradient of all in its group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = max(float(p.grad.abs().max()) for p in group["params"] if p.grad is not None)
        super().step()


class Distributed(Base):
    """As the first Muon: each rank steps on some of the parameters, and sends them."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"][dist.get_rank() :: dist.get_world_size()]:
            dist.all_gather([p], p)


class Keeping(Base):
    def __init__(self, params):
        super().__init__(params)
        self.all = [list(group["params"]) for group in self.param_groups]


class Wrapping(Base):
    def __init__(self, params):
        params = list(params)
        super().__init__(params)
        self.inner = torch.optim.SGD(params, lr=0.1)


class Forwarding(torch.optim.Optimizer):
    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1)

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)


class Rows(Base):
    def update(self, p, grad, state, group):
        state["norms"] = p.reshape(len(p), -1)[:2].sum(1)


def with_another_step(parameters):
    optimizer = adamw(parameters)
    optimizer.step = lambda: None
    return optimizer


@pytest.mark.parametrize(
    ("kind", "granularity", "words"),
    [
        (Distributed, "tensor", r"Distributed\.step\(\) communicates through torch\.distributed \(all_gather\)"),
        (Keeping, "tensor", "keeps its parameters in its attribute 'all'"),
        (Wrapping, "tensor", "has another optimizer in its attribute 'inner', with groups of its own"),
        (Forwarding, "tensor", "wraps another optimizer; call shard_optimizer"),
        (Base, None, "does not know the step of .*Base"),
        (torch.optim.LBFGS, None, "LBFGS works on all parameters at once"),
        (lambda p: adamw(p, differentiable=True), None, "differentiable=True"),
        (with_another_step, None, "has been replaced"),
    ],
)
@pytest.mark.parametrize("on_one_rank", [False, True])
@on_ranks(2)
def test_a_call_that_is_refused_leaves_the_optimizer_as_it_was(rank, kind, granularity, words, on_one_rank):
    model = replicated(rank)
    fails = rank.rank == 1 or not on_one_rank
    optimizer = kind(list(model.parameters())) if fails else adamw(model.parameters())
    kept = vars(optimizer)
    before, state = dict(kept), dict(kept.get("state", {}))
    with pytest.raises((ShardingError, OptionError) if fails else PeerError, match=words):
        shard_optimizer(optimizer, granularity=granularity if fails else None)
    assert kept.keys() == before.keys()
    assert all(kept[name] is value for name, value in before.items())
    assert dict(kept.get("state", {})) == state
    assert not isinstance(optimizer, ShardedOptimizer)
    train(rank, model, shard_optimizer(adamw(model.parameters())), range(1))


@pytest.mark.parametrize(
    ("kind", "granularity", "words"),
    [
        (Noisy, "tensor", r"Noisy\.step\(\) draws random numbers"),
        (Rows, "element", r"Rows has a Tensor of shape \(2,\) in its state"),
    ],
)
@on_ranks(2)
def test_what_a_first_step_must_not_do_is_an_error_on_all_ranks(rank, kind, granularity, words):
    model = replicated(rank)
    before = values(model)
    optimizer = made(kind, model, True, granularity)
    backward(rank, model, 0)
    with pytest.raises((ShardingError, PeerError), match=words):
        optimizer.step()
    assert equal(before, values(model))


@on_ranks(2)
def test_an_option_that_a_step_makes_of_several_parameters_is_an_error_in_the_next(rank):
    model, optimizer = begun(rank, AdaptsToAll, granularity="tensor")
    backward(rank, model, 0)
    optimizer.step()
    with pytest.raises(AgreementError, match=r"'lr': .*; if AdaptsToAll\.step\(\) changes it by what it sees"):
        optimizer.step()


# ----------------------------------------------------------------------- one rank does something else


@on_ranks(2)
def test_state_that_one_rank_alone_has_loaded_is_an_error_on_all(rank):
    model, optimizer = begun(rank, steps=2)
    state = full_state_dict(optimizer, all_ranks=True)
    train(rank, model, optimizer, range(2, 3))
    if rank.rank == 0:
        optimizer.load_state_dict(state)
    words = "the state since the last step .*: has been loaded on rank 0, has not been loaded on rank 1"
    with pytest.raises(AgreementError, match=words):
        optimizer.step()
    if rank.rank == 1:
        optimizer.load_state_dict(state)
    optimizer.step()


@pytest.mark.parametrize("granularity", ["element", "tensor"])
@on_ranks(2)
def test_a_weight_that_one_rank_alone_has_transposed_is_an_error_on_all(rank, granularity):
    model, optimizer = begun(
        rank, granularity=granularity, net=lambda: nn.Sequential(nn.Linear(37, 37), nn.Linear(37, 4)), steps=1
    )
    backward(rank, model, 1)
    if rank.rank == 1:
        model[0].weight.data = model[0].weight.data.t()
    with pytest.raises((LayoutError, AgreementError, PeerError), match=r"another memory format|their parts"):
        optimizer.step()


@pytest.mark.parametrize("granularity", ["element", "tensor"])
@without_sharding_too(2)
def test_a_parameter_that_is_taken_out_of_its_group_leaves_and_comes_back_with_its_state(rank, sharded, granularity):
    model, optimizer = begun(rank, sharded=sharded, granularity=granularity, steps=2)
    group = optimizer.param_groups[0]
    out = [group["params"].pop(0), group["params"].pop(2)]
    train(rank, model, optimizer, range(2, 4))
    if sharded:
        placement = shards_of(optimizer).placement
        assert {piece.number for pieces in placement.by_rank for piece in pieces} == {1, 2, 4, 5}
    out[1].data = out[1].data.clone()  # what is not stepped may go elsewhere
    train(rank, model, optimizer, range(4, 5))
    group["params"] += out
    train(rank, model, optimizer, range(5, 7))
    return values(model)


@on_ranks(2)
def test_a_rank_that_has_loaded_state_after_a_failed_step_does_not_wait_for_the_others(rank):
    class Failing(Base):
        fails = False

        def step(self, closure=None):
            super().step()
            if self.fails:
                raise ValueError("on purpose")

    _, optimizer = begun(rank, Failing, granularity="tensor", steps=1)
    state = full_state_dict(optimizer, all_ranks=True)
    optimizer.fails = rank.rank == 0
    with pytest.raises((ValueError, PeerError), match="on purpose"):
        optimizer.step()
    optimizer.fails = False
    if rank.rank == 0:
        optimizer.load_state_dict(state)
    with pytest.raises((ShardingError, PeerError), match=r"has failed.*Load a checkpoint"):
        optimizer.step()
    optimizer.load_state_dict(state)
    optimizer.step()


# ------------------------------------------------------------------------------- between the steps


def test_state_of_another_rank_says_where_it_is_and_copies_say_what_to_do():
    def read(rank):
        model, optimizer = begun(rank, granularity="tensor", steps=1)
        seen = []
        for parameter in model.parameters():
            if parameter in optimizer.state:
                seen.append(optimizer.state[parameter]["exp_avg"].local)
            else:
                with pytest.raises(ShardingError, match=r"state of parameter .* is on another rank.*full_state_dict"):
                    _ = optimizer.state[parameter]
        assert len(seen) == len(optimizer.state) == len(dict(optimizer.state.items()))
        for forbidden in (copy.deepcopy, lambda given: torch.save(given, io.BytesIO())):
            with pytest.raises(ShardingError, match=r"cannot be (copied|pickled): .*full_state_dict\(optimizer\)"):
                forbidden(optimizer)
        return len(seen)

    assert sum(run_ranks(2, read)) == 6


@on_ranks(1)
def test_an_optimizer_that_is_no_longer_used_is_freed_at_once(rank):
    _model, optimizer = begun(rank, steps=1)
    moment = weakref.ref(next(iter(shards_of(optimizer).placement.state.values()))["exp_avg"])
    gc.disable()
    try:
        del optimizer
        assert moment() is None
    finally:
        gc.enable()
