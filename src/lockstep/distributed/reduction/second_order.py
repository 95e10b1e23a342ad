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
from lockstep.distributed.reduction.backward import BackwardPass, current_pass
from lockstep.distributed.reduction.graph import CollectiveInPass, collectives_behind
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.dtensors import like_parameter, local_part
from lockstep.errors import PeerError

Reached = WeakMethod[Callable[[], None]]
"""Tells a replicated module that a pass has come to what may lead to its parameters, on some rank."""


class _AllReduce(CollectiveInPass):
    """That of the mean of some tensors in backward; it lives as long as the graph that goes through it."""

    def __init__(
        self, collectives: Collectives, likes: Sequence[Tensor], linked: Sequence[Tensor], reached: Sequence[Reached]
    ) -> None:
        super().__init__(linked[0] if linked else None)
        self._collectives, self._reached = collectives, reached
        self._linked = [(each.dtype, each.device) for each in linked]
        self._specs = [(tuple(each.shape), each.dtype, each.device) for each in map(local_part, likes)]
        if self._specs:
            self._specs.append(((1 + len(likes),), *self._specs[0][1:]))

    @property
    def group(self) -> Group:
        """The ranks."""
        return self._collectives.group

    def leads_to(self) -> list[object]:
        """See :meth:`CollectiveInPass.leads_to`."""
        methods: list[Any] = [each() for each in self._reached]
        return [method.__self__ for method in methods if method is not None]

    def runs_in(self, this: object) -> None:
        """See :meth:`CollectiveInPass.runs_in`; tells the modules."""
        for each in self._reached:
            if (reached := each()) is not None:
                reached()
        super().runs_in(this)

    def gradients_of_linked(self) -> list[Tensor]:
        """What goes back to the tensors without elements that were linked: nothing but that it has come to them."""
        return [torch.empty(0, dtype=dtype, device=device) for dtype, device in self._linked]

    def take_part(self) -> None:
        """All-reduce what tells the other ranks that this one has failed."""
        nothing = [torch.full(shape, nan, dtype=dtype, device=device) for shape, dtype, device in self._specs]
        _means(nothing, self._collectives)


_graphs: WeakKeyDictionary[Group, WeakSet[_AllReduce]] = WeakKeyDictionary()


def has_graphs(group: Group) -> bool:
    """Whether a backward pass may go through a mean over the ranks of ``group``, which is a collective, at a time that
    depends on what else it goes through."""
    return bool(_graphs and _graphs.get(group))


def means_behind(tensors: Sequence[Tensor], group: Group) -> int:
    """How many means over the ranks of a group a pass through these tensors comes to."""
    found = collectives_behind(tensors)
    return sum(isinstance(each, _AllReduce) and each.group is group for each in found)


def _note_graph(
    ctx: Any, collectives: Collectives, likes: Sequence[Tensor], linked: Sequence[Tensor], reached: Sequence[Reached]
) -> Tensor:
    """A graph is made whose backward calls :func:`_means_of_gradients`, of tensors like these.

    Returns an output without elements, by which later means are linked to the function: a pass that comes to those
    comes to it afterwards, on every rank.
    """
    ctx.collectives, ctx.in_pass = collectives, _AllReduce(collectives, likes, linked, reached)
    _graphs.setdefault(collectives.group, WeakSet()).add(ctx.in_pass)
    handle = local_part(likes[0]).new_empty(0) if likes else torch.empty(0)
    ctx.save_for_backward(handle)
    return handle


def _linked_to(collectives: Collectives, this: BackwardPass | None) -> list[Tensor]:
    """What means that are made in a pass are linked to: a leaf, so that they have a graph, and those made before."""
    joined = torch.empty(0, device=collectives.device, requires_grad=True)
    last = None if this is None else this.whole.means.get(collectives.group)
    return [joined] if last is None else [joined, last]


def _mean_in_pass(ctx: Any, tensors: Sequence[Tensor], flags: Sequence[bool]) -> tuple[list[Tensor], list[bool]]:
    """The means, in a backward pass, and which of the flags any rank has set; raises :class:`PeerError` if the pass has
    failed on another rank before."""
    this, group, linked = current_pass(), ctx.collectives.group, []
    ctx.in_pass.runs_in(this)
    if torch.is_grad_enabled():  # ``create_graph``
        linked = [*_linked_to(ctx.collectives, this), *ctx.saved_tensors]
    given = (*linked, *tensors, _flags(tensors, [False, *flags]))
    *means, heard, handle = Mean.apply(ctx.collectives, (), len(linked), *given)
    if linked and this is not None:
        this.whole.means[group] = handle
    failed, *others = heard.tolist()
    if failed != failed:  # NaN
        raise PeerError(
            f"rank {ctx.collectives.global_rank}: backward failed on another rank before it came to a mean over the "
            "ranks that this rank's goes through (of gradients with create_graph=True, or by mean_over_ranks()); that "
            "rank's own error says why. No gradient has been handed out"
        )
    return means, [each != 0 for each in others]


