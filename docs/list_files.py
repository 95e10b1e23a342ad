"""Lists every file of the library with the first line of its docstring, for docs/files.md.

``python docs/list_files.py`` prints the list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "lockstep"
MARK = "<!-- files -->"


def rooms() -> list[str]:
    """Return the packages in the order in which the table of the architecture has them."""
    named = re.findall(r"^\| `lockstep/([\w/]*)` \|", (DOCS / "architecture.md").read_text(), re.M)
    found = {file.parent.relative_to(SOURCE).as_posix() for file in SOURCE.rglob("__init__.py")}
    if {name.rstrip("/") or "." for name in named} != found:
        raise ValueError(f"docs/architecture.md has the rooms {sorted(named)}, src/lockstep has {sorted(found)}")
    return named


def first_line(file: Path) -> str:
    """Return the first line of a file's docstring, in Markdown."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return docstring.partition("\n")[0].replace("``", "`")


def listed() -> Iterator[str]:
    """Yield the lines of the list, in Markdown, room by room."""
    for room in rooms():
        yield f"\n## lockstep/{room}\n\n{first_line(SOURCE / room / '__init__.py')}\n"
        for file in sorted((SOURCE / room).glob("*.py")):
            if file.name != "__init__.py":
                yield f"- [`{file.name}`](../src/lockstep/{room}{file.name}): {first_line(file)}"


def _put_in(app: Sphinx, page: str, source: list[str]) -> None:
    if MARK in source[0]:
        source[0] = source[0].replace(MARK, "\n".join(listed()))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx, before the links to files of the repository are made absolute."""
    app.connect("source-read", _put_in, priority=400)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    print("\n".join(listed()))
