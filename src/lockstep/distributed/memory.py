"""The memory in which the gradients of a shared bucket live.

Buckets of small tensors keep theirs: making views anew would cost more than the memory is worth. Buckets of larger
ones leave it to the parameters' gradients, so that it is gone after ``zero_grad()``, while forward needs the room. In
both cases memory in which somebody still holds a gradient of an earlier round is never written again: the bucket moves
to new memory.
"""

import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.buckets import Bucket
from lockstep.distributed.dtensors import like_parameter, local_part

Empty = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes a tensor of one dimension, uninitialised."""

KEPT_BELOW_BYTES = 16 * 1024
"""Buckets whose tensors are smaller than this on average keep their memory."""


class GradientMemory:
    """The flat tensor of a bucket, its views, and the gradients that parameters get; ``extra`` elements follow them.

    ``empty`` gives the memory.
    """

    def __init__(self, layout: Bucket, parameters: Sequence[Parameter], extra: int, empty: Empty) -> None:
        self._layout, self._parameters, self._extra, self._empty = layout, parameters, extra, empty
        self._kept = layout.nbytes < KEPT_BELOW_BYTES * len(layout.slots)
        self.flat: Tensor | None = None
        self.views: list[Tensor] = []
        self.grads: list[Tensor] = []
        """The views, or DTensors around them."""
        self._alone: tuple[int, list[int]] = 0, []  # users and references while nobody else has any
        self._handed: list[weakref.ref[Tensor]] = []

    def claim(self, current: list[Tensor | None]) -> list[bool]:
        """Make ready to write the next gradients; returns which of ``current`` are in this memory, and stay in it.

        If they have to move, ``current`` is changed to what they are now.
        """
        if self.flat is None and self._handed:
            self._take_up(current)
        if self.flat is None:
            self._allocate()
            return [False] * len(current)
        inside = list(map(operator.is_, current, self.grads))
        if False not in inside or not self._held(inside):
            return inside
        old = self.views
        self._allocate()
        for i, moves in enumerate(inside):
            if moves:
                self.views[i].copy_(old[i])
                current[i] = self.grads[i]
        return inside

    def rest(self) -> None:
        """The gradients have been handed out."""
        if not self._kept:
            self._handed = [weakref.ref(grad) for grad in self.grads]
            self.flat, self.views, self.grads = None, [], []

    def blank(self) -> Tensor:
        """Other memory of the same size, all zero."""
        layout = self._layout
        return torch.zeros(layout.numel + self._extra, dtype=layout.dtype, device=layout.device)

    def _allocate(self) -> None:
        layout = self._layout
        flat = self._empty(layout.numel + self._extra, layout.dtype, layout.device)
        self.flat, self.views = flat, self._layout.views(flat)
        self.grads = [like_parameter(view, p) for p, view in zip(self._parameters, self.views, strict=True)]
        self._alone = storage_users(flat), references(self.grads)

    def _take_up(self, current: Sequence[Tensor | None]) -> None:
        """Go on in the memory that was handed out, if the parameters still have all of it."""
        handed, self._handed = [each() for each in self._handed], []
        if all(own is not None and own is grad for own, grad in zip(handed, current, strict=True)):
            self.grads = [own for own in handed if own is not None]
            self.views = [local_part(own).detach() for own in self.grads]
            start = self.views[0].storage_offset() - self._layout.slots[0].offset
            self.flat = self.views[0].as_strided((self._layout.numel + self._extra,), (1,), start)

    def _held(self, inside: Sequence[bool]) -> bool:
        """Whether anything but this bucket and its parameters still sees gradients of an earlier round."""
        assert self.flat is not None
        users, counts = self._alone
        if storage_users(self.flat) > users:
            return True
        now = references(self.grads)
        return now != counts and any(a > b for a, b, stays in zip(now, counts, inside, strict=True) if not stays)


def storage_users(tensor: Tensor) -> int:
    """How many tensors share the tensor's memory, itself included."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the handle just made


def references(objects: Sequence[Any]) -> list[int]:
    """The reference count of each entry of a list."""
    return list(map(sys.getrefcount, objects))
