"""A sharded optimizer gives weights and state the bits that they have without sharding, on the same ranks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep
import threaded
from lockstep.sharding import ShardedOptimizer, full_state_dict, shard_optimizer, streams
from lockstep.sharding.optimizer import shards_of
from processes import run_processes
from programs.ranks import on_ranks
from sharded_runs import (
    adamw,
    backward,
    begun,
    equal,
    made,
    network,
    replicated,
    results,
    same_without_sharding,
    train,
    values,
    without_sharding_too,
)
from threaded import count_collectives, run_ranks

OPTIMIZERS = {
    "AdamW": adamw,
    "AdamW, fused": lambda p: adamw(p, fused=True, amsgrad=True),
    "AdamW, foreach": lambda p: adamw(p, foreach=True, maximize=True),
    "AdamW, lr is a tensor": lambda p: adamw(p, lr=torch.tensor(0.01), foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.01),
}
WHOLE = {"Adafactor", "Muon"}


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(rank, sharded, make, steps=4):
    return results(*begun(rank, make, sharded=sharded, steps=steps))


IN_SHARED_MEMORY = ("AdamW", "SGD, momentum", "Adafactor", "Muon")


@pytest.mark.parametrize(
    ("name", "hosts"), [*((name, "") for name in OPTIMIZERS), *((name, "aaa") for name in IN_SHARED_MEMORY)]
)
def test_weights_and_state_have_the_bits_of_the_plain_optimizer(name, hosts):
    same_without_sharding(3, trained, OPTIMIZERS[name], hosts=hosts)


@pytest.mark.parametrize(
    ("world", "hosts", "nbytes"), [(3, "aaa", 64), (2, "", 1024), (3, "", 1024), (3, "aaa", 1024), (3, "", 12000)]
)
def test_weights_and_state_that_are_gathered_in_several_chunks(world, hosts, nbytes, monkeypatch):
    """The weights of a rank are 24 KB; chunks end within a parameter, within an element of the first, and behind it."""
    monkeypatch.setattr(streams, "CHUNK_BYTES", nbytes)
    same_without_sharding(world, trained, adamw, hosts=hosts)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_matrices_are_cut_unless_the_optimizer_needs_them_whole(rank, name):
    _, optimizer = begun(rank, OPTIMIZERS[name])
    shards = shards_of(optimizer).placement
    assert {each.is_whole for each in shards.placed if each.parameter.dim() == 2} == {name in WHOLE}
    numels = [sum(piece.stop - piece.start for piece in pieces) for pieces in shards.by_rank]
    assert name in WHOLE or max(numels) - min(numels) < 2 * 128


@pytest.mark.parametrize("world", [1, 2])
@without_sharding_too(None, "world")
def test_it_takes_an_instance_that_has_trained_and_keeps_what_refers_to_it(rank, sharded):
    model = replicated(rank)
    optimizer = adamw(model.parameters())
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    train(rank, model, optimizer, range(2))
    scheduler.step()
    if sharded:
        assert shard_optimizer(optimizer) is optimizer
    later = StepLR(optimizer, 3, gamma=0.5)
    for step in range(2, 6):
        train(rank, model, optimizer, range(step, step + 1))
        scheduler.step()
        later.step()
    assert type(optimizer) is torch.optim.AdamW
    assert isinstance(optimizer, ShardedOptimizer) == sharded
    return results(model, optimizer)


def compiled_steps(rank, sharded):
    warnings.filterwarnings("ignore", message=".*script_method")  # of what PyTorch's compiler imports
    graphs = []

    def backend(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph

    model, optimizer = begun(rank, lambda p: adamw(p, foreach=True), sharded=sharded)
    step = torch.compile(optimizer.step, backend=backend)
    for number in range(4):
        optimizer.zero_grad()
        backward(rank, model, number)
        step()
    return values(model), full_state_dict(optimizer, all_ranks=True), max(graphs) > 20


@pytest.mark.around
@pytest.mark.parametrize("world", [1, 2])
def test_a_compiled_step_compiles_what_a_rank_does_of_it(world):
    """Each rank is a process, since the compiler of PyTorch 2.11 crashes if two threads compile at once."""
    plain, sharded = (run_processes(world, compiled_steps, each) for each in (False, True))
    assert equal(plain, sharded)
    assert all(has_compiled for *_, has_compiled in sharded)


@without_sharding_too(2, hosts="aa")
def test_a_moving_average_beside_it_under_ddp(rank, sharded):
    model = lockstep.DistributedDataParallel(rank.make(network), process_group=rank.group)
    optimizer = made(adamw, model, sharded)
    averages = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(3):
        train(rank, model, optimizer, range(step, step + 1))
        averages.update_parameters(model.module)
    return values(averages)


class AveragedAdamW(torch.optim.AdamW):
    """Keeps a moving average of the weights in its state, as docs/memory.md shows."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if "average" not in state:
                        state["average"] = weight.detach().clone()
                    state["average"].lerp_(weight, 0.1)
        return loss


