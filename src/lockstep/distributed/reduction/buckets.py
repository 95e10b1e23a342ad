"""Gradients in their buckets: taken from the parameters, sent as one tensor, handed out again.

A gradient lives in its bucket. Between rounds ``parameter.grad`` is a view of the bucket's flat tensor, so an
accumulation or ``zero_grad(set_to_none=False)`` works in place and nothing has to be copied in; a gradient that
autograd made anew, after ``zero_grad()``, is copied in once. While a bucket is on its way its parameters have no
gradient, so that a late one cannot be added to memory that is being sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.buckets import TensorSpec
from lockstep.distributed.dtensors import is_dtensor, like_parameter, local_part, matching_gradient
from lockstep.distributed.reduction.plan import Kind, PlannedBucket
from lockstep.distributed.reduction.report import Report
from lockstep.distributed.reduction.storage import Empty, GradientMemory
from lockstep.errors import LayoutError

_dtype_of, _device_of = attrgetter("dtype"), attrgetter("device")
_has_graph = attrgetter("requires_grad")  # of a gradient: under create_graph=True


class ManagedParameter:
    """A parameter whose gradient is synchronised."""

    __slots__ = ("__weakref__", "_kind", "graphs", "index", "name", "parameter", "sparse", "spec")

    def __init__(self, index: int, name: str, parameter: Parameter, sparse: bool) -> None:
        self.index, self.name, self.parameter, self.sparse = index, name, parameter, sparse
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        spec = TensorSpec.of(local_part(parameter), name)
        self.spec = TensorSpec(name, spec.shape, spec.stride, dtype, spec.device)
        self._kind = parameter.dtype, parameter.device
        self.graphs: list[tuple[ManagedParameter, Tensor]] = []
        """Gradients that backward made with ``create_graph=True``: the reducer's list, common to all its parameters."""

    def take(self, grad: Tensor) -> Tensor:
        """The gradient of this rank as a plain tensor; raises if it is not of the planned dtype and shape."""
        if grad.requires_grad:
            self.graphs.append((self, grad))
        local = matching_gradient(grad.detach(), self.parameter)
        self.check(local)
        return local

    def check(self, local: Tensor) -> None:
        """Raise :class:`LayoutError` if a parameter or gradient is not of the planned dtype, shape and device."""
        spec = self.spec
        if local.shape != spec.shape or local.dtype != spec.dtype or local.device != spec.device:
            raise LayoutError(
                f"parameter {self.name} had gradients of {spec.dtype}, shape {spec.shape}, on {spec.device} when its "
                f"module was replicated, and has one of {local.dtype}, shape {tuple(local.shape)}, on {local.device} "
                "now; change shape, dtype and device of a module before replicating it"
            )

    def check_parameter(self) -> None:
        """Raise :class:`LayoutError` if the parameter is not of the dtype and on the device that it had."""
        if (self.parameter.dtype, self.parameter.device) != self._kind:
            raise LayoutError(
                f"parameter {self.name} was {self._kind[0]} on {self._kind[1]} when its module was replicated, and is "
                f"{self.parameter.dtype} on {self.parameter.device} now; change dtype and device of a module before "
                "replicating it"
            )

    def blank(self) -> Tensor:
        """No gradient: zeros of the planned dtype and shape, without any entry if gradients are sparse."""
        spec = self.spec
        if self.sparse:
            size = (1, 0), (0, *spec.shape[1:])
            indices = torch.empty(size[0], dtype=torch.int64, device=spec.device)
            values = torch.empty(size[1], dtype=spec.dtype, device=spec.device)
            return torch.sparse_coo_tensor(indices, values, spec.shape, check_invariants=True).coalesce()
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).zero_()


class GradientBucket(ABC):
    """One bucket of the plan, in use; subclasses differ in where the gradients lie while they are sent."""

    def __init__(self, index: int, planned: PlannedBucket, members: Sequence[ManagedParameter]) -> None:
        self.index, self.planned = index, planned
        self.members = list(members)
        self._parameters = [member.parameter for member in members]
        self._kinds = self._kinds_now()
        self.missing = len(self.members)
        self.sent = False
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
        self.sent = False
        self._spared.clear()

    @abstractmethod
    def collect(self, scale: float, touched: bytearray) -> Tensor:
        """Take the gradients from the parameters, times ``scale``; returns what is to be summed.

        ``touched`` tells of every parameter whether it has had a gradient since the last round. What the others hold
        counts, too, but is given back unless another rank has had one.
        """

    @abstractmethod
    def accept(self, summed: Tensor) -> None:
        """Put back what a communication hook made of the tensor that :meth:`collect` returned."""

    @abstractmethod
    def rescale(self, factor: float) -> None:
        """Multiply all reduced gradients."""

    def hand_out(self, report: Report) -> None:
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
        """A tensor to send in place of what :meth:`collect` returns, without any gradient."""
        return self.members[0].blank().flatten()


