"""A bucket: gradients are taken from their parameters, sent as one tensor, and copied out again.

A bucket holds one large gradient or one sparse one, which is reduced where autograd has put it; or several, side by
side in one flat tensor. These live there: between rounds ``parameter.grad`` is a view of that memory, so an
accumulation or ``zero_grad(set_to_none=False)`` works in place and nothing has to be copied in. A gradient that
autograd has allocated, after ``zero_grad()``, is copied in once. While a bucket is being sent its parameters have no
gradient, so that a late one cannot be added to memory that is being sent.

On the CPU a bucket keeps its memory, where new memory costs a page fault for every 4 KiB that are first written, and so
it does wherever its tensors are small, since new views would cost more than the memory is worth. On an accelerator a
bucket of larger tensors leaves its memory to the parameters' gradients, so that ``zero_grad()`` frees it for the next
forward. In either case, if other code still holds a gradient of an earlier round, its memory is never overwritten:
everything is copied to new memory.

Gradients are compared with the bucket's views by memory and layout, not by identity: ``grad.data =`` and
``module.to(memory_format=...)`` give the same object other memory, and ``grad.detach()`` is another object with the
same memory.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from lockstep._base.devices import is_accelerator
from lockstep._base.dtensors import is_dtensor, like_parameter, local_part
from lockstep._base.inner_tensors import is_plain
from lockstep.distributed.reduction.autograd.gradients import GradientSnapshot, note_bucket_memory, references, users_of
from lockstep.distributed.reduction.buckets.plan import BucketKind, PlannedBucket, travels_in_half
from lockstep.distributed.reduction.module.managed_parameters import ManagedParameter

Empty = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes a tensor of one dimension, uninitialised."""
KEPT_BELOW_BYTES = 16 * 1024
"""Buckets whose tensors are smaller than this on average keep their memory on an accelerator, too."""
NOTHING = torch.empty(0, device="cpu")

_grad_of, _data_of = map(attrgetter, ("grad", "data"))
_is_set_to = Tensor.is_set_to


def set_grads(parameters: Iterable[Parameter], grads: Iterable[Tensor | None]) -> None:
    """Assign the gradients of parameters, in a loop in C: every step does it for each parameter."""
    deque(map(setattr, parameters, repeat("grad"), grads), maxlen=0)


class CopiedIn(NamedTuple):
    """What a bucket has taken from its parameters."""

    flat: Tensor
    """What is to be summed."""
    factor: float = 1.0
    """The factor by which it is to be multiplied before the sum."""
    undefined: Sequence[int] = ()
    """Parameters, by number, that have no gradient, whether or not their hooks have run."""
    row: Tensor = NOTHING
    """The elements behind the gradients that carry the report; empty if this bucket does not carry it."""


