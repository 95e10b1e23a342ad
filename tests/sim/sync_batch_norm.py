"""The kernels of `torch.nn.SyncBatchNorm`, which exist for CUDA alone; importing this registers them for `sim`.

Channels are dimension 1. Statistics of half precision are kept in single precision, as on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import impl

Optional = Tensor | None


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _over_rows(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def _along_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape([-1 if dim == 1 else 1 for dim in range(like.dim())])


@impl("aten::batch_norm_stats", "PrivateUse1")
def _stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_wide(values), _over_rows(values), correction=0)
    return mean, torch.rsqrt(variance + eps)


@impl("aten::batch_norm_gather_stats_with_counts", "PrivateUse1")
def _gather_stats(
    values: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Optional,
    running_var: Optional,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """From each rank's mean, inverse deviation and number of rows to those of all rows."""
    rows = counts.to(means.dtype)
    share = (rows / rows.sum())[:, None]
    mean = (share * means).sum(0)
    variance = (share * (inverses.pow(-2) - eps + means.square())).sum(0) - mean.square()
    if running_mean is not None and running_var is not None:
        unbiased = variance * (rows.sum() / (rows.sum() - 1))
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return mean, torch.rsqrt(variance + eps)


@impl("aten::batch_norm_elemt", "PrivateUse1")
def _normalise(values: Tensor, weight: Optional, bias: Optional, mean: Tensor, inverse: Tensor, eps: float) -> Tensor:
    found = (_wide(values) - _along_channels(mean, values)) * _along_channels(inverse, values)
    if weight is not None:
        found = found * _along_channels(weight, values)
    if bias is not None:
        found = found + _along_channels(bias, values)
    return torch.empty_like(values).copy_(found)


@impl("aten::batch_norm_backward_reduce", "PrivateUse1")
def _backward_sums(
    grad: Tensor,
    values: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Optional,
    of_input: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Optional, Optional]:
    grad, centred = _wide(grad), _wide(values) - _along_channels(mean, values)
    total, with_values = grad.sum(_over_rows(grad)), (grad * centred).sum(_over_rows(grad))
    dtype = total.dtype if weight is None else weight.dtype
    of_weights = (with_values * inverse).to(dtype) if of_weight else None
    return total, with_values, of_weights, total.to(dtype, copy=True) if of_bias else None


@impl("aten::batch_norm_backward_elemt", "PrivateUse1")
def _backward(
    grad: Tensor,
    values: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Optional,
    total: Tensor,
    with_values: Tensor,
    counts: Tensor,
) -> Tensor:
    rows = counts.sum()
    centred = _wide(values) - _along_channels(mean, values)
    slope = _along_channels(with_values / rows * inverse.square(), values)
    found = _wide(grad) - _along_channels(total / rows, values) - centred * slope
    found = found * _along_channels(inverse if weight is None else inverse * weight, values)
    return torch.empty_like(values).copy_(found)
