"""Penalties on gradients, at random: ranks use other parameters, and have constant gradients.

A line is a step, in which the gradients of a first loss are part of a second one: which parameters each rank uses, in
which way, and which gradients are penalised.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import lockstep
from fuzz.programs import Program
from threaded import Rank, run_ranks

TERMS: dict[str, Any] = {
    "nothing": None,
    "constant gradient": lambda own, following, x: own * x,
    "linear gradient": lambda own, following, x: own**2 * x,
    "quadratic gradient": lambda own, following, x: own**3 * x,
    "two parameters": lambda own, following, x: own * following * x,
}
Kinds = tuple[str, ...]
"""The term of each parameter."""


class Setting(NamedTuple):
    """What holds for a whole program."""

    world: int
    hosts: str
    cap: float
    """Size of a bucket in MiB."""


class Step(NamedTuple):
    """A line."""

    first: tuple[Kinds, ...]
    """By rank, in the loss whose gradients are penalised."""
    second: tuple[Kinds, ...]
    """By rank, in the loss beside the penalty, if there is one."""
    penalised: tuple[bool, ...]
    adds_loss: bool


class Terms(nn.Module):
    """A sum with a term for each parameter, of a kind that the call says."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(2, dtype=torch.float64) + 0.5 for _ in range(5))

    def forward(self, x: torch.Tensor, kinds: Kinds) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number, kind in enumerate(kinds):
            if TERMS[kind] is not None:
                total = total + TERMS[kind](self.weights[number], self.weights[(number + 1) % 5], x).sum()
        return total


def draw(seed: int, length: int, device: str = "") -> Program:
    chance = random.Random(seed)
    world = 2 + seed % 2
    setting = Setting(world, "a" * world if seed % 4 > 1 else "", chance.choice([25, 1e-5, 2e-5]))

    def kinds(nothing: int) -> Kinds:
        """There is a term at all."""
        drawn = tuple(chance.choice([*["nothing"] * nothing, *list(TERMS)[1:]]) for _ in range(5))
        return drawn if {*drawn} != {"nothing"} else ("linear gradient",) * 5

    def step() -> Step:
        first, second = (tuple(kinds(nothing) for _ in range(world)) for nothing in (1, 3))
        return Step(first, second, tuple(chance.random() < 0.5 for _ in range(5)), chance.random() < 0.5)

    return Program(setting, tuple(step() for _ in range(length)))


def run(module: Any, steps: Sequence[Step], ranks: Iterable[int], group: Any = None) -> list[list[Any]]:
    """Steps of the given ranks, whose losses count as their mean; the gradients after each."""
    ranks, weights, found = list(ranks), list(module.weights), []
    for number, step in enumerate(steps):
        inputs = [torch.tensor([1.0, 2.0], dtype=torch.float64) * (rank + number + 1) for rank in ranks]
        losses = [module(x, step.first[rank]) for rank, x in zip(ranks, inputs, strict=True)]
        grads = _gradients(sum(losses) / len(ranks), weights)
        grads = grads if group is None else lockstep.loop.mean_over_ranks(grads, group)
        squares = [grad.square().sum() for grad, counts in zip(grads, step.penalised, strict=True) if counts]
        penalty = sum(squares, torch.zeros((), dtype=torch.float64)) / 100
        if step.adds_loss:
            losses = [module(x, step.second[rank]) for rank, x in zip(ranks, inputs, strict=True)]
            penalty = penalty + sum(losses) / len(ranks)
        if penalty.requires_grad:
            penalty.backward()
        found.append([None if weight.grad is None else weight.grad.clone() for weight in weights])
        module.zero_grad()
    return found


def _gradients(loss: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    if not loss.requires_grad:
        return [0 * weight for weight in weights]
    grads = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    return [torch.zeros_like(weight) if g is None else g for g, weight in zip(grads, weights, strict=True)]


def _run(rank: Rank, program: Program, module: Terms) -> list[list[Any]]:
    own = lockstep.replicate(copy.deepcopy(module), process_group=rank.group, bucket_cap_mb=program.setting.cap)
    return run(own, program.lines, [rank.rank], rank.group)


def play(program: Program) -> None:
    """Run a program on all ranks, and in one process; raises what is wrong."""
    setting = program.setting
    torch.manual_seed(0)
    module = Terms()
    wanted = run(copy.deepcopy(module), program.lines, range(setting.world))
    for result in run_ranks(setting.world, _run, program, module, hosts=setting.hosts):
        for number, (got, references) in enumerate(zip(result, wanted, strict=True)):
            for own, reference in zip(got, references, strict=True):
                assert own is not None or reference is None, f"step {number}"
                own, reference = (torch.zeros(2, dtype=torch.float64) if g is None else g for g in (own, reference))
                torch.testing.assert_close(own, reference, msg=lambda text, step=number: f"step {step}: {text}")