@on_ranks(2)
def test_a_moving_average_in_the_state_is_sharded_with_it(rank):
    model, optimizer = begun(rank, AveragedAdamW, granularity="element")
    averages = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(3):
        train(rank, model, optimizer, range(step, step + 1))
        averages.update_parameters(model)
    held = sum(state["average"].numel() for state in shards_of(optimizer).placement.state.values())
    state = full_state_dict(optimizer, all_ranks=True)["state"]
    found, expected = [state[number]["average"] for number in range(len(state))], values(averages)
    assert equal(found, expected)
    assert abs(held - sum(each.numel() for each in expected) / 2) <= 128


@without_sharding_too(2)
def test_groups_that_are_added_layers_that_are_frozen_and_unfrozen(rank, sharded):
    model = replicated(rank)
    model[4].requires_grad_(False)
    groups = [{"params": list(model[0].parameters()) + list(model[4].parameters()), "lr": 0.02}]
    optimizer = made(lambda _: adamw(groups), model, sharded)
    train(rank, model, optimizer, range(2))
    optimizer.add_param_group({"params": list(model[2].parameters()), "weight_decay": 0.3})
    train(rank, model, optimizer, range(2, 4))
    model[4].requires_grad_(True)
    model[0].requires_grad_(False)
    train(rank, model, optimizer, range(4, 6))
    model[0].requires_grad_(True)
    optimizer.param_groups[0]["lr"] = 0.001
    train(rank, model, optimizer, range(6, 8))
    return results(model, optimizer)


@without_sharding_too(2)
def test_accumulation_clipping_hooks_and_a_closure(rank, sharded):
    model, optimizer = begun(rank, momentum, sharded=sharded)
    seen = []
    optimizer.register_step_pre_hook(lambda given, args, kwargs: seen.append(given is optimizer))
    optimizer.register_step_post_hook(lambda given, args, kwargs: seen.append(len(given.param_groups[0]["params"])))
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            with lockstep.accumulate(model, last=micro == 2):
                backward(rank, model, 10 * step + micro)
        clip = optimizer.clip_grad_norm_ if sharded else lambda n: nn.utils.clip_grad_norm_(model.parameters(), n)
        norms.append(clip(0.01))
        optimizer.step()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 37)).square().mean()
        loss.backward()
        return loss

    last = optimizer.step(closure).detach()
    assert seen == [True, 6] * 4
    return values(model), norms, last


