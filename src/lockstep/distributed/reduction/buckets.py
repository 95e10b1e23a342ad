"""Gradients in their buckets: taken from the parameters, sent as one tensor, copied out again.

A gradient lives in its bucket. Between rounds ``parameter.grad`` is a view of the bucket's flat tensor, so an
accumulation or ``zero_grad(set_to_none=False)`` works in place and nothing has to be copied in; a gradient that
autograd made anew, after ``zero_grad()``, is copied in once: in parts of the bucket that come together, while backward
runs (``tests/ranks/test_copied_early.py``). While a bucket is on its way its parameters have no
gradient, so that a late one cannot be added to memory that is being sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lockstep.distributed.dtensors import is_dtensor, like_parameter, local_part
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.plan import AdaptivePlan, Kind, PlannedBucket
from lockstep.distributed.reduction.report import Report
from lockstep.distributed.reduction.storage import Empty, GradientMemory

_dtype_of, _device_of = attrgetter("dtype"), attrgetter("device")
_grad_of = attrgetter("grad")
_has_graph = attrgetter("requires_grad")  # of a gradient: under create_graph=True


PART_BYTES = 128 * 1024
"""So many bytes of gradients are copied into their bucket together, as they come: they are in the processor's cache
then, and the memory that they leave is what backward makes the next ones in."""


class CopiedIn(NamedTuple):
    """What a bucket has taken from its parameters."""

    flat: Tensor
    """What is to be summed."""
    factor: float = 1.0
    """What it is to be multiplied by before that."""
    undefined: Sequence[int] = ()
    """Parameters, by number, that have no gradient, whether or not their hooks have run."""
    graphs: Sequence[tuple[ManagedParameter, Tensor]] = ()
    """Gradients that backward made with ``create_graph=True``."""


class BucketPart:
    """Gradients of a bucket that are counted, and copied, together."""

    __slots__ = ("bucket", "is_copied", "missing", "positions")

    def __init__(self, bucket: "GradientBucket", positions: range) -> None:
        self.bucket, self.positions = bucket, positions
        self.missing = len(positions)
        """How many have not come; the parameters' hooks count it down."""
        self.is_copied = False
        """Whether they are in the bucket's memory already, and not in the parameters' ``.grad``."""


