"""Gradients of gradients: means that autograd can go through, and the graphs of ``create_graph=True``."""

from collections.abc import Callable, Sequence
from math import nan
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from lockstep.distributed.collectives import Collectives, Group
from lockstep.distributed.dtensors import like_parameter, local_part
from lockstep.distributed.reduction.backward import current_pass
from lockstep.distributed.reduction.graph import CollectiveInPass
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.errors import PeerError


class _AllReduce(CollectiveInPass):
    """That of the mean of some tensors in backward; it lives as long as the graph that goes through it."""

    def __init__(self, collectives: Collectives, likes: Sequence[Tensor], flags: int) -> None:
        super().__init__()
        self._collectives = collectives
        self._specs = [(tuple(each.shape), each.dtype, each.device) for each in map(local_part, likes)]
        if self._specs:
            self._specs.append(((1 + flags,), *self._specs[0][1:]))

    def take_part(self) -> None:
        """All-reduce what tells the other ranks that this one has failed."""
        nothing = [torch.full(shape, nan, dtype=dtype, device=device) for shape, dtype, device in self._specs]
        _means(nothing, self._collectives)


_graphs: WeakKeyDictionary[Group, WeakSet[_AllReduce]] = WeakKeyDictionary()


def has_graphs(group: Group) -> bool:
    """Whether a backward pass may go through a mean over the ranks of ``group``, which is a collective, at a time that
    depends on what else it goes through."""
    return bool(_graphs and _graphs.get(group))


def _note_graph(ctx: Any, collectives: Collectives, likes: Sequence[Tensor], flags: int = 0) -> None:
    """A graph is made whose backward calls :func:`_mean_in_pass`, with tensors like these and so many flags."""
    ctx.collectives, ctx.in_pass = collectives, _AllReduce(collectives, likes, flags)
    _graphs.setdefault(collectives.group, WeakSet()).add(ctx.in_pass)


def _mean_in_pass(ctx: Any, tensors: Sequence[Tensor], flags: Sequence[bool] = ()) -> tuple[list[Tensor], list[bool]]:
    """The means, in a backward pass, and which of the flags any rank has set; raises :class:`PeerError` if the pass has
    failed on another rank before."""
    ctx.in_pass.runs_in(current_pass())
    *means, heard = Mean.apply(ctx.collectives, None, *tensors, _flags(tensors, [False, *flags]))
    failed, *others = heard.tolist()
    if failed != failed:  # NaN
        raise PeerError(
            f"rank {ctx.collectives.global_rank}: backward failed on another rank before it came to a mean over the "
            "ranks that this rank's goes through (of gradients with create_graph=True, or by mean_over_ranks()); that "
            "rank's own error says why. No gradient has been handed out"
        )
    return means, [each != 0 for each in others]


def _flags(tensors: Sequence[Tensor], flags: Sequence[bool]) -> Tensor:
    """Flags that travel with tensors."""
    first = local_part(tensors[0])
    return torch.tensor(flags, dtype=first.dtype, device=first.device)


class Mean(Function):
    """The mean over the ranks of each of several tensors; forward and backward are the same.

    With ``joined``, a tensor that requires a gradient, the means have a graph also if the tensors have none here.
    """

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, joined: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All-reduce the tensors."""
        _note_graph(ctx, collectives, tensors)
        return tuple(_means(tensors, collectives))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """All-reduce their gradients."""
        means, _ = _mean_in_pass(ctx, grads)
        return None, None, *means


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
        ctx.factor, ctx.is_idle, ctx.reached = factor, is_idle, reached
        ctx.parameters = [member.parameter for member in reduced]
        ctx.set_materialize_grads(False)
        values = tuple(parameter.grad.clone() for parameter in ctx.parameters)
        ctx.dtypes = [value.dtype for value in values]
        _note_graph(ctx, collectives, values, flags=len(values))
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
        means, there = _mean_in_pass(ctx, whole, [grad is not None for grad in counted])
        own = (torch.zeros_like(mean) if ctx.is_idle else mean * ctx.factor for mean in means)
        # None stays None where no rank has any.
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
