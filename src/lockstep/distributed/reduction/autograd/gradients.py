"""The gradients of parameters: which a pass has changed, the memory of those in a flat bucket, those programs keep.

A :class:`GradientSnapshot` compares the gradients before and after the pass. Autograd either sets ``.grad`` to a new
object, or adds to the existing one, which raises its version. So references and versions show every change, whatever
was called (the module, a part of it, its wrapper) and whether or not it was compiled. A comparison takes about 0.1 us
for each parameter that has a gradient, and a quarter of that for one that has none. Gradients that are views of a
bucket are ``view.data``, so that each has its own version.

The memory is that of a :class:`GradientMemory`. A bucket keeps its memory on the CPU, where new memory costs a page
fault for every 4 KiB that are first written, and wherever its tensors are small, since new views would cost more than
the memory is worth. On an accelerator a bucket of larger tensors leaves its memory to the parameters' gradients, so
that ``zero_grad()`` frees it for the next forward. In either case, if other code still holds a gradient of an earlier
round, its memory is never overwritten: the bucket moves to new memory.

Gradients are compared with the bucket's views by memory and layout, not by identity: ``grad.data =`` and
``module.to(memory_format=...)`` give the same object other memory, and ``grad.detach()`` is another object with the
same memory.

A *kept gradient* is one whose memory the program reads itself: a ``.grad`` that is a view of one flat tensor, which the
optimizer reads, or a tensor that ``.grad`` was once. PyTorch's DistributedDataParallel writes the mean into the
``.grad`` from before the pass. Here the mean is made in a bucket or a new tensor, and :func:`write_back` copies it.

A gradient from before the pass counts as kept if anything but ``.grad`` refers to the tensor or its memory, or if
PyTorch has not allocated the memory (``torch.from_numpy``). If nothing does, as after ``no_sync()``, nobody can tell
that a bucket's tensor takes its place. Gradients that share memory with each other alone are not kept: autograd makes
such, even some that overlap.
"""

import logging
import operator
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import compress, repeat
from operator import and_, attrgetter, is_, is_not, ne, or_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from lockstep._base.buckets import Bucket
from lockstep._base.dtensors import is_dtensor, like_parameter, local_part

grad_of = attrgetter("grad")
_version_of, _data_of = attrgetter("_version"), attrgetter("data")


class GradientSnapshot:
    """The gradients of ``parameters`` and their versions at this moment."""

    __slots__ = ("_versions", "grads", "parameters")

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = parameters
        self.grads: list[Tensor | None] = list(map(grad_of, parameters))
        self._versions: list[int] | None = None  # None: no parameter has a gradient
        if any(map(is_not, self.grads, repeat(None))):
            self._versions = _versions(self.grads)

    @property
    def is_empty(self) -> bool:
        """True if no parameter has a gradient."""
        return self._versions is None

    def changed(self) -> Sequence[int]:
        """Return the positions of gradients that have been set or changed since."""
        now: list[Any] = list(map(grad_of, self.parameters))
        if self._versions is None:
            if type(None) not in map(type, now):
                return range(len(now))
            return list(compress(range(len(now)), map(is_not, now, repeat(None))))
        versions = _versions(now)
        if versions == self._versions and all(map(is_, now, self.grads)):
            return ()
        changed = map(or_, map(ne, versions, self._versions), map(is_not, now, self.grads))
        come = list(map(and_, changed, map(is_not, now, repeat(None))))  # a gradient that was set to None has not come
        return range(len(now)) if False not in come else list(compress(range(len(now)), come))

    def missing(self, positions: Sequence[int], now: Sequence[Any]) -> Sequence[int]:
        """Return the positions, among these, whose gradient, as it is ``now``, has not been set or changed since."""
        if self._versions is None:
            return list(compress(positions, map(is_, now, repeat(None)))) if type(None) in map(type, now) else ()
        return [
            position
            for position, grad in zip(positions, now, strict=True)
            if grad is None or (grad is self.grads[position] and _version(grad) == self._versions[position])
        ]


