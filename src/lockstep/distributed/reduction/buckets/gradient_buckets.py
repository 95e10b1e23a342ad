"""The buckets of a plan, and gradients that have missed their bucket, or have none."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lockstep._base.buckets import plan_buckets
from lockstep._base.dtensors import like_parameter
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.record import FAILURE, ranks_that_failed
from lockstep.distributed.comm.rows import SumOfRows
from lockstep.distributed.reduction.buckets.bucket import Bucket, Empty, with_rows
from lockstep.distributed.reduction.buckets.plan import AdaptivePlan
from lockstep.distributed.reduction.module.managed_parameters import ManagedParameter, Trigger
from lockstep.errors import PeerError


class BucketsInUse:
    """The buckets of a plan, in launch order and by parameter."""

    def __init__(
        self,
        plan: AdaptivePlan,
        parameters: Sequence[ManagedParameter],
        report_numel: int,
        empty: Empty,
        half: torch.dtype | None = None,
    ) -> None:
        """Make the buckets of ``plan``.

        ``report_numel``: elements that the report takes behind the last bucket; 0 if it travels on its own; ``half``:
        the half precision in which float32 gradients travel, or None.
        """
        planned = plan.current.buckets
        self.in_order: list[Bucket] = []
        """All buckets, in launch order."""
        self.of: list[Bucket | None] = [None] * len(parameters)
        """The bucket of each parameter; None for a parameter without one."""
        for number, each in enumerate(planned):
            extra = report_numel if number == len(planned) - 1 else 0
            members = [parameters[index] for index in each.indices]
            waits = bool(extra) or plan.waits_for_end(each)
            bucket = Bucket(number, each, members, waits, extra, empty, half)
            self.in_order.append(bucket)
            for index in each.indices:
                self.of[index] = bucket
        waiting = (number for number, bucket in enumerate(self.in_order) if bucket.waits_for_end)
        self.early = next(waiting, len(self.in_order))
        """The number of buckets before the first one that waits for the end of backward."""
        self.labels = [f"bucket {number + 1} of {len(planned)}" for number in range(len(planned))]
        """The name of each bucket in messages and profiles."""
        self.report_bucket = self.in_order[-1] if report_numel else None
        """The bucket that carries the report behind its gradients, or None."""
        self.unbucketed = [index for index, bucket in enumerate(self.of) if bucket is None]
        """The parameters that have no bucket."""
        self.triggers: dict[int, Trigger] | None = None
        """What a pass puts onto parameters while it runs, by their numbers; None: to be chosen anew."""

    def not_given(self, grads: Sequence[Tensor | None]) -> list[int]:
        """Return the numbers of parameters whose gradients, of ``grads``, may not be those that their bucket has given
        them."""
        others = [*self.unbucketed, *range(len(self.of), len(grads))]
        for bucket in self.in_order:
            if not bucket.has_given(grads):
                others += bucket.planned.indices
        return others

    def storages(self) -> set[int]:
        """Return the numbers of the storages that the buckets have at present."""
        return {bucket.storage for bucket in self.in_order}


# ------------------------------------------- gradients that missed their bucket, or have none


class LateGradient:
    """A reduced gradient, to be added to the one from the parameter's bucket, if it has one."""

    def __init__(self, member: ManagedParameter, value: Tensor) -> None:
        self._member = member
        self.value = value

    def accept(self, summed: Tensor) -> None:
        """Take the sum over the ranks in place of this rank's value."""
        self.value = summed

    def copy_out(self, factor: float) -> None:
        """Add it, times ``factor``, to the parameter's ``.grad``."""
        parameter, value = self._member.parameter, self.value
        grad = like_parameter(value.mul_(factor) if factor != 1 else value, parameter)
        if parameter.grad is None:
            parameter.grad = grad
        elif parameter.grad.is_sparse and not grad.is_sparse:
            parameter.grad = grad.add_(parameter.grad)
        else:
            parameter.grad.add_(grad)


def reduce_late(members: Sequence[ManagedParameter], collectives: Collectives, divisor: float) -> list[LateGradient]:
    """Take these parameters' gradients away and return their means over the ranks; a missing gradient counts as zero.

    Every rank passes the same parameters. Communicates one all-reduce of a flag for each rank, then one all-reduce for
    each dtype and device, and the rows of each sparse gradient. If a rank cannot put its gradients together, it raises
    its own error, and the others raise :class:`PeerError`.
    """
    grads = {}
    for member in members:
        grad = member.parameter.grad
        if grad is not None:
            grads[id(member.parameter)] = grad
            member.parameter.grad = None
    flats: list[Tensor] = []
    results: list[LateGradient] = []
    rows: list[tuple[Tensor, bool, str, Callable[[Tensor], object]]] = []
    failure: Exception | None = None
    try:
        for flat, parts in _dense(members, grads):
            flats.append(flat.div_(divisor))
            results += parts
        for member in members:
            if member.sparse:
                late = grads.get(id(member.parameter))
                value = member.zeros() if late is None else member.take(late)
                results.append(LateGradient(member, with_rows(value) / divisor))
                name = f"late gradient of {member.name}"
                rows.append((results[-1].value, not value.is_sparse, name, results[-1].accept))
    except Exception as error:
        failure = error
    _check_all(failure, collectives)
    for flat in flats:
        collectives.all_reduce(flat, "late gradients").wait()
    for each in rows:
        both = SumOfRows(collectives, *each)
        both.wait()
        both.gather()
        both.finish()
    return results


def _dense(
    members: Sequence[ManagedParameter], grads: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, list[LateGradient]]]:
    """Yield one flat tensor of gradients for each dtype and device, and the late gradients that are views of it."""
    dense = [member for member in members if not member.sparse]
    for bucket in plan_buckets([member.spec for member in dense]).buckets:
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        # .data gives each view its own version counter, which views otherwise share: see gradients.py.
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
    encoded = FAILURE.encode(failure is not None, collectives.rank)
    failed = torch.tensor(list(encoded), dtype=torch.int64).to(collectives.device)
    collectives.all_reduce(failed, "whether each rank has its late gradients").wait()
    if failure is not None:
        raise failure
    totals, _ = FAILURE.decode(failed.tolist())
    if totals["failed"]:
        raise PeerError(
            f"rank {collectives.global_rank}: {ranks_that_failed(totals, collectives.global_ranks)} could not put "
            "together the late gradients; the error there says why. No gradient has been handed out; every rank can go "
            "on with the next batch after zero_grad()"
        )
