"""The same training with a sharded optimizer and with the plain one, for ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.sharding import full_state_dict, shard_optimizer
from lockstep.sharding.granularity import Granularity
from programs.ranks import called_by
from threaded import Rank, run_ranks

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def network() -> nn.Sequential:
    """Sizes that no number of ranks divides, and a vector that is cut."""
    return nn.Sequential(nn.Linear(37, 50), nn.Tanh(), nn.Linear(50, 301), nn.Tanh(), nn.Linear(301, 7))


def replicated(rank: Rank, make: Callable[[], nn.Module] = network, **options: Any) -> Any:
    return lockstep.replicate(rank.make(make), process_group=rank.group, **options)


def adamw(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **{"lr": 0.01} | options)


class FailingSGD(torch.optim.SGD):
    """Fails after it has changed some weights."""

    fails: type[BaseException] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.fails:
            raise self.fails("on purpose")


def failing_sgd(parameters: Iterable[nn.Parameter]) -> FailingSGD:
    return FailingSGD(parameters, lr=0.1, momentum=0.9)


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


def begun(
    rank: Rank,
    make: Make = adamw,
    *,
    sharded: bool = True,
    granularity: Granularity | None = None,
    net: Callable[[], nn.Module] = network,
    steps: int = 0,
    **options: Any,
) -> tuple[Any, Any]:
    """Return a replicated module and its optimizer, sharded or not, after so many steps."""
    model = replicated(rank, net, **options)
    optimizer = made(make, model, sharded, granularity)
    train(rank, model, optimizer, range(steps))
    return model, optimizer


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def results(model: nn.Module, optimizer: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    return values(model), full_state_dict(optimizer, all_ranks=True)


def equal(one: Any, other: Any) -> bool:
    """Return True if two nested values have the same bits, in the same order."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def same_without_sharding(world: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Return what ranks get of `function(rank, sharded, *args)`, which has the same bits without sharding and with it.

    `options` are those of `run_ranks`.
    """
    plain, found = (run_ranks(world, function, sharded, *args, **options) for sharded in (False, True))
    assert equal(plain, found)
    return found


def without_sharding_too(world: int, *parameters: str, **options: Any) -> Any:
    """As `on_ranks`, for a test of a rank and whether it shards, which returns the same bits in both cases."""

    def run(count: int, function: Callable[..., Any], *args: Any, errors: bool, **options: Any) -> list[Any]:
        return same_without_sharding(count, function, *args, **options)

    return called_by(run, world, parameters, None, (), options, given_by_run=2)
