"""Nested inputs and outputs: containers are opened, their leaves mapped, and the same containers built again.

Containers are tuples, named tuples, lists, dicts, subclasses of these, dataclasses, and every type registered with
PyTorch's pytree registry. Everything else is a leaf. This is the only file that uses ``torch.utils._pytree``.
"""

import dataclasses
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
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
    kind, base = type(value), _base(value, OrderedDict, defaultdict, dict)
    items = list(base.items(value))  # a subclass may do anything in its own method
    keys, children = [key for key, _ in items], [child for _, child in items]
    names = [f"[{key!r}]" for key in keys]
    if kind in (dict, OrderedDict):
        return Node(names, children, lambda new: kind(zip(keys, new, strict=True)))

    def bare(children: list[Any]) -> Any:
        new = base.__new__(kind)
        if base is defaultdict:
            defaultdict.__init__(new, value.default_factory)  # type: ignore[attr-defined]
        for key, child in zip(keys, children, strict=True):
            base.__setitem__(new, key, child)
        if _attributes(value) is value:
            object.__setattr__(new, "__dict__", new)
        return new

    def holds(new: Any, children: list[Any]) -> bool:
        return list(base.keys(new)) == keys and all(map(operator.is_, base.values(new), children))

    def from_items(children: list[Any]) -> Any:
        return kind(zip(keys, children, strict=True))

    def from_keywords(children: list[Any]) -> Any:
        return kind(**dict(zip(keys, children, strict=True)))

    ways: list[_Way] = [from_keywords, bare] if dataclasses.is_dataclass(value) else [from_items, from_keywords, bare]
    if isinstance(value, defaultdict | Counter):  # neither builds from items
        ways = [bare]
    return Node(names, children, _Rebuilding(value, path, children, ways, holds, keys))


def _open_registered(value: Any) -> Node:
    definition = pytree.SUPPORTED_NODES[type(value)]
    children, context = definition.flatten_fn(value)
    names = [f"[{i}]" for i in range(len(children))]
    return Node(names, list(children), lambda new: definition.unflatten_fn(new, context), context)


def _open_sequence(value: Any, path: str) -> Node:
    kind, fields = type(value), getattr(type(value), "_fields", None)
    base = _base(value, list, tuple)
    children = [*base.__iter__(value)]
    names = [f".{name}" for name in fields] if fields else [f"[{i}]" for i in range(len(children))]
    if kind is list or kind is tuple:
        return Node(names, children, kind)

    def bare(children: list[Any]) -> Any:
        if base is tuple:
            return tuple.__new__(kind, children)
        new = list.__new__(kind)
        list.extend(new, children)
        return new

    def holds(new: Any, children: list[Any]) -> bool:
        return base.__len__(new) == len(children) and all(map(operator.is_, base.__iter__(new), children))

    def from_arguments(children: list[Any]) -> Any:
        return kind(*children)

    ways: list[_Way] = [from_arguments, bare] if fields else [kind, from_arguments, bare]
    if base is list:
        ways = [bare]
    return Node(names, children, _Rebuilding(value, path, children, ways, holds))


def _open_dataclass(value: Any, path: str) -> Node:
    fields = [field for field in dataclasses.fields(value) if hasattr(value, field.name)]
    names = [field.name for field in fields]
    children = [getattr(value, name) for name in names]

    def constructed(children: list[Any]) -> Any:
        """Make one by its constructor, which derives what it derives from the new children."""
        pairs = list(zip(fields, children, strict=True))
        new = type(value)(**{field.name: child for field, child in pairs if field.init})
        for field, child in pairs:
            if not field.init and getattr(new, field.name, field.default) is field.default:
                object.__setattr__(new, field.name, child)
        return new

    def bare(children: list[Any]) -> Any:
        new = object.__new__(type(value))
        for name, child in zip(names, children, strict=True):
            object.__setattr__(new, name, child)
        return new

    def holds(new: Any, children: list[Any]) -> bool:
        return all(getattr(new, f.name) is child for f, child in zip(fields, children, strict=True) if f.init)

    build = _Rebuilding(value, path, children, [constructed, bare], holds, names)
    return Node([f".{name}" for name in names], children, build)


_Way = Callable[[list[Any]], Any]


def _base(value: Any, *bases: Any) -> Any:
    return next(base for base in bases if isinstance(value, base))


