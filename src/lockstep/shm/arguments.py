"""Checks and flattens the arguments of collectives, and writes the results back.

Each collective of PyTorch has one form with lists of tensors and an object of options, and one with single tensors and
values: ``allreduce([x], options)`` and ``allreduce(x, op, timeout)``, by position or by name. Methods of the ``shm``
group are written for the former; :func:`with_overloads` brings the latter to it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import DeviceError, LayoutError, UnknownOptionError

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""The name of each value in PyTorch's methods, and the name of its field in the options."""
_OF_OUR_OWN = frozenset(("factor", "rounded_to"))
"""Arguments that PyTorch's methods do not have, by name only."""


def with_overloads(
    options: Callable[[], Any], tensors: Sequence[str], values: Sequence[str] = (), single: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method take single values in place of options.

    The method takes one argument for each entry of ``tensors``, which lists the names of that argument, and then
    ``opts``. ``values`` are the names, in order, of the values that may be given instead of ``opts``. If ``single``, a
    single tensor becomes a list of one, and a list beside it becomes a list of one list.

    Example:
        >>> import torch.distributed as dist
        >>> @with_overloads(dist.ReduceOptions, ["tensors tensor"], ["root", "op", "timeout"])
        ... def reduce(self, tensors, opts):
        ...     return opts.rootRank
        >>> reduce(None, [], root=3)
        3
    """
    names = [each.split() for each in tensors]

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def collective(self: Any, *given: Any, **named: Any) -> Any:
            given_tensors = list(given[: len(names)])
            for known in names[len(given_tensors) :]:
                name = next((each for each in known if each in named), None)
                if name is None:
                    raise TypeError(f"{method.__name__}() needs {' or '.join(known)}")
                given_tensors.append(named.pop(name))
            given_values = given[len(names) :]
            if named.keys() - _OF_OUR_OWN or any(each is not None for each in given_values):
                opts = _options(method.__name__, given_values, named, options(), values)
            else:
                opts = options()
            return method(self, *(_as_lists(given_tensors) if single else given_tensors), opts, **named)

        return collective

    return decorate


def _options(what: str, given: Sequence[Any], named: dict[str, Any], opts: Any, values: Sequence[str]) -> Any:
    """Return the given options, or new ones from single values, which are removed from ``named``."""
    if "opts" in named:
        given = [named.pop("opts"), *given]
    if given and hasattr(given[0], "asyncOp"):
        if len(given) > 1 or named.keys() - _OF_OUR_OWN:
            raise TypeError(f"{what}() takes options, or single values; it was given both")
        return given[0]
    if len(given) > len(values):
        raise TypeError(f"{what}() takes the tensors and {', '.join(values)}; it was given {len(given)} values")
    asked = dict(zip(values, given, strict=False))
    for name in [each for each in named if each not in _OF_OUR_OWN]:
        if name not in values:
            raise UnknownOptionError(
                f"{what}() has no argument {name!r}; next to the tensors it takes {', '.join(values)}"
            )
        if name in asked:
            raise TypeError(f"{what}() was given {name} twice")
        asked[name] = named.pop(name)
    for name, value in asked.items():
        if value is not None:
            setattr(opts, _FIELDS[name], value)
    return opts


def _as_lists(given: list[Any]) -> list[Any]:
    """Wrap single tensors in lists, as collectives take them, and wrap a list beside a single tensor in a list."""
    if not any(isinstance(each, Tensor) for each in given):
        return given
    return [[each] if isinstance(each, Tensor) or each else each for each in given]


# ------------------------------------------------------------------------------------ tensors of any layout


def check_tensors(tensors: Sequence[Tensor], what: str) -> None:
    """Raise unless there is a tensor, and all are dense tensors of one dtype on the CPU."""
    if not tensors:
        raise LayoutError(f"{what}: expected at least one tensor, got none")
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise DeviceError(
                f"{what}: the shm process group moves tensors on the CPU, got one on {tensor.device}; use a group of "
                'that device\'s backend, such as dist.new_group(backend="nccl")'
            )
        if tensor.layout != torch.strided:
            raise LayoutError(f"{what}: expected dense tensors, got one with layout {tensor.layout}")
        if tensor.dtype != tensors[0].dtype:
            raise LayoutError(f"{what}: expected tensors of one dtype, got {tensors[0].dtype} and {tensor.dtype}")


def check_numel(tensors: Sequence[Tensor], numel: int, what: str) -> None:
    """Raise unless every tensor has that many elements."""
    for i, tensor in enumerate(tensors):
        if tensor.numel() != numel:
            raise LayoutError(f"{what}: expected {numel} elements, got {tensor.numel()} in tensor {i}")


def check_writable(tensors: Sequence[Tensor], what: str) -> None:
    """Raise if elements of an output tensor share memory, as in an expanded tensor."""
    for tensor in tensors:
        if not tensor.is_contiguous() and any(
            n > 1 and not by for n, by in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise LayoutError(
                f"{what}: a result cannot be written to an expanded tensor (shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}), whose elements share memory; give a tensor of its own, such as .contiguous()"
            )


def check_message(tensors: Sequence[Tensor], what: str) -> None:
    """Raise unless the elements of each tensor of a message lie one after the other: Gloo moves no others."""
    check_tensors(tensors, what)
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise LayoutError(
                f"{what}: expected contiguous tensors, got one of shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}; send tensor.contiguous(), and receive into a new tensor, to be copied"
            )


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in one dimension: the memory itself of a single plain, contiguous tensor, else a copy."""
    if len(tensors) == 1 and _is_plain(tensors[0]):
        tensor = tensors[0]
        return _alias(tensor, (tensor.numel(),), (1,))
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the result of a collective on what :func:`flatten` returned to the tensors, if that is a copy."""
    if len(tensors) == 1 and flat.data_ptr() == tensors[0].data_ptr():
        return
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        if tensor.is_conj():
            part = part.conj()
        if tensor.is_neg():
            part = part.neg()
        _alias(tensor, tensor.shape, tensor.stride()).copy_(part.view(tensor.shape))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _alias(tensor: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the memory of a tensor as a plain tensor with a version counter of its own.

    So autograd does not notice what collectives write, as with PyTorch's own.
    """
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tuple(shape), tuple(stride))
