"""Prints tables and numbers: as plain text, with ``rich`` if it is installed (in a terminal), or as JSON."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

_FACTORS = ((1e-6, "us", 1e6), (1e-3, "us", 1e6), (1.0, "ms", 1e3), (float("inf"), "s", 1.0))

SOON = 2.0
"""Seconds after which a command says what it is doing."""
_EVERY = 15.0


class ProgressLine:
    """Reports on stderr what a command is doing, once that takes long: one line that changes, or several in a file.

    A context manager; it erases the line that changes at its end.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._next = SOON
        self._changes = sys.stderr.isatty()

    def show(self, part: str = "") -> None:
        """Print the progress, unless the command began, or printed it, a short time ago."""
        passed = time.monotonic() - self._began
        if passed < self._next:
            return
        self._next = passed + (1.0 if self._changes else _EVERY)
        text = f"lockstep: {self._what}{f', {part}' if part else ''} ({passed:.0f} s)"
        print(
            f"\r{text}\x1b[K" if self._changes else text, end="" if self._changes else "\n", file=sys.stderr, flush=True
        )

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._changes and self._next > SOON:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with its first column aligned to the left and all others to the right."""
    if sys.stdout.isatty() and _print_rich(title, headers, rows):
        return
    cells = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    print(f"\n{title}" if title else "")
    for number, row in enumerate(cells):
        padded = [each.rjust(widths[i]) if i else each.ljust(widths[i]) for i, each in enumerate(row)]
        print("  ".join(padded).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def print_json(value: Any) -> None:
    """Print one JSON document, for machines."""
    print(json.dumps(value, indent=2))


def seconds(value: float) -> str:
    """Return a duration with three significant digits: ``1.23 ms``."""
    _, unit, factor = next(each for each in _FACTORS if abs(value) < each[0])
    return f"{value * factor:.3g} {unit}" if abs(value * factor) < 1000 else f"{value * factor:.0f} {unit}"


def size(count: float) -> str:
    """Return a number of bytes with a unit: ``64 MB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TB"


def _print_rich(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Print the table with ``rich``; return False if it is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(title=title, title_justify="left")
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return True