def _versions(grads: Sequence[Any]) -> list[int]:
    try:
        return list(map(_version_of, grads))
    except (AttributeError, RuntimeError):  # None has no version, nor has an inference tensor
        return list(map(_version, grads))


def _version(grad: Tensor | None) -> int:
    """Return the version of a gradient; 0 without a gradient, and for an inference tensor, which has no version."""
    return 0 if grad is None or grad.is_inference() else grad._version


Empty = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes a tensor of one dimension, uninitialised."""

_is_set_to = Tensor.is_set_to
_NOTHING = torch.empty(0, device="cpu")


KEPT_BELOW_BYTES = 16 * 1024
"""Buckets whose tensors are smaller than this on average keep their memory on an accelerator, too."""


class _Memory(NamedTuple):
    """A flat tensor, and its views."""

    flat: Tensor
    gradients: Tensor
    """The part of it in which gradients lie."""
    row: Tensor
    """The part that follows them."""
    views: list[Tensor]
    """The views in which the gradients lie; no other code has them, so nothing that others do to their tensors changes
    these."""
    grads: list[Tensor]
    """The gradients that parameters get: separate tensors with the memory of the views, or DTensors of these."""
    users: int
    """The number of tensors that share the memory while no other code has one."""
    counts: list[int]
    """The reference counts of ``grads`` while no other code has one."""


_NO_MEMORY = _Memory(_NOTHING, _NOTHING, _NOTHING, [], [], 0, [])


class GradientMemory:
    """The flat tensor of a bucket, its views, and the gradients that parameters get; ``extra`` elements follow them.

    ``empty`` gives the memory.
    """

    def __init__(self, layout: Bucket, parameters: Sequence[Parameter], extra: int, empty: Empty) -> None:
        self._layout = layout
        self._parameters = parameters
        self._numel = layout.numel + extra
        self._empty = empty
        self.is_kept = layout.device.type == "cpu" or layout.nbytes < KEPT_BELOW_BYTES * len(layout.slots)
        """True if the memory stays from round to round."""
        self._has_dtensors = any(map(is_dtensor, parameters))
        self.now = _NO_MEMORY
        """The memory, from :meth:`claim` to :meth:`release`."""
        self._none_inside = [False] * len(layout.slots)
        self._left: tuple[StorageWeakRef, int] | None = None  # memory that only gradients hold, and its offset

    def claim(self, current: list[Tensor | None]) -> Sequence[bool]:
        """Prepare the memory for the next gradients; return the numbers of those of ``current`` that are in it and stay
        there.

        If they have to move, ``current`` is updated to the moved gradients.
        """
        if self.now is _NO_MEMORY and self._left is not None:
            self._readopt(current)
        memory = self.now
        if memory is _NO_MEMORY:
            self._allocate()
            return self._none_inside
        if self._is_unused(memory, current):
            return self._none_inside
        inside = self._in_place(current, memory.views)
        whole = False not in inside
        if whole and all(map(operator.is_, current, memory.grads)):
            return inside
        if not whole and _is_seen_by_others(memory, inside):  # test_a_gradient_that_somebody_keeps_is_not_overwritten
            new = self._allocate()
            for i, moves in enumerate(inside):
                if moves:
                    new.views[i].copy_(memory.views[i])
                    current[i] = new.grads[i]
        elif not self._are_grads_in_place(memory):
            self.now = memory._replace(grads=self._gradients(memory.views))  # tests/gradients/test_gradient_memory.py
        return inside

    def _is_unused(self, memory: _Memory, current: Sequence[Tensor | None]) -> bool:
        """Return True if only this object and the parameters have tensors in this memory. A gradient of ``current`` in
        it is either one that a parameter got, or counts as one more user."""
        return (
            True not in map(operator.is_, current, memory.grads)
            and users_of(memory.flat.untyped_storage()) == memory.users
            and list(map(sys.getrefcount, memory.grads)) == memory.counts
            and self._are_grads_in_place(memory)
        )

    def _in_place(self, grads: Sequence[Tensor | None], views: Sequence[Tensor]) -> list[bool]:
        """Return which of the gradients are in the memory of their views: the same memory, shape and strides."""
        if self._has_dtensors:
            grads = [None if grad is None else local_part(grad) for grad in grads]
        try:
            return [grad is not None and _is_set_to(view, grad) for grad, view in zip(grads, views, strict=True)]
        except NotImplementedError:  # not for sparse gradients
            dense = [None if grad is None or grad.is_sparse else grad for grad in grads]
            return self._in_place(dense, views)

    def release(self) -> None:
        """Drop the reference to the memory, so that only the parameters' gradients hold it."""
        self._left = StorageWeakRef(self.now.flat.untyped_storage()), int(self.now.flat.storage_offset())
        self.now = _NO_MEMORY

    def zeros(self) -> Tensor:
        """Return new memory of the same size, filled with zeros."""
        return torch.zeros(self._numel, dtype=self._layout.dtype, device=self._layout.device)

    def _allocate(self) -> _Memory:
        flat = self._empty(self._numel, self._layout.dtype, self._layout.device)
        if self.is_kept:
            _note_bucket_memory(flat)
        self.now = memory = self._lay_out(flat, self._layout.views(flat), None)
        return memory

    def _lay_out(self, flat: Tensor, views: list[Tensor], grads: list[Tensor] | None) -> _Memory:
        numel = self._layout.numel
        parts = flat[:numel], flat[numel:]
        grads = self._gradients(views) if grads is None else grads
        return _Memory(flat, *parts, views, grads, users_of(flat.untyped_storage()), references(grads))

    def _gradients(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that parameters get: with the memory of the views, but each with its own version."""
        if not self._has_dtensors:
            return list(map(_data_of, views))
        return [like_parameter(view.data, p) for p, view in zip(self._parameters, views, strict=True)]

    def _readopt(self, current: Sequence[Tensor | None]) -> None:
        """Continue in the memory that the parameters' gradients hold, if they still have all of it."""
        assert self._left is not None
        (storage, start), self._left = self._left, None
        grads = [grad for grad in current if grad is not None and not grad.is_sparse]
        if len(grads) < len(current):
            return
        first = local_part(grads[0])
        if first.untyped_storage()._cdata == storage.cdata:
            flat = first.as_strided((self._numel,), (1,), start)
            views = self._layout.views(flat)
            if False not in self._in_place(grads, views):
                self.now = self._lay_out(flat, views, grads)

    def _are_grads_in_place(self, memory: _Memory) -> bool:
        """Return True if the tensors that parameters got still have the same memory."""
        if self._has_dtensors:
            return False not in self._in_place(memory.grads, memory.views)
        return all(map(_is_set_to, memory.grads, memory.views))


bucket_memory: dict[int, StorageWeakRef] = {}
"""The memory of buckets that keep it, of this plan and of earlier ones, as long as anything refers to it."""


def _note_bucket_memory(flat: Tensor) -> None:
    for key in [key for key, storage in list(bucket_memory.items()) if storage.expired()]:
        bucket_memory.pop(key, None)
    storage = StorageWeakRef(flat.untyped_storage())
    bucket_memory[storage.cdata] = storage


def _is_seen_by_others(memory: _Memory, inside: Sequence[bool]) -> bool:
    """Return True if anything but the bucket and its parameters still sees gradients of an earlier round."""
    if users_of(memory.flat.untyped_storage()) > memory.users:
        return True
    now = references(memory.grads)
    return now != memory.counts and any(
        a > b for a, b, stays in zip(now, memory.counts, inside, strict=True) if not stays
    )


def users_of(storage: UntypedStorage) -> int:
    """Return how many tensors have that memory."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the handle itself


def references(objects: Sequence[Any]) -> list[int]:
    """Return the reference count of each entry of a list."""
    return list(map(sys.getrefcount, objects))


# ------------------------------------------------------------------------ gradients that the program keeps


class KeptGradient(NamedTuple):
    """A gradient that the program keeps."""

    position: int
    """The position of its parameter in the snapshot."""
    parameter: Parameter
    grad: Tensor


def find_kept(before: GradientSnapshot, positions: Iterable[int], given: Container[int]) -> list[KeptGradient]:
    """Return the gradients, of those ``before`` the pass, that the program keeps; nothing may have been copied out yet.

    ``positions``: of the parameters to look at; ``given``: the numbers of storages in which buckets still refer to the
    gradients that they have given. If another object of the library refers to a gradient, it counts as kept, which
    costs a copy.
    """
    if before.is_empty:
        return []
    every = before.grads
    positions = [position for position in positions if every[position] is not None]
    counts = references([every[position] for position in positions])
    storages = _storages([cast("Tensor", every[position]) for position in positions])
    keys = [0 if storage is None else storage._cdata for storage in storages]
    sharing = Counter(keys)
    kept = {
        key
        for key, storage in zip(keys, storages, strict=True)
        if storage is not None
        and (users_of(storage) > sharing[key] or not storage.resizable())
        and not (key in bucket_memory or key in given)
    }
    found = [
        position
        for position, key, count in zip(positions, keys, counts, strict=True)
        if key in kept or count > _UNKEPT + (key in given)
    ]
    return [KeptGradient(each, before.parameters[each], cast("Tensor", every[each])) for each in found]


def _storages(grads: Sequence[Tensor]) -> list[UntypedStorage | None]:
    """Return the storages of gradients; None for those that are not strided."""
    local = grads if set(map(type, grads)) <= {Tensor} else list(map(local_part, grads))
    try:
        return list(map(Tensor.untyped_storage, local))
    except NotImplementedError:
        return [each.untyped_storage() if each.layout == torch.strided else None for each in local]


def _references_of_unkept() -> int:
    parameter = Parameter(torch.empty(0, device="cpu"))
    parameter.grad = torch.empty(0, device="cpu")
    grads = [parameter.grad]
    return references([grads[0]])[0]


_UNKEPT = _references_of_unkept()
"""The reference count of a gradient in two lists that nothing else in Python refers to."""


def write_back(kept: Sequence[KeptGradient]) -> None:
    """Copy the gradients that the parameters have now into those that the program keeps, and let these be ``.grad``."""
    found = [
        (parameter, grad, reduced)
        for _, parameter, grad in kept
        if (reduced := parameter.grad) is not None and reduced is not grad and _can_hold(grad, reduced)
    ]
    if found:
        values = [new.to_dense() if new.is_sparse and not grad.is_sparse else new for _, grad, new in found]
        torch._foreach_copy_([local_part(grad) for _, grad, _ in found], list(map(local_part, values)))
        for parameter, grad, _ in found:
            parameter.grad = grad


def _can_hold(grad: Tensor, reduced: Tensor) -> bool:
    """Return False for gradients that autograd would not have added to in place either."""
    if is_dtensor(reduced):
        return is_dtensor(grad) and grad.placements == reduced.placements  # type: ignore[attr-defined]
    return reduced.is_sparse or not grad.is_sparse


def give_up(kept: Sequence[KeptGradient]) -> None:
    """Zero the memory of gradients that the program keeps, and that are dropped; log that ``.grad`` is None now."""
    if kept:
        for each in kept:
            local_part(each.grad).zero_()
        logging.getLogger("lockstep").warning(
            "gradients whose memory the program keeps were dropped (%d): that memory is zero now, and .grad is None. A "
            "program that reads that memory has to set .grad again before the next backward",
            len(kept),
        )
