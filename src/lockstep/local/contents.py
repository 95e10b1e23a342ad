"""Tells whether containers still have the same objects in them, by identity."""

import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

_flatten = chain.from_iterable


def identical(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return True if both have the same objects in the same order."""
    one, other = list(one), list(other)
    return len(one) == len(other) and all(map(operator.is_, one, other))


def differing_dicts(now: list[dict[str, Any]], then: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the dictionaries whose names or values (by identity), or their order, are not as in their
    copies."""
    return [i for i, (one, other) in enumerate(zip(now, then, strict=True)) if _differ(one, other)]


def _differ(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return list(now) != list(then) or not all(map(operator.is_, now.values(), then.values()))


def changed_names(now: dict[str, Any], then: dict[str, Any]) -> set[str]:
    """Return the names that were added to a dictionary, have another value (by identity), or are gone."""
    return {name for name in now if name not in then or now[name] is not then[name]} | (then.keys() - now.keys())


class DictionaryContents:
    """The names and values that a number of dictionaries have at present."""

    def __init__(self, dictionaries: list[dict[str, Any]]) -> None:
        self._sizes = list(map(len, dictionaries))
        self._names = list(_flatten(dictionaries))
        self._values = list(_flatten(map(dict.values, dictionaries)))

    def differ(self, dictionaries: list[dict[str, Any]]) -> bool:
        """Return True if any dictionary has other names or objects, or another order, than when this was made."""
        try:
            return (
                list(map(len, dictionaries)) != self._sizes
                or list(_flatten(dictionaries)) != self._names
                or not all(map(operator.is_, _flatten(map(dict.values, dictionaries)), self._values))
            )
        except RuntimeError:  # another thread is changing one
            return True
