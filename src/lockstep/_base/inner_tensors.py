"""The tensors in which the values of a parameter or buffer lie.

A parameter is more than one tensor of memory. It has a class, attributes and inner tensors: a ``DTensor`` has its local
part, a class with ``__tensor_flatten__`` (quantised weights) the tensors that this method names, a sparse tensor
indices and values. Classes that only add attributes, or override ``__torch_function__``, keep their values in memory
of their own, as a plain tensor does, and perhaps more of them in attributes (``quant_state`` of bitsandbytes).

:func:`inner_tensors` is what is sent, digested and compared between ranks, and :func:`describe` what must be the same
before: everything that is not a tensor.
"""

import copy
import ctypes
import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep._base.devices import CPU, direct_copy_works
from lockstep._base.dtensors import is_dtensor, local_part
from lockstep.errors import NotReplicableError

_COPIED = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
"""The dtypes for which every operation exists that moves or compares values."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype of the same size in which values of any other dtype are moved."""
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_OWN_CLASSES = (Tensor, Parameter)
_FACTS = bool | int | float | complex | str | bytes | None | torch.dtype | torch.layout
_LEAVES = (Tensor, Enum, Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.Generator)
_SHOWN = 300
"""The length of a description that is shown whole."""


def has_own_dispatch(tensor: Tensor) -> bool:
    """Return True if a tensor's class has ``__torch_dispatch__``, so that its values lie elsewhere."""
    return type(tensor) not in _OWN_CLASSES and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_plain(tensor: Tensor) -> bool:
    """Return True for a strided tensor whose values lie in its own memory, whatever attributes its class adds."""
    return tensor.layout is torch.strided and not tensor.is_nested and not has_own_dispatch(tensor)


def is_ordinary(tensor: Tensor) -> bool:
    """Return True for a plain tensor of PyTorch's own classes, which is no more than its memory."""
    is_own = type(tensor) in _OWN_CLASSES
    return is_own and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors in which the values of a tensor lie; writing to them writes the tensor.

    They have no graph, and a dtype that every operation can copy: others are seen as integers of the same size. The
    attributes of a frozen tensor of another class than PyTorch's own belong to its values.

    Raises :class:`NotReplicableError` for a class that does not say where its values are.
    """
    if tensor.dtype in _COPIED and is_ordinary(tensor):
        return [tensor.detach()]
    return [part for part in _parts(tensor) if isinstance(part, Tensor)]


def describe(tensor: Tensor) -> str:
    """Return what else than values must be the same on all ranks; empty for an ordinary tensor."""
    if is_ordinary(tensor):
        return ""
    texts = [_shown(part) if isinstance(part, Tensor) else str(part) for part in _parts(tensor)]
    text = f"{type(tensor).__name__} of {', '.join(texts)}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ... (sha256 {hashlib.sha256(text.encode()).hexdigest()})"


def bits(tensor: Tensor) -> Tensor:
    """Return a view of a strided tensor with a dtype that every operation can copy, for its own dtype or instead."""
    if tensor.dtype in _COPIED:
        return tensor
    same_size = _BITS[tensor.dtype.itemsize]
    if tensor.is_quantized:  # view() would give a quantised tensor again
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=same_size, device=tensor.device).set_(tensor.untyped_storage(), *place)
    return tensor.view(same_size)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the values of a plain tensor as bytes in one dimension: a view if they lie one after the other."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # view(-1) keeps any stride of a single element


def read_bytes(tensor: Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the values of a plain tensor as a buffer of bytes on the CPU; PyTorch's own way needs NumPy."""
    flat = as_bytes(tensor.detach().cpu())
    found = (ctypes.c_ubyte * len(flat)).from_address(flat.data_ptr())
    found.owner = flat  # type: ignore[attr-defined]  # of the memory
    return found


def like(value: Tensor, parameter: Tensor, *, requires_grad: bool) -> Tensor:
    """Return a parameter of the same class with other memory, ``value``, and no attributes yet."""
    if type(parameter) in _OWN_CLASSES:
        return Parameter(value, requires_grad)
    return torch.Tensor._make_subclass(type(parameter), value, requires_grad)


@torch.no_grad()
def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor on a device, with its class, its inner tensors and its attributes.

    Attributes are shared; for another device, tensors in them are copied.
    """
    with nullcontext() if has_own_dispatch(tensor) else torch._C.DisableTorchFunctionSubclass():
        made = _sent(tensor.detach(), device)
    if not has_own_dispatch(tensor):
        made = made if type(tensor) is Tensor else like(made, tensor, requires_grad=False)
    elif isinstance(tensor, Parameter):
        made = Parameter(made, requires_grad=False)
    own = vars(made)
    others = {name: each for name, each in vars(tensor).items() if name not in own}
    own.update(others if device == tensor.device else _moved(others, device))
    return made


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device, by way of the host where a direct one would have other values."""
    via = device if direct_copy_works(tensor.device, device) else CPU
    return tensor.to(via, copy=True).to(device)


