"""Of the product of a test's parameters, cases that hold every pair of values; ``--products`` runs all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations

import pytest

FEWEST = 8
"""Cases of a test from which on some are left out."""

Row = tuple[Hashable, ...]


def pairs(row: Row) -> set[tuple[int, int, Hashable, Hashable]]:
    """Return the pairs of values in a row, with their places."""
    return {(i, j, row[i], row[j]) for i, j in combinations(range(len(row)), 2)}


def covering(rows: Sequence[Row]) -> list[int]:
    """Return the numbers of rows that hold every pair of values that any row holds: greedily, always the same ones."""
    bits: dict[Hashable, int] = {}  # a pair is a bit, a row a number: of 14,000 cases, each worker is done at once
    held = [sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs(row)) for row in rows]
    wanted = (1 << len(bits)) - 1
    chosen = []
    while wanted:
        best = max(range(len(rows)), key=lambda number: (held[number] & wanted).bit_count())
        chosen.append(best)
        wanted &= ~held[best]
    return sorted(chosen)


def parameters(item: pytest.Item) -> Row:
    """Return the values in a case of a test. Those that are written in one row are one, since rows are no product."""
    values = getattr(getattr(item, "callspec", None), "params", {})
    rows = [_names(mark) for mark in item.iter_markers("parametrize")]
    alone = sorted(values.keys() - {name for row in rows for name in row})
    return tuple(tuple(repr(values[name]) for name in row) for row in [*rows, *([name] for name in alone)])


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of tests with three parameters and more that are not needed to hold every pair of values."""
    cases: dict[str, list[tuple[pytest.Item, Row]]] = defaultdict(list)
    for item in items:
        if len(row := parameters(item)) >= 3:
            cases[item.nodeid.partition("[")[0]].append((item, row))
    found = []
    for each in cases.values():
        if len(each) >= FEWEST:
            kept = set(covering([row for _, row in each]))
            found += [item for number, (item, _) in enumerate(each) if number not in kept]
    return found
