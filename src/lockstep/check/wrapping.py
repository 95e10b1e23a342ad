"""The ways of wrapping a model that a check knows by name, and the parameters of a wrapped model by their old names."""

import importlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.errors import OptionError

Wrap = Callable[[Module], Module]


def _lockstep(model: Module) -> Module:
    from lockstep.distributed import replicate

    return replicate(model)


def _ddp(model: Module) -> Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def _fsdp2(model: Module) -> Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    return model


def _accelerate(model: Module) -> Module:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    wrapped: Module = accelerator.prepare(model)
    return wrapped


WRAPS: dict[str, Wrap] = {"lockstep": _lockstep, "ddp": _ddp, "fsdp2": _fsdp2, "accelerate": _accelerate}


def named_inside(wrapped: Any, names: Collection[str]) -> Module:
    """Return the module inside of a wrapped one that has parameters of these names."""
    if isinstance(wrapped, Module):
        for each in wrapped.modules():
            if set(names) <= {name for name, _ in each.named_parameters()}:
                return each
    raise OptionError(
        f"the function that wraps the model has returned a {type(wrapped).__name__} in which no module has the "
        f"model's parameters ({', '.join(list(names)[:3])}, ...); return the model, or a module that contains it"
    )


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor; of a ``DTensor``, which all ranks call this for, the whole one."""
    full = getattr(tensor, "full_tensor", None)
    value: Tensor = tensor.detach() if full is None else full().detach()
    return value.clone()
