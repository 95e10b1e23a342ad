"""Reduces, at the end of the same backward, gradients that missed their bucket or have none."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.buckets import plan_buckets
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.managed_parameters import ManagedParameter
from lockstep.dtensors import like_parameter
from lockstep.errors import PeerError


class LateGradient:
    """A reduced gradient, to be added to the one from the parameter's bucket, if it has one."""

    def __init__(self, member: ManagedParameter, value: Tensor) -> None:
        self._member = member
        self._value = value

    def copy_out(self, factor: float) -> None:
        """Add it, times ``factor``, to the parameter's ``.grad``."""
        parameter, value = self._member.parameter, self._value
        grad = like_parameter(value.mul_(factor) if factor != 1 else value, parameter)
        if parameter.grad is not None:
            parameter.grad.add_(grad)
        else:
            parameter.grad = grad


def reduce_late(members: Sequence[ManagedParameter], collectives: Collectives, divisor: float) -> list[LateGradient]:
    """Take these parameters' gradients away and return their means over the ranks; a missing gradient counts as zero.

    Every rank passes the same parameters. Communicates one all-reduce of a flag for each rank, then one all-reduce for
    each dtype and device and for each sparse gradient. If a rank cannot put its gradients together, it raises its own
    error, and the others raise :class:`PeerError`.
    """
    grads = {}
    for member in members:
        grad = member.parameter.grad
        if grad is not None:
            grads[id(member.parameter)] = grad
            member.parameter.grad = None
    flats: list[tuple[Tensor, str]] = []
    results: list[LateGradient] = []
    failure: Exception | None = None
    try:
        for member in members:
            # Check parameters without a gradient as well, since they get one:
            # test_a_frozen_layer_that_is_retyped_on_one_rank_and_trained_on_another.
            member.check_parameter()
        for flat, parts in _dense(members, grads):
            flats.append((flat.div_(divisor), "late gradients"))
            results += parts
        for member in members:
            if member.sparse:
                late = grads.get(id(member.parameter))
                value = member.zeros() if late is None else member.take(late).coalesce() / divisor
                flats.append((value, f"late gradient of {member.name}"))
                results.append(LateGradient(member, value))
    except Exception as error:
        failure = error
    _check_all(failure, collectives)
    for flat, name in flats:
        collectives.all_reduce(flat, name).wait()
    return results


def _dense(
    members: Sequence[ManagedParameter], grads: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, list[LateGradient]]]:
    """Yield one flat tensor of gradients for each dtype and device, and the late gradients that are views of it."""
    dense = [member for member in members if not member.sparse]
    for bucket in plan_buckets([member.spec for member in dense]).buckets:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        # .data gives each view its own version counter, which views otherwise share: see gradient_snapshot.py.
        parts = [
            LateGradient(dense[slot.index], view.data)
            for slot, view in zip(bucket.slots, bucket.views(flat), strict=True)
        ]
        for slot, view in zip(bucket.slots, bucket.views(flat), strict=True):
            member = dense[slot.index]
            grad = grads.get(id(member.parameter))
            if grad is not None:
                taken = member.take(grad)
                view.copy_(taken.to_dense() if taken.is_sparse else taken)
        yield flat, parts


def _check_all(failure: Exception | None, collectives: Collectives) -> None:
    """Raise on every rank if any rank has a failure."""
    failed = torch.zeros(collectives.world, dtype=torch.int64)
    failed[collectives.rank] = failure is not None
    failed = failed.to(collectives.device)
    collectives.all_reduce(failed, "whether each rank has its late gradients").wait()
    if failure is not None:
        raise failure
    ranks = [rank for rank, flag in zip(collectives.global_ranks, failed.tolist(), strict=True) if flag]
    if ranks:
        raise PeerError(
            f"rank {collectives.global_rank}: rank {ranks[0]} could not put together its late gradients; that rank's "
            "own error says why. No gradient has been handed out; every rank can go on with the next batch after "
            "zero_grad()"
        )
