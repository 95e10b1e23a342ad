"""Finds values that ``torch.load(weights_only=True)`` could not read back, before they are written."""

import io
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from lockstep._base.dtensors import is_dtensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)
_TENSORS = (Tensor, torch.nn.Parameter)
_AT_MOST = 3
_NOT_PICKLED = "which cannot be pickled"


def problems(value: Any, name: str, *, whole: bool) -> list[str]:
    """Return the parts of a value that could not be read back, with place and type; only the first few.

    With ``whole``, the value has to be the same on all ranks; then a part of a sharded tensor is a problem, too.
    """
    found = _look(value, name, whole, set())
    return [text for text, _ in zip(found, range(_AT_MOST), strict=False)]


def advice(found: list[str]) -> str:
    """Return what to do about the problems: a sentence."""
    instead = (
        "Save tensors, numbers, strings, and dicts, lists and tuples of these (an array as torch.from_numpy(array), "
        "one of NumPy's numbers as number.item(), an object as its state_dict(), a defaultdict as dict(it))"
    )
    if all(_NOT_PICKLED in each for each in found):
        return f"{instead}; leave out functions, locks, generators and files, and make them anew before you resume"
    return f"{instead}; or allow a type by torch.serialization.add_safe_globals()"


def _look(value: Any, name: str, whole: bool, seen: set[int]) -> Iterator[str]:
    kind = type(value)
    if kind in _PLAIN or id(value) in seen:
        return
    seen.add(id(value))
    if kind in (dict, OrderedDict, Counter):
        for key, child in value.items():
            yield from _look(key, f"the key {key!r} of {name}", whole, seen)
            yield from _look(child, f"{name}[{key!r}]", whole, seen)
        yield from _attributes(value, name, whole, seen)
    elif kind in (list, tuple):
        for index, child in enumerate(value):
            yield from _look(child, f"{name}[{index}]", whole, seen)
    elif kind is set:
        for child in value:
            yield from _look(child, f"{child!r} in {name}", whole, seen)
    elif kind in _TENSORS:
        yield from _attributes(value, name, whole, seen)
    elif whole and isinstance(value, Tensor) and is_dtensor(value):
        yield (
            f"{name} is a DTensor, of which each rank has a part; what is sharded is saved by "
            "torch.distributed.checkpoint"
        )
    else:
        yield from _other(value, name)


def _attributes(value: Any, name: str, whole: bool, seen: set[int]) -> Iterator[str]:
    """Look at the attributes of state dicts and tensors, which are saved with them."""
    for attribute, child in getattr(value, "__dict__", {}).items():
        yield from _look(child, f"{name}.{attribute}", whole, seen)


def _other(value: Any, name: str) -> Iterator[str]:
    """Try to save a value of an unknown type: it may have been registered with ``torch.serialization``."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        gist = re.split(r"[\n]", str(error) or type(error).__name__)[0]
        yield f"{name} is a {kind}, {_NOT_PICKLED}: {gist}"
        return
    buffer.seek(0)
    unsafe = get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        yield f"{name} is a {kind}, which torch.load(weights_only=True) does not read back ({', '.join(unsafe)})"
