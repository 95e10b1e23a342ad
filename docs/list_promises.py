"""Lists the promises of docs/distributed_reference.md with the tests that fail where they are broken.

docs/promises.toml maps the beginning of each paragraph, list item and row of a table to its tests, heading by heading.
``python docs/list_promises.py`` prints the list; docs/promises.md shows it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests"
MARK = "<!-- promises -->"
_CODE = re.compile(r"^```.*?^```$|^\|[^\n]*\n\|---[^\n]*$", re.M | re.S)  # and heads of tables
_PART = re.compile(r"^#[^\n]*$|^\|[^\n]*$|^ *\S(?:[^\n]|\n(?!\n|- |\|))*", re.M)

Tests = Mapping[str, Mapping[str, list[str]]]
"""By heading and beginning of a statement: the tests, as ``folder/test_file.py::test_name``."""


class Statement(NamedTuple):
    """A paragraph, a list item or a row of a table, in one line."""

    heading: str
    text: str


def read() -> tuple[list[Statement], Tests]:
    """Return the statements of docs/distributed_reference.md, and the tests of docs/promises.toml."""
    page = (DOCS / "distributed_reference.md").read_text()
    return statements(page), tomllib.loads((DOCS / "promises.toml").read_text())


def statements(page: str) -> list[Statement]:
    """Return the statements below the headings of a page; what stands above the first ``##`` promises nothing."""
    found, heading = [], ""
    for part in _PART.findall(_CODE.sub("", page)):
        if part.startswith("#"):
            heading = part.lstrip("# ") if part.startswith("##") else ""
        elif heading and part.startswith("|"):
            found.append(Statement(heading, " | ".join(cell.strip() for cell in part.strip("| ").split("|"))))
        elif heading:
            found.append(Statement(heading, " ".join(part.split()).removeprefix("- ")))
    return found


def problems(page: list[Statement], tests: Tests) -> list[str]:
    """Return what is wrong with the map: statements without an entry or with several, stale entries, missing tests."""
    found = []
    for statement in page:
        entries = _entries(statement, tests)
        if len(entries) != 1:
            found.append(f"{len(entries)} entries for: {statement.heading}: {statement.text}")
    for heading, entries in tests.items():
        for beginning, names in entries.items():
            count = sum(each.heading == heading and each.text.startswith(beginning) for each in page)
            if count != 1:
                found.append(f"{count} statements begin with: {heading}: {beginning}")
            found += [f"no such test: {name}" for name in names if not _exists(name)]
    return found


def _entries(statement: Statement, tests: Tests) -> list[list[str]]:
    below = tests.get(statement.heading, {})
    return [names for beginning, names in below.items() if statement.text.startswith(beginning)]


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    if not (TESTS / file).is_file():
        return False
    functions = {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    return not name or name in functions


def listed(page: list[Statement], tests: Tests) -> Iterator[str]:
    """Yield the lines of the list, in Markdown: each promise by its first sentence, with links to its tests."""
    section = ""
    for statement in page:
        for names in filter(None, _entries(statement, tests)):
            if statement.heading != section:
                section = statement.heading
                yield f"\n## {section}\n"
            sentence = re.split(r"(?<=.{40}\.)\s", statement.text)[0]
            yield "- " + re.sub(r"\[(.*?)\]\(.*?\)", r"\1", sentence)
            for test in names:
                file, _, name = test.partition("::")
                yield f"  - [`{name or file}`](../tests/{file})"


def _put_in(app: Sphinx, page: str, source: list[str]) -> None:
    if MARK in source[0]:
        source[0] = source[0].replace(MARK, "\n".join(listed(*read())))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx, before the links to files of the repository are made absolute."""
    app.connect("source-read", _put_in, priority=400)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    print("\n".join(listed(*read())))
