"""A parameter whose gradient is synchronised: what was planned for it, and whether it is still so."""

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.buckets import TensorSpec
from lockstep.distributed.dtensors import local_part, matching_gradient
from lockstep.errors import LayoutError


class ManagedParameter:
    """A parameter whose gradient is synchronised."""

    __slots__ = ("__weakref__", "_kind", "index", "name", "parameter", "sparse", "spec")

    def __init__(self, index: int, name: str, parameter: Parameter, sparse: bool) -> None:
        self.index, self.name, self.parameter, self.sparse = index, name, parameter, sparse
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        spec = TensorSpec.of(local_part(parameter), name)
        self.spec = TensorSpec(name, spec.shape, spec.stride, dtype, spec.device)
        self._kind = parameter.dtype, parameter.device

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
        """Raise :class:`LayoutError` if the parameter is not of the dtype and on the device that it had."""
        if (self.parameter.dtype, self.parameter.device) != self._kind:
            raise LayoutError(
                f"parameter {self.name} was {self._kind[0]} on {self._kind[1]} when its module was replicated, and is "
                f"{self.parameter.dtype} on {self.parameter.device} now; change dtype and device of a module before "
                "replicating it"
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
