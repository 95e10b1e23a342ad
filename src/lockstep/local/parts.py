"""Opens values that may lead into a module tree, and builds equal values from other parts.

Values that are opened: bound methods, partial functions, weak references, dictionaries, lists, tuples, sets, deques,
dataclasses, and subclasses of these. Objects of other kinds, and the variables that a function closes over, are not.
"""

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch

# values without parts that could lead into the tree
ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.FunctionType,
    torch.device,
    torch.dtype,
)


def parts_of(value: Any) -> list[Any] | None:
    """Return the parts of ``value`` that may lead into the tree; None for a value that is not opened."""
    found = None if isinstance(value, ATOMS) else opened(value)
    return None if found is None else found[0]


def opens(value: Any) -> bool:
    """Return True if a value is of a kind that is opened."""
    kinds = (dict, list, tuple, set, frozenset, deque, types.MethodType, functools.partial, weakref.ref)
    return isinstance(value, kinds) or (not isinstance(value, ATOMS) and is_dataclass(value))


def opened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the parts of ``value`` that may lead into the tree, and a function that rebuilds it from other parts."""
    if isinstance(value, types.MethodType):
        return [value.__self__], lambda new: types.MethodType(value.__func__, new[0])
    if isinstance(value, functools.partial):
        count, names = len(value.args), list(value.keywords)
        parts = [value.func, *value.args, *value.keywords.values()]
        return parts, lambda new: functools.partial(
            new[0], *new[1 : 1 + count], **dict(zip(names, new[1 + count :], strict=True))
        )
    if isinstance(value, weakref.ref):
        return [value()], lambda new: weakref.ref(new[0])
    if isinstance(value, dict):
        count = len(value)
        return [*value, *value.values()], lambda new: refilled(value, dict(zip(new[:count], new[count:], strict=True)))
    if isinstance(value, tuple):
        named = hasattr(value, "_fields")
        return list(value), lambda new: type(value)(*new) if named else type(value)(new)
    if isinstance(value, list | set | frozenset | deque):
        return list(value), lambda new: refilled(value, new)
    if is_dataclass(value):
        names = [f.name for f in fields(value) if hasattr(value, f.name)]
        return [getattr(value, name) for name in names], lambda new: _with_fields(value, names, new)
    return None


def refilled(value: Any, new: Any) -> Any:
    """Return a container like ``value`` with other members or items."""
    if isinstance(value, frozenset):
        return type(value)(new)
    filled = copy.copy(value)
    filled.clear()
    filled.extend(new) if isinstance(value, list | deque) else filled.update(new)
    return filled


def _with_fields(value: Any, names: list[str], new: list[Any]) -> Any:
    filled = copy.copy(value)
    for name, part in zip(names, new, strict=True):
        object.__setattr__(filled, name, part)
    return filled
