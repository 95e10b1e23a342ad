"""What the tests share that hold ours against PyTorch's DistributedDataParallel: both classes, networks, outcomes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from small_modules import one_weight

_of_torch = pytest.mark.around  # what PyTorch's own does changes with PyTorch, and not with lockstep
both = pytest.mark.parametrize("implementation", [pytest.param("torch", marks=_of_torch), "lockstep"])
since_2_13 = pytest.mark.skipif(
    "forward_sync_buffers" not in inspect.signature(nn.parallel.DistributedDataParallel).parameters,
    reason="before 2.13, PyTorch's own lacks some options, and overwrites buffers at each forward",
)
both_since_2_13 = pytest.mark.parametrize(
    "implementation", [pytest.param("torch", marks=[since_2_13, _of_torch]), "lockstep"]
)


def ddp_class(implementation: str) -> Any:
    """The class of that name; by name, since functions that run in other processes get plain arguments."""
    return {"torch": nn.parallel, "lockstep": lockstep}[implementation].DistributedDataParallel


def failure(call: Callable[[], Any]) -> tuple[list[str], str]:
    """The names of the error's classes, most special first, and its message; without an error, none and the result."""
    try:
        return [], repr(call())
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)


def warned(call: Callable[[], Any]) -> list[tuple[str, str, str]]:
    """Class, message and file of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(warning.category.__name__, str(warning.message), warning.filename) for warning in caught]


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    """Copies of the parameters' gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def scalars(module: nn.Module) -> list[float | None]:
    """The parameters' gradients, first elements as numbers."""
    return [None if grad is None else grad.flatten()[0].item() for grad in gradients(module)]


def values(module: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters and buffers."""
    return [value.clone() for value in module.state_dict().values()]


def own(rank: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A rank's part of a batch."""
    return tensor.chunk(rank.world)[rank.rank]


class Bag(nn.Module):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(10, 4, sparse=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Distributions over the columns."""
        return self.embedding(rows).softmax(1)


class Mixed(nn.Module):
    """Layers with a frozen bias, and an integer parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7, bias=False)
        self.middle = nn.Linear(7, 5)
        self.middle.bias.requires_grad_(False)
        self.last = nn.Linear(5, 2, bias=False)
        self.steps = nn.Parameter(torch.tensor([2, 3]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three layers and a softmax."""
        return self.last(self.middle(self.first(x).relu()).relu()).softmax(1)


class Branches(nn.Module):
    """Three weights of one element; forward takes the names of those to use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = one_weight(), one_weight(), one_weight()

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        """Sum of the named layers' outputs."""
        return sum(getattr(self, name)(x) for name in names)
