"""Writes docs/promises.md: each promise of docs/distributed.md, and the tests that would fail if it were broken.

A comment ``<!-- tests: gradients/test_x.py::test_y ... -->`` after a paragraph or a list item names them; below a table
there is one for each row, in order. Paths begin in the folder tests. ``<!-- no promise -->`` stands where none is.
``make format`` runs this.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests"
SOURCE = DOCS / "distributed.md"
PAGE = DOCS / "promises.md"
HEAD = """# Promises and their tests

Each promise of [Many processes](distributed.md), by its beginning, and the tests that fail where it is broken.
"""
_CODE = re.compile(r"^```.*?^```$|^\|[^\n]*\n\|---[^\n]*$", re.M | re.S)  # and heads of tables
_PART = re.compile(r"^ *<!--.*?-->$|^#[^\n]*$|^\|[^\n]*$|^ *\S(?:[^\n]|\n(?!\n|- | *<!--|\|))*", re.M | re.S)


@dataclass
class Statement:
    """A paragraph, an item or a row of a table; its tests are None until a comment names them or denies them."""

    heading: str
    text: str
    tests: list[str] | None = None


def statements(text: str) -> list[Statement]:
    """Return the statements of a page, each with the tests that the comment after it names."""
    found: list[Statement] = []
    heading, waiting = "", list[Statement]()
    for part in _PART.findall(_CODE.sub("", text)):
        comment = re.match(r"\s*<!-- (?:tests:\s(?P<tests>.*)|no promise)\s-->$", part, re.S)
        if comment:
            if not waiting:
                raise ValueError(f"no paragraph, item or row is left for the comment {part}")
            waiting.pop(0).tests = (comment["tests"] or "").split()
        elif part.startswith("#"):
            heading, waiting = part.lstrip("# "), []
        elif not part.strip().startswith("<!--"):
            found.append(Statement(heading, part))
            rows = bool(waiting) and part.startswith("|") and waiting[-1].text.startswith("|")
            waiting = [*waiting, found[-1]] if rows else [found[-1]]
    return found


def promises() -> Iterator[tuple[str, str, list[str]]]:
    """Yield for each promise the heading above it, its beginning, and its tests."""
    for statement in statements(SOURCE.read_text()):
        if statement.tests:
            yield statement.heading, _beginning(statement.text), statement.tests


def _beginning(text: str) -> str:
    if text.startswith("|"):
        return " - ".join(cell for each in text.strip("| ").split("|") if (cell := each.strip()))
    whole = " ".join(text.split()).removeprefix("- ")
    return re.split(r"(?<=.{40}\.)\s", whole)[0]


def unmarked() -> list[str]:
    """Return the paragraphs, items and rows that neither name tests nor say that there is no promise in them."""
    _, _, text = SOURCE.read_text().partition("\n## ")
    return [each.text for each in statements(text.partition("\n")[2]) if each.tests is None]


def missing() -> list[str]:
    """Return the tests that are named and do not exist."""
    found = []
    for _, _, tests in promises():
        for test in tests:
            file, _, name = test.partition("::")
            path = TESTS / file
            if not path.exists():
                found.append(test)
                continue
            names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
            if name and name not in names:
                found.append(test)
    return found


def write() -> str:
    """Return the page."""
    lines, section = [HEAD], ""
    for heading, text, tests in promises():
        if heading != section:
            section = heading
            lines.append(f"## {heading}\n")
        lines.append("- " + re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text))
        for test in tests:
            file, _, name = test.partition("::")
            lines.append(f"  - [`{name or file}`](../tests/{file})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write())
