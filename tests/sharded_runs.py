"""The same training with a sharded optimizer and with the plain one, for ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.sharding import shard_optimizer
from lockstep.sharding.granularity import Granularity
from threaded import Rank

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def network() -> nn.Sequential:
    """Sizes that no number of ranks divides, and a vector that is cut."""
    return nn.Sequential(nn.Linear(37, 50), nn.Tanh(), nn.Linear(50, 301), nn.Tanh(), nn.Linear(301, 7))


def replicated(rank: Rank, make: Callable[[], nn.Module] = network, **options: Any) -> Any:
    return lockstep.replicate(rank.make(make), process_group=rank.group, **options)


def adamw(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **{"lr": 0.01} | options)


def backward(rank: Rank, model: nn.Module, step: int, width: int = 37) -> None:
    model(torch.randn(4, width, generator=rank.generator(step))).square().mean().backward()


def train(rank: Rank, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(rank, model, step)
        optimizer.step()


def made(make: Make, model: nn.Module, sharded: bool, granularity: Granularity | None = None) -> Any:
    optimizer = make(list(model.parameters()))
    return shard_optimizer(optimizer, granularity=granularity) if sharded else optimizer


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: Any, other: Any) -> bool:
    """Return True if two nested values have the same bits, in the same order."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other
