"""PURE: which gradients travel together, in which order, and how that adapts. No tensor is touched in this file.

Gradients are put into buckets in the order in which backward is expected to produce them. A bucket's place in the
launch order is that of its last gradient, since that completes it. There are three kinds:

- ``FLAT``: several gradients in one flat tensor, in which they then live;
- ``SINGLE``: one large gradient, reduced where autograd has put it, without a copy or additional memory;
- ``SPARSE``: one sparse gradient.

The last flat bucket is moved to the very end, where everything is known, and carries the report (``status.py``), unless
its dtype cannot; then the report travels on its own.

A plan changes in the same way on every rank, by what all ranks know. The first one has the parameters trained on any
rank, in reverse order of registration. After the first round it is replaced, once, by a plan of the parameters that any
rank used, in the order in which their gradients came on rank 0. A parameter used later is added at the end. One whose
gradient comes in several pieces is moved to the end, and launched only after backward.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch

from lockstep._base.buckets import FlatBucket, TensorSpec, pack_bucket
from lockstep.errors import LayoutError

MIB = 1024 * 1024
FIRST_CAP_BYTES = 1 * MIB
DEFAULT_CAP_BYTES = 25 * MIB
SINGLE_BYTES = 4 * MIB
"""On the CPU gradients of at least this size travel alone: copying one would cost more than a collective. Accelerators
copy fast, but each collective takes their host some 0.2 ms: there only those travel alone that would fill a bucket."""


def travels_in_half(dtype: torch.dtype, half: torch.dtype | None) -> bool:
    """Return True if gradients of a dtype travel in ``reduce_dtype``: float32, and the same half precision, whose sums
    a backend would round more than once."""
    return half is not None and dtype in (torch.float32, half)


class BucketKind(Enum):
    """The way in which a bucket moves its gradients."""

    FLAT = "shared"  # the values are part of saved training states
    SINGLE = "alone"
    SPARSE = "sparse"


@dataclass(frozen=True)
class PlannedBucket:
    """Gradients that are reduced by one collective."""

    kind: BucketKind
    layout: FlatBucket

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The indices of its parameters."""
        return tuple(slot.index for slot in self.layout.slots)

    @property
    def can_hold_report(self) -> bool:
        """True if a report can follow the gradients: the dtype must represent sums of small integers exactly."""
        dtype = self.layout.dtype
        return self.kind is BucketKind.FLAT and dtype.is_floating_point and dtype.itemsize >= 2


@dataclass(frozen=True)
class ReductionPlan:
    """The buckets, in the order in which every rank launches them."""

    specs: tuple[TensorSpec, ...]
    buckets: tuple[PlannedBucket, ...]

    @cached_property
    def members(self) -> frozenset[int]:
        """The indices of the parameters that are in a bucket."""
        return frozenset(index for bucket in self.buckets for index in bucket.indices)

    def to_json(self) -> str:
        """Return the kinds of the buckets and the names of their parameters as JSON."""
        return json.dumps(
            [[bucket.kind.value, [self.specs[i].name for i in bucket.indices]] for bucket in self.buckets]
        )

    @classmethod
    def from_json(cls, text: str, specs: Sequence[TensorSpec]) -> "ReductionPlan":
        """Return the plan that :meth:`to_json` has written, for parameters with the same names."""
        place = {spec.name: index for index, spec in enumerate(specs)}
        buckets = []
        for kind, names in json.loads(text):
            if unknown := [name for name in names if name not in place]:
                raise LayoutError(f"the plan is of another module: it has a parameter {unknown[0]!r}, this one has not")
            members = [specs[place[name]] for name in names]
            for other in members[1:]:
                if (other.dtype, other.device) != (members[0].dtype, members[0].device):
                    raise LayoutError(
                        f"the plan is of another module: {names[0]!r} and {other.name!r} are in one bucket, but here "
                        f"they are {members[0].dtype} on {members[0].device} and {other.dtype} on {other.device}"
                    )
            buckets.append(PlannedBucket(BucketKind(kind), _pack(specs, [place[name] for name in names])))
        return cls(tuple(specs), tuple(buckets))


