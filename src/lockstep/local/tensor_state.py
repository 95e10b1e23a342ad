"""Where the data of tensors is, how it is laid out, and whether it was written since the last look."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_version_of: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
_requires_grad: Callable[[Tensor], bool] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_dtype: Callable[[Tensor], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]
_implementation: Callable[[Tensor], int] = Tensor._cdata.__get__  # type: ignore[attr-defined]
_never = itertools.count()


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:  # inference tensors count no versions: take them as written each time
        return [next(_never) if tensor.is_inference() else tensor._version for tensor in tensors]


def addresses(tensors: list[Tensor]) -> list[int]:
    """Where the data of each tensor is in memory."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # a sparse tensor has no one address: only its identity and its version tell
        return [t.data_ptr() if t.layout == torch.strided else -1 for t in tensors]


def kinds(tensors: list[Tensor]) -> tuple[list[torch.Size], list[torch.dtype]]:
    """Shape and dtype of each tensor."""
    return list(map(Tensor.size, tensors)), list(map(_dtype, tensors))


def layouts(tensors: list[Tensor]) -> tuple[list[torch.Size], list[Any], list[torch.dtype]]:
    """Shape, strides and dtype of each tensor."""
    sizes, dtypes = kinds(tensors)
    try:
        return sizes, list(map(Tensor.stride, tensors)), dtypes
    except RuntimeError:
        return sizes, [t.stride() if t.layout == torch.strided else None for t in tensors], dtypes


class Tensors:
    """Where the values of some tensors are, and whether they were written."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._versions = _versions(tensors)
        self._devices = [t.device for t in tensors]
        self._implementations = list(map(_implementation, tensors))
        self._addresses, self._layouts, self._kinds = addresses(tensors), layouts(tensors), kinds(tensors)
        self._gradients = list(map(_requires_grad, tensors))

    def moved(self) -> bool:
        """Whether any tensor's data is elsewhere now: moved, retyped, resized, or replaced through ``.data``.

        Or it has become another in place, by ``torch.utils.swap_tensors``: its gradients then go elsewhere, too.
        """
        if addresses(self.tensors) != self._addresses or layouts(self.tensors) != self._layouts:
            return True
        if list(map(_implementation, self.tensors)) != self._implementations:
            return True
        return not all(self._addresses) and self.retyped()  # no data has no address

    def retyped(self) -> bool:
        """Whether any tensor has another dtype, device or shape now."""
        return kinds(self.tensors) != self._kinds or [t.device for t in self.tensors] != self._devices

    def requirements_changed(self) -> bool:
        """Whether ``requires_grad`` of any tensor is another than at the last look."""
        gradients = list(map(_requires_grad, self.tensors))
        if gradients == self._gradients:
            return False
        self._gradients = gradients
        return True

    def written(self) -> list[int]:
        """The numbers of the tensors that were written since the last look, by their version counters."""
        versions = _versions(self.tensors)
        if versions == self._versions:
            return []
        then, self._versions = self._versions, versions
        return [i for i, (old, new) in enumerate(zip(then, versions, strict=True)) if old != new]
