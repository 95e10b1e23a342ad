"""A bucket: gradients that are taken from their parameters, sent as one tensor, and copied out again.

A gradient lives in its bucket. Between rounds ``parameter.grad`` is a view of the bucket's flat tensor, so an
accumulation or ``zero_grad(set_to_none=False)`` works in place and nothing has to be copied in; a gradient that
autograd made anew, after ``zero_grad()``, is copied in once. While a bucket is on its way its parameters have no
gradient, so that a late one cannot be added to memory that is being sent.

Here are the buckets of one gradient; ``flat_bucket.py`` has those of many.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.plan import PlannedBucket
from lockstep.distributed.reduction.verdict import Verdict
from lockstep.dtensors import is_dtensor, like_parameter, local_part

_dtype_of, _device_of, _grad_of = attrgetter("dtype"), attrgetter("device"), attrgetter("grad")


class CopiedIn(NamedTuple):
    """What a bucket has taken from its parameters."""

    flat: Tensor
    """What is to be summed."""
    factor: float = 1.0
    """What it is to be multiplied by before that."""
    undefined: Sequence[int] = ()
    """Parameters, by number, that have no gradient, whether or not their hooks have run."""


class BucketPart:
    """Gradients of a bucket that are copied together."""

    __slots__ = ("awaited", "bucket", "indices", "is_complete", "is_copied", "is_looked_at", "positions")

    def __init__(self, bucket: "GradientBucket", positions: range, is_looked_at: bool) -> None:
        self.bucket = bucket
        self.positions = positions
        self.indices = bucket.planned.indices[positions.start : positions.stop]
        """The parameters, by number."""
        self.is_looked_at = is_looked_at
        """True if anything is done when all have come, before the end of backward."""
        self.awaited = self.indices[-1]
        """The parameter whose gradient is expected to be the last one."""
        self.is_complete = False
        """True if all have come while backward runs, and that has been noticed."""
        self.is_copied = False
        """True if they are in the bucket's memory already, and not in the parameters' ``.grad``."""

    def open(self) -> None:
        """A round begins."""
        self.is_complete = False
        self.is_copied = False


class GradientBucket(ABC):
    """One bucket of the plan, in use; subclasses differ in where the gradients lie while they are sent."""

    def __init__(self, index: int, planned: PlannedBucket, members: Sequence[ManagedParameter], waits: bool) -> None:
        self.index, self.planned = index, planned
        self.members = list(members)
        self.waits_for_end = waits
        """Whether it waits for the end of backward."""
        self._parameters = [member.parameter for member in members]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._devices = [parameter.device for parameter in self._parameters]
        cut = self._cut()
        self.parts = [BucketPart(self, positions, len(cut) > 1 or not waits) for positions in cut]
        self.missing = len(self.parts)
        """How many parts are not complete."""
        self._scale = 1.0
        self._unused: list[tuple[ManagedParameter, Tensor, Tensor | None]] = []

    def _check_unchanged(self) -> None:
        """Raise :class:`LayoutError` if a parameter has been retyped or moved: only this rank would find out, when it
        is too late to tell the others, that it cannot have the gradient."""
        parameters = self._parameters
        moved = torch.accelerator.is_available() and list(map(_device_of, parameters)) != self._devices
        if moved or list(map(_dtype_of, parameters)) != self._dtypes:
            for member in self.members:
                member.check_parameter()

    @property
    def has_gradients(self) -> bool:
        """Return True if any of its parameters has a gradient now."""
        return any(map(is_not, map(_grad_of, self._parameters), repeat(None)))

    def _cut(self) -> list[range]:
        """Which members, by position, are waited for together."""
        return [range(len(self.members))]

    def open(self, scale: float) -> None:
        """A round begins, in which gradients are multiplied by ``scale`` before they are summed."""
        self._scale = scale
        self._unused.clear()
        if self.missing < len(self.parts):
            self.missing = len(self.parts)
            for part in self.parts:
                part.open()

    def part_is_complete(self, part: BucketPart) -> bool:
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
    def multiply(self, factor: float) -> None:
        """Multiply all reduced gradients."""

    def copy_out(self, verdict: Verdict) -> None:
        """Give the parameters their reduced gradients; one that no rank used gets back what it had."""
        for position, member in enumerate(self.members):
            if verdict.uses(member.index):
                member.parameter.grad = self._gradient(position)
        for member, grad, values in self._unused:
            if not verdict.uses(member.index):
                if values is not None:
                    local_part(grad).copy_(values)
                member.parameter.grad = grad
        self._unused.clear()

    @abstractmethod
    def _gradient(self, position: int) -> Tensor:
        """What the member at that position gets."""

    def _keep_unused(self, member: ManagedParameter, grad: Tensor, inside: bool) -> None:
        """Keep the gradient of a parameter that this rank did not use: perhaps no rank did."""
        # Another rank's would not fit, when it is too late to tell:
        # test_a_layer_that_changes_on_a_rank_that_does_not_use_it.
        member.check_parameter()
        self._unused.append((member, grad, local_part(grad).clone() if inside else None))

    @property
    def row(self) -> Tensor:
        """The report's place; empty unless there is one."""
        return torch.empty(0)

    def zeros(self) -> Tensor:
        """A tensor to send in place of what :meth:`copy_in` returns, without any gradient."""
        return self.members[0].zeros().flatten()


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
            member.check_parameter()
            taken = member.zeros()
        else:
            taken = member.take(grad)
            is_unused = used is not None and not used[member.index]
            if is_unused:
                self._keep_unused(member, grad, inside=False)
            if is_unused or grad.requires_grad or taken.is_sparse or taken.stride() != slot.stride:
                taken = member.zeros().copy_(taken.to_dense() if taken.is_sparse else taken)
            elif not is_dtensor(grad):
                self._own = grad
        self._result = taken
        member.parameter.grad = None
        return CopiedIn(flattened(taken), self._scale, _undefined(member, grad))

    def accept(self, summed: Tensor) -> None:
        """See :meth:`GradientBucket.accept`."""
        accept_into(flattened(self._result), summed)

    def multiply(self, factor: float) -> None:
        """See :meth:`GradientBucket.multiply`."""
        self._result.mul_(factor)

    def copy_out(self, verdict: Verdict) -> None:
        """See :meth:`GradientBucket.copy_out`; the gradient is the parameter's alone again."""
        super().copy_out(verdict)
        del self._result, self._own

    def _gradient(self, position: int) -> Tensor:
        return self._own if self._own is not None else like_parameter(self._result, self.members[0].parameter)