class SharedBucket(GradientBucket):
    """Gradients that live side by side in one flat tensor."""

    def __init__(
        self, index: int, planned: PlannedBucket, members: Sequence[ManagedParameter], extra: int, empty: Empty
    ) -> None:
        super().__init__(index, planned, members)
        self._extra = extra
        self._indices = planned.indices
        self._plain = not any(is_dtensor(parameter) for parameter in self._parameters)
        self._memory = GradientMemory(planned.layout, self._parameters, extra, empty)

    def collect(self, scale: float, touched: bytearray) -> Tensor:
        """See :meth:`GradientBucket.collect`; the report's row, behind the gradients, is not scaled."""
        self._check_unchanged()
        grads = [parameter.grad for parameter in self._parameters]
        memory = self._memory
        inside = memory.claim(grads)
        assert memory.flat is not None
        if not all(map(touched.__getitem__, self._indices)):
            self._spare_untouched(grads, inside, touched)
        for parameter in self._parameters:
            parameter.grad = None
        if True not in inside and type(None) not in map(type, grads):
            self._copy_in(memory.views, cast("list[Tensor]", grads), range(len(grads)))
        else:
            self._fill(grads, inside, touched)
        if scale != 1:
            self._gradients.mul_(scale)
        return memory.flat if self._extra else self._gradients

    def _fill(self, grads: Sequence[Tensor | None], inside: Sequence[bool], touched: bytearray) -> None:
        """Copy in what is not there yet, and clear the places of gradients that are missing."""
        views = self._memory.views
        given = [(i, grad) for i, grad in enumerate(grads) if grad is not None and not inside[i]]
        if given:
            self._copy_in([views[i] for i, _ in given], [grad for _, grad in given], [i for i, _ in given])
        if empty := [i for i, grad in enumerate(grads) if grad is None]:
            torch._foreach_zero_([views[i] for i in empty])
            for i in empty:
                touched[self._indices[i]] = 0  # by a gradient that was undefined

    def _copy_in(self, views: list[Tensor], grads: list[Tensor], positions: Sequence[int]) -> None:
        """Copy gradients into their views; raises if one is of another kind than was planned."""
        if self._plain and not any(map(_has_graph, grads)):
            try:
                torch._foreach_copy_(views, grads)
                return
            except RuntimeError:  # a sparse gradient, or one of another shape
                pass
        taken = [self.members[i].take(grad) for i, grad in zip(positions, grads, strict=True)]
        torch._foreach_copy_(views, [grad.to_dense() if grad.is_sparse else grad for grad in taken])

    def _spare_untouched(self, grads: Sequence[Tensor | None], inside: Sequence[bool], touched: bytearray) -> None:
        for member, grad, is_inside in zip(self.members, grads, inside, strict=True):
            if grad is not None and not touched[member.index]:
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

    def hand_out(self, report: Report) -> None:
        """See :meth:`GradientBucket.hand_out`."""
        if report.used is not None and not all(map(report.used.__getitem__, self._indices)):
            super().hand_out(report)
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


class AloneBucket(GradientBucket):
    """One large gradient, reduced where it is."""

    def collect(self, scale: float, touched: bytearray) -> Tensor:
        """See :meth:`GradientBucket.collect`."""
        self._check_unchanged()
        (member,) = self.members
        (slot,) = self.planned.layout.slots
        grad = member.parameter.grad
        self._own: Tensor | None = None
        if grad is None:
            taken = member.blank()
            touched[member.index] = 0
        else:
            taken = member.take(grad)
            spared = not touched[member.index]
            if spared:
                self._spare(member, grad, inside=False)
            if spared or grad.requires_grad or taken.is_sparse or taken.stride() != slot.stride:
                taken = member.blank().copy_(taken.to_dense() if taken.is_sparse else taken)
            elif not is_dtensor(grad):
                self._own = grad
        self._result = taken
        member.parameter.grad = None
        flat = flattened(taken)
        return flat.mul_(scale) if scale != 1 else flat

    def accept(self, summed: Tensor) -> None:
        """See :meth:`GradientBucket.accept`."""
        accept_into(flattened(self._result), summed)

    def rescale(self, factor: float) -> None:
        """See :meth:`GradientBucket.rescale`."""
        self._result.mul_(factor)

    def hand_out(self, report: Report) -> None:
        """See :meth:`GradientBucket.hand_out`; the gradient is the parameter's alone again."""
        super().hand_out(report)
        del self._result, self._own

    def _gradient(self, position: int) -> Tensor:
        return self._own if self._own is not None else like_parameter(self._result, self.members[0].parameter)


class SparseBucket(GradientBucket):
    """One sparse gradient; ranks may have different rows."""

    def collect(self, scale: float, touched: bytearray) -> Tensor:
        """See :meth:`GradientBucket.collect`."""
        self._check_unchanged()
        (member,) = self.members
        grad = member.parameter.grad
        taken = member.blank() if grad is None else member.take(grad)
        touched[member.index] &= grad is not None
        if grad is not None and not touched[member.index]:
            self._spare(member, grad, inside=False)
        member.parameter.grad = None
        self._result = (taken if taken.is_sparse else taken.to_sparse(1)).coalesce() * scale
        return self._result

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


def make_bucket(
    index: int, planned: PlannedBucket, members: Sequence[ManagedParameter], extra: int, empty: Empty
) -> GradientBucket:
    """The bucket in use for a planned one; ``extra`` elements behind the gradients carry the report.

    ``empty`` gives the memory of gradients that lie side by side.
    """
    if planned.kind is Kind.ALONE:
        return AloneBucket(index, planned, members)
    if planned.kind is Kind.SPARSE:
        return SparseBucket(index, planned, members)
    return SharedBucket(index, planned, members, extra, empty)


def flattened(tensor: Tensor) -> Tensor:
    """All elements of a tensor without gaps, in the order in which they lie in memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def accept_into(gradients: Tensor, summed: Tensor) -> None:
    """Copy what a hook returned, unless it is what it was given."""
    if summed.data_ptr() != gradients.data_ptr() or summed.dtype != gradients.dtype:
        gradients.copy_(summed.view_as(gradients))
