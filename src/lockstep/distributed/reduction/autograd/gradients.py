"""The gradients of parameters: which a pass has changed, and which the program keeps.

A :class:`GradientSnapshot` compares the gradients before and after the pass. Autograd either sets ``.grad`` to a new
object, or adds to the existing one, which raises its version. So references and versions show every change, whatever
was called (the module, a part of it, its wrapper) and whether or not it was compiled. A comparison takes about 0.1 us
for each parameter that has a gradient, and a quarter of that for one that has none. Gradients that are views of a
bucket are ``view.data``, so that each has its own version.

A *kept gradient* is one whose memory the program reads itself: a ``.grad`` that is a view of one flat tensor, which the
optimizer reads, or a tensor that ``.grad`` was once. PyTorch's DistributedDataParallel writes the mean into the
``.grad`` from before the pass. Here the mean is made in a bucket or a new tensor, and :func:`write_back` copies it.

A gradient from before the pass counts as kept if anything but ``.grad`` refers to the tensor or its memory, or if
PyTorch has not allocated the memory (``torch.from_numpy``). If nothing does, as after ``no_sync()``, nobody can tell
that a bucket's tensor takes its place. Gradients that share memory with each other alone are not kept: autograd makes
such, even some that overlap.
"""

import logging
import sys
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import compress, repeat
from operator import and_, attrgetter, is_, is_not, ne, or_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from lockstep._base.dtensors import is_dtensor, local_part

grad_of = attrgetter("grad")
_version_of = attrgetter("_version")


class GradientSnapshot:
    """The gradients of ``parameters`` and their versions at this moment."""

    __slots__ = ("_versions", "grads", "is_empty", "parameters")

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = parameters
        self.grads: list[Tensor | None] = list(map(grad_of, parameters))
        self.is_empty = not any(map(is_not, self.grads, repeat(None)))
        """True if no parameter has a gradient."""
        self._versions = [] if self.is_empty else _versions(self.grads)

    def changed(self) -> Sequence[int]:
        """Return the positions of gradients that have been set or changed since."""
        now: list[Any] = list(map(grad_of, self.parameters))
        if self.is_empty:
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
        if self.is_empty:
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


bucket_memory: dict[int, StorageWeakRef] = {}
"""The memory of buckets that keep it, of this plan and of earlier ones, as long as anything refers to it."""


def note_bucket_memory(flat: Tensor) -> None:
    """Note the memory of a bucket that keeps it."""
    for key in [key for key, storage in list(bucket_memory.items()) if storage.expired()]:
        bucket_memory.pop(key, None)
    storage = StorageWeakRef(flat.untyped_storage())
    bucket_memory[storage.cdata] = storage


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
