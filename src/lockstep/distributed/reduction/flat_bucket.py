"""A bucket of many gradients, side by side in one flat tensor.

They are copied in together when all have come, or, if they are many, in parts, each when it is complete and still in
the processor's cache (``tests/ranks/test_copied_early.py``).
"""

import operator
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from lockstep.distributed.reduction.bucket import BucketPart, CopiedIn, GradientBucket, accept_into, set_grads
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.plan import PlannedBucket
from lockstep.distributed.reduction.storage import Empty, GradientMemory
from lockstep.distributed.reduction.verdict import Verdict
from lockstep.dtensors import is_dtensor

_grad_of = attrgetter("grad")

PART_BYTES = 256 * 1024
"""So many bytes of gradients are copied into their bucket together, as they come: they are in the processor's cache
then, and the memory that they leave is what backward makes the next ones in."""
WHOLE_BYTES = 512 * 1024
"""A bucket of no more is copied as a whole: it is in a cache all the same."""


class FlatBucket(GradientBucket):
    """Gradients that live side by side in one flat tensor."""

    def __init__(
        self,
        index: int,
        planned: PlannedBucket,
        members: Sequence[ManagedParameter],
        waits: bool,
        extra: int,
        empty: Empty,
    ) -> None:
        """``extra`` elements behind the gradients are for the report; ``empty`` gives the memory."""
        self._plain = not any(is_dtensor(member.parameter) for member in members)
        self._copies_early: bool | None = False  # None: not known before the first part has come
        super().__init__(index, planned, members, waits)
        self._extra = extra
        self._indices = planned.indices
        self._memory = GradientMemory(planned.layout, self._parameters, extra, empty)

    def _cut(self) -> list[range]:
        """Parts of ``PART_BYTES`` and little more. An accelerator works off what it is given: there one is best."""
        on_cpu = self.members[0].spec.device.type == "cpu"
        if not (on_cpu and self._plain) or self.planned.layout.nbytes <= WHOLE_BYTES:
            return super()._cut()
        parts: list[range] = []
        begin = nbytes = 0
        for position, member in enumerate(self.members):
            nbytes += member.spec.nbytes
            if nbytes >= PART_BYTES or position == len(self.members) - 1:
                parts.append(range(begin, position + 1))
                begin, nbytes = position + 1, 0
        return parts

    def open(self, scale: float) -> None:
        """See :meth:`GradientBucket.open`."""
        super().open(scale)
        self._copies_early = None if len(self.parts) > 1 else False

    def part_is_complete(self, part: BucketPart) -> bool:
        """See :meth:`GradientBucket.part_is_complete`; copies the part, unless it takes a closer look to do so."""
        is_full = super().part_is_complete(part)
        if self._copies_early is not False and not torch.is_grad_enabled():  # copies would have a graph
            if self._copies_early is None:
                self._copies_early = self._memory.claim_early(list(map(_grad_of, self._parameters)))
            if self._copies_early:
                self._copy_part(part)
        return is_full

    def _copy_part(self, part: BucketPart) -> None:
        begin, end = part.positions.start, part.positions.stop
        parameters, views = self._parameters[begin:end], self._memory.views[begin:end]
        grads: list[Any] = list(map(_grad_of, parameters))
        if type(None) in map(type, grads):
            return
        try:
            if len(grads) == 1 and self._scale != 1:
                torch.mul(grads[0], self._scale, out=views[0])
            else:
                torch._foreach_copy_(views, grads)
                if self._scale != 1:
                    slots = self.planned.layout.slots
                    last = slots[end].offset if end < len(slots) else None
                    self._memory.gradients[slots[begin].offset : last].mul_(self._scale)
        except RuntimeError:  # a sparse gradient, or one of another shape: copy_in knows
            return
        set_grads(parameters, repeat(None))
        part.is_copied = True

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """See :meth:`GradientBucket.copy_in`; the report's row, behind the gradients, is not scaled."""
        self._check_unchanged()
        grads: list[Tensor | None] = list(map(_grad_of, self._parameters))
        memory = self._memory
        if self._copies_early:
            if used is None and all(map(operator.is_, grads, repeat(None))) and self._is_copied():
                return CopiedIn(memory.flat)
            if any(part.is_copied for part in self.parts):
                return self._copy_rest(grads, memory.in_place(grads), used)
        inside = memory.in_place(grads) if self._copies_early else memory.claim(grads)
        if used is not None and not all(map(used.__getitem__, self._indices)):
            self._keep_all_unused(grads, inside, used)
        set_grads(self._parameters, repeat(None))
        undefined: list[int] = []
        if True not in inside and type(None) not in map(type, grads):
            self._copy(memory.views, cast("list[Tensor]", grads), range(len(grads)))
        else:
            undefined = self._copy_some(grads, inside, range(len(grads)))
        factor = self._scale
        if self._extra and factor != 1:  # the report is not to be scaled
            memory.gradients.mul_(factor)
            factor = 1.0
        return CopiedIn(memory.flat, factor, undefined)

    def _is_copied(self) -> bool:
        """Whether all has been copied early."""
        return all(part.is_copied for part in self.parts)

    def _copy_rest(
        self, grads: Sequence[Tensor | None], inside: Sequence[bool], used: Sequence[int] | None
    ) -> CopiedIn:
        """Copy, and scale, what has not been copied early, and add what has come since to what has been."""
        rest = [i for part in self.parts if not part.is_copied for i in part.positions]
        again = [i for part in self.parts if part.is_copied for i in part.positions if grads[i] is not None]
        if used is not None and not all(map(used.__getitem__, self._indices)):
            self._keep_all_unused(grads, inside, used)
        set_grads(self._parameters, repeat(None))
        undefined = self._copy_some(grads, inside, rest)
        views = self._memory.views
        if rest and self._scale != 1:
            torch._foreach_mul_([views[i] for i in rest], self._scale)
        for i in again:
            taken = self.members[i].take(cast("Tensor", grads[i]))
            views[i].add_(taken.to_dense() if taken.is_sparse else taken, alpha=self._scale)
        return CopiedIn(self._memory.flat, 1.0, undefined)

    def _copy_some(self, grads: Sequence[Tensor | None], inside: Sequence[bool], positions: Sequence[int]) -> list[int]:
        """Copy what is at ``positions``, unless it is in place, or clear its place; returns the parameters, by number,
        that have no gradient."""
        views = self._memory.views
        given = [(i, grad) for i in positions if (grad := grads[i]) is not None and not inside[i]]
        self._copy([views[i] for i, _ in given], [grad for _, grad in given], [i for i, _ in given])
        empty = [i for i in positions if grads[i] is None]
        if empty:
            for i in empty:
                # There is no gradient that would show it: test_a_layer_that_changes_on_a_rank_that_does_not_use_it.
                self.members[i].check_parameter()
            torch._foreach_zero_([views[i] for i in empty])
        return [self._indices[i] for i in empty]

    def _copy(self, views: list[Tensor], grads: list[Tensor], positions: Sequence[int]) -> None:
        """Copy gradients into their views; raises if one is of another kind than was planned."""
        if not grads:
            return
        if self._plain:
            try:
                torch._foreach_copy_(views, grads)
                return
            except RuntimeError:  # a sparse gradient, or one of another shape
                pass
        taken = [self.members[i].take(grad) for i, grad in zip(positions, grads, strict=True)]
        torch._foreach_copy_(views, [grad.to_dense() if grad.is_sparse else grad for grad in taken])

    def _keep_all_unused(self, grads: Sequence[Tensor | None], inside: Sequence[bool], used: Sequence[int]) -> None:
        for member, grad, is_inside in zip(self.members, grads, inside, strict=True):
            if grad is not None and not used[member.index]:
                self._keep_unused(member, grad, is_inside)

    @property
    def row(self) -> Tensor:
        """The report's place, behind the gradients."""
        return self._memory.row

    def zeros(self) -> Tensor:
        """See :meth:`GradientBucket.zeros`."""
        return self._memory.zeros()

    def accept(self, summed: Tensor) -> None:
        """See :meth:`GradientBucket.accept`."""
        accept_into(self._memory.gradients, summed)

    def multiply(self, factor: float) -> None:
        """See :meth:`GradientBucket.multiply`."""
        self._memory.gradients.mul_(factor)

    def copy_out(self, verdict: Verdict) -> None:
        """See :meth:`GradientBucket.copy_out`."""
        if verdict.used is not None and not all(map(verdict.used.__getitem__, self._indices)):
            super().copy_out(verdict)
        else:
            try:
                set_grads(self._parameters, self._memory.grads)
            except RuntimeError:
                for member in self.members:
                    member.check(member.parameter)
                raise
            self._unused.clear()
        self._memory.release()

    def _gradient(self, position: int) -> Tensor:
        return self._memory.grads[position]
