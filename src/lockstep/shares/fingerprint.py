"""``fingerprint()``: one line that is the same for two runs if, and only if, their models have the same bits."""

import hashlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lockstep._base.dtensors import local_part
from lockstep._base.inner_tensors import describe, inner_tensors, read_bytes
from lockstep._base.wrapper import unwrapped
from lockstep.errors import NotReplicableError, OptionError


def fingerprint(model: Module, optimizer: Optimizer | None = None) -> str:
    """Return the SHA-256 of a model's parameters and buffers, and an optimizer's state, as 64 hexadecimal digits.

    Two runs that print the same line have the same bits in each parameter and in each buffer of the ``state_dict``,
    with the same names, dtypes and shapes, and in the optimizer's state of each parameter. Hyperparameters, such as the
    learning rate, and devices do not count. Values are copied to the CPU first.

    Args:
        model: A module, replicated or not; for a ``DistributedDataParallel`` or a compiled module, the one inside.
        optimizer: The optimizer of its parameters.

    Communicates nothing. For a ``DTensor`` it covers the part that this rank holds. A sharded optimizer counts as the
    plain one: then every rank has to call this function, which communicates what
    ``full_state_dict(optimizer, all_ranks=True)`` does.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> _ = torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
        >>> fingerprint(model)[:16]
        '2648152e3fcf9f0c'

    Raises:
        OptionError: A tensor's class does not say where its values lie (``__tensor_flatten__``).

    PyTorch has no such function.
    """
    plain = unwrapped(model)
    digest = hashlib.sha256()
    for name, value in (*_named_tensors(plain), *_optimizer_state(plain, optimizer)):
        if isinstance(value, Tensor):
            _add(digest, name, local_part(value))
        else:
            digest.update(f"{name}\0{value!r}\0".encode())
    return digest.hexdigest()


def _named_tensors(model: Module) -> Iterator[tuple[str, Any]]:
    yield from (("parameter " + name, parameter) for name, parameter in model.named_parameters())
    passing = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in module._non_persistent_buffers_set
    }
    yield from (("buffer " + name, buffer) for name, buffer in model.named_buffers() if name not in passing)


def _optimizer_state(model: Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Any]]:
    if optimizer is None:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gathered = getattr(optimizer, "gathered_state_dict", None)  # of a sharded optimizer
    numbered = gathered(True)["state"] if gathered is not None else None
    for number, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {}) if numbered is None else numbered.get(number, {})
        for key in sorted(state, key=str):
            yield f"state {key} of {names.get(id(parameter), number)}", state[key]


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name}\0{tensor.dtype}{tuple(tensor.shape)}\0".encode())
    try:
        inner = inner_tensors(tensor)
    except NotReplicableError as error:
        raise OptionError(f"fingerprint() cannot read {name}: {error}") from None
    digest.update(describe(tensor).encode())
    for each in inner:
        digest.update(read_bytes(each))
