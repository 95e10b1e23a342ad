"""How a plan changes, on every rank alike, by what all ranks know.

It begins with the parameters that are trained on any rank, in the reverse order of registration. After the first round
it is made anew, once: of the parameters that any rank used, in the order in which their gradients arrived on rank 0. A
parameter that turns up later joins at the end. One whose gradient comes in several pieces moves to the end, too, and is
held there until backward is over.
"""

from collections.abc import Collection, Sequence

import torch

from lockstep.distributed.collectives import Collectives
from lockstep.distributed.reduction.buckets import ManagedParameter
from lockstep.distributed.reduction.plan import PlannedBucket, ReductionPlan, plan_reduction
from lockstep.distributed.reduction.report import Report


class AdaptivePlan:
    """The plan in use, and what it will be made of."""

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        trained: Collection[int],
        caps: Sequence[int],
        delayed: Collection[int],
        collectives: Collectives,
    ) -> None:
        self._parameters, self._caps, self._delayed = parameters, tuple(caps), frozenset(delayed)
        self._collectives = collectives
        self._specs = [parameter.spec for parameter in parameters]
        self._sparse = frozenset(p.index for p in parameters if p.sparse)
        self._held: frozenset[int] = frozenset()
        self.arrivals: dict[int, None] | None = {}
        """The order in which gradients arrive in this round; None when it is not wanted any more."""
        self.current = self._plan(sorted(trained, reverse=True))

    @property
    def is_whole(self) -> bool:
        """Whether every parameter has a place."""
        return len(self.current.members) == len(self._parameters)

    def holds(self, bucket: PlannedBucket) -> bool:
        """Whether a bucket has to wait for the end of backward."""
        return not self._held.isdisjoint(bucket.indices)

    def restore(self, text: str) -> None:
        """Go on with the plan of an earlier run."""
        self.arrivals = None
        self.current = ReductionPlan.from_json(text, self._specs)

    def adapt(self, report: Report) -> bool:
        """Learn from a round; returns whether the plan is another one now. Communicates one broadcast, the first
        time."""
        if self.arrivals is not None:
            order = self._order_on_rank_0(self.arrivals)
            self.arrivals = None
            self.current = self._plan([i for i in order if report.uses(i)])
            return True
        if not report.late:
            return False
        late, members = set(report.late), self.current.members
        self._held |= late & members
        kept = [i for bucket in self.current.buckets for i in bucket.indices if i not in late]
        self.current = self._plan([*kept, *sorted(late - members), *sorted(late & members)])
        return True

    def _plan(self, order: Sequence[int]) -> ReductionPlan:
        last = [i for i in order if i in self._delayed]
        first = [i for i in order if i not in self._delayed]
        return plan_reduction(self._specs, [*first, *last], self._caps, self._sparse)

    def _order_on_rank_0(self, arrivals: Collection[int]) -> list[int]:
        """Rank 0's order, completed by the parameters that it did not use."""
        whole = list(dict.fromkeys([*arrivals, *(p.index for p in reversed(self._parameters))]))
        told = torch.tensor(whole, dtype=torch.int64, device=self._collectives.device)
        self._collectives.broadcast(told, "order of gradients").wait()
        return [int(index) for index in told.tolist()]