class GradientBucket(ABC):
    """One bucket of the plan, in use; subclasses differ in where the gradients lie while they are sent."""

    def __init__(self, index: int, planned: PlannedBucket, members: Sequence[ManagedParameter]) -> None:
        self.index, self.planned = index, planned
        self.members = list(members)
        self._parameters = [member.parameter for member in members]
        self._kinds = self._kinds_now()
        self.parts = [BucketPart(self, positions) for positions in self._cut()]
        self.missing = len(self.parts)
        """How many parts have not come."""
        self.held = False
        """Whether it waits for the end of backward."""
        self._scale = 1.0
        self._spared: list[tuple[ManagedParameter, Tensor, Tensor | None]] = []

    def _kinds_now(self) -> list[torch.dtype | torch.device]:
        found: list[Any] = list(map(_dtype_of, self._parameters))
        if torch.accelerator.is_available():
            found += map(_device_of, self._parameters)
        return found

    def _check_unchanged(self) -> None:
        """Raise :class:`LayoutError` if a parameter has been retyped or moved: only this rank would find out, when it
        is too late to tell the others, that it cannot have the gradient."""
        if self._kinds_now() != self._kinds:
            for member in self.members:
                member.check_parameter()

    def _cut(self) -> list[range]:
        """Which members, by position, are counted together."""
        return [range(len(self.members))]

    def open(self, scale: float, copies_early: bool) -> None:
        """A round begins, in which gradients are multiplied by ``scale`` before they are summed; ``copies_early``:
        and may be taken from the parameters while backward runs."""
        self._scale = scale
        self.missing = len(self.parts)
        for part in self.parts:
            part.missing, part.is_copied = len(part.positions), False
        self._spared.clear()

    def part_has_come(self, part: BucketPart) -> bool:
        """All gradients of a part have come; returns whether all of the bucket have."""
        self.missing -= 1
        return not self.missing

    @abstractmethod
    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """Take the gradients from the parameters, those aside that have been taken early.

        ``used`` tells of every parameter whether it has had a gradient since the last round; None: all have. What the
        others hold counts, too, but is given back unless another rank has had one.
        """

    @abstractmethod
    def accept(self, summed: Tensor) -> None:
        """Put back what a communication hook made of the tensor that :meth:`copy_in` returned."""

    @abstractmethod
    def rescale(self, factor: float) -> None:
        """Multiply all reduced gradients."""

    def copy_out(self, report: Report) -> None:
        """Give the parameters their reduced gradients; one that no rank used gets back what it had."""
        for position, member in enumerate(self.members):
            if report.uses(member.index):
                member.parameter.grad = self._gradient(position)
        for member, grad, values in self._spared:
            if not report.uses(member.index):
                if values is not None:
                    local_part(grad).copy_(values)
                member.parameter.grad = grad
        self._spared.clear()

    @abstractmethod
    def _gradient(self, position: int) -> Tensor:
        """What the member at that position gets."""

    def _spare(self, member: ManagedParameter, grad: Tensor, inside: bool) -> None:
        """Keep the gradient of a parameter that this rank did not use: perhaps no rank did."""
        self._spared.append((member, grad, local_part(grad).clone() if inside else None))

    @property
    def row(self) -> Tensor:
        """The report's place; empty unless there is one."""
        return torch.empty(0)

    def blank(self) -> Tensor:
        """A tensor to send in place of what :meth:`copy_in` returns, without any gradient."""
        return self.members[0].blank().flatten()


