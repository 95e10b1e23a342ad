"""Gradients of gradients: means that autograd can go through, and the graphs of ``create_graph=True``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from lockstep.distributed.collectives import Collectives
from lockstep.distributed.dtensors import like_parameter, local_part
from lockstep.distributed.reduction.parameter import ManagedParameter


class Mean(Function):
    """The mean over the ranks of each of several tensors; forward and backward are the same."""

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All-reduce the tensors."""
        ctx.collectives = collectives
        return tuple(_means(tensors, collectives))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """All-reduce their gradients."""
        return None, *Mean.apply(ctx.collectives, *grads)


class _Reduced(Function):
    """Gradients that have been reduced already, as a function of this rank's: backward goes on through those."""

    @staticmethod
    def forward(
        ctx: Any, collectives: Collectives, factor: float, is_idle: bool, values: list[Tensor], *_: Tensor
    ) -> Any:
        ctx.collectives, ctx.factor, ctx.is_idle = collectives, factor, is_idle
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        means = Mean.apply(ctx.collectives, *(map(torch.zeros_like, grads) if ctx.is_idle else grads))
        own = (torch.zeros_like(mean) if ctx.is_idle else mean * ctx.factor for mean in means)
        return None, None, None, None, None, *own


def with_graphs(
    graphs: Sequence[tuple[ManagedParameter, Tensor]],
    reduced: Sequence[ManagedParameter],
    factor: float,
    is_idle: bool,
    collectives: Collectives,
) -> None:
    """Join the reduced gradients to the graphs that ``create_graph=True`` has made of this rank's.

    ``reduced`` are the parameters that any rank has used, the same ones on every rank. Those that this rank has no
    graph of, perhaps all, are joined as well: other ranks may have one, and going back through them takes all ranks.
    ``is_idle``: this rank's batch counts nothing, nor does what it then goes back from, to parameters without a graph
    of its own: the other ranks reduce what they get there.
    """
    own: dict[Parameter, Tensor] = {}  # not by number: one that is new has that of another
    values = [member.parameter.grad for member in reduced]
    with torch.enable_grad():
        for member, graph in graphs:  # one that came in two pieces, in time and late, has two
            own[member.parameter] = own[member.parameter] + graph if member.parameter in own else graph
        inputs = [
            member.parameter if is_idle else own.get(member.parameter, value)
            for member, value in zip(reduced, values, strict=True)
        ]
        joined = torch.empty(0, device=collectives.device, requires_grad=True)  # so that all of them have a graph
        grads = _Reduced.apply(collectives, factor, is_idle, values, joined, *inputs)
    for member, grad in zip(reduced, grads, strict=True):
        member.parameter.grad = grad


def _means(tensors: Sequence[Tensor], collectives: Collectives) -> list[Tensor]:
    """The means, laid out as the tensors are on this rank."""
    locals_ = [local_part(tensor) for tensor in tensors]
    means = list(tensors)
    for number, mean in collectives.all_reduce_coalesced(locals_, "mean of tensors", 1 / collectives.world):
        means[number] = like_parameter(torch.empty_like(locals_[number]).copy_(mean), tensors[number])
    return means
