"""Gradients of gradients: means that autograd can go through, and the graphs of ``create_graph=True``."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from lockstep.distributed.collectives import Collectives, Group
from lockstep.distributed.dtensors import like_parameter, local_part
from lockstep.distributed.reduction.parameter import ManagedParameter


class _Graph:
    """Lives as long as a graph that goes through a mean."""

    __slots__ = ("__weakref__",)


_graphs: WeakKeyDictionary[Group, WeakSet[_Graph]] = WeakKeyDictionary()


def has_graphs(group: Group) -> bool:
    """Whether a backward pass may go through a mean over the ranks of ``group``, which is a collective, at a time that
    depends on what else it goes through."""
    return bool(_graphs and _graphs.get(group))


def _note_graph(ctx: Any, collectives: Collectives) -> None:
    ctx.collectives, ctx.graph = collectives, _Graph()
    _graphs.setdefault(collectives.group, WeakSet()).add(ctx.graph)


class Mean(Function):
    """The mean over the ranks of each of several tensors; forward and backward are the same.

    With ``joined``, a tensor that requires a gradient, the means have a graph also if the tensors have none here.
    """

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, joined: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All-reduce the tensors."""
        _note_graph(ctx, collectives)
        return tuple(_means(tensors, collectives))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """All-reduce their gradients."""
        return None, None, *Mean.apply(ctx.collectives, None, *grads)


class _Reduced(Function):
    """Gradients that have been reduced already, as a function of this rank's: backward goes on through those."""

    @staticmethod
    def forward(
        ctx: Any,
        collectives: Collectives,
        factor: float,
        is_idle: bool,
        reached: WeakMethod[Callable[[], None]],
        reduced: Sequence[ManagedParameter],
        *_: Tensor,
    ) -> Any:
        _note_graph(ctx, collectives)
        ctx.factor, ctx.is_idle, ctx.reached = factor, is_idle, reached
        ctx.parameters = [member.parameter for member in reduced]
        ctx.set_materialize_grads(False)
        values = tuple(parameter.grad.clone() for parameter in ctx.parameters)
        ctx.dtypes = [value.dtype for value in values]
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        reached = ctx.reached()
        if reached is not None:
            reached()
        counted = [None] * len(grads) if ctx.is_idle else grads
        whole = [
            torch.zeros_like(parameter, dtype=dtype, requires_grad=False) if grad is None else grad
            for grad, parameter, dtype in zip(counted, ctx.parameters, ctx.dtypes, strict=True)
        ]
        first = local_part(whole[0])
        given = torch.tensor([grad is not None for grad in counted], dtype=first.dtype, device=first.device)
        *means, given = Mean.apply(ctx.collectives, None, *whole, given)
        own = (torch.zeros_like(mean) if ctx.is_idle else mean * ctx.factor for mean in means)
        there = [each != 0 for each in given.tolist()]  # None stays None where no rank has any
        return None, None, None, None, None, None, *(mean if t else None for mean, t in zip(own, there, strict=True))


def with_graphs(
    graphs: Sequence[tuple[ManagedParameter, Tensor]],
    reduced: Sequence[ManagedParameter],
    factor: float,
    is_idle: bool,
    reached: WeakMethod[Callable[[], None]],
    collectives: Collectives,
) -> None:
    """Join the reduced gradients to the graphs that ``create_graph=True`` has made of this rank's.

    ``reduced`` are the parameters that any rank has used, the same ones on every rank. Those that this rank has no
    graph of, perhaps all, are joined as well: other ranks may have one, and going back through them takes all ranks.
    ``is_idle``: this rank's batch counts nothing, nor does what it then goes back from, to parameters without a graph
    of its own: the other ranks reduce what they get there. ``reached`` is called by a pass that goes back through them,
    which may come to parameters on some ranks only.
    """
    own: dict[Parameter, Tensor] = {}  # not by number: one that is new has that of another
    with torch.enable_grad():
        for member, graph in graphs:  # one that came in two pieces, in time and late, has two
            own[member.parameter] = own[member.parameter] + graph if member.parameter in own else graph
        inputs = [
            member.parameter if is_idle else own.get(member.parameter, member.parameter.grad) for member in reduced
        ]
        joined = torch.empty(0, device=collectives.device, requires_grad=True)  # so that all of them have a graph
        grads = _Reduced.apply(collectives, factor, is_idle, reached, reduced, joined, *inputs)
    for member, grad in zip(reduced, grads, strict=True):
        member.parameter.grad = grad


def _means(tensors: Sequence[Tensor], collectives: Collectives) -> list[Tensor]:
    """The means, laid out as the tensors are on this rank."""
    locals_ = [local_part(tensor) for tensor in tensors]
    means = list(tensors)
    for number, mean in collectives.all_reduce_coalesced(locals_, "mean of tensors", 1 / collectives.world):
        means[number] = like_parameter(torch.empty_like(locals_[number]).copy_(mean), tensors[number])
    return means