class Bucket:
    """One bucket of the plan, in use."""

    def __init__(
        self,
        index: int,
        planned: PlannedBucket,
        members: Sequence[ManagedParameter],
        waits: bool,
        extra: int,
        empty: Empty,
        half: torch.dtype | None = None,
    ) -> None:
        """``waits``: it is launched only after backward; ``extra`` elements behind the gradients are for the report;
        ``empty`` gives the memory; ``half``: the half precision in which float32 gradients travel, or None."""
        layout, is_sparse = planned.layout, planned.kind is BucketKind.SPARSE
        self.index = index
        self.planned = planned
        self.members = list(members)
        self.half = half if travels_in_half(layout.dtype, half) and not is_sparse else None
        """The half precision in which the gradients travel; None for their own dtype."""
        self.waits_for_end = waits
        """True if it is launched only after backward."""
        self.has_stream = is_accelerator(layout.device)
        """True if its gradients are accumulated on streams: it is on an accelerator."""
        self.is_full = False
        """True if it was noticed, while backward runs, that all gradients have come."""
        self.is_dense = False
        """True if a sparse gradient is dense this time, since a dense one was added to it; a hook gets it as a sparse
        one."""
        self._parameters = [member.parameter for member in members]
        self._is_plain = all(map(is_plain, self._parameters))
        self._has_dtensors = any(map(is_dtensor, self._parameters))
        self._stream: torch.Stream | None = None  # the one of all gradients, once it is known
        self._scale = 1.0
        self._reduces_copies = False
        self._result = NOTHING  # the one gradient, while it is reduced
        self._unused: list[tuple[int, Tensor, Tensor | None]] = []
        # the memory of several
        self._is_kept = layout.device.type == "cpu" or layout.nbytes < KEPT_BELOW_BYTES * len(layout.slots)
        self._numel = layout.numel + extra
        self._extra = extra
        self._empty = empty
        self._left: tuple[StorageWeakRef, int] | None = None  # memory that only gradients hold, and its offset
        self._drop_memory()

    @property
    def has_gradients(self) -> bool:
        """Return True if any of its parameters has a gradient now."""
        return any(map(is_not, map(_grad_of, self._parameters), repeat(None)))

    def open(self, scale: float) -> None:
        """Begin a round, in which gradients are multiplied by ``scale`` before they are summed, except those that
        travel in half precision: they are divided after they have been summed (``comm/half_precision.py``)."""
        self._scale = scale if self.half is None else 1.0
        self._unused.clear()
        self._reduces_copies = False
        self.is_full = False

    def reduce_copies(self) -> None:
        """Reduce copies of this round's gradients, because the program keeps a gradient: after a failure, messages
        could still be written into its memory."""
        self._reduces_copies = True

    # ------------------------------------------------------------------------ while backward runs

    def note_gradients(self, snapshot: GradientSnapshot) -> int | None:
        """Note that the bucket is full if all gradients have come since the ``snapshot``; else return the parameter, by
        number, that is expected last of those without one."""
        missing = snapshot.missing(self.planned.indices, list(map(_grad_of, self._parameters)))
        self.is_full = not missing
        return missing[-1] if missing else None

    def is_on_current_stream(self) -> bool:
        """Return True if the current stream is the one on which autograd accumulates all of its gradients: only there
        may they be taken before the pass has ended."""
        if self._stream is None:
            first = self.members[0].stream
            if first is None or any(member.stream != first for member in self.members):
                return False
            self._stream = first
        return bool(torch.accelerator.current_stream(self._stream.device) == self._stream)

    # ------------------------------------------------------------------------ from the parameters to what is sent

    def copy_in(self, used: Sequence[int] | None) -> CopiedIn:
        """Take the gradients from the parameters.

        ``used``: for each parameter, True if it has got a gradient since the last round; None: all have. The ``.grad``
        of the others is reduced, too, but they get it back unchanged if no other rank has used the parameter either.
        """
        grads: list[Tensor | None] = list(map(_grad_of, self._parameters))
        copied = (
            self._take_several(grads, used) if self.planned.kind is BucketKind.FLAT else self._take_one(grads[0], used)
        )
        set_grads(self._parameters, repeat(None))
        return copied

    def _take_one(self, grad: Tensor | None, used: Sequence[int] | None) -> CopiedIn:
        (member,), is_sparse = self.members, self.planned.kind is BucketKind.SPARSE
        taken = member.zeros() if grad is None else member.take(grad)
        undefined = () if grad is not None else (member.index,)
        is_unused = grad is not None and used is not None and not used[member.index]
        if grad is not None and is_unused:
            self._keep_unused(0, grad, inside=False)
        if is_sparse:
            self.is_dense, self._result = not taken.is_sparse, with_rows(taken) * self._scale
            return CopiedIn(self._result, 1.0, undefined)
        if grad is not None:
            is_other = grad.requires_grad or taken.is_sparse or taken.stride() != self.planned.layout.slots[0].stride
            if self._reduces_copies or is_unused or is_other:
                taken = member.zeros().copy_(taken.to_dense() if taken.is_sparse else taken)
            elif not is_dtensor(grad):
                taken = grad  # the parameter gets back the same tensor
        self._result = taken
        return CopiedIn(_flattened(taken), self._scale, undefined)

    def _take_several(self, grads: list[Tensor | None], used: Sequence[int] | None) -> CopiedIn:
        inside = self._claim(grads)
        if used is not None and not all(map(used.__getitem__, self.planned.indices)):
            for position, (member, grad) in enumerate(zip(self.members, grads, strict=True)):
                if grad is not None and not used[member.index]:
                    self._keep_unused(position, grad, inside[position])
        undefined: Sequence[int] = ()
        if True not in inside and type(None) not in map(type, grads):
            self._copy(self._views, grads, range(len(grads)))  # type: ignore[arg-type]  # None is not among them
        else:
            undefined = self._copy_some(grads, inside)
        factor = self._scale
        if self._extra and factor != 1:  # the report is not to be scaled
            self._gradients.mul_(factor)
            factor = 1.0
        return CopiedIn(self._flat, factor, undefined, self._row)

    def _copy_some(self, grads: Sequence[Tensor | None], inside: Sequence[bool]) -> Sequence[int]:
        """Copy gradients unless they are in place already, and clear the places of missing ones; return the numbers of
        the parameters that have none."""
        given = [(i, grad) for i, grad in enumerate(grads) if grad is not None and not inside[i]]
        self._copy([self._views[i] for i, _ in given], [grad for _, grad in given], [i for i, _ in given])
        empty = [i for i, grad in enumerate(grads) if grad is None]
        if empty:
            torch._foreach_zero_([self._views[i] for i in empty])
        return [self.planned.indices[i] for i in empty]

    def _copy(self, views: list[Tensor], grads: list[Tensor], positions: Sequence[int]) -> None:
        """Copy gradients into their views; raise if one is sparse or has another shape than planned."""
        if not grads:
            return
        if self._is_plain:
            try:
                torch._foreach_copy_(views, grads)
                return
            except RuntimeError:  # a sparse gradient, or one of another shape
                pass
        taken = [self.members[i].take(grad) for i, grad in zip(positions, grads, strict=True)]
        torch._foreach_copy_(views, [grad.to_dense() if grad.is_sparse else grad for grad in taken])

    def _keep_unused(self, position: int, grad: Tensor, inside: bool) -> None:
        """Keep the gradient of a parameter that this rank did not use, in case no rank did."""
        self._unused.append((position, grad, local_part(grad).clone() if inside else None))

    def zeros(self) -> CopiedIn:
        """Return what is sent in place of what :meth:`copy_in` returns, without any gradient."""
        if self.planned.kind is BucketKind.FLAT:
            flat = torch.zeros(self._numel, dtype=self.planned.layout.dtype, device=self.planned.layout.device)
            return CopiedIn(flat, row=flat[self.planned.layout.numel :])
        zeros = self.members[0].zeros()
        return CopiedIn(zeros if zeros.is_sparse else _flattened(zeros))

    # ------------------------------------------------------------------------ from what was sent to the parameters

    def accept(self, summed: Tensor) -> None:
        """Set the tensor that :meth:`copy_in` returned to the result of a communication hook, or to a sum of rows."""
        if self.planned.kind is BucketKind.SPARSE:
            self._result = summed
            return
        sent = self._gradients if self.planned.kind is BucketKind.FLAT else _flattened(self._result)
        if summed.data_ptr() != sent.data_ptr() or summed.dtype != sent.dtype:
            sent.copy_(summed.view_as(sent))

    def multiply(self, factor: float) -> None:
        """Multiply all reduced gradients."""
        if self.planned.kind is BucketKind.SPARSE:
            self._result = self._result * factor
        else:
            (self._gradients if self.planned.kind is BucketKind.FLAT else self._result).mul_(factor)

    def copy_out(self, used: Sequence[bool] | None) -> None:
        """Give the parameters their reduced gradients; a parameter that no rank used gets back its earlier ``.grad``.

        ``used``: for each parameter, True if any rank has used it; None: all have been used.
        """
        grads, indices = self._grads, self.planned.indices
        if self.planned.kind is not BucketKind.FLAT:
            is_sparse = self.planned.kind is BucketKind.SPARSE
            grads = [self._result if is_sparse else like_parameter(self._result, self._parameters[0])]
            self._result = NOTHING
        if used is None or all(map(used.__getitem__, indices)):
            set_grads(self._parameters, grads)
        else:
            for parameter, grad, index in zip(self._parameters, grads, indices, strict=True):
                if used[index]:
                    parameter.grad = grad
            for position, grad, values in self._unused:
                if not used[indices[position]]:
                    if values is not None:
                        local_part(grad).copy_(values)
                    self._parameters[position].grad = grad
        self._unused.clear()
        if not self._is_kept and self._grads:
            self._left = StorageWeakRef(self._flat.untyped_storage()), int(self._flat.storage_offset())
            self._drop_memory()

    # ------------------------------------------------------------------------ the memory of several gradients

    @property
    def storage(self) -> int:
        """The number of the storage that the bucket has at present."""
        return int(self._flat.untyped_storage()._cdata)

    def has_given(self, grads: Sequence[Tensor | None]) -> bool:
        """Return True if ``grads``, those of all parameters by number, are those that this bucket has given them in its
        own memory."""
        return bool(self._grads) and all(map(is_, map(grads.__getitem__, self.planned.indices), self._grads))

    def _drop_memory(self) -> None:
        self._flat = self._gradients = self._row = NOTHING
        # No other code has the views, so nothing that others do to their tensors changes them. Parameters get tensors
        # with the memory of the views, or DTensors of these.
        self._views: list[Tensor] = []
        self._grads: list[Tensor] = []
        self._users = 0  # how many tensors share the memory while no other code has one
        self._counts: list[int] = []  # the reference counts of the gradients while no other code has one

    def _claim(self, current: Sequence[Tensor | None]) -> Sequence[bool]:
        """Prepare the memory for the next gradients; return which of the ``current`` ones are in it, and stay there."""
        none_inside = [False] * len(current)
        if not self._views and not self._has_readopted(current):
            self._allocate()
            return none_inside
        storage = self._flat.untyped_storage()
        if not storage.nbytes():  # the program has freed the memory of a gradient, and thereby of all
            self._allocate()
            return none_inside
        users, counts = users_of(storage), list(map(sys.getrefcount, self._grads))
        is_unused = users == self._users and counts == self._counts and True not in map(is_, current, self._grads)
        inside = none_inside if is_unused else self._in_place(current)
        if False not in inside and all(map(is_, current, self._grads)):
            return inside
        if not is_unused and False in inside:  # test_a_gradient_that_somebody_keeps_is_not_overwritten
            held = (a > b and not stays for a, b, stays in zip(counts, self._counts, inside, strict=True))
            if users > self._users or any(held):
                self._allocate()
                return none_inside
        local = map(local_part, self._grads) if self._has_dtensors else self._grads
        if not all(map(_is_set_to, local, self._views)):  # the program has given them other memory (``grad.data =``)
            self._make_grads()
        return inside

    def _in_place(self, grads: Sequence[Tensor | None]) -> Sequence[bool]:
        """Return which gradients are in the memory of their views: the same memory, shape and strides."""
        if self._has_dtensors:
            grads = [None if grad is None else local_part(grad) for grad in grads]
        try:
            return [grad is not None and _is_set_to(view, grad) for grad, view in zip(grads, self._views, strict=True)]
        except NotImplementedError:  # not for sparse gradients
            return self._in_place([None if grad is None or grad.is_sparse else grad for grad in grads])

    def _allocate(self) -> None:
        layout = self.planned.layout
        flat = self._empty(self._numel, layout.dtype, layout.device)
        if self._is_kept:
            note_bucket_memory(flat)
        self._lay_out(flat, layout.views(flat))

    def _lay_out(self, flat: Tensor, views: list[Tensor], grads: list[Tensor] | None = None) -> None:
        numel = self.planned.layout.numel
        self._flat, self._gradients, self._row, self._views = flat, flat[:numel], flat[numel:], views
        self._make_grads(grads)
        self._users = users_of(flat.untyped_storage())

    def _make_grads(self, grads: list[Tensor] | None = None) -> None:
        """Make the tensors that parameters get, each with a version of its own, unless there are ``grads``."""
        if grads is None:
            grads = list(map(_data_of, self._views))
            if self._has_dtensors:
                grads = [like_parameter(grad, p) for grad, p in zip(grads, self._parameters, strict=True)]
        self._grads = grads
        self._counts = references(grads)

    def _has_readopted(self, current: Sequence[Tensor | None]) -> bool:
        """Continue in the memory that the parameters' gradients hold, if they have all of it; return True then."""
        grads = [grad for grad in current if grad is not None and not grad.is_sparse]
        left, self._left = self._left, None
        if left is None or len(grads) < len(current):
            return False
        first, (storage, start) = local_part(grads[0]), left
        if first.untyped_storage()._cdata != storage.cdata:
            return False
        flat = first.as_strided((self._numel,), (1,), start)
        self._views = self.planned.layout.views(flat)
        if False in self._in_place(grads):
            self._views = []
            return False
        self._lay_out(flat, self._views, grads)
        return True


def with_rows(grad: Tensor) -> Tensor:
    """Return a gradient as a coalesced one with a single sparse dimension."""
    rows = grad.is_sparse and grad.sparse_dim() == 1
    return (grad if rows else grad.to_dense().to_sparse(1)).coalesce()


def _flattened(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor without gaps, in the order in which they lie in memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
