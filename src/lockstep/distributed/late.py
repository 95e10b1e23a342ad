"""Gradients that came too late for their bucket, or had none: reduced at the end of the same backward."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.buckets import plan_buckets
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.dtensors import like_parameter
from lockstep.distributed.gradients import ManagedParameter


class LateGradient:
    """A reduced gradient that is to be added to what the parameter gets from its bucket, if it has one."""

    def __init__(self, member: ManagedParameter, value: Tensor) -> None:
        self._member, self._value = member, value

    def hand_out(self, factor: float) -> None:
        """Add it, times ``factor``, to the parameter's gradient."""
        parameter, value = self._member.parameter, self._value
        grad = like_parameter(value.mul_(factor) if factor != 1 else value, parameter)
        if parameter.grad is not None:
            parameter.grad.add_(grad)
        else:
            parameter.grad = grad


def reduce_late(members: Sequence[ManagedParameter], collectives: Collectives, divisor: float) -> list[LateGradient]:
    """The means over the ranks of what these parameters have as gradients now, and have no more; see
    :func:`reduce_again`."""
    grads = {}
    for member in members:
        grad = member.parameter.grad
        if grad is not None:
            grads[member.index] = grad
            member.parameter.grad = None
    return reduce_again(members, grads, collectives, divisor, "late gradient")


def reduce_again(
    members: Sequence[ManagedParameter],
    grads: Mapping[int, Tensor],
    collectives: Collectives,
    divisor: float,
    what: str,
) -> list[LateGradient]:
    """The means over the ranks of gradients by parameter; a rank that has none counts as zero.

    Every rank passes the same parameters. One all-reduce for each dtype and device, and for each sparse gradient.
    """
    results: list[LateGradient] = []
    dense = [member for member in members if not member.sparse]
    plan = plan_buckets([member.spec for member in dense])
    for bucket in plan.buckets:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        chosen = [dense[slot.index] for slot in bucket.slots]
        views = bucket.views(flat)
        for member, view in zip(chosen, views, strict=True):
            if member.index in grads:
                taken = member.take(grads[member.index])
                view.copy_(taken.to_dense() if taken.is_sparse else taken)
        collectives.all_reduce(flat.div_(divisor), f"{what}s").wait()
        results += [LateGradient(member, view) for member, view in zip(chosen, views, strict=True)]
    for member in members:
        if member.sparse:
            grad = grads.get(member.index)
            value = member.blank() if grad is None else member.take(grad).coalesce() / divisor
            collectives.all_reduce(value, f"{what} of {member.name}").wait()
            results.append(LateGradient(member, value))
    return results
