"""How much the loss of each replica counts in a training step, so that they add up to the loss of the whole batch.

The means of most criteria are over rows, or over elements, of which each row has equally many. Cross entropy and
negative log-likelihood divide by the labels that are not ignored, or by the sum of the labels' class weights, unless
targets are probabilities. Autograd keeps that divisor with the loss, so it is known whatever function or module calls
the criterion, if the loss is its result.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F

from lockstep._base.devices import CPU
from lockstep._base.tree import tensors_in
from lockstep.errors import OptionError
from lockstep.local import scatter_gather
from lockstep.local.comm import copy_to

_SMOOTHING = {F.cross_entropy, torch.nn.CrossEntropyLoss.forward}
if hasattr(F, "linear_cross_entropy"):  # since PyTorch 2.13
    _SMOOTHING |= {F.linear_cross_entropy, torch.nn.LinearCrossEntropyLoss.forward}
"""Criteria whose loss may be the sum of two means with the same divisor (``label_smoothing``)."""
_MEAN, _SUM = 1, 2
"""Reductions, as autograd notes them."""
_NEAR = 16
"""The number of operations before the loss among which means over labels are looked for."""


@torch.no_grad()
def weights_of_parts(
    weight: Callable[[Any], Any], target: Any, replicas: int, dim: int, split: Sequence[float] | None
) -> list[float]:
    """Return what ``weight`` gives for each replica's part of the target, on the target's device.

    A target that is not split has a part for each device, even if the batch has fewer rows.
    """
    home = next((tensor.device for tensor in tensors_in(target)), CPU)
    parts, _ = scatter_gather.scatter_arguments((target,), None, [home] * replicas, dim, split)
    found = [float(weight(*args)) for args, _ in parts]
    for number, each in enumerate(found):
        if not (isfinite(each) and each >= 0):
            raise OptionError(
                f"step() got a weight of {each} for the part of replica {number}; expected what the mean of loss_fn "
                "divides by, such as the number of labels: a finite number, 0 or more"
            )
    return found


def weighted(
    losses: Sequence[Tensor], loss_fn: Callable[..., Tensor], rows: Sequence[int], given: Sequence[float] | None
) -> list[Tensor]:
    """Return the replicas' losses, weighted so that they add up to the loss of the whole batch.

    ``given`` are the weights of the program. Without them, they are what the means divide by, if that can be seen, and
    else the numbers of rows.
    """
    if len(losses) == 1 or (given is None and _is_sum(loss_fn, losses)):
        return list(losses)
    if given is not None:
        return _by(given, rows, losses)
    found = [_means_over_labels(loss) for loss in losses]
    may_be_sum = _function(loss_fn) in _SMOOTHING
    if all(nodes and (may_be_sum or nodes[0] is loss.grad_fn) for nodes, loss in zip(found, losses, strict=True)):
        return _by_labels([nodes[0] for nodes in found], rows, losses)
    _warn_of_other_means(losses, loss_fn, found, rows)
    return _by(rows, rows, losses)


def _by(weights: Sequence[float], rows: Sequence[int], losses: Sequence[Tensor]) -> list[Tensor]:
    """Weight losses by numbers; if all are 0, by rows: one device would return 0 / 0, too.

    A loss of weight 0 may be 0 / 0, and its gradient, too: it is left out.
    """
    weights = weights if any(weights) else rows
    total = sum(weights)
    pairs = zip(losses, weights, strict=True)
    return [loss * (weight / total) if weight else loss.new_zeros(()) for loss, weight in pairs]


def _by_labels(nodes: Sequence[Any], rows: Sequence[int], losses: Sequence[Tensor]) -> list[Tensor]:
    kept = [node._saved_total_weight.detach() for node in nodes]
    totals = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in kept]
    if all(each.is_cpu for each in totals) or any(node._saved_weight is not None for node in nodes):
        for node, loss, total in zip(nodes, losses, totals, strict=True):
            if not total and node is not loss.grad_fn and _has_labels(node):
                raise OptionError(
                    "step() got a cross entropy with label_smoothing in which all labels of a replica are of classes "
                    "with weight 0: its mean is over nothing, but smoothing counts. Give these classes a weight above "
                    "0, or compute the loss from the outputs of all: loss_fn(parallel(*inputs), target)"
                )
        return _by([float(each) for each in totals], rows, losses)
    # The host does not wait for accelerators: without class weights, the gradient of a loss without labels is 0.
    total = torch.stack([copy_to(each, totals[0].device) for each in totals]).sum()
    parts = [each / copy_to(total, each.device) for each in totals]
    return [torch.where(part == 0, 0, loss * part) for loss, part in zip(losses, parts, strict=True)]


def _has_labels(node: Any) -> bool:
    """Return True unless all labels of a mean are ignored."""
    ignored = node._saved_ignore_index  # of 64 bits, without the sign
    return bool((node._saved_target != (ignored - (1 << 64) if ignored >> 63 else ignored)).any())


def _function(loss_fn: Any) -> Any:
    """Return the function that computes the loss: of a module its forward, of a ``partial`` the one inside."""
    if isinstance(loss_fn, Module):
        return type(loss_fn).forward
    return loss_fn.func if isinstance(loss_fn, partial) else loss_fn


def _is_of_torch(loss_fn: Any) -> bool:
    return getattr(_function(loss_fn), "__module__", "") in (F.__name__, torch.nn.modules.loss.__name__)


def _option(loss_fn: Any, name: str) -> Any:
    return loss_fn.keywords.get(name) if isinstance(loss_fn, partial) else getattr(loss_fn, name, None)


def _is_sum(loss_fn: Any, losses: Sequence[Tensor]) -> bool:
    if _is_of_torch(loss_fn) and _option(loss_fn, "reduction") == "sum":
        return True
    return all(getattr(loss.grad_fn, "_saved_reduction", None) == _SUM for loss in losses)


def _means_over_labels(loss: Tensor) -> list[Any]:
    """Return autograd's nodes of means over labels among the last operations of a loss, the last first."""
    return [
        node
        for node in islice(_operations(loss), _NEAR)
        if node.name().startswith("NllLoss") and node._saved_reduction == _MEAN
    ]


