"""A parameter whose gradient is synchronised: what was planned for it, and the check that it is still so."""

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.buckets import TensorSpec
from lockstep.dtensors import local_part, matching_gradient
from lockstep.errors import LayoutError


class ManagedParameter:
    """A parameter whose gradient is synchronised."""

    __slots__ = ("__weakref__", "_kind", "index", "name", "parameter", "sparse", "spec")

    def __init__(self, index: int, name: str, parameter: Parameter, sparse: bool) -> None:
        self.index, self.name, self.parameter, self.sparse = index, name, parameter, sparse
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        spec = TensorSpec.of(local_part(parameter), name)
        self.spec = TensorSpec(name, spec.shape, spec.stride, dtype, spec.device)
        self._kind = _kind_of(parameter)

    def take(self, grad: Tensor) -> Tensor:
        """The gradient of this rank as a plain tensor; raises if it is not of the planned dtype and shape."""
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
        """Raise :class:`LayoutError` if the parameter is not of the dtype, shape and device that it had."""
        kind = _kind_of(self.parameter)
        if kind != self._kind:
            raise LayoutError(
                f"parameter {self.name} was {_describe(*self._kind)} when its module was replicated, and is "
                f"{_describe(*kind)} now; change shape, dtype and device of a module before replicating it"
            )

    def zeros(self) -> Tensor:
        """No gradient: zeros of the planned dtype and shape, without any entry if gradients are sparse."""
        spec = self.spec
        if self.sparse:
            size = (1, 0), (0, *spec.shape[1:])
            indices = torch.empty(size[0], dtype=torch.int64, device=spec.device)
            values = torch.empty(size[1], dtype=spec.dtype, device=spec.device)
            return torch.sparse_coo_tensor(indices, values, spec.shape, check_invariants=True).coalesce()
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).zero_()


def _kind_of(parameter: Parameter) -> tuple[torch.dtype, torch.Size, torch.device]:
    return parameter.dtype, parameter.shape, parameter.device


def _describe(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    return f"{dtype}, shape {tuple(shape)}, on {device}"
