"""Means over the ranks that autograd can go through: for ``torch.autograd.grad``, and for ``create_graph=True``."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.buckets import TensorSpec, plan_buckets
from lockstep.distributed.agree import Description, Line, agree, describe_tensor
from lockstep.distributed.collectives import Collectives, Group, resolve_group
from lockstep.distributed.dtensors import like_parameter, local_part
from lockstep.distributed.reduction.buckets import ManagedParameter
from lockstep.errors import CommunicationError
from lockstep.phases import Phases


@overload
def mean_over_ranks(tensors: Tensor, process_group: Group | None = None) -> Tensor: ...
@overload
def mean_over_ranks(tensors: Sequence[Tensor], process_group: Group | None = None) -> tuple[Tensor, ...]: ...
def mean_over_ranks(tensors: Tensor | Sequence[Tensor], process_group: Group | None = None) -> Any:
    """The mean over the ranks of a tensor, or of each of several; differentiable any number of times.

    ``torch.autograd.grad`` gives this rank's gradients, also for a replicated module: nothing tells the library that
    they are meant to be shared. This makes them the mean, and a loss built on the result has the right gradients:
    backward averages the incoming gradients over the ranks, so that, with parameters whose gradients are averaged as
    well, it is the gradient of the mean over the ranks of their losses.

    Args:
        tensors: A tensor, or a sequence of them: floating or complex, of the same shapes and dtypes on every rank.
        process_group: The ranks; the default group if None.

    Returns:
        New tensors, of the same shapes and dtypes, as a tuple if a sequence was given.

    Communicates one all-gather of some bytes, which compares the shapes, and one all-reduce for each dtype and device;
    in each backward through it, the latter again. Waits for them. Every rank must call it, and run backward through
    it, equally often. Strides may differ.

    Raises:
        AgreementError: Ranks pass other shapes, dtypes or numbers of tensors, on every rank.
        CommunicationError: There is no group, or a rank does not answer.

    Example:
        >>> import torch.distributed as dist
        >>> store = dist.HashStore()
        >>> group = dist.ProcessGroupGloo(store, 0, 1)
        >>> weight = torch.tensor([2.0], requires_grad=True)
        >>> (grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        >>> (shared,) = mean_over_ranks([grad], group)
        >>> shared.square().sum().backward()  # a gradient penalty
        >>> shared.item(), weight.grad.item()
        (12.0, 288.0)

    Stands for: ``torch.distributed.nn.functional.all_reduce`` divided by the world size.
    """
    group = resolve_group(process_group)
    if group is None:
        raise CommunicationError("there is no process group yet; call torch.distributed.init_process_group() first")
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    collectives = Collectives(group, Phases())
    lines = [Line("the number of tensors given to mean_over_ranks()", str(len(listed)))]
    lines += [Line(f"tensor {n} given to mean_over_ranks()", _described(each)) for n, each in enumerate(listed)]
    agree(Description(lines), [], collectives)
    means = _Mean.apply(collectives, *listed)
    return means[0] if isinstance(tensors, Tensor) else tuple(means)


class _Mean(Function):
    """Forward and backward are the same sum, divided by the world size."""

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.collectives = collectives
        return tuple(_means(tensors, collectives))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_Mean.apply(ctx.collectives, *grads)


class _Reduced(Function):
    """Gradients that have been reduced already, as a function of this rank's: backward goes on through those."""

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, factor: float, values: list[Tensor], *_graphs: Tensor) -> Any:
        ctx.collectives, ctx.factor = collectives, factor
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, None, *(mean * ctx.factor for mean in _Mean.apply(ctx.collectives, *grads))


def with_graphs(
    graphs: Sequence[tuple[ManagedParameter, Tensor]],
    reduced: Sequence[ManagedParameter],
    factor: float,
    collectives: Collectives,
) -> None:
    """Join the reduced gradients to the graphs that ``create_graph=True`` has made of this rank's.

    ``reduced`` are the parameters that any rank has used, the same ones on every rank. Those that this rank has no
    graph of, perhaps all, are joined as well: other ranks may have one, and going back through them takes all ranks.
    """
    own: dict[int, Tensor] = {}
    values = [member.parameter.grad for member in reduced]
    with torch.enable_grad():
        for member, graph in graphs:  # one that came in two pieces, in time and late, has two
            own[member.index] = own[member.index] + graph if member.index in own else graph
        inputs = [own.get(member.index, value) for member, value in zip(reduced, values, strict=True)]
        joined = torch.empty(0, device=collectives.device, requires_grad=True)  # so that all of them have a graph
        grads = _Reduced.apply(collectives, factor, values, joined, *inputs)
    for member, grad in zip(reduced, grads, strict=True):
        member.parameter.grad = grad


def _described(tensor: Any) -> str:
    return describe_tensor(tensor, layout=False) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"


def _means(tensors: Sequence[Tensor], collectives: Collectives) -> list[Tensor]:
    """All-reduces contiguous copies: strides may differ from rank to rank. Results are laid out as the tensors are."""
    locals_ = [local_part(tensor) for tensor in tensors]
    plan = plan_buckets([TensorSpec.of(tensor).contiguous() for tensor in locals_])
    means = list(tensors)
    for bucket in plan.buckets:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        views, own = bucket.views(flat), bucket.take(locals_)
        torch._foreach_copy_(views, [local.detach() for local in own])
        collectives.all_reduce(flat.div_(collectives.world), "mean of tensors").wait()
        for slot, view, local in zip(bucket.slots, views, own, strict=True):
            means[slot.index] = like_parameter(torch.empty_like(local).copy_(view), tensors[slot.index])
    return means
