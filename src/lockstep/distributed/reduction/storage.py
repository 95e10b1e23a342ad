"""The memory of the gradients in a flat bucket, and whether anybody else still sees it.

A bucket keeps its memory on the CPU, where new memory costs a page fault for every 4 KiB that are first written, and
wherever its tensors are small, since new views would cost more than the memory is worth. On an accelerator a bucket of
larger tensors leaves its memory to the parameters' gradients, so that it is gone after ``zero_grad()``, while forward
needs the room. In either case memory in which somebody still holds a gradient of an earlier round is never written
again: the bucket moves to new memory.

What a parameter holds as its gradient is judged by its memory and layout, never by which object it is: ``grad.data =``
and ``module.to(memory_format=...)`` give the same object other memory, ``grad.detach()`` is another object with the
same.
"""

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from lockstep.buckets import Bucket
from lockstep.dtensors import is_dtensor, like_parameter, local_part

Empty = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes a tensor of one dimension, uninitialised."""

_is_set_to = Tensor.is_set_to
_NOTHING = torch.empty(0, device="cpu")


KEPT_BELOW_BYTES = 16 * 1024
"""Buckets whose tensors are smaller than this on average keep their memory on an accelerator, too."""


class GradientMemory:
    """The flat tensor of a bucket, its views, and the gradients that parameters get; ``extra`` elements follow them.

    ``empty`` gives the memory.
    """

    def __init__(self, layout: Bucket, parameters: Sequence[Parameter], extra: int, empty: Empty) -> None:
        self._layout, self._parameters, self._extra, self._empty = layout, parameters, extra, empty
        self._kept = layout.device.type == "cpu" or layout.nbytes < KEPT_BELOW_BYTES * len(layout.slots)
        self._has_dtensors = any(map(is_dtensor, parameters))
        self._flat: Tensor | None = None
        self.gradients = self.row = _NOTHING
        """The two parts of it: in which gradients lie, and what follows them."""
        self.views: list[Tensor] = []
        """Nobody else's while the memory is kept: what others do to the tensors they hold does not change these."""
        self.grads: list[Tensor] = []
        """What parameters get: other tensors in the places of the views, or DTensors around such."""
        self._alone: tuple[int, list[int]] = 0, []  # users and references while nobody else has any
        self._none_inside = [False] * len(layout.slots)
        self._left: tuple[StorageWeakRef, int] | None = None  # memory that was left to the gradients, and its offset

    @property
    def flat(self) -> Tensor:
        """All of it; there is some from :meth:`claim` to :meth:`release`."""
        assert self._flat is not None
        return self._flat

    def claim(self, current: list[Tensor | None]) -> Sequence[bool]:
        """Make ready to write the next gradients; returns which of ``current`` are in this memory, and stay in it.

        If they have to move, ``current`` is changed to what they are now.
        """
        if self._flat is None and self._left is not None:
            self._take_up(current)
        if self._flat is None:
            self._allocate()
            return self._none_inside
        if self._is_unused(current):
            return self._none_inside
        inside = self.in_place(current)
        whole = False not in inside
        if whole and all(map(operator.is_, current, self.grads)):
            return inside
        if not whole and self._is_seen_by_others(inside):  # test_a_gradient_that_somebody_keeps_is_not_overwritten
            old = self.views
            self._allocate()
            for i, moves in enumerate(inside):
                if moves:
                    self.views[i].copy_(old[i])
                    current[i] = self.grads[i]
        elif not self._are_grads_in_place():
            self.grads = self._gradients()  # tests/ranks/test_gradient_memory.py
        return inside

    def _is_unused(self, current: Sequence[Tensor | None]) -> bool:
        """Whether nobody has a tensor in this memory but this object: a gradient of ``current`` that is, is one of
        those that parameters got, or makes one user more."""
        users, counts = self._alone
        return (
            True not in map(operator.is_, current, self.grads)
            and storage_users(self._flat) == users
            and references(self.grads) == counts
            and self._are_grads_in_place()
        )

    def claim_early(self, current: Sequence[Tensor | None]) -> bool:
        """Make ready to write while gradients still come; False if that has to wait, as one of ``current`` is in this
        memory, or was, and more may be added to it there."""
        if self._flat is None:
            former, _ = self._left or (None, 0)
            dense = [local_part(grad) for grad in current if grad is not None and not grad.is_sparse]
            if former is not None and any(grad.untyped_storage()._cdata == former.cdata for grad in dense):
                return False
            self._left = None
            self._allocate()
            return True
        return True not in self.claim(list(current))

    def in_place(self, current: Sequence[Tensor | None]) -> list[bool]:
        """Which of the gradients are in this memory, each in its own place: the same memory, shape and strides."""
        return self._in_place(current, self.views)

    def _in_place(self, grads: Sequence[Tensor | None], views: Sequence[Tensor]) -> list[bool]:
        if self._has_dtensors:
            grads = [None if grad is None else local_part(grad) for grad in grads]
        try:
            return [grad is not None and _is_set_to(view, grad) for grad, view in zip(grads, views, strict=True)]
        except NotImplementedError:  # not for sparse gradients
            dense = [None if grad is None or grad.is_sparse else grad for grad in grads]
            return self._in_place(dense, views)

    def release(self) -> None:
        """The parameters have got their gradients."""
        if not self._kept:
            self._left = StorageWeakRef(self.flat.untyped_storage()), int(self.flat.storage_offset())
            self._lie_in(None, [], [])

    def zeros(self) -> Tensor:
        """Other memory of the same size, all zero."""
        layout = self._layout
        return torch.zeros(layout.numel + self._extra, dtype=layout.dtype, device=layout.device)

    def _allocate(self) -> None:
        layout = self._layout
        flat = self._empty(layout.numel + self._extra, layout.dtype, layout.device)
        self._lie_in(flat, layout.views(flat), [])
        self.grads = self._gradients()
        self._alone = storage_users(flat), references(self.grads)

    def _lie_in(self, flat: Tensor | None, views: list[Tensor], grads: list[Tensor]) -> None:
        self._flat, self.views, self.grads = flat, views, grads
        if flat is None:
            self.gradients = self.row = _NOTHING
        else:
            self.gradients, self.row = flat[: self._layout.numel], flat[self._layout.numel :]

    def _gradients(self) -> list[Tensor]:
        """What parameters are to get: other tensors than the views, unless those are given up then."""
        # With versions of their own, which those of one memory share: see gradient_look.py.
        views = [view.data for view in self.views]
        return [like_parameter(view, p) for p, view in zip(self._parameters, views, strict=True)]

    def _take_up(self, current: Sequence[Tensor | None]) -> None:
        """Go on in the memory that was left to the gradients, if the parameters still have all of it."""
        assert self._left is not None
        (storage, start), self._left = self._left, None
        grads = [grad for grad in current if grad is not None and not grad.is_sparse]
        if len(grads) < len(current):
            return
        first = local_part(grads[0])
        if first.untyped_storage()._cdata == storage.cdata:
            flat = first.as_strided((self._layout.numel + self._extra,), (1,), start)
            views = self._layout.views(flat)
            if False not in self._in_place(grads, views):
                self._lie_in(flat, views, grads)

    def _are_grads_in_place(self) -> bool:
        """Whether the tensors that parameters got are where they were, whatever was done with them."""
        if self._has_dtensors:
            return False not in self._in_place(self.grads, self.views)
        return all(map(_is_set_to, self.grads, self.views))

    def _is_seen_by_others(self, inside: Sequence[bool]) -> bool:
        """Whether anything but this bucket and its parameters still sees gradients of an earlier round."""
        users, counts = self._alone
        if storage_users(self.flat) > users:
            return True
        now = references(self.grads)
        return now != counts and any(a > b for a, b, stays in zip(now, counts, inside, strict=True) if not stays)


def storage_users(tensor: Any) -> int:
    """How many tensors share the tensor's memory, itself included."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the handle just made


def references(objects: Sequence[Any]) -> list[int]:
    """The reference count of each entry of a list."""
    return list(map(sys.getrefcount, objects))
