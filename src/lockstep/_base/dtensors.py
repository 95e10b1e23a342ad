"""Parameters that are ``DTensor``s: one dimension of a larger mesh replicates what other dimensions have sharded.

Gradients are reduced as local tensors; each parameter then gets a ``DTensor`` again.
"""

import sys
from typing import Any

from torch import Tensor


def dtensor_class() -> Any:
    """Return the class ``DTensor``, or None as long as nothing has imported it: then there are no instances."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_dtensor(tensor: Tensor) -> bool:
    """Return True if a tensor is a ``DTensor``."""
    kind = dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Tensor) -> Tensor:
    """Return the plain tensor that this rank holds of a ``DTensor``; a plain tensor is returned as it is."""
    if not is_dtensor(tensor):
        return tensor
    return tensor.detach()._local_tensor  # type: ignore[no-any-return, attr-defined]


def matching_gradient(grad: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, laid out over the mesh as the parameter is."""
    if not is_dtensor(grad):
        return grad
    if grad.placements != parameter.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return local_part(grad)


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient for a parameter, made from this rank's part of it."""
    if not is_dtensor(parameter):
        return local
    return dtensor_class().from_local(  # type: ignore[no-any-return]
        local,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
