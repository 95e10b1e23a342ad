"""Gradients in their buckets: taken from the parameters, sent as one tensor, copied out again.

A gradient lives in its bucket. Between rounds ``parameter.grad`` is a view of the bucket's flat tensor, so an
accumulation or ``zero_grad(set_to_none=False)`` works in place and nothing has to be copied in; a gradient that
autograd made anew, after ``zero_grad()``, is copied in once. While a bucket is on its way its parameters have no
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
_has_graph = attrgetter("requires_grad")  # of a gradient: under create_graph=True


class CopiedIn(NamedTuple):
    """What a bucket has taken from its parameters."""

    flat: Tensor
    """What is to be summed."""
    undefined: Sequence[int] = ()
    """Parameters, by number, that have no gradient, whether or not their hooks have run."""
    graphs: Sequence[tuple[ManagedParameter, Tensor]] = ()
    """Gradients that backward made with ``create_graph=True``."""


class GradientBucket(ABC):
    """One bucket of the plan, in use; subclasses differ in where the gradients lie while they are sent."""

    def __init__(self, index: int, planned: PlannedBucket, members: Sequence[ManagedParameter]) -> None:
        self.index, self.planned = index, planned
        self.members = list(members)
        self._parameters = [member.parameter for member in members]
        self._kinds = self._kinds_now()
        self.missing = len(self.members)
        """How many gradients it still waits for; the parameters' hooks count it down."""
        self.held = False
        """Whether it waits for the end of backward."""
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

    def open(self) -> None:
        """A round begins."""
        self.missing = len(self.members)
        self._spared.clear()

    @abstractmethod
    def copy_in(self, scale: float, used: Sequence[int] | None) -> CopiedIn:
        """Take the gradients from the parameters, times ``scale``.

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
        super().__init__(index, planned, members)
        self._extra = extra
        self._indices = planned.indices
        self._plain = not any(is_dtensor(parameter) for parameter in self._parameters)
        self._memory = GradientMemory(planned.layout, self._parameters, extra, empty)

    def copy_in(self, scale: float, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.copy_in`; the report's row, behind the gradients, is not scaled."""
        self._check_unchanged()
        grads = [parameter.grad for parameter in self._parameters]
        memory = self._memory
        inside = memory.claim(grads)
        assert memory.flat is not None
        if used is not None and not all(map(used.__getitem__, self._indices)):
            self._spare_unused(grads, inside, used)
        for parameter in self._parameters:
            parameter.grad = None
        empty: list[int] = []
        if True not in inside and type(None) not in map(type, grads):
            graphs = self._copy(memory.views, cast("list[Tensor]", grads), range(len(grads)))
        else:
            given = [(i, grad) for i, grad in enumerate(grads) if grad is not None and not inside[i]]
            positions = [i for i, _ in given]
            graphs = self._copy([memory.views[i] for i in positions], [grad for _, grad in given], positions)
            empty = [i for i, grad in enumerate(grads) if grad is None]
            if empty:
                torch._foreach_zero_([memory.views[i] for i in empty])
        if scale != 1:
            self._gradients.mul_(scale)
        flat = memory.flat if self._extra else self._gradients
        return CopiedIn(flat, [self._indices[i] for i in empty], graphs)

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
        self._memory.rest()

    def _gradient(self, position: int) -> Tensor:
        return self._memory.grads[position]


class SingleBucket(GradientBucket):
    """One large gradient, reduced where it is."""

    def copy_in(self, scale: float, used: Sequence[int] | None) -> CopiedIn:
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
        return _copied_alone(member, grad, flat.mul_(scale) if scale != 1 else flat)

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

    def copy_in(self, scale: float, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.copy_in`."""
        self._check_unchanged()
        (member,) = self.members
        grad = member.parameter.grad
        taken = member.blank() if grad is None else member.take(grad)
        if grad is not None and used is not None and not used[member.index]:
            self._spare(member, grad, inside=False)
        member.parameter.grad = None
        self._result = (taken if taken.is_sparse else taken.to_sparse(1)).coalesce() * scale
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
        return CopiedIn(flat, [member.index])
    return CopiedIn(flat, (), [(member, grad)] if grad.requires_grad else ())


class BlankBucket(GradientBucket):
    """What communication hooks see of a bucket whose round has failed: zeros. Its gradients stay as they are."""

    def __init__(self, bucket: GradientBucket) -> None:
        super().__init__(bucket.index, bucket.planned, bucket.members)

    def copy_in(self, scale: float, used: Sequence[int] | None) -> CopiedIn:
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
        for number, each in enumerate(planned):
            extra = report_numel if number == len(planned) - 1 else 0
            bucket = make_bucket(number, each, [parameters[index] for index in each.indices], extra, empty)
            bucket.held = bool(extra) or plan.holds(each)
            self._all.append(bucket)
            for index in each.indices:
                self.of[index] = bucket
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