def test_whatever_reads_whole_gradients_works_as_without_sharding():
    """PyTorch's norms and clipping, a hook on a parameter, and a second optimizer over the same parameters."""

    def trained_by_two(rank, sharded):
        model, first = begun(rank, momentum, sharded=sharded)
        second = adamw(model.parameters())
        seen = []
        model[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        for step in range(3):
            first.zero_grad()
            backward(rank, model, step)
            seen.append(nn.utils.get_total_norm([each.grad for each in model.parameters()]))
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            first.step()
            second.step()
        return values(model), seen

    first, second = same_without_sharding(2, trained_by_two)
    assert equal(first, second)
    assert len(first[1]) == 6
    assert not equal(first[0], run_ranks(2, trained, True, momentum, 3)[0][0])


@pytest.mark.parametrize("fused", [False, True])
@without_sharding_too(2)
def test_an_infinite_gradient_on_one_rank_skips_the_step_of_all(rank, sharded, fused):
    model, optimizer = begun(rank, lambda p: adamw(p, fused=fused), sharded=sharded)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        bad = float("inf") if step == 1 and rank.rank == 1 else 1.0
        scaler.scale(model(torch.randn(4, 37, generator=rank.generator(step))).mean() * bad).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    return results(model, optimizer)


class ManyKinds(nn.Module):
    """Parameters of other layouts, dtypes and shapes, and a layer that is not used."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
        self.low = nn.Linear(16, 33).to(torch.bfloat16)
        self.unused = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        hidden = checkpoint(self.conv, x, use_reentrant=False).mean((2, 3))
        return self.low(hidden.to(torch.bfloat16)) * self.scale


@without_sharding_too(2)
def test_several_modules_unused_parameters_other_layouts_and_dtypes(rank, sharded):
    one, two = replicated(rank, ManyKinds), replicated(rank, lambda: nn.Linear(33, 3))
    optimizer = made(lambda _: adamw([*one.parameters(), *two.parameters()]), one, sharded)
    for step in range(3):
        optimizer.zero_grad()
        images = torch.randn(2, 3, 8, 8, generator=rank.generator(step)).to(memory_format=torch.channels_last)
        two(one(images).float()).square().mean().backward()
        optimizer.step()
    return values(two), *results(one, optimizer)


def test_shares_give_the_same_bits_on_one_rank_and_on_two():
    def shared(rank, sharded):
        model, optimizer = begun(rank, sharded=sharded, shares=4, loss="sum")
        numbers = torch.randn(24, 37, generator=torch.Generator().manual_seed(1))
        batches = lockstep.shares.GlobalBatches(TensorDataset(numbers), 8, 4, process_group=rank.group)
        for batch in batches:
            optimizer.zero_grad()
            for (rows,) in batch:
                model(rows).square().sum().backward()
            optimizer.step()
        return results(model, optimizer)

    expected = run_ranks(1, shared, False)[0]
    for world in (1, 2):
        assert all(equal(each, expected) for each in run_ranks(world, shared, True))


def test_all_chunks_in_shared_memory_are_gathered_in_one_collective(monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_BYTES", 1024)
    monkeypatch.setitem(threaded._NAMES, "_gather_in_chunks", "gather_in_chunks")

    def counted(rank):
        model, optimizer = begun(rank)
        backward(rank, model, 0)
        with count_collectives(rank) as seen:
            optimizer.step()
        return [each.name for each in seen]

    assert run_ranks(3, counted, hosts="aaa") == [["gather_in_chunks"]] * 3


@on_ranks(2)
def test_a_step_costs_one_small_sum_and_the_weights(rank):
    model, optimizer = begun(rank, steps=1)
    backward(rank, model, 1)
    with count_collectives(rank) as seen:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    weights = sum(each.numel() for each in model.parameters())
    (first, head), (second, nbytes) = [(each.name, each.numel) for each in seen]
    assert (first, head, second) == ("all_reduce", 1024, "all_gather_single")
    assert 2 * weights <= nbytes <= 2 * weights + 8 + 64 + 128 * 4


@pytest.mark.parametrize(
    ("longest", "world", "expected"),
    [
        (1, 2, 64),
        (100, 64, 128),
        (10**9, 2, 2 << 20),
        (10**9, 8, 2 << 20),
        (10**9, 64, 256 << 10),
        (300 << 10, 64, 256 << 10),
    ],
)
def test_chunks_of_all_ranks_take_at_most_16_mib(longest, world, expected):
    assert streams.chunk_bytes(longest, world) == expected


@pytest.mark.parametrize("world", [2, 4])
@on_ranks(None, "world")
def test_the_state_is_divided_by_the_number_of_ranks(rank):
    model, optimizer = begun(rank, steps=2)
    tensors = [each for state in shards_of(optimizer).placement.state.values() for each in state.values()]
    weights = sum(each.numel() for each in model.parameters())
    nbytes = sum(each.nbytes for each in tensors if each.dim()) / weights
    assert abs(nbytes - 8 / rank.world) < 0.02 * 8 / rank.world


@on_ranks(2)
def test_a_deep_copy_of_the_module_is_not_changed_by_steps(rank):
    model = replicated(rank)
    before = copy.deepcopy(model)
    optimizer = made(adamw, model, True)
    train(rank, model, optimizer, range(1))
    kept, expected = values(before), values(rank.make(network))
    assert equal(kept, expected)
