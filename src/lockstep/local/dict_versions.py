"""Which dictionaries have been written, without going through them: by numbers that change with each write.

Python 3.11 counts the writes to every dictionary; from 3.12 on a library may watch dictionaries instead. Dynamo, whose
guards ask the same question, reads or counts either through one function, private to PyTorch. The number of a
dictionary stays the same only if nothing in it was set, deleted or put elsewhere. It may be another for the same items,
which were exchanged for others and put back: so a new number is a reason to look, and no more than that. Two things
have no part in it: the order of an ``OrderedDict``, which is kept elsewhere, and, from Python 3.12 on, an update that
fills an empty dictionary. Those are not asked for.

Where there are no such numbers, dictionaries are gone through each time, which costs several times as much: in a
PyTorch without the function, and in a Python without the GIL, where Dynamo's table of watched dictionaries has no lock.
"""

import operator
import sys
import sysconfig
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

_flatten = chain.from_iterable
_ABSENT = object()


class _Key(str):
    """A name that is no plain ``str``, and so has no place among the names that instances of a class share."""

    __slots__ = ()


_KEY = _Key("_lockstep_version")


def _detach(attributes: dict[Any, Any]) -> None:
    """Let the values of an instance's attributes lie in its ``__dict__``.

    From Python 3.13 on they otherwise lie in the instance, as long as they are those that all instances have, and a
    write to one there is not told to who watches the dictionary.
    """
    if sys.version_info >= (3, 13):
        attributes[_KEY] = None
        del attributes[_KEY]


class _Instance:
    def __init__(self) -> None:
        self.a: object = 0
        self.b: object = 0


_WRITES: tuple[Callable[[Any, dict[str, Any]], object], ...] = (
    lambda o, d: setattr(o, "a", object()),
    lambda o, d: object.__setattr__(o, "a", object()),
    lambda o, d: delattr(o, "b"),
    lambda o, d: setattr(o, "c", 1),
    lambda o, d: d.update(a=2),
    lambda o, d: d.setdefault("d", 3),
    lambda o, d: d.pop("a"),
    lambda o, d: d.popitem(),
    lambda o, d: d.__ior__({"e": 4}),
    lambda o, d: d.clear(),
)


def _counts_writes(counter: Callable[[dict[Any, Any]], int]) -> bool:
    """Whether the dictionary of an instance has another number after every kind of write, and the same without one."""
    instance = _Instance()
    attributes = vars(instance)
    _detach(attributes)

    def counts(write: Callable[[], object]) -> bool:
        before = counter(attributes)
        still = counter(attributes) == before
        write()
        return still and counter(attributes) != before

    def store() -> None:
        instance.a = object()

    # the interpreter stores in another way once it has run the same line some times
    writes: list[Callable[[], object]] = [store] * 50
    writes += [partial(write, instance, attributes) for write in _WRITES]
    try:
        return all(counts(write) for write in writes)
    except Exception:  # another function of that name
        return False


def _counter() -> Callable[[dict[Any, Any]], int] | None:
    """Dynamo's function, if it is there and does what is asked of it."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        from torch._C._dynamo.guards import dict_version
    except ImportError:
        return None
    counter: Callable[[dict[Any, Any]], int] = dict_version
    return counter if _counts_writes(counter) else None


_version_of = _counter()


class DictWatch:
    """Dictionaries that are only gone through after one of them was written."""

    def __init__(self, dicts: Iterable[Any]) -> None:
        unique = list({id(d): d for d in dicts}.values())
        plain = _version_of is not None and all(type(d) is dict and d for d in unique)
        self._dicts: list[dict[Any, Any]] | None = unique if plain else None
        self._versions: list[int] | None = None

    def same(self, compare: Callable[[], bool]) -> bool:
        """What ``compare`` says, which is not asked again if nothing was written since it said yes.

        It tells whether the dictionaries have what they should have.
        """
        if self._dicts is None or _version_of is None:
            return compare()
        versions = list(map(_version_of, self._dicts))  # before the comparison: a write in between counts as new
        if versions == self._versions:
            return True
        same = compare()
        self._versions = versions if same else None
        return same

    def reset(self) -> None:
        """Something else is expected of the dictionaries now."""
        self._versions = None


class WrittenDicts:
    """Which of some objects' dictionaries have other items ``now`` than their copies have, which were made ``then``.

    The lists and the copies may be changed by whoever made them.
    """

    def __init__(self, now: list[dict[Any, Any]], then: list[dict[Any, Any]]) -> None:
        for attributes in now if _version_of is not None else ():
            _detach(attributes)
        self._now, self._then = now, then
        self._versions: list[int | None] = [None] * len(now)

    def numbers(self) -> list[int]:
        """The numbers of those that have other names, or other values, by identity."""
        if _version_of is None:
            return [] if _identical(self._now, self._then) else self._differing(range(len(self._now)))
        versions = list(map(_version_of, self._now))
        if versions == self._versions:
            return []
        suspects = [i for i, (a, b) in enumerate(zip(versions, self._versions, strict=True)) if a != b]
        differing = self._differing(suspects)
        self._versions = [*versions]
        for number in differing:  # until the copy has the same items
            self._versions[number] = None
        return differing

    def _differing(self, numbers: Iterable[int]) -> list[int]:
        return [i for i in numbers if not _same_items(self._now[i], self._then[i])]


def _identical(now: list[dict[Any, Any]], then: list[dict[Any, Any]]) -> bool:
    """Whether all dictionaries have the same names and values in the same order, in one pass."""
    try:
        return (
            list(map(len, now)) == list(map(len, then))
            and list(_flatten(now)) == list(_flatten(then))
            and all(map(operator.is_, _flatten(map(dict.values, now)), _flatten(map(dict.values, then))))
        )
    except RuntimeError:  # another thread writes one just now
        return False


def _same_items(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    """Whether a dictionary has the same names, in whatever order, and the same values."""
    return len(now) == len(then) and all(value is then.get(name, _ABSENT) for name, value in list(now.items()))
