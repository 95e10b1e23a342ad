"""Opens values that may lead into a module tree, and tells whether the objects in them are still the same.

Values that are opened: bound methods, partial functions, weak references, dictionaries, lists, tuples, sets, deques,
dataclasses, and subclasses of these. Objects of other kinds, and the variables that a function closes over, are not.

:class:`Contents` compares any number of containers in one pass, by identity, in order. :class:`Inside` describes an
attribute's value: whether it leads into the module tree, which tensors are in it, and which containers have to be
watched. A value that leads into the tree is watched completely, since each replica has one of its own. Any other value
is the same object in all replicas, so only a new part that leads into the tree has to be noticed: in a value with more
than :data:`BRIEF` parts, such as a vocabulary, only the sizes and the first and last few parts of each container are
compared.
"""

import copy
import functools
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import fields, is_dataclass
from itertools import chain, islice
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


BRIEF = 1000  # a value with at most this many parts is compared part by part
ENDS = 8  # number of parts compared at each end of a container in a larger value

_flatten = chain.from_iterable
_values = operator.methodcaller("values")
_ATOM_TYPES = frozenset(ATOMS)
# containers that are replaced as a whole, never changed
_FIXED = (tuple, frozenset, types.MethodType, weakref.ref)
_ITERABLE = (dict, list, set, deque)


def identical(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return True if both have the same objects in the same order."""
    one, other = list(one), list(other)
    return len(one) == len(other) and all(map(operator.is_, one, other))


def differing_dicts(now: list[dict[Any, Any]], then: list[dict[Any, Any]]) -> list[int]:
    """Return the numbers of the dictionaries whose names or values (by identity), or their order, are not as in their
    copies."""
    return [i for i, (one, other) in enumerate(zip(now, then, strict=True)) if _differs(one, other)]


def _differs(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    try:
        return list(now) != list(then) or not all(map(operator.is_, now.values(), then.values()))
    except RuntimeError:  # another thread writes it just now
        return True


def changed_names(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Return the names that were added to a dictionary, have another value (by identity), or are gone."""
    names = [name for name, value in list(now.items()) if name not in then or value is not then[name]]
    return names + [name for name in then if name not in now]


class Contents:
    """The keys, values and members of a number of dictionaries, lists, sets and deques."""

    def __init__(self, containers: Iterable[Any]) -> None:
        everything = list(containers)
        self._empty = [c for c in everything if not c]
        self._containers = [c for c in everything if c]
        self._dicts = [c for c in self._containers if isinstance(c, dict)]
        self._sizes = list(map(len, self._containers))
        self._members = list(_flatten(self._containers))
        self._values = list(_flatten(map(_values, self._dicts)))

    def changed(self) -> bool:
        """Return True if any container has other objects, or another order, than when this object was made."""
        try:
            return (
                any(self._empty)
                or list(map(len, self._containers)) != self._sizes
                or not all(map(operator.is_, _flatten(self._containers), self._members))
                or not all(map(operator.is_, _flatten(map(_values, self._dicts)), self._values))
            )
        except RuntimeError:  # another thread is changing one
            return True


class Inside:
    """The parts of an attribute's value, to be watched.

    :attr:`leads` is True if the value leads to a module or tensor of the tree, whose ids are ``known``. :attr:`tensors`
    are the ids of all tensors in it, :attr:`watched` the containers to compare, with their sizes and parts.
    """

    def __init__(self, value: Any, known: Container[int]) -> None:
        self.leads = False
        self.tensors = set[int]()
        containers, count = self._walk(value, known)
        brief = self.leads or count <= BRIEF
        self._look: Callable[[Any], list[Any]] = _all_parts if brief else _ends
        self.watched = [(c, _size(c), self._look(c)) for c in (containers if brief else _sample(value))]

    def _walk(self, value: Any, known: Container[int]) -> tuple[list[Any], int]:
        """Return all objects in it whose parts can be exchanged, and the number of parts of all containers together."""
        todo, seen, found, count = [value], dict[int, Any](), [], 0
        while todo:
            part = todo.pop()
            if isinstance(part, torch.Tensor):
                self.tensors.add(id(part))
            if id(part) in known:
                self.leads = True
                continue
            parts = None if id(part) in seen else parts_of(part)
            if parts is None:
                continue
            seen[id(part)] = part
            count += len(parts)
            if not isinstance(part, _FIXED):
                found.append(part)
            if not _ATOM_TYPES.issuperset(map(type, parts)):
                todo.extend(p for p in parts if type(p) not in _ATOM_TYPES)
        return found, count

    def __bool__(self) -> bool:
        return bool(self.leads or self.tensors or self.watched)

    def changed(self) -> bool:
        """Return True if anything in it has visibly changed since this object was made."""
        try:
            return any(_size(c) != size or not identical(self._look(c), parts) for c, size, parts in self.watched)
        except RuntimeError:  # another thread is changing a container
            return True


def _all_parts(container: Any) -> list[Any]:
    return list(container) if type(container) is list else parts_of(container) or []


def _ends(container: Any) -> list[Any]:
    """Return the first and last parts of a container, if they can be reached at once."""
    if isinstance(container, dict):
        return [*islice(container, ENDS), *islice(container.values(), ENDS)]
    if isinstance(container, list | tuple):
        return [*container[:ENDS], *container[-ENDS:]]
    if isinstance(container, set | frozenset | deque):
        return list(islice(container, ENDS))
    return _all_parts(container)


def _size(container: Any) -> int:
    return len(container) if isinstance(container, _ITERABLE) else 0


def _sample(value: Any) -> list[Any]:
    """Return some of the containers inside a value that has many, the outermost first."""
    todo, seen, count = deque([value]), dict[int, Any](), 0
    while todo and count < BRIEF:
        part = todo.popleft()
        if id(part) in seen or not opens(part):
            continue
        seen[id(part)] = part
        parts = _ends(part)
        count += len(parts)
        todo.extend(p for p in parts if type(p) not in _ATOM_TYPES)
    return [c for c in seen.values() if not isinstance(c, _FIXED)]
