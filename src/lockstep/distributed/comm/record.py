"""Records that the ranks tell each other: each fact is declared once, with what it adds up to over the ranks.

PURE. A :class:`Record` travels as zeros and ones whose sums over the ranks tell everything that is to be known: all
ranks have the same number if and only if each of its bits adds up to 0 or to the number of ranks. So its size does not
depend on the number of ranks, and it can follow gradients in an all-reduce, in a dtype that counts the ranks exactly
(:func:`counts_exactly`). Where ranks have to be named, each sends what it says as bytes instead (:class:`Packing`), and
they are gathered.
"""

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import string_at
from enum import Enum, auto
from operator import mul
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

_ZERO_OR_ONE = bytes.maketrans(b"01", b"\0\1")
_PLACE_VALUES = [1 << place for place in reversed(range(128))]


def bits_of(number: int, count: int) -> bytes:
    """Return a number's lowest bits, the highest of them first, as bytes of 0 or 1.

    Example:
        >>> list(bits_of(6, 4))
        [0, 1, 1, 0]
    """
    return format(number, f"0{count}b").encode().translate(_ZERO_OR_ONE)


def are_alike(sums: Iterable[float], ranks: float) -> bool:
    """Return True if ``ranks`` ranks have added the same bits.

    Example:
        >>> are_alike([0.0, 3.0, 3.0, 0.0], 3)
        True
    """
    return {0, ranks}.issuperset(sums)


def total_of(sums: Sequence[float]) -> int:
    """Return the total of the numbers of which each bit has been added up; at most 128 bits.

    Example:
        >>> total_of([0.0, 2.0, 1.0])  # 2 + 3
        5
    """
    return sum(map(mul, map(int, sums), _PLACE_VALUES[-len(sums) :])) if any(sums) else 0  # most are


def counts_exactly(dtype: torch.dtype, ranks: int) -> bool:
    """Return True if sums of so many ones are exact in a dtype."""
    return ranks <= 2 / torch.finfo(dtype).eps


class Fold(Enum):
    """What the ranks learn of a field."""

    SAME = auto()
    """Whether all ranks that say it say the same."""
    SUM = auto()
    """The total; of ones, the number of ranks that say it."""
    WHO = auto()
    """The total of the numbers of the ranks that say it: the number of the one, if only one does."""


class Field(NamedTuple):
    """A fact that each rank tells all others."""

    name: str
    bits: int
    fold: Fold
    value: Callable[[Any], int]
    """Returns this rank's number, which is not negative, from what it says."""
    said_by: str = "ranks"
    """The name of the field that counts the ranks that say it; for :attr:`Fold.SAME`."""


class Record:
    """Fields, in the order in which they travel.

    Example:
        >>> record = Record(
        ...     Field("ranks", 1, Fold.SUM, lambda _: 1),
        ...     Field("step", 8, Fold.SAME, lambda said: said["step"]),
        ...     Field("failed", 1, Fold.SUM, lambda said: said["failed"]),
        ... )
        >>> rows = [record.encode({"step": step, "failed": False}, rank) for rank, step in enumerate([3, 4])]
        >>> record.decode([sum(column) for column in zip(*rows)])
        ({'ranks': 2, 'failed': 0}, {'step'})
    """

    def __init__(self, *fields: Field) -> None:
        self.fields = fields
        self.size = sum(field.bits for field in fields)
        """The number of zeros and ones."""

    def __repr__(self) -> str:
        return f"Record({', '.join(field.name for field in self.fields)})"

    def number(self, said: Any, rank: int) -> int:
        """Return what a rank adds to the sums, as the bits of one number."""
        number = 0
        for _, bits, fold, value, _ in self.fields:
            number = number << bits | (value(said) if fold is not Fold.WHO else value(said) * rank)
        return number

    def encode(self, said: Any, rank: int) -> bytes:
        """Return what a rank adds to the sums, as bytes of 0 or 1."""
        return bits_of(self.number(said, rank), self.size)

    def decode(self, sums: Iterable[float]) -> tuple[Mapping[str, int], set[str]]:
        """Return the totals by name, and the names of the fields in which ranks differ."""
        rest = iter(sums)
        parts = {field.name: list(itertools.islice(rest, field.bits)) for field in self.fields}
        totals = {field.name: total_of(parts[field.name]) for field in self.fields if field.fold is not Fold.SAME}
        same = (field for field in self.fields if field.fold is Fold.SAME)
        return totals, {field.name for field in same if not are_alike(parts[field.name], totals[field.said_by])}


FAILURE = Record(
    Field("failed", 1, Fold.SUM, bool),
    Field("numbers_of_failed", 20, Fold.WHO, bool),
)
"""Whether a rank has failed, as True or False, and which one if it is the only one."""


def ranks_that_failed(totals: Mapping[str, int], ranks: Sequence[int]) -> str:
    """Return, for a message, who has failed: one rank by its number in ``ranks``, or how many."""
    failed: int = totals["failed"]
    return f"rank {ranks[totals['numbers_of_failed']]}" if failed == 1 else f"{failed} ranks"


# ------------------------------------------------------------------------------------- as bytes

R = TypeVar("R", bound=tuple[Any, ...])
_CODES = {int: "Q", bool: "?", float: "d"}


class Packing(Generic[R]):
    """A named tuple of numbers, and of further named tuples, as bytes of a size that its annotations give; integers are
    not negative, and have 64 bits."""

    def __init__(self, kind: type[R]) -> None:
        self._read = _reader(kind)
        self._struct = struct.Struct(f"<{''.join(_codes(kind))}")
        self.size = self._struct.size
        """The number of bytes."""

    def pack(self, record: R) -> Tensor:
        """Return a record as bytes."""
        return torch.frombuffer(bytearray(self._struct.pack(*_numbers(record))), dtype=torch.uint8)

    def unpack(self, packed: Tensor) -> list[R]:
        """Return the records of all ranks from their bytes, which lie one after the other, on the CPU."""
        packed = packed.contiguous()
        data = string_at(packed.data_ptr(), packed.nbytes)
        return [self._read(iter(each)) for each in self._struct.iter_unpack(data)]


def _codes(kind: Any) -> Iterator[str]:
    hints = get_type_hints(kind)
    for name in kind._fields:
        yield from _codes(hints[name]) if issubclass(hints[name], tuple) else _CODES[hints[name]]


def _numbers(record: Iterable[Any]) -> Iterator[Any]:
    for each in record:
        yield from _numbers(each) if isinstance(each, tuple) else (each,)


def _reader(kind: Any) -> Callable[[Iterator[Any]], Any]:
    """Return a function that takes a record's numbers from an iterator, and builds it."""
    hints = get_type_hints(kind)  # once: it takes longer than to read a record
    parts = [_reader(hints[name]) if issubclass(hints[name], tuple) else next for name in kind._fields]
    return lambda numbers: kind._make(part(numbers) for part in parts)
