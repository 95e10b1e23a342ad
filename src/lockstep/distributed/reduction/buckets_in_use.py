"""The buckets of a plan, in use: in their order, and found by parameter."""

from collections.abc import Iterator, Sequence

from lockstep.distributed.reduction.adaptation import AdaptivePlan
from lockstep.distributed.reduction.buckets import GradientBucket, ManagedParameter, make_bucket
from lockstep.distributed.reduction.report_transport import Reporting
from lockstep.distributed.reduction.storage import Empty


class BucketsInUse:
    """Built from a plan; the last bucket carries the report if it can, and if nothing (``hooked``) changes it on the
    way."""

    def __init__(
        self,
        plan: AdaptivePlan,
        parameters: Sequence[ManagedParameter],
        reporting: Reporting,
        hooked: bool,
        empty: Empty,
    ) -> None:
        planned = plan.current.buckets
        carries = bool(planned) and planned[-1].can_carry and not hooked
        device = parameters[0].spec.device if parameters else reporting.device
        reporting.lay_out(planned[-1].layout.dtype if carries else None, device)
        self._all: list[GradientBucket] = []
        self.of: list[GradientBucket | None] = [None] * len(parameters)
        """For each parameter its bucket, if it has one."""
        for number, each in enumerate(planned):
            rides = carries and number == len(planned) - 1
            members = [parameters[index] for index in each.indices]
            bucket = make_bucket(number, each, members, reporting.numel if rides else 0, empty)
            bucket.held = rides or plan.holds(each)
            self._all.append(bucket)
            for index in each.indices:
                self.of[index] = bucket
        self.carrier = self._all[-1] if carries else None
        """The bucket behind whose gradients the report rides."""
        self.placeless = [index for index, place in enumerate(self.of) if place is None]
        """The parameters that have no bucket."""

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> GradientBucket:
        return self._all[index]

    def __iter__(self) -> Iterator[GradientBucket]:
        return iter(self._all)
