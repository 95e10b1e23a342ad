"""Tells whether containers still have the same objects in them, by identity."""

import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

_flatten = chain.from_iterable
_values = operator.methodcaller("values")


def identical(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return True if both have the same objects in the same order."""
    one, other = list(one), list(other)
    return len(one) == len(other) and all(map(operator.is_, one, other))


def differing_dicts(now: list[dict[str, Any]], then: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the dictionaries whose names or values (by identity), or their order, are not as in their
    copies."""
    same_names = list(map(len, now)) == list(map(len, then)) and list(_flatten(now)) == list(_flatten(then))
    if same_names and all(map(operator.is_, _flatten(map(_values, now)), _flatten(map(_values, then)))):
        return []
    return [i for i, (one, other) in enumerate(zip(now, then, strict=True)) if _differ(one, other)]


def _differ(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return list(now) != list(then) or not all(map(operator.is_, now.values(), then.values()))


def changed_names(now: dict[str, Any], then: dict[str, Any]) -> set[str]:
    """Return the names that were added to a dictionary, have another value (by identity), or are gone."""
    return {name for name in now if name not in then or now[name] is not then[name]} | (then.keys() - now.keys())


class Contents:
    """The names and values of a number of dictionaries."""

    def __init__(self, dictionaries: Iterable[dict[str, Any]]) -> None:
        everything = list(dictionaries)
        self._empty = [d for d in everything if not d]
        self._dicts = [d for d in everything if d]
        self._sizes = list(map(len, self._dicts))
        self._names = list(_flatten(self._dicts))
        self._values = list(_flatten(map(_values, self._dicts)))

    def changed(self) -> bool:
        """Return True if any dictionary has other names or objects, or another order, than when this was made."""
        try:
            return (
                any(self._empty)
                or list(map(len, self._dicts)) != self._sizes
                or list(_flatten(self._dicts)) != self._names
                or not all(map(operator.is_, _flatten(map(_values, self._dicts)), self._values))
            )
        except RuntimeError:  # another thread is changing one
            return True
