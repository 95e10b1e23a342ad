"""Nested inputs and outputs: containers are opened, their leaves mapped, and the same containers built again.

Containers are tuples, named tuples, lists, dicts, subclasses of these, dataclasses, and every type registered with
PyTorch's pytree registry. Everything else is a leaf. This is the only file that uses ``torch.utils._pytree``.
"""

import copy
import dataclasses
import operator
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from lockstep.errors import StructureError


class Node(NamedTuple):
    """An opened container: a name for each child, the children, and how to build a like container of new ones."""

    names: list[str]
    children: list[Any]
    build: Callable[[list[Any]], Any]
    context: Any = None  # what a registered type keeps beside its children


_LEAVES = (torch.Tensor, torch.Size, str, bytes, int, float, complex, bool, type(None), type, torch.nn.Module)


def open_node(value: Any, path: str = "") -> Node | None:
    """Return the opened container; None for a leaf."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, PackedSequence):
        raise StructureError(
            f"{path or 'the value'} is a PackedSequence, whose rows cannot be split or put together along a "
            "dimension; pass the padded tensor and the lengths, and pack inside forward"
        )
    if isinstance(value, dict) and _native(value):
        return _open_dict(value, path)
    if type(value) in pytree.SUPPORTED_NODES and not _native(value):
        return _open_registered(value)
    if isinstance(value, tuple | list):
        return _open_sequence(value, path)
    if dataclasses.is_dataclass(value):
        return _open_dataclass(value, path)
    return None


def _native(value: Any) -> bool:
    """Return True if this file opens the type itself: built-in types, and subclasses that are not registered."""
    return type(value) in (tuple, list, dict, OrderedDict, defaultdict) or type(value) not in pytree.SUPPORTED_NODES


def _open_dict(value: dict[Any, Any], path: str) -> Node:
    keys, kind = list(value), type(value)
    names, children = [f"[{key!r}]" for key in keys], list(value.values())
    if kind in (dict, OrderedDict):
        return Node(names, children, lambda new: kind(zip(keys, new, strict=True)))
    has_fields = bool(dataclasses.is_dataclass(value))

    def construct(children: list[Any]) -> Any:
        items = zip(keys, children, strict=True)
        return kind(**dict(items)) if has_fields else kind(items)

    def replace(children: list[Any]) -> Any:
        new = copy.copy(value)
        for key, child in zip(keys, children, strict=True):
            if has_fields:
                new[key] = child
            else:
                dict.__setitem__(new, key, child)
        return new

    def holds(new: Any, children: list[Any]) -> bool:
        return list(new) == keys and all(map(operator.is_, new.values(), children))

    ways = [replace] if isinstance(value, defaultdict | Counter) else [construct, replace]  # neither builds from items
    return Node(names, children, partial(_first_that_holds, ways, holds, kind, path))


def _open_registered(value: Any) -> Node:
    definition = pytree.SUPPORTED_NODES[type(value)]
    children, context = definition.flatten_fn(value)
    names = [f"[{i}]" for i in range(len(children))]
    return Node(names, list(children), lambda new: definition.unflatten_fn(new, context), context)


def _open_sequence(value: Any, path: str) -> Node:
    kind, fields = type(value), getattr(value, "_fields", None)
    names = [f".{name}" for name in fields] if fields else [f"[{i}]" for i in range(len(value))]
    if kind is list or kind is tuple:
        return Node(names, list(value), kind)

    def construct(children: list[Any]) -> Any:
        return kind(*children) if fields else kind(children)

    def replace(children: list[Any]) -> Any:
        if isinstance(value, list):
            new = copy.copy(value)
            new[:] = children
        else:  # its own __new__ may take anything; a shallow copy would not call it either
            new = tuple.__new__(kind, children)
            vars(new).update(vars(value))
        return new

    def holds(new: Any, children: list[Any]) -> bool:
        return len(new) == len(children) and all(map(operator.is_, new, children))

    ways = [replace] if isinstance(value, list) else [construct, replace]
    return Node(names, list(value), partial(_first_that_holds, ways, holds, kind, path))


def _first_that_holds(
    ways: Sequence[Callable[[list[Any]], Any]],
    holds: Callable[[Any, list[Any]], bool],
    kind: type,
    path: str,
    children: list[Any],
) -> Any:
    """Return the result of the first of ``ways`` that has these very children.

    A user's constructor may want other arguments than the children, or take them for something else.
    """
    failure: Exception | None = None
    for way in ways:
        try:
            new = way(children)
            if type(new) is kind and holds(new, children):
                return new
        except Exception as error:  # whatever it raises only means that this way does not work
            failure = error
    raise StructureError(
        f"cannot make another {kind.__name__} for {path or 'the value'}, with other tensors in it"
        f"{'' if failure is None else f' ({failure!r})'}: neither its constructor nor a copy takes them. Register the "
        "type with torch.utils._pytree.register_pytree_node, or pass a plain tuple, list or dict"
    ) from failure


def _open_dataclass(value: Any, path: str) -> Node:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]

    def replace(children: list[Any]) -> Any:
        new = copy.copy(value)  # neither __init__ nor __post_init__ runs: a chunk of a checked value needs no checks
        for name, child in zip(names, children, strict=True):
            object.__setattr__(new, name, child)
        return new

    build = partial(_first_that_holds, [replace], lambda new, children: True, type(value), path)
    return Node([f".{name}" for name in names], [getattr(value, name) for name in names], build)


class Leaf(NamedTuple):
    """A leaf and its path: ``inputs[0]['mask'].rows``."""

    path: str
    value: Any


class Tree:
    """A nested value taken apart into :attr:`leaves`; :meth:`build` makes a value like it from new leaves.

    Values of the types in ``whole`` are leaves, whatever they contain.
    """

    def __init__(self, value: Any, path: str, whole: tuple[type, ...] = ()) -> None:
        self.leaves: list[Leaf] = []
        self._whole = whole
        self._shape = self._open(value, path)

    def _open(self, value: Any, path: str) -> Any:
        node = None if isinstance(value, self._whole) else open_node(value, path)
        if node is None:
            self.leaves.append(Leaf(path, value))
            return None
        pairs = zip(node.names, node.children, strict=True)
        return node.build, [self._open(child, (path + name).removeprefix(".")) for name, child in pairs]

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return the value with its leaves replaced, in order."""
        remaining = iter(leaves)
        return _build(self._shape, remaining)


def _build(shape: Any, leaves: Iterator[Any]) -> Any:
    if shape is None:
        return next(leaves)
    build, children = shape
    return build([_build(child, leaves) for child in children])


def tree_map(function: Callable[[Any], Any], value: Any, path: str = "value", whole: tuple[type, ...] = ()) -> Any:
    """Apply ``function`` to every leaf; values of the types in ``whole`` are leaves, too."""
    tree = Tree(value, path, whole)
    return tree.build([function(leaf.value) for leaf in tree.leaves])


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor among the leaves."""
    return (leaf.value for leaf in Tree(value, "value").leaves if isinstance(leaf.value, torch.Tensor))
