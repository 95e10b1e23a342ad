"""Values for a program's own objects, which are told apart by identity: two modules may be equal, or have no hash."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class IdentityMap(Generic[T]):
    """A dictionary whose keys are compared by identity, and leave it when they are freed.

    Example:
        >>> one, other = set(), set()  # equal, without a hash
        >>> colours = IdentityMap()
        >>> colours[one] = "red"
        >>> colours.get(one), colours.get(other)
        ('red', None)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Any], T]] = {}

    def __setitem__(self, key: object, value: T) -> None:
        self._entries[id(key)] = ref(key, partial(self._entries.pop, id(key))), value

    def __getitem__(self, key: object) -> T:
        return self._entries[id(key)][1]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def get(self, key: object) -> T | None:
        """Return the value for an object, or None."""
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def discard(self, key: object) -> None:
        """Remove an object, if it is there."""
        self._entries.pop(id(key), None)

    def clear(self) -> None:
        """Remove all objects."""
        self._entries.clear()

    def __iter__(self) -> Iterator[Any]:
        keys = (key() for key, _ in list(self._entries.values()))
        return (key for key in keys if key is not None)

    def values(self) -> list[T]:
        """Return all values, in the order in which they were first set."""
        return [value for _, value in list(self._entries.values())]