def plan_reduction(
    specs: Sequence[TensorSpec],
    order: Iterable[int],
    caps: Sequence[int] = (FIRST_CAP_BYTES, DEFAULT_CAP_BYTES),
    sparse: Collection[int] = (),
    single_bytes: int = SINGLE_BYTES,
) -> ReductionPlan:
    """Put the parameters listed in ``order`` into buckets.

    ``caps``: sizes in bytes of the buckets of each dtype and device, in order; the last one holds for all further
    buckets. ``single_bytes``: what :data:`SINGLE_BYTES` says.
    """
    if not caps or min(caps) <= 0:
        raise LayoutError(f"expected bucket sizes of at least one byte, got {list(caps)}")
    placed: list[tuple[int, PlannedBucket]] = []
    tail: list[PlannedBucket] = []
    together: dict[tuple[torch.dtype, torch.device], list[tuple[int, int]]] = {}
    for position, index in enumerate(order):
        spec = specs[index]
        if index in sparse:
            tail.append(PlannedBucket(BucketKind.SPARSE, _pack(specs, [index])))
        elif spec.nbytes >= (single_bytes if spec.device.type == "cpu" else max(single_bytes, caps[-1])):
            placed.append((position, PlannedBucket(BucketKind.SINGLE, _pack(specs, [index]))))
        else:
            together.setdefault((spec.dtype, spec.device), []).append((position, index))
    for small in together.values():
        placed += [
            (part[-1][0], PlannedBucket(BucketKind.FLAT, _pack(specs, [index for _, index in part])))
            for part in _cut(specs, small, caps)
        ]
    ordered = [bucket for _, bucket in sorted(placed, key=lambda entry: entry[0])]
    # What the report says is known when backward has ended, so its bucket is the last one.
    with_report = max((i for i, bucket in enumerate(ordered) if bucket.can_hold_report), default=None)
    last = [] if with_report is None else [ordered.pop(with_report)]
    return ReductionPlan(tuple(specs), (*ordered, *tail, *last))


def _cut(
    specs: Sequence[TensorSpec], small: Sequence[tuple[int, int]], caps: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Cut gradients of one dtype and device, pairs of position and index, into buckets of the sizes in ``caps``."""
    parts: list[list[tuple[int, int]]] = [[]]
    filled = 0
    for position, index in small:
        nbytes = specs[index].nbytes
        if parts[-1] and filled + nbytes > caps[min(len(parts), len(caps)) - 1]:
            parts.append([])
            filled = 0
        parts[-1].append((position, index))
        filled += nbytes
    return parts


def _pack(specs: Sequence[TensorSpec], indices: Sequence[int]) -> FlatBucket:
    """Pack without padding: communication hooks expect a buffer of just the gradients, one after the other."""
    return pack_bucket(specs, indices, alignment=1)


class AdaptivePlan:
    """The plan in use, and observations for the next one."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        trained: Collection[int],
        sparse: Collection[int] = (),
        delayed: Collection[int] = (),
        caps: Sequence[int] = (FIRST_CAP_BYTES, DEFAULT_CAP_BYTES),
    ) -> None:
        self._specs = list(specs)
        self._caps = tuple(caps)
        self._sparse = frozenset(sparse)
        self._delayed = frozenset(delayed)
        self._waiting: set[int] = set()
        self._arrivals: dict[int, None] = {}
        self.observes = True
        """True until the plan has been made from the order observed in the first round."""
        self.current = self._plan(sorted(trained, reverse=True))

    def waits_for_end(self, bucket: PlannedBucket) -> bool:
        """Return True if a bucket is launched only after backward."""
        return not self._waiting.isdisjoint(bucket.indices)

    def restore(self, text: str) -> None:
        """Continue with the plan of an earlier run."""
        self.observes = False
        self.current = ReductionPlan.from_json(text, self._specs)

    def begin_round(self) -> None:
        """Forget the order of the last round."""
        self._arrivals.clear()

    def observe(self, index: int) -> None:
        """Record that the gradient of a parameter has come."""
        self._arrivals[index] = None

    @property
    def observed_order(self) -> list[int]:
        """All parameters, in the order of their gradients in this round; those without one come last."""
        return list(dict.fromkeys([*self._arrivals, *reversed(range(len(self._specs)))]))

    def rebuild(self, order: Iterable[int]) -> None:
        """Make the plan of the parameters that are used, in the order in which their gradients came on rank 0."""
        self.observes = False
        # Ranks with other branches see other orders, and all have to send the same buckets: rank 0's order counts.
        self.current = self._plan(list(order))

    def adapt(self, late: Collection[int]) -> bool:
        """Give a place to gradients that came too late in a round; return True if the plan has changed."""
        if not late:
            return False
        members, gone = self.current.members, set(late)
        # What has come too late once may do so again: its bucket waits for the end of backward from now on. All others
        # keep their order, and go on to leave early.
        self._waiting.update(gone & members)
        kept = [i for bucket in self.current.buckets for i in bucket.indices if i not in gone]
        self.current = self._plan([*kept, *sorted(gone - members), *sorted(gone & members)])
        return True

    def _plan(self, order: Sequence[int]) -> ReductionPlan:
        last = [i for i in order if i in self._delayed]
        first = [i for i in order if i not in self._delayed]
        return plan_reduction(self._specs, [*first, *last], self._caps, self._sparse)