@dataclasses.dataclass(frozen=True)
class _Rebuilding:
    """Builds a container of a user's class again, with other children.

    The first of ``ways`` counts that makes one that ``holds`` these very children: a constructor may want other
    arguments, or take them for something else. Then it gets the attributes of ``value`` that it lacks: an attribute
    that is one of the old children becomes the new one. A container whose children are the same is the same object.
    """

    value: Any
    path: str
    children: list[Any]
    ways: list[_Way]
    holds: Callable[[Any, list[Any]], bool]
    names: list[Any] = dataclasses.field(default_factory=list)

    def __call__(self, children: list[Any]) -> Any:
        if self._is_same(children):
            return self.value
        new = self._made_of(children)
        for name, attribute in _own_attributes(self.value).items():
            if name not in _own_attributes(new) and not _is_computed_on_demand(self.value, name):
                object.__setattr__(new, name, self._followed(name, attribute, children))
        return new

    def _is_same(self, children: list[Any]) -> bool:
        """Return True if nothing has to be built; everybody gets a built-in container of his own."""
        same = len(children) == len(self.children) and all(map(operator.is_, children, self.children))
        return same and type(self.value) not in (defaultdict, Counter)

    def _made_of(self, children: list[Any]) -> Any:
        failure: Exception | None = None
        for way in self.ways:
            try:
                new = way(children)
                if type(new) is type(self.value) and self.holds(new, children):
                    return new
            except Exception as error:  # whatever it raises only means that this way does not work
                failure = error
        raise StructureError(
            f"cannot make another {type(self.value).__name__} for {self.path or 'the value'}, with other tensors in it"
            f"{'' if failure is None else f' ({failure!r})'}: neither its constructor nor a copy takes them. Register "
            "the type with torch.utils._pytree.register_pytree_node, or pass a plain tuple, list or dict"
        ) from failure

    def _followed(self, name: str, attribute: Any, children: list[Any]) -> Any:
        """Return an attribute for the new container: its child if it was a child, else the same, without tensors."""
        for i, child in enumerate(self.children):
            if attribute is child and (not isinstance(child, _ATOMS) or self.names[i : i + 1] == [name]):
                return children[i]
        if holds_tensors(attribute):
            raise StructureError(
                f"cannot make another {type(self.value).__name__} for {self.path or 'the value'}: its attribute {name} "
                "has tensors that are not among its items, and whose rows nobody knows. Make them items or fields, or "
                "register the type with torch.utils._pytree.register_pytree_node"
            )
        return attribute


_ATOMS = (str, bytes, int, float, complex, bool, type(None))


def _attributes(value: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of an object, if it has one, whatever its class makes of attributes."""
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def _own_attributes(value: Any) -> dict[str, Any]:
    """Return all attributes that an object itself has, in its ``__dict__`` and in ``__slots__``."""
    in_slots = {}
    for member in slot_members(type(value)):
        with suppress(AttributeError):
            in_slots[member.__name__] = member.__get__(value)
    return in_slots | _attributes(value)


def slot_members(kind: type) -> list[MemberDescriptorType]:
    """Return the descriptors of attributes that a class keeps in ``__slots__``."""
    owners = (vars(base).values() for base in kind.__mro__ if "__slots__" in vars(base))
    return [member for member in chain.from_iterable(owners) if isinstance(member, MemberDescriptorType)]


def _is_computed_on_demand(value: Any, name: str) -> bool:
    return any(isinstance(vars(base).get(name), cached_property) for base in type(value).__mro__)


def holds_tensors(value: Any) -> bool:
    """Return True if a value is a tensor or has one among its attributes, or in containers and other objects there.

    Not counted are tensors of modules and parameters, which are no part of a batch, and variables of closures.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting and len(seen) < _AT_MOST:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            if not isinstance(each, torch.nn.Parameter):
                return True
        elif id(each) not in seen and not isinstance(each, _NOT_LOOKED_INTO):
            seen.add(id(each))
            waiting += _parts(each)
    return False


_AT_MOST = 1000
"""The largest number of objects inside one that are looked at."""
_NOT_LOOKED_INTO = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.nn.Module, *_ATOMS)


def _parts(value: Any) -> list[Any]:
    """Return the members of a container, and the attributes of an object; no method of its class is called."""
    parts = list(_own_attributes(value).values())
    base = next((b for b in (dict, list, tuple, set, frozenset, deque) if isinstance(value, b)), None)
    if base is not None:
        parts += islice(dict.values(value) if base is dict else base.__iter__(value), _AT_MOST)
    return parts


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

    def build(self, leaves: Iterable[Any]) -> Any:
        """Return the value with its leaves replaced, in order; from an iterator, take as many as there are."""
        return _build(self._shape, iter(leaves))


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