def _moved(attributes: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy attributes, with the tensors in them on another device; modules and code are shared."""
    memo = {id(each): _sent(each, device) if isinstance(each, Tensor) else each for each in _leaves_of(attributes)}
    moved: dict[str, Any] = copy.deepcopy(attributes, memo)
    return moved


def inner_tensors_of(name: str, tensor: Tensor) -> list[Tensor]:
    """Return what :func:`inner_tensors` does for a parameter or buffer with a name, which its error has, too."""
    try:
        return inner_tensors(tensor)
    except NotReplicableError as error:
        raise NotReplicableError(f"{name} cannot be made equal on all ranks: {error}") from None


def check_trained(name: str, parameter: Tensor) -> None:
    """Raise :class:`NotReplicableError` for a parameter whose gradient is not known to be a plain tensor or
    ``DTensor``."""
    if not (is_plain(parameter) or is_dtensor(parameter)):
        raise NotReplicableError(
            f"parameter {name} is trained and a {_kind(parameter)}, whose gradients cannot be reduced: train a "
            "torch.nn.Parameter, or a subclass without __torch_dispatch__; or freeze it (requires_grad_(False)) and "
            "train others beside it; or leave it out, by ignored_modules or params_and_buffers_to_ignore"
        )


def _kind(tensor: Tensor) -> str:
    if has_own_dispatch(tensor):
        return type(tensor).__name__
    return "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"


def _parts(tensor: Tensor) -> Iterator[Any]:
    """Yield the plain tensors that a tensor is made of, and the facts about it that are not tensors."""
    if is_dtensor(tensor):
        yield from _parts(local_part(tensor))
    elif hasattr(type(tensor), "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            inner = getattr(tensor, name)
            yield name
            if isinstance(inner, Tensor):
                yield from _parts(inner)
        yield from _found_in(context)
    elif has_own_dispatch(tensor) or tensor.is_nested or tensor.layout not in (torch.strided, *_SPARSE):
        raise NotReplicableError(
            f"a {_kind(tensor)} does not say where its values lie, as a class does with __tensor_flatten__; leave it "
            "out, by ignored_modules or params_and_buffers_to_ignore, and give it the same values on every rank"
        )
    else:
        yield from _of_memory(tensor)


def _of_memory(tensor: Tensor) -> Iterator[Any]:
    with torch._C.DisableTorchFunctionSubclass() if type(tensor) not in _OWN_CLASSES else nullcontext():
        own = Tensor.detach(tensor)  # a class may have a method of that name which returns no tensor
        if own.layout is not torch.strided:
            yield own.layout
            if own.layout is torch.sparse_coo:
                yield f"coalesced: {own.is_coalesced()}"
            for method in _SPARSE[own.layout]:
                yield from _of_memory(getattr(own, method)())
        else:
            if own.is_quantized:
                yield _quantizer(own)
            if own.dtype not in _COPIED:
                yield own.dtype
            yield bits(own)
    if type(tensor) not in _OWN_CLASSES and not tensor.requires_grad:
        yield from _found_in(vars(tensor))


def _quantizer(tensor: Tensor) -> str:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{tensor.qscheme()}, scale {tensor.q_scale()}, zero point {tensor.q_zero_point()}"
    numbers = tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()
    return f"{tensor.qscheme()}, axis {tensor.q_per_channel_axis()}, scales {numbers[0]}, zero points {numbers[1]}"


def _found_in(value: Any) -> Iterator[Any]:
    """Yield the inner tensors of tensors and the simple values inside containers and objects.

    Modules, code, tensors that need a gradient and devices, which differ between ranks, do not belong to the values.
    """
    for each in _leaves_of(value):
        if isinstance(each, Enum):
            yield each.name
        elif isinstance(each, _FACTS):
            yield repr(each)
        elif isinstance(each, Tensor) and not each.requires_grad:
            yield from _parts(each)


def _leaves_of(value: Any) -> Iterator[Any]:
    """Yield what lies inside of containers and objects and is neither: tensors, simple values, modules, code."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, _FACTS):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, _LEAVES):
                yield each
            elif isinstance(each, dict):
                waiting += reversed([part for pair in each.items() for part in pair])
            elif isinstance(each, list | tuple):
                waiting += reversed(each)
            elif hasattr(each, "__dict__"):
                waiting.append(vars(each))


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