def _operations(loss: Tensor) -> Iterator[Any]:
    waiting: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    for node in waiting:  # which grows
        yield node
        waiting += [before for before, _ in node.next_functions if before is not None]


def _warn_of_other_means(
    losses: Sequence[Tensor], loss_fn: Any, found: Sequence[Sequence[Any]], rows: Sequence[int]
) -> None:
    """Warn if a mean that is not over rows is in the loss, or if an attribute of the criterion tells of one."""
    weight = None if _is_of_torch(loss_fn) else _option(loss_fn, "weight")
    if not _is_of_torch(loss_fn) and _option(loss_fn, "ignore_index") is not None:
        why = "loss_fn has an ignore_index"
    elif isinstance(weight, Tensor) and not isinstance(weight, Parameter):
        why = "loss_fn has weights of classes"
    elif any(not _is_by_rows(nodes, rows) for nodes in zip(*found, strict=False)):
        why = "there is a cross entropy in it, whose mean is over labels, and replicas have other proportions of these"
    elif "cross_entropy" in next((node.name() for node in _operations(losses[0])), ""):  # in chunks
        why = "it is a cross entropy that is computed in chunks"
    else:
        return
    warnings.warn(
        f"step() weights the losses of the replicas by their rows, and their mean may be over something else: {why}. "
        "Give step(..., weight=function): function(target) returns what the mean divides by (weight=len: rows). If "
        "the loss is a sum of several means, compute it from the outputs of all: loss_fn(parallel(*inputs), target)",
        stacklevel=7,  # of the caller of step()
    )


def _is_by_rows(nodes: Sequence[Any], rows: Sequence[int]) -> bool:
    """Return True if the divisors of the replicas' means are in proportion to their rows, as far as the CPU knows."""
    if any(node._saved_weight is not None for node in nodes):
        return False
    totals = [node._saved_total_weight for node in nodes]
    return not totals[0].is_cpu or all(
        float(t) * rows[0] == float(totals[0]) * r for t, r in zip(totals, rows, strict=True)
    )
