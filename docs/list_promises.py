"""Writes docs/promises.md: each promise of docs/distributed.md, and the tests that would fail if it were broken.

A comment ``<!-- tests: gradients/test_x.py::test_y ... -->`` after a paragraph or a list item, or in a row of a table,
names them; paths begin in the folder tests. ``<!-- no promise -->`` stands where none is. ``make format`` runs this.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests"
SOURCE = DOCS / "distributed.md"
PAGE = DOCS / "promises.md"
HEAD = """# Promises and their tests

Each promise of [Many processes](distributed.md), by its beginning, and the tests that fail where it is broken.
"""
_COMMENT = re.compile(r"<!-- tests: (.*?) -->")


def promises() -> Iterator[tuple[str, str, list[str]]]:
    """Yield for each promise the heading above it, its beginning, and its tests."""
    heading = ""
    lines = SOURCE.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("#"):
            heading = line.lstrip("# ")
        found = _COMMENT.search(line)
        if found is None:
            continue
        if line.startswith("|"):
            cells = [cell.strip() for cell in _COMMENT.sub("", line).strip("| ").split("|")]
            text = " - ".join(cell for cell in cells if cell)
        else:
            first = number
            while lines[first - 1].strip() and not lines[first].startswith("- "):
                first -= 1
            whole = " ".join(each.strip() for each in lines[first:number])
            text = re.split(r"(?<=.{40}\.)\s", whole.removeprefix("- "))[0]
        yield heading, text, found[1].split()


def unmarked() -> list[str]:
    """Return the paragraphs, items and rows that neither name tests nor say that there is no promise in them."""
    text = re.sub(
        r"^```.*?^```$|^<!-- python\n.*?^-->$|^\|[^\n]*\n\|---[^\n]*$", "", SOURCE.read_text(), flags=re.M | re.S
    )
    _, _, text = text.partition("\n## ")
    blocks = [block.strip() for block in re.split(r"\n\s*\n|\n(?=- |\||#)", text.partition("\n")[2])]
    return [block for block in blocks if block and block[0] != "#" and not re.search("<!-- (tests:|no promise)", block)]


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