class SparseBucket(GradientBucket):
    """One sparse gradient; ranks may have different rows."""

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.copy_in`."""
        (member,) = self.members
        member.check_parameter()
        grad = member.parameter.grad
        taken = member.zeros() if grad is None else member.take(grad)
        if grad is not None and used is not None and not used[member.index]:
            self._keep_unused(member, grad, inside=False)
        member.parameter.grad = None
        self._result = (taken if taken.is_sparse else taken.to_sparse(1)).coalesce() * self._scale
        return CopiedIn(self._result, 1.0, _undefined(member, grad))

    def zeros(self) -> Tensor:
        """See :meth:`GradientBucket.zeros`."""
        return self.members[0].zeros()

    def accept(self, summed: Tensor) -> None:
        """See :meth:`GradientBucket.accept`."""
        self._result = summed

    def multiply(self, factor: float) -> None:
        """See :meth:`GradientBucket.multiply`."""
        self._result = self._result * factor

    def _gradient(self, position: int) -> Tensor:
        return self._result


def _undefined(member: ManagedParameter, grad: Tensor | None) -> Sequence[int]:
    """See :attr:`CopiedIn.undefined`, of a bucket with one parameter."""
    return (member.index,) if grad is None else ()


class ZeroBucket(GradientBucket):
    """What communication hooks see of a bucket whose round has failed: zeros. Its gradients stay as they are."""

    def __init__(self, bucket: GradientBucket) -> None:
        super().__init__(bucket.index, bucket.planned, bucket.members, waits=True)

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.zeros`."""
        return CopiedIn(self.zeros())

    def accept(self, summed: Tensor) -> None:
        """Nothing is taken."""

    def multiply(self, factor: float) -> None:
        """Nothing is there."""

    def _gradient(self, position: int) -> Tensor:
        return torch.empty(0)


def flattened(tensor: Tensor) -> Tensor:
    """All elements of a tensor without gaps, in the order in which they lie in memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def accept_into(gradients: Tensor, summed: Tensor) -> None:
    """Copy what a hook returned, unless it is what it was given."""
    if summed.data_ptr() != gradients.data_ptr() or summed.dtype != gradients.dtype:
        gradients.copy_(summed.view_as(gradients))


def set_grads(parameters: Iterable[Parameter], grads: Iterable[Tensor | None]) -> None:
    """Give parameters their gradients; without any Python for each."""
    deque(map(setattr, parameters, repeat("grad"), grads), maxlen=0)