def _means_of_gradients(ctx: Any, grads: Sequence[Tensor | None], likes: Sequence[Tensor]) -> list[Tensor | None]:
    """The means of gradients of tensors like ``likes``; None stays None where no rank has any."""
    whole = [torch.zeros_like(like) if grad is None else grad for grad, like in zip(grads, likes, strict=True)]
    means, there = _mean_in_pass(ctx, whole, [grad is not None for grad in grads])
    return [mean if each else None for mean, each in zip(means, there, strict=True)]


def _flags(tensors: Sequence[Tensor], flags: Sequence[bool]) -> Tensor:
    """Flags that travel with tensors."""
    first = local_part(tensors[0])
    return torch.tensor(flags, dtype=first.dtype, device=first.device)


class Mean(Function):
    """The mean over the ranks of each of several tensors; forward and backward are the same.

    The first ``linked`` tensors have no elements: see :func:`_linked_to`. What :func:`_note_graph` returns comes behind
    the means. ``reached`` are called by a pass that goes back through them, which may come to parameters on some ranks
    only.
    """

    @staticmethod
    def forward(
        ctx: Any, collectives: Collectives, reached: Sequence[Reached], linked: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """All-reduce the tensors."""
        ctx.set_materialize_grads(False)
        links, tensors = tensors[:linked], tensors[linked:]
        parts = ((tensor, local_part(tensor)) for tensor in tensors)
        ctx.likes = [like_parameter(part.new_zeros(()).expand(part.shape), tensor) for tensor, part in parts]
        return *_means(tensors, collectives), _note_graph(ctx, collectives, tensors, links, reached)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """All-reduce their gradients."""
        means = _means_of_gradients(ctx, grads[:-1], ctx.likes)
        return None, None, None, *ctx.in_pass.gradients_of_linked(), *means


class _Reduced(Function):
    """Gradients that have been reduced already, as a function of this rank's: backward goes on through those."""

    @staticmethod
    def forward(
        ctx: Any,
        collectives: Collectives,
        factor: float,
        is_idle: bool,
        reached: Reached,
        reduced: Sequence[ManagedParameter],
        linked: int,
        *inputs: Tensor,
    ) -> Any:
        ctx.factor, ctx.is_idle = factor, is_idle
        ctx.parameters = [member.parameter for member in reduced]
        ctx.set_materialize_grads(False)
        values = tuple(parameter.grad.clone() for parameter in ctx.parameters)
        ctx.dtypes = [value.dtype for value in values]
        return *values, _note_graph(ctx, collectives, values, inputs[:linked], [reached])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        likes = [each.detach().to(dtype) for each, dtype in zip(ctx.parameters, ctx.dtypes, strict=True)]
        means = _means_of_gradients(ctx, [None] * len(likes) if ctx.is_idle else grads[:-1], likes)
        if ctx.is_idle:
            own = [mean if mean is None else torch.zeros_like(mean) for mean in means]
        else:
            own = [mean if mean is None else mean * ctx.factor for mean in means]
        return None, None, None, None, None, None, *ctx.in_pass.gradients_of_linked(), *own


def with_graphs(
    graphs: Sequence[tuple[ManagedParameter, Tensor]],
    reduced: Sequence[ManagedParameter],
    factor: float,
    is_idle: bool,
    reached: Reached,
    collectives: Collectives,
) -> None:
    """Join the reduced gradients to the graphs that ``create_graph=True`` has made of this rank's.

    ``reduced`` are the parameters that any rank has used, the same ones on every rank. Those that this rank has no
    graph of, perhaps all, are joined as well: other ranks may have one, and going back through them takes all ranks.
    ``is_idle``: this rank's batch counts nothing, nor does what it then goes back from, to parameters without a graph
    of its own: the other ranks reduce what they get there. ``reached`` is called by a pass that goes back through them,
    which may come to parameters on some ranks only.

    If the pass has gone through means itself, a pass through the new gradients goes through all those again, on every
    rank: on some, nothing else may lead there.
    """
    own: dict[Parameter, Tensor] = {}  # not by number: one that is new has that of another
    with torch.enable_grad():
        for member, graph in graphs:  # one that came in two pieces, in time and late, has two
            own[member.parameter] = own[member.parameter] + graph if member.parameter in own else graph
        inputs = [
            member.parameter if is_idle else own.get(member.parameter, member.parameter.grad) for member in reduced
        ]
        linked = _linked_to(collectives, current_pass())  # so that all of them have a graph
        *grads, _ = _Reduced.apply(collectives, factor, is_idle, reached, reduced, len(linked), *linked, *inputs)
    for member, grad in zip(reduced, grads, strict=True):
        member.parameter.grad = grad


def _means(tensors: Sequence[Tensor], collectives: Collectives) -> list[Tensor]:
    """The means, laid out as the tensors are on this rank."""
    locals_ = [local_part(tensor) for tensor in tensors]
    means = list(tensors)
    for number, mean in collectives.all_reduce_coalesced(locals_, "mean of tensors", 1 / collectives.world):
        means[number] = like_parameter(torch.empty_like(locals_[number]).copy_(mean), tensors[number])
    return means
