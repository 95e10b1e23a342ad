"""Training loops of ranks with unequal numbers of batches, some of them left out, beside one process in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from small_modules import fails_in_backward
from threaded import Rank, run_ranks

WHERE = ["before forward", "in forward", "in backward"]


class BadBatchError(Exception):
    """Raised by what cannot use a batch."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the ranks do."""

    lengths: tuple[int, ...]
    known: bool = True
    """True if loaders know their lengths."""
    window: int = 1
    """Micro-batches of each step."""
    weighted: bool = False
    wrapped: bool = False
    modules: int = 1
    groups: int = 1
    epochs: int = 2
    hosts: str = ""
    device: str = ""
    context: bool = True
    """True if batches are left out by `skip_on`, else by `skip_batch`."""
    bad: tuple[tuple[int, int, int, str], ...] = ()
    """Batches that cannot be used: epoch, rank, batch, and where that shows."""
    stop: tuple[int, int, int] | None = None
    """When a rank asks to stop: epoch, rank, turn."""
    zeros: bool = False
    """True if gradients are set to zero, and not to None."""


def random_plan(seed: int) -> Plan:
    """Any of them."""
    numbers = random.Random(seed)
    world = numbers.choice([2, 2, 3])
    lengths = tuple(numbers.randrange(1, 6) for _ in range(world))
    epochs, modules = 2, numbers.choice([1, 1, 2])
    batches = [(e, r, b) for e in range(epochs) for r in range(world) for b in range(lengths[r])]
    bad = numbers.sample(batches, numbers.choice([0, 0, 1, 2, 3]))
    stops = not bad and numbers.random() < 0.4  # one that a failed backward keeps from being told is told a step later
    return Plan(
        lengths,
        known=numbers.random() < 0.6,
        window=numbers.choice([1, 1, 2, 3]),
        weighted=numbers.random() < 0.3,
        wrapped=numbers.random() < 0.4,
        modules=modules,
        groups=numbers.choice([1, modules]),
        hosts=numbers.choice(["", "a" * world]),
        context=numbers.random() < 0.5,
        bad=tuple((*each, numbers.choice(WHERE)) for each in bad),
        stop=(numbers.randrange(epochs), numbers.randrange(world), numbers.randrange(6)) if stops else None,
        zeros=numbers.random() < 0.2,
    )


def network() -> nn.Module:
    """One of the networks that are trained."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def data(plan: Plan, rank: int, epoch: int) -> list[dict[str, torch.Tensor]]:
    """A rank's batches, of unequal sizes."""
    numbers = torch.Generator("cpu").manual_seed(1000 * epoch + rank)
    return [
        {"x": torch.randn(1 + (n + rank) % 3, 3, generator=numbers, dtype=torch.float64, device="cpu")}
        for n in range(plan.lengths[rank])
    ]


def loss_of(models: list[nn.Module], x: torch.Tensor, weighted: bool, where: str = "") -> torch.Tensor:
    """A sum over rows, or a mean; fails where it is told to."""
    if where == "before forward":
        raise BadBatchError(where)
    first, *others = models
    hidden = first(x)
    if where == "in forward":
        raise BadBatchError(where)
    hidden = fails_in_backward(hidden, where == "in backward", BadBatchError)
    rows = sum((model(x) for model in others), hidden).square()
    return rows.sum() if weighted else rows.mean()


