"""Modules of a weight or two, whose gradients can be told beforehand, and failures of their backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def filled(module: Any, value: float = 1.0) -> Any:
    """The module, with every parameter set to the value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def one_weight(value: float = 1.0) -> nn.Linear:
    """y = w * x, so that the gradient of w is the sum of the x."""
    return filled(nn.Linear(1, 1, bias=False), value)


def chain(count: int = 2, value: float = 1.0) -> nn.Sequential:
    """Two of them, or another number, one after the other."""
    return nn.Sequential(*(one_weight(value) for _ in range(count)))


def x_of(rank: Any, value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An input of one element that tells ranks apart: the value on rank 0, twice that on rank 1."""
    return torch.full((1, 1), value * (rank.rank + 1), dtype=dtype)


class CallInBackward(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], Any]) -> torch.Tensor:
        """A copy of x."""
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient as it is."""
        ctx.call()
        return grad, None


def fails_in_backward(x: torch.Tensor, fails: bool = True, error: type[Exception] = ArithmeticError) -> torch.Tensor:
    """A copy of x, whose backward fails ("a bad batch") if it is told to."""

    def call() -> None:
        if fails:
            raise error("a bad batch")

    return CallInBackward.apply(x, call)


class StopInBackward(torch.autograd.Function):
    """The identity, whose backward gives its input no gradient if it ``stops``, not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stops: bool = True) -> torch.Tensor:
        """A copy of x."""
        ctx.stops = stops
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        """The gradient as it is, or none."""
        return None if ctx.stops else grad, None


def error_of(call: Callable[[], Any]) -> type[Exception] | None:
    """Return what a call raises; None if nothing."""
    try:
        call()
    except Exception as error:
        return type(error)
    return None
