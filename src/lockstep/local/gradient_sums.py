"""Sums the gradients of replicas, in replica order, and adds the sums to the parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

Gradients = dict[int, tuple[Tensor, Tensor]]  # by the id of a leaf tensor: the tensor, and its gradient


def summed(rows: Sequence[Sequence[Tensor | None]], owned: Sequence[bool]) -> list[Tensor | None]:
    """Return the sums of gradients over replicas, in replica order; ``rows`` has one row for each replica.

    A row that is ``owned`` may be written to: nothing else refers to its tensors.
    """
    totals: list[Tensor | None] = [None] * len(rows[0])
    writable = [False] * len(totals)
    for row, own in zip(rows, owned, strict=True):
        into: list[Tensor] = []
        terms: list[Tensor] = []
        for i, grad in enumerate(row):
            total = totals[i]
            if grad is None or total is None:
                totals[i], writable[i] = (total, writable[i]) if grad is None else (grad, own)
            elif not grad.layout == total.layout == torch.strided or not (own or writable[i]):
                totals[i], writable[i] = total + grad, True
            else:  # a sum of two is the same either way round
                kept, added = (total, grad) if writable[i] else (grad, total)
                totals[i], writable[i] = kept, True
                into.append(kept)
                terms.append(added)
        if into:
            torch._foreach_add_(into, terms)
    return totals


class _Delivery(Function):
    """A node whose backward returns gradients that were given to it; see :func:`accumulate`."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        found = (None, *ctx.gradients)
        ctx.gradients.clear()  # now nothing else refers to them: they become the parameters' gradients without a copy
        return found


def accumulate(tensors: Sequence[Tensor], gradients: list[Tensor]) -> None:
    """Add gradients to ``.grad`` of leaf tensors as a backward pass does, with all hooks; empties the list."""
    if tensors:
        with torch.enable_grad():
            _Delivery.apply(gradients, *tensors).backward()
