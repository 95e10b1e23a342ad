"""The rows of batches: which ones a rank takes, and whether the ranks together take each row of one process once."""

import hashlib
import io
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep._base.inner_tensors import read_bytes
from lockstep._base.tree import Tree
from lockstep.errors import OptionError, StructureError

Split = str | tuple[int, ...]
"""``even`` (one block of rows for each rank, sizes differ by at most one), ``strided`` (every N-th row), or the number
of rows for each rank in proportion to these numbers."""


def parse_split(text: str, ranks: int) -> Split:
    """Return the split that an argument of the command names."""
    if text in ("even", "strided"):
        return text
    parts = [part.strip() for part in text.split(",")]
    if all(part.isdigit() for part in parts) and any(int(part) for part in parts):
        if len(parts) == ranks:
            return tuple(int(part) for part in parts)
        raise OptionError(f"the split {text!r} has {len(parts)} numbers for {ranks} ranks; give one for each rank")
    raise OptionError(f"there is no split {text!r}; expected even, strided, or a number of rows for each rank (6,2)")


def rows_of_rank(count: int, split: Split, rank: int, ranks: int) -> range:
    """Return the numbers of the rows that a rank takes out of ``count``."""
    if split == "strided":
        return range(rank, count, ranks)
    if split == "even":
        each, more = divmod(count, ranks)
        begin = rank * each + min(rank, more)
        return range(begin, begin + each + (rank < more))
    assert not isinstance(split, str)
    first, last = (round(sum(split[:r]) * count / sum(split)) for r in (rank, rank + 1))
    return range(first, last)


def take_rows(batch: Any, split: Split, rank: int, ranks: int, has_samples: bool) -> Any:
    """Return the part of a whole batch that a rank computes."""
    rows = list(rows_of_rank(count_rows(batch, has_samples), split, rank, ranks))
    if has_samples:
        return [batch[row] for row in rows]
    tree = Tree(batch, "batch")
    return tree.build([leaf.value[rows] if _has_rows(leaf.value) else leaf.value for leaf in tree.leaves])


def count_rows(batch: Any, has_samples: bool = False) -> int:
    """Return the number of rows, which all tensors of a batch have in their first dimension."""
    if has_samples:
        return len(batch)
    found = [leaf for leaf in Tree(batch, "batch").leaves if _has_rows(leaf.value)]
    if not found:
        raise StructureError(
            f"a batch of the case is a {type(batch).__name__} without a tensor that has rows; expected nested tensors "
            "with the rows first, or a list of samples with Case(collate=...)"
        )
    other = next((leaf for leaf in found if len(leaf.value) != len(found[0].value)), None)
    if other is not None:
        raise StructureError(
            f"tensors of a batch have different numbers of rows: {found[0].path} has {len(found[0].value)}, "
            f"{other.path} has {len(other.value)}; put the rows first in all of them, or give a list of samples and "
            "Case(collate=...)"
        )
    return len(found[0].value)


def digests_of(batch: Any, has_samples: bool = False) -> list[str]:
    """Return a digest for each row of a batch; empty for a batch without rows."""
    if has_samples:
        return [_digest([leaf.value for leaf in Tree(sample, "sample").leaves]) for sample in batch]
    tensors = [leaf.value for leaf in Tree(batch, "batch").leaves if _has_rows(leaf.value)]
    if not tensors or len({len(each) for each in tensors}) > 1:
        return []
    return [_digest([each[row] for each in tensors]) for row in range(len(tensors[0]))]


def rows_taken_wrongly(whole: Sequence[str], by_rank: Sequence[Sequence[str]]) -> tuple[int, int, int]:
    """Return how many rows of a step are taken too often, are taken by no rank, and are none of one process's."""
    wanted, got = Counter(whole), Counter(row for rows in by_rank for row in rows)
    again = sum(max(0, count - wanted[row]) for row, count in got.items() if row in wanted)
    return again, sum((wanted - got).values()), sum(count for row, count in got.items() if row not in wanted)


def period_of(steps: Sequence[Sequence[str]]) -> int | None:
    """Return the number of steps after which the batches of a rank come again in the same order; None if they do not.

    Batches that are all the same have no order, and one that comes again proves nothing.
    """
    for period in range(2, len(steps) - 1):
        head, tail = list(steps[:period]), list(steps[period:])
        if len({tuple(rows) for rows in head}) > 1 and tail == (head * len(steps))[: len(tail)]:
            return period
    return None


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _digest(values: Sequence[Any]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for value in values:
        if isinstance(value, Tensor):
            digest.update(str((value.dtype, tuple(value.shape))).encode())
            digest.update(read_bytes(value))
        else:
            stream = io.BytesIO()
            _Pickler(stream).dump(value)
            digest.update(stream.getvalue())
    return digest.hexdigest()


class _Pickler(pickle.Pickler):
    """Writes a tensor as its bytes; pickle writes addresses of its memory, too."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return bytes, (bytes(read_bytes(value)),)
        return NotImplemented
