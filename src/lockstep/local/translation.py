"""Rebuilds values that lead to modules or tensors of a network, with those of a copy in their place.

A value is looked into if its type is one of these, and no subclass of it: list, tuple, dict, set, frozenset, deque,
OrderedDict, defaultdict, bound method, ``functools.partial``, ``weakref.ref``. So no method of a user's class is
called. Objects of all other types, and the variables of a closure, are the same in every copy; so are values with more
than :data:`LIMIT` parts, such as a vocabulary.
"""

import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable
from typing import Any

LIMIT = 10_000
"""The largest number of parts, at all depths together, of a value that is looked into."""

_LISTS = (list, deque)
_DICTS = (dict, OrderedDict, defaultdict)
_CHANGING = (*_LISTS, *_DICTS, set)


_OPEN: dict[type, Callable[[Any], list[Any]]] = (
    dict.fromkeys((*_LISTS, tuple, set, frozenset), list)
    | dict.fromkeys(_DICTS, lambda value: [*value, *value.values()])
    | {
        types.MethodType: lambda value: [value.__self__],
        functools.partial: lambda value: [value.func, *value.args, *value.keywords.values()],
        weakref.ref: lambda value: [value()],
    }
)
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type, types.FunctionType})


def opens(value: object) -> bool:
    """Return True if a value is looked into."""
    return type(value) in _OPEN


def is_plain(value: Any) -> bool:
    """Return True if a value that :func:`opens` has only numbers, strings, functions and the like in it."""
    return _is_long(value) or _ATOMS.issuperset(map(type, _OPEN[type(value)](value)))


def _is_long(value: Any) -> bool:
    return hasattr(type(value), "__len__") and len(value) > LIMIT


def leads(value: Any, known: Container[int]) -> bool:
    """Return True if a value is, or leads to, one of the objects whose ids are ``known``."""
    todo, seen, count = [value], set[int](), 0
    while todo:
        part = todo.pop()
        if id(part) in known:
            return True
        if type(part) not in _OPEN or id(part) in seen:
            continue
        seen.add(id(part))
        count += len(part) if hasattr(type(part), "__len__") else 1
        if count > LIMIT:
            return False
        todo += [p for p in _OPEN[type(part)](part) if type(p) not in _ATOMS]
    return False


class Translation:
    """Maps values to a copy's versions of them, given the ``counterparts`` of a network's modules and tensors by id.

    A container that several values share is rebuilt once.
    """

    def __init__(self, counterparts: dict[int, Any]) -> None:
        self._done = dict(counterparts)

    def __call__(self, value: Any) -> Any:
        """Return the copy's version of ``value``: ``value`` itself, unless a part of it has a counterpart."""
        if id(value) in self._done:
            return self._done[id(value)]
        if type(value) not in _OPEN or _is_long(value):
            return value
        if type(value) in _CHANGING:
            return self._refilled(value)
        parts = _OPEN[type(value)](value)
        translated = list(map(self, parts))
        return value if _same(translated, parts) else _like(value, translated)

    def _refilled(self, value: Any) -> Any:
        """Return a container with other members; it may contain itself."""
        new = self._done[id(value)] = value.copy()
        parts = _OPEN[type(value)](value)
        translated = list(map(self, parts))
        if _same(translated, parts):
            self._done[id(value)] = value
            return value
        if type(value) in _DICTS:
            keys, values = translated[: len(value)], translated[len(value) :]
            if _same(keys, parts):  # do not ask all keys for their hashes
                new.update((k, v) for k, v, old in zip(keys, values, value.values(), strict=True) if v is not old)
            else:
                new.clear()
                new.update(zip(keys, values, strict=True))
        else:
            new.clear()
            new.extend(translated) if type(value) in _LISTS else new.update(translated)
        return new


def _same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    return all(new is old for new, old in zip(one, other, strict=False))


def _like(value: Any, parts: list[Any]) -> Any:
    """Return a value like one that cannot be changed, with other parts."""
    if type(value) is types.MethodType:
        return types.MethodType(value.__func__, parts[0])
    if type(value) is weakref.ref:
        return weakref.ref(parts[0])
    if type(value) is functools.partial:
        function, *args = parts[: 1 + len(value.args)]
        return functools.partial(function, *args, **dict(zip(value.keywords, parts[1 + len(args) :], strict=True)))
    return tuple(parts) if type(value) is tuple else frozenset(parts)
