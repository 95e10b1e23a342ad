"""Nested inputs and outputs: open a container, map its leaves, build it again.

Containers are tuples, named tuples, lists, dicts, subclasses of these, dataclasses, and every type registered with
PyTorch's pytree registry. Everything else is a leaf. This is the only file that uses ``torch.utils._pytree``.
"""

import copy
import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
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
    """The children of a container, or None for a leaf."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, PackedSequence):
        raise StructureError(
            f"{path or 'the value'} is a PackedSequence, whose rows cannot be split or put together along a "
            "dimension; pass the padded tensor and the lengths, and pack inside forward"
        )
    if isinstance(value, dict) and _native(value):
        return _open_dict(value)
    if type(value) in pytree.SUPPORTED_NODES and not _native(value):
        return _open_registered(value)
    if isinstance(value, tuple | list):
        return _open_sequence(value)
    if dataclasses.is_dataclass(value):
        return _open_dataclass(value)
    return None


def _native(value: Any) -> bool:
    """Whether this file opens the type itself: the built-in ones, and subclasses that nobody registered."""
    return type(value) in (tuple, list, dict, OrderedDict, defaultdict) or type(value) not in pytree.SUPPORTED_NODES


def _open_dict(value: dict[Any, Any]) -> Node:
    keys, kind, has_fields = list(value), type(value), bool(dataclasses.is_dataclass(value))

    def build(children: list[Any]) -> Any:
        if isinstance(value, defaultdict | Counter):  # neither builds from items
            new = copy.copy(value)
            dict.update(new, zip(keys, children, strict=True))
            return new
        if has_fields:
            return kind(**dict(zip(keys, children, strict=True)))
        return kind(zip(keys, children, strict=True))

    return Node([f"[{key!r}]" for key in keys], list(value.values()), build)


def _open_registered(value: Any) -> Node:
    definition = pytree.SUPPORTED_NODES[type(value)]
    children, context = definition.flatten_fn(value)
    names = [f"[{i}]" for i in range(len(children))]
    return Node(names, list(children), lambda new: definition.unflatten_fn(new, context), context)


def _open_sequence(value: Any) -> Node:
    kind, fields = type(value), getattr(value, "_fields", None)
    names = [f".{name}" for name in fields] if fields else [f"[{i}]" for i in range(len(value))]

    def build(children: list[Any]) -> Any:
        if kind is list or kind is tuple:
            return kind(children)
        if isinstance(value, list):
            new = copy.copy(value)
            new[:] = children
            return new
        return kind(*children) if fields else kind(children)

    return Node(names, list(value), build)


def _open_dataclass(value: Any) -> Node:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]

    def build(children: list[Any]) -> Any:
        new = copy.copy(value)  # neither __init__ nor __post_init__ runs: a chunk of a checked value needs no checks
        for name, child in zip(names, children, strict=True):
            object.__setattr__(new, name, child)
        return new

    return Node([f".{name}" for name in names], [getattr(value, name) for name in names], build)


class Leaf(NamedTuple):
    """A leaf, and where it is: ``inputs[0]['mask'].rows``."""

    path: str
    value: Any


class Tree:
    """A nested value taken apart into :attr:`leaves`; :meth:`build` puts a like one together from new leaves.

    Values of the types in ``whole`` are leaves, whatever they hold.
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
        """The value with its leaves replaced, in their order."""
        remaining = iter(leaves)
        return _build(self._shape, remaining)


def _build(shape: Any, leaves: Iterator[Any]) -> Any:
    if shape is None:
        return next(leaves)
    build, children = shape
    return build([_build(child, leaves) for child in children])


def tree_map(function: Callable[[Any], Any], value: Any, path: str = "value", whole: tuple[type, ...] = ()) -> Any:
    """The value with ``function`` applied to every leaf; values of the types in ``whole`` are leaves, too."""
    tree = Tree(value, path, whole)
    return tree.build([function(leaf.value) for leaf in tree.leaves])


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor among the leaves."""
    return (leaf.value for leaf in Tree(value, "value").leaves if isinstance(leaf.value, torch.Tensor))