class FlatBucket(GradientBucket):
    """Gradients that live side by side in one flat tensor."""

    def __init__(
        self, index: int, planned: PlannedBucket, members: Sequence[ManagedParameter], extra: int, empty: Empty
    ) -> None:
        self._plain = not any(is_dtensor(member.parameter) for member in members)
        self._copies_early: bool | None = False  # None: not known before the first part has come
        super().__init__(index, planned, members)
        self._extra = extra
        self._indices, self._numel = planned.indices, planned.layout.numel
        self._memory = GradientMemory(planned.layout, self._parameters, extra, empty)

    def _cut(self) -> list[range]:
        """Parts of ``PART_BYTES`` and little more. An accelerator works off what it is given: there one is best."""
        if self.members[0].spec.device.type != "cpu" or not self._plain:
            return super()._cut()
        parts: list[range] = []
        begin = nbytes = 0
        for position, member in enumerate(self.members):
            nbytes += member.spec.nbytes
            if nbytes >= PART_BYTES or position == len(self.members) - 1:
                parts.append(range(begin, position + 1))
                begin, nbytes = position + 1, 0
        return parts

    def open(self, scale: float, copies_early: bool) -> None:
        """See :meth:`GradientBucket.open`."""
        super().open(scale, copies_early)
        can = self._plain and self.members[0].spec.device.type == "cpu"
        self._copies_early = None if copies_early and can else False

    def part_has_come(self, part: BucketPart) -> bool:
        """See :meth:`GradientBucket.part_has_come`; copies the part, unless it takes a closer look to do so."""
        if self._copies_early is None:
            self._copies_early = self._memory.claim_early(list(map(_grad_of, self._parameters)))
        if self._copies_early:
            self._copy_part(part)
        return super().part_has_come(part)

    def _copy_part(self, part: BucketPart) -> None:
        begin, end = part.positions.start, part.positions.stop
        parameters, views = self._parameters[begin:end], self._memory.views[begin:end]
        grads: list[Any] = list(map(_grad_of, parameters))
        if type(None) in map(type, grads) or any(map(_has_graph, grads)):
            return
        try:
            if len(grads) == 1 and self._scale != 1:
                torch.mul(grads[0], self._scale, out=views[0])
            else:
                torch._foreach_copy_(views, grads)
                if self._scale != 1:
                    assert self._memory.flat is not None
                    slots = self.planned.layout.slots
                    first, last = slots[begin].offset, slots[end].offset if end < len(slots) else self._numel
                    self._memory.flat[first:last].mul_(self._scale)
        except RuntimeError:  # a sparse gradient, or one of another shape: copy_in knows
            return
        for parameter in parameters:
            parameter.grad = None
        part.is_copied = True

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.copy_in`; the report's row, behind the gradients, is not scaled."""
        self._check_unchanged()
        grads: list[Tensor | None] = list(map(_grad_of, self._parameters))
        memory = self._memory
        inside = memory.in_place(grads) if self._copies_early else memory.claim(grads)
        assert memory.flat is not None
        flat = memory.flat if self._extra else self._gradients
        if any(part.is_copied for part in self.parts):
            return self._copy_rest(flat, grads, inside, used)
        if used is not None and not all(map(used.__getitem__, self._indices)):
            self._spare_unused(grads, inside, used)
        for parameter in self._parameters:
            parameter.grad = None
        undefined: list[int] = []
        if True not in inside and type(None) not in map(type, grads):
            graphs = self._copy(memory.views, cast("list[Tensor]", grads), range(len(grads)))
        else:
            graphs, undefined = self._copy_some(grads, inside, range(len(grads)))
        factor = self._scale
        if self._extra and factor != 1:  # the report is not to be scaled
            self._gradients.mul_(factor)
            factor = 1.0
        return CopiedIn(flat, factor, undefined, graphs)

    def _copy_rest(
        self, flat: Tensor, grads: Sequence[Tensor | None], inside: Sequence[bool], used: Sequence[int] | None
    ) -> CopiedIn:
        """Copy, and scale, what has not been copied early, and add what has come since to what has been."""
        rest = [i for part in self.parts if not part.is_copied for i in part.positions]
        again = [i for part in self.parts if part.is_copied for i in part.positions if grads[i] is not None]
        if not rest and not again:
            return CopiedIn(flat)
        if used is not None and not all(map(used.__getitem__, self._indices)):
            self._spare_unused(grads, inside, used)
        for parameter in self._parameters:
            parameter.grad = None
        graphs, undefined = self._copy_some(grads, inside, rest)
        views = self._memory.views
        if rest and self._scale != 1:
            torch._foreach_mul_([views[i] for i in rest], self._scale)
        for i in again:
            taken = self.members[i].take(cast("Tensor", grads[i]))
            views[i].add_(taken.to_dense() if taken.is_sparse else taken, alpha=self._scale)
        return CopiedIn(flat, 1.0, undefined, graphs)

    def _copy_some(
        self, grads: Sequence[Tensor | None], inside: Sequence[bool], positions: Sequence[int]
    ) -> tuple[list[tuple[ManagedParameter, Tensor]], list[int]]:
        """Copy what is at ``positions``, unless it is in place, or clear its place; returns gradients with graphs, and
        the parameters, by number, that have none."""
        views = self._memory.views
        given = [(i, grad) for i in positions if (grad := grads[i]) is not None and not inside[i]]
        graphs = self._copy([views[i] for i, _ in given], [grad for _, grad in given], [i for i, _ in given])
        empty = [i for i in positions if grads[i] is None]
        if empty:
            torch._foreach_zero_([views[i] for i in empty])
        return graphs, [self._indices[i] for i in empty]

    def _copy(
        self, views: list[Tensor], grads: list[Tensor], positions: Sequence[int]
    ) -> list[tuple[ManagedParameter, Tensor]]:
        """Copy gradients into their views, and return those with graphs; raises if one is of another kind than was
        planned."""
        if not grads:
            return []
        with_graphs = any(map(_has_graph, grads))
        if self._plain and not with_graphs:
            try:
                torch._foreach_copy_(views, grads)
                return []
            except RuntimeError:  # a sparse gradient, or one of another shape
                pass
        members = [self.members[i] for i in positions]
        taken = [member.take(grad) for member, grad in zip(members, grads, strict=True)]
        torch._foreach_copy_(views, [grad.to_dense() if grad.is_sparse else grad for grad in taken])
        return [pair for pair in zip(members, grads, strict=True) if pair[1].requires_grad]

    def _spare_unused(self, grads: Sequence[Tensor | None], inside: Sequence[bool], used: Sequence[int]) -> None:
        for member, grad, is_inside in zip(self.members, grads, inside, strict=True):
            if grad is not None and not used[member.index]:
                self._spare(member, grad, is_inside)

    @property
    def row(self) -> Tensor:
        """The report's place, behind the gradients."""
        assert self._memory.flat is not None
        return self._memory.flat[self.planned.layout.numel :]

    @property
    def _gradients(self) -> Tensor:
        assert self._memory.flat is not None
        return self._memory.flat[: self.planned.layout.numel]

    def blank(self) -> Tensor:
        """See :meth:`GradientBucket.blank`."""
        return self._memory.blank()

    def accept(self, summed: Tensor) -> None:
        """See :meth:`GradientBucket.accept`."""
        accept_into(self._gradients, summed)

    def rescale(self, factor: float) -> None:
        """See :meth:`GradientBucket.rescale`."""
        self._gradients.mul_(factor)

    def copy_out(self, report: Report) -> None:
        """See :meth:`GradientBucket.copy_out`."""
        if report.used is not None and not all(map(report.used.__getitem__, self._indices)):
            super().copy_out(report)
        else:
            for member, parameter, grad in zip(self.members, self._parameters, self._memory.grads, strict=True):
                try:
                    parameter.grad = grad
                except RuntimeError:
                    member.check(parameter)
                    raise
            self._spared.clear()
        self._memory.release()

    def _gradient(self, position: int) -> Tensor:
        return self._memory.grads[position]


class SingleBucket(GradientBucket):
    """One large gradient, reduced where it is."""

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.copy_in`."""
        self._check_unchanged()
        (member,) = self.members
        (slot,) = self.planned.layout.slots
        grad = member.parameter.grad
        self._own: Tensor | None = None
        if grad is None:
            taken = member.blank()
        else:
            taken = member.take(grad)
            spared = used is not None and not used[member.index]
            if spared:
                self._spare(member, grad, inside=False)
            if spared or grad.requires_grad or taken.is_sparse or taken.stride() != slot.stride:
                taken = member.blank().copy_(taken.to_dense() if taken.is_sparse else taken)
            elif not is_dtensor(grad):
                self._own = grad
        self._result = taken
        member.parameter.grad = None
        flat = flattened(taken)
        return _copied_alone(member, grad, flat)._replace(factor=self._scale)

    def accept(self, summed: Tensor) -> None:
        """See :meth:`GradientBucket.accept`."""
        accept_into(flattened(self._result), summed)

    def rescale(self, factor: float) -> None:
        """See :meth:`GradientBucket.rescale`."""
        self._result.mul_(factor)

    def copy_out(self, report: Report) -> None:
        """See :meth:`GradientBucket.copy_out`; the gradient is the parameter's alone again."""
        super().copy_out(report)
        del self._result, self._own

    def _gradient(self, position: int) -> Tensor:
        return self._own if self._own is not None else like_parameter(self._result, self.members[0].parameter)


