"""Tells if the memory, layout or values of tensors have changed since the last look."""

import itertools
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

_version_of: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
_requires_grad: Callable[[Tensor], bool] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_dtype: Callable[[Tensor], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]
_device: Callable[[Tensor], torch.device] = Tensor.device.__get__
_implementation: Callable[[Tensor], int] = Tensor._cdata.__get__  # type: ignore[attr-defined]
_never = itertools.count()


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:  # inference tensors count no versions: assume that they are written each time
        return [next(_never) if tensor.is_inference() else tensor._version for tensor in tensors]


def addresses(tensors: list[Tensor]) -> list[int]:
    """Return the address of each tensor's data."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # a sparse tensor has no single address: only its identity and its version are compared
        return [t.data_ptr() if t.layout == torch.strided else -1 for t in tensors]


def kinds(tensors: list[Tensor]) -> tuple[list[torch.Size], list[torch.dtype]]:
    """Return the shape and the dtype of each tensor."""
    return list(map(Tensor.size, tensors)), list(map(_dtype, tensors))


def layouts(tensors: list[Tensor]) -> tuple[list[torch.Size], list[Any], list[torch.dtype]]:
    """Return the shape, the strides and the dtype of each tensor."""
    sizes, dtypes = kinds(tensors)
    try:
        return sizes, list(map(Tensor.stride, tensors)), dtypes
    except RuntimeError:
        return sizes, [t.stride() if t.layout == torch.strided else None for t in tensors], dtypes


def _guards_of(kind: Any, tensors: list[Tensor], sizes: Iterable[Any], strides: Iterable[Any]) -> Callable[..., bool]:
    given = {"dynamic_dims_sizes": list(map(list, sizes)), "dynamic_dims_strides": list(map(list, strides))}
    passes: Callable[..., bool] = kind(*tensors, **given).check
    return passes


def _tensor_guards() -> Any:
    """Return Dynamo's guards for tensors if they exist and notice all relevant changes; else None."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        with torch.inference_mode(False):
            tensor = torch.empty(2, 3, device="cpu")
            passes = _guards_of(TensorGuards, [tensor], [(2, 3)], [(3, 1)])
            others = [
                tensor[:1],
                torch.empty(3, 2, device="cpu").t(),
                tensor.double(),
                tensor.detach().requires_grad_(),
            ]
            return TensorGuards if passes(tensor) and not any(map(passes, others)) else None
    except Exception:  # there are none, or they have another interface
        return None


_TensorGuards = _tensor_guards()


class Layouts:
    """The shapes, strides, dtypes, devices and ``requires_grad`` of some tensors.

    If possible, all are compared in one call of Dynamo's guards for tensors, which are private to PyTorch. These guards
    also reject a tensor if the calling thread is in another state, such as autocast. So tensors that do not pass are
    compared here.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._then = self._now()
        self._passes: Callable[..., bool] | None = None  # made when first needed

    def changed(self) -> bool:
        """Return True if anything has changed since this object was made."""
        if self._passes is not None and self._passes(*self.tensors):
            return False
        if self._now() != self._then:
            return True
        self._passes = self._guards()
        return False

    def laid_out_anew(self) -> bool:
        """Return True if anything except ``requires_grad`` has changed."""
        return self._now()[:-1] != self._then[:-1]

    def retyped(self) -> bool:
        """Return True if a dtype, device or shape has changed."""
        sizes, _, dtypes, devices, _ = self._now()
        return (sizes, dtypes, devices) != (self._then[0], *self._then[2:4])

    def _now(self) -> tuple[list[torch.Size], list[Any], list[torch.dtype], list[torch.device], list[bool]]:
        return *layouts(self.tensors), list(map(_device, self.tensors)), list(map(_requires_grad, self.tensors))

    def _guards(self) -> Callable[..., bool] | None:
        sizes, strides, *_ = self._then
        if _TensorGuards is None or None in strides:
            return None
        return _guards_of(_TensorGuards, self.tensors, sizes, strides)


class Change(Enum):
    """The kind of change of tensors since the last look; the last of these that applies."""

    NONE = auto()
    REQUIREMENTS = auto()  # another ``requires_grad``
    PLACES = auto()  # other data: moved, resized, or replaced through ``.data``; or other tensors, swapped in place
    KINDS = auto()  # another dtype, device or shape


class TensorSnapshot:
    """The addresses, layouts and versions of some tensors at the last look."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._versions = _versions(tensors)
        self._implementations = list(map(_implementation, tensors))
        self._addresses = addresses(tensors)
        self._layouts = Layouts(tensors)

    def change(self, *, gradients: bool = True) -> Change:
        """Return the kind of change since this object was made.

        Tensors that were swapped in place (``torch.utils.swap_tensors``) with their data at the same address count as
        changed only if ``gradients`` are wanted, which then go elsewhere.
        """
        moved = addresses(self.tensors) != self._addresses
        changed = self._layouts.changed()
        if moved or changed:
            if self._layouts.retyped():
                return Change.KINDS
            return Change.PLACES if moved or self._layouts.laid_out_anew() else Change.REQUIREMENTS
        swapped = gradients and list(map(_implementation, self.tensors)) != self._implementations
        return Change.PLACES if swapped else Change.NONE

    def take_requirements(self) -> None:
        """Record the present ``requires_grad`` of each tensor as seen."""
        self._layouts = Layouts(self.tensors)

    def written(self) -> list[int]:
        """Return the numbers of the tensors written since the last look, according to their version counters."""
        versions = _versions(self.tensors)
        if versions == self._versions:
            return []
        then, self._versions = self._versions, versions
        return [i for i, (old, new) in enumerate(zip(then, versions, strict=True)) if old != new]
