"""The buckets of a plan, as they are used in each round."""

from collections.abc import Sequence

from lockstep.distributed.reduction.bucket import BucketPart, GradientBucket, SingleBucket, SparseBucket
from lockstep.distributed.reduction.flat_bucket import FlatBucket
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.plan import AdaptivePlan, Kind, PlannedBucket
from lockstep.distributed.reduction.storage import Empty


class BucketsInUse:
    """The buckets of a plan, in the order in which they leave, and found by parameter."""

    def __init__(
        self, plan: AdaptivePlan, parameters: Sequence[ManagedParameter], report_numel: int, empty: Empty
    ) -> None:
        """``report_numel``: the elements that the report takes behind the last bucket, 0 if it travels on its own."""
        planned = plan.current.buckets
        self.in_order: list[GradientBucket] = []
        """All of them."""
        self.of: list[GradientBucket | None] = [None] * len(parameters)
        """For each parameter its bucket, if it has one."""
        self.part_of: list[BucketPart | None] = [None] * len(parameters)
        """For each parameter the part of its bucket that it belongs to, if it has one."""
        for number, each in enumerate(planned):
            extra = report_numel if number == len(planned) - 1 else 0
            members = [parameters[index] for index in each.indices]
            waits = bool(extra) or plan.waits_for_end(each)
            bucket = make_bucket(number, each, members, waits, extra, empty)
            self.in_order.append(bucket)
            for part in bucket.parts:
                for index in part.indices:
                    self.of[index], self.part_of[index] = bucket, part
        self.labels = [f"bucket {number + 1} of {len(planned)}" for number in range(len(planned))]
        """How messages and profilers name them."""
        self.report_bucket = self.in_order[-1] if report_numel else None
        """The bucket behind whose gradients the report rides."""
        self.unbucketed = [index for index, bucket in enumerate(self.of) if bucket is None]
        """The parameters that have no bucket."""
        self.all_used = bytes((1,)) * len(parameters)
        """A one for each parameter."""
        self.parts = [part for bucket in self.in_order for part in bucket.parts]
        """The parts of all buckets."""


def make_bucket(
    index: int,
    planned: PlannedBucket,
    members: Sequence[ManagedParameter],
    waits: bool,
    extra: int,
    empty: Empty,
) -> GradientBucket:
    """The bucket in use for a planned one; ``waits``: it waits for the end of backward; ``extra`` elements behind the
    gradients carry the report.

    ``empty`` gives the memory of gradients that lie side by side.
    """
    if planned.kind is Kind.SINGLE:
        return SingleBucket(index, planned, members, waits)
    if planned.kind is Kind.SPARSE:
        return SparseBucket(index, planned, members, waits)
    return FlatBucket(index, planned, members, waits, extra, empty)
