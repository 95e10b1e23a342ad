"""Penalties on gradients, at random: ranks use other parameters, and have constant gradients; beside one process."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import lockstep
from threaded import run_ranks

TERMS = {
    "nothing": None,
    "constant gradient": lambda own, following, x: own * x,
    "linear gradient": lambda own, following, x: own**2 * x,
    "quadratic gradient": lambda own, following, x: own**3 * x,
    "two parameters": lambda own, following, x: own * following * x,
}


class Terms(nn.Module):
    """A sum with a term for each parameter, of a kind that the call says."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(2, dtype=torch.float64) + 0.5 for _ in range(5))

    def forward(self, x, kinds):
        total = torch.zeros((), dtype=torch.float64)
        for number, kind in enumerate(kinds):
            if TERMS[kind] is not None:
                total = total + TERMS[kind](self.weights[number], self.weights[(number + 1) % 5], x).sum()
        return total


class Program:
    """What each rank does, drawn at random: penalties on gradients."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.world, self.hosts = 2 + seed % 2, "aaa"[: (2 + seed % 2) * (seed % 4 > 1)]
        self.first = [self._kinds(draw, 1) for _ in range(self.world)]
        self.second = [self._kinds(draw, 3) for _ in range(self.world)]
        self.penalised = [draw.random() < 0.5 for _ in range(5)]
        self.adds_loss = draw.random() < 0.5
        self.cap = draw.choice([25, 1e-5, 2e-5])

    @staticmethod
    def _kinds(draw, nothing):
        """Of each parameter; there is a term at all."""
        kinds = [draw.choice([*["nothing"] * nothing, *list(TERMS)[1:]]) for _ in range(5)]
        return kinds if any(kind != "nothing" for kind in kinds) else ["linear gradient"] * 5

    def run(self, module, ranks, group=None):
        """Three steps of the given ranks, whose losses count as their mean; the gradients after each."""
        weights, found = list(module.weights), []
        for step in range(3):
            inputs = [torch.tensor([1.0, 2.0], dtype=torch.float64) * (rank + step + 1) for rank in ranks]
            losses = [module(x, self.first[rank]) for rank, x in zip(ranks, inputs, strict=True)]
            grads = self._gradients(sum(losses) / len(ranks), weights)
            grads = grads if group is None else lockstep.loop.mean_over_ranks(grads, group)
            squares = [grad.square().sum() for grad, counts in zip(grads, self.penalised, strict=True) if counts]
            penalty = sum(squares, torch.zeros((), dtype=torch.float64)) / 100
            if self.adds_loss:
                losses = [module(x, self.second[rank]) for rank, x in zip(ranks, inputs, strict=True)]
                penalty = penalty + sum(losses) / len(ranks)
            if penalty.requires_grad:
                penalty.backward()
            found.append([None if weight.grad is None else weight.grad.clone() for weight in weights])
            module.zero_grad()
        return found

    def _gradients(self, loss, weights):
        if not loss.requires_grad:
            return [0 * weight for weight in weights]
        grads = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        return [torch.zeros_like(weight) if g is None else g for g, weight in zip(grads, weights, strict=True)]


def run_program(rank, program, module):
    own = lockstep.replicate(copy.deepcopy(module), process_group=rank.group, bucket_cap_mb=program.cap)
    return program.run(own, [rank.rank], rank.group)


def compare(seed):
    program, module = Program(seed), Terms()
    wanted = program.run(copy.deepcopy(module), range(program.world))
    for result in run_ranks(program.world, run_program, program, module, hosts=program.hosts):
        for step in range(3):
            for own, reference in zip(result[step], wanted[step], strict=True):
                assert own is not None or reference is None, f"program {seed}"
                own, reference = (torch.zeros(2, dtype=torch.float64) if g is None else g for g in (own, reference))
                torch.testing.assert_close(own, reference, msg=f"program {seed}")


def test_few():
    for seed in range(12):
        compare(seed)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(100, 2100, 100))
def test_many(first):
    for seed in range(first, first + 100):
        compare(seed)