class SparseBucket(GradientBucket):
    """One sparse gradient; ranks may have different rows."""

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.copy_in`."""
        self._check_unchanged()
        (member,) = self.members
        grad = member.parameter.grad
        taken = member.blank() if grad is None else member.take(grad)
        if grad is not None and used is not None and not used[member.index]:
            self._spare(member, grad, inside=False)
        member.parameter.grad = None
        self._result = (taken if taken.is_sparse else taken.to_sparse(1)).coalesce() * self._scale
        return _copied_alone(member, grad, self._result)

    def blank(self) -> Tensor:
        """See :meth:`GradientBucket.blank`."""
        return self.members[0].blank()

    def accept(self, summed: Tensor) -> None:
        """See :meth:`GradientBucket.accept`."""
        self._result = summed

    def rescale(self, factor: float) -> None:
        """See :meth:`GradientBucket.rescale`."""
        self._result = self._result * factor

    def _gradient(self, position: int) -> Tensor:
        return self._result


def _copied_alone(member: ManagedParameter, grad: Tensor | None, flat: Tensor) -> CopiedIn:
    """What a bucket has taken from its only parameter."""
    if grad is None:
        return CopiedIn(flat, 1.0, [member.index])
    return CopiedIn(flat, 1.0, (), [(member, grad)] if grad.requires_grad else ())


class BlankBucket(GradientBucket):
    """What communication hooks see of a bucket whose round has failed: zeros. Its gradients stay as they are."""

    def __init__(self, bucket: GradientBucket) -> None:
        super().__init__(bucket.index, bucket.planned, bucket.members)

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.blank`."""
        return CopiedIn(self.blank())

    def accept(self, summed: Tensor) -> None:
        """Nothing is taken."""

    def rescale(self, factor: float) -> None:
        """Nothing is there."""

    def _gradient(self, position: int) -> Tensor:
        return torch.empty(0)


class BucketsInUse:
    """The buckets of a plan: in the order in which they leave, and found by parameter."""

    def __init__(
        self, plan: AdaptivePlan, parameters: Sequence[ManagedParameter], report_numel: int, empty: Empty
    ) -> None:
        """``report_numel``: the elements that the report takes behind the last bucket, 0 if it travels on its own."""
        planned = plan.current.buckets
        self._all: list[GradientBucket] = []
        self.of: list[GradientBucket | None] = [None] * len(parameters)
        """For each parameter its bucket, if it has one."""
        self.part_of: list[BucketPart | None] = [None] * len(parameters)
        """For each parameter the part of its bucket that it belongs to, if it has one."""
        for number, each in enumerate(planned):
            extra = report_numel if number == len(planned) - 1 else 0
            bucket = make_bucket(number, each, [parameters[index] for index in each.indices], extra, empty)
            bucket.held = bool(extra) or plan.holds(each)
            self._all.append(bucket)
            for part in bucket.parts:
                for index in each.indices[part.positions.start : part.positions.stop]:
                    self.of[index], self.part_of[index] = bucket, part
        self.report_bucket = self._all[-1] if report_numel else None
        """The bucket behind whose gradients the report rides."""
        self.unbucketed = [index for index, bucket in enumerate(self.of) if bucket is None]
        """The parameters that have no bucket."""
        self.expected = bytes(bucket is not None for bucket in self.of)
        """A one for each parameter that has a bucket."""

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> GradientBucket:
        return self._all[index]

    def __iter__(self) -> Iterator[GradientBucket]:
        return iter(self._all)


def make_bucket(
    index: int, planned: PlannedBucket, members: Sequence[ManagedParameter], extra: int, empty: Empty
) -> GradientBucket:
    """The bucket in use for a planned one; ``extra`` elements behind the gradients carry the report.

    ``empty`` gives the memory of gradients that lie side by side.
    """
    if planned.kind is Kind.SINGLE:
        return SingleBucket(index, planned, members)
    if planned.kind is Kind.SPARSE:
        return SparseBucket(index, planned, members)
    return FlatBucket(index, planned, members, extra, empty)


def flattened(tensor: Tensor) -> Tensor:
    """All elements of a tensor without gaps, in the order in which they lie in memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def accept_into(gradients: Tensor, summed: Tensor) -> None:
    """Copy what a hook returned, unless it is what it was given."""
    if summed.data_ptr() != gradients.data_ptr() or summed.dtype != gradients.dtype:
        gradients.copy_(summed.view_as(gradients))