def train(rank: Rank, plan: Plan, store: dist.Store) -> dict[str, Any]:
    """A rank's loop: as a user would write it, but for what goes wrong on purpose."""
    groups = [rank.group, *(new_group(rank, n, store) for n in range(1, plan.groups))]
    with torch.device("cpu"):
        plain = [rank.make(network, seed) for seed in range(plan.modules)]
    plain = [module.to(rank.device) for module in plain]
    models: list[Any] = []
    for number, module in enumerate(plain):
        group = groups[number % plan.groups]
        wrap = lockstep.DistributedDataParallel if plan.wrapped else lockstep.replicate
        models.append(wrap(module, process_group=group))
    everything = [p for module in plain for p in module.parameters()]
    optimizer = torch.optim.Adam(everything, lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    asks: list[bool] = []
    keep = lockstep.loop.stop_when(lambda: bool(asks), rank.group)
    seen: dict[str, Any] = {"turns": 0, "steps": 0, "padded": 0, "means": [], "stopped": False}
    for epoch in range(plan.epochs):
        batches = data(plan, rank.rank, epoch)
        turns = lockstep.batches(batches if plan.known else iter(batches), *models)
        for turn, batch in enumerate(turns):
            last = (turn + 1) % plan.window == 0 or (plan.known and turn + 1 == len(turns))
            x = batch.pop("x").to(rank.device)
            bad = [w for e, r, b, w in plan.bad if (e, r, b) == (epoch, rank.rank, turn) and not turns.is_padding]
            if plan.stop == (epoch, rank.rank, turn):
                asks.append(True)
            if turn % plan.window == 0:
                optimizer.zero_grad(set_to_none=not plan.zeros)
            value = micro_batch(models, plan, x, bad[0] if bad else "", last)
            seen["turns"] += 1
            seen["padded"] += turns.is_padding
            if plan.window == 1 and lockstep.loop.skipped(*models):
                seen["means"].append(math.nan)  # no rank has anything to count
            elif plan.window == 1:  # a collective of the program's own
                means = lockstep.mean({"loss": value or 0.0}, weight=0 if value is None else len(x), group=rank.group)
                seen["means"].append(means["loss"])
            if not last:
                continue
            if not lockstep.loop.skipped(*models):
                seen["steps"] += 1
                optimizer.step()
                scheduler.step()
            elif any(p.grad is not None for p in everything):
                raise AssertionError("a batch that was left out has gradients")
            if lockstep.should_stop(rank.group):
                seen["stopped"] = True
                break
        if seen["stopped"]:
            break
    for module in models:
        lockstep.check_in_sync(module)
    moments = [
        optimizer.state[p][name] for p in everything if p in optimizer.state for name in ("exp_avg", "exp_avg_sq")
    ]
    assert all(rank.all_equal(each) for each in moments)
    assert keep.should_stop is seen["stopped"] or not seen["turns"]
    return {**seen, "values": [p.detach().cpu().clone() for p in everything], "rate": scheduler.get_last_lr()}


def micro_batch(models: list[Any], plan: Plan, x: torch.Tensor, where: str, last: bool) -> float | None:
    """Forward and backward; None if the batch is left out."""
    weight = len(x) if plan.weighted else None
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(lockstep.accumulate(model, last=last, weight=weight))
        if plan.context:
            with lockstep.loop.skip_on(BadBatchError, modules=models):
                return forward_and_backward(models, plan, x, where)
            return None
        try:
            return forward_and_backward(models, plan, x, where)
        except (BadBatchError, lockstep.errors.PeerError):
            lockstep.loop.skip_batch(*models)
            return None


def forward_and_backward(models: list[Any], plan: Plan, x: Any, where: str) -> float:
    loss = loss_of(models, x, plan.weighted, where)
    loss.backward()
    return loss.item()


def new_group(rank: Rank, number: int, store: dist.Store) -> Any:
    """Another group of the same ranks."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.PrefixStore(f"group {number}", store), rank.rank, rank.world, options)


def alone(plan: Plan) -> dict[str, Any]:
    """Return what one process does that has all ranks' batches."""
    models = [Rank(0, 1, None).make(network, seed) for seed in range(plan.modules)]
    everything = [p for module in models for p in module.parameters()]
    optimizer = torch.optim.Adam(everything, lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    longest, steps, stopped = max(plan.lengths), 0, False
    for epoch in range(plan.epochs):
        batches = [data(plan, rank, epoch) for rank in range(len(plan.lengths))]
        for begin in range(0, longest, plan.window):
            turns = range(begin, min(begin + plan.window, longest))
            contributed, counted, left_out = [], 0, False
            for rank, its in enumerate(batches):
                own = [its[turn]["x"] for turn in turns if turn < len(its)]
                if not own:
                    continue
                bad = [b for e, r, b, _ in plan.bad if (e, r) == (epoch, rank) and b in turns]
                left_out = left_out or bool(bad)
                losses = [loss_of(models, x, plan.weighted) for x in own]
                contributed.append(torch.autograd.grad(sum(losses), everything))
                counted += sum(map(len, own)) if plan.weighted else 1
            if not left_out:
                for p, *grads in zip(everything, *contributed, strict=True):
                    p.grad = sum(grads) / counted
                optimizer.step()
                scheduler.step()
                steps += 1
            gone_through = turns if plan.known else range(begin, begin + plan.window)
            if plan.stop is not None and plan.stop[0] == epoch and plan.stop[2] in gone_through:
                stopped = True
            if stopped:
                break
        if stopped:
            break
    return {
        "steps": steps,
        "values": [p.detach() for p in everything],
        "rate": scheduler.get_last_lr(),
        "stopped": stopped,
    }


def compare(plan: Plan) -> list[dict[str, Any]]:
    """Run both, and compare; returns what the ranks have seen."""
    found = run_ranks(len(plan.lengths), train, plan, dist.HashStore(), hosts=plan.hosts, device=plan.device)
    wanted = alone(plan)
    for each in found:
        assert each["steps"] == wanted["steps"], plan
        assert each["stopped"] == wanted["stopped"]
        torch.testing.assert_close(each["values"], wanted["values"], rtol=1e-9, atol=1e-12)
        assert each["rate"] == wanted["rate"]
        assert each["turns"] == found[0]["turns"]
        if plan.window == 1 and not plan.weighted:
            torch.testing.assert_close(each["means"], found[0]["means"], equal_nan=True)
    return found
