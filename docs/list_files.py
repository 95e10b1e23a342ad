"""Writes ``docs/files.md``: every file of the library with the first line of its docstring. ``make format`` runs it."""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "lockstep"
PAGE = DOCS / "files.md"
HEAD = """\
# Files

<!-- Written by docs/list_files.py, from the first lines of docstrings: edit those, and run `make format`. -->

Every file with the first line of its docstring, room by room, in the order of the [architecture](architecture.md).
PURE: what comes out depends on the arguments alone, and no other rank is asked, so that a table can test it.
"""


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


def write() -> str:
    """Return the page."""
    lines = [HEAD]
    for room in rooms():
        lines += [f"## lockstep/{room}\n", f"{first_line(SOURCE / room / '__init__.py')}\n"]
        files = [file for file in sorted((SOURCE / room).glob("*.py")) if file.name != "__init__.py"]
        lines += [f"- [`{file.name}`](../src/lockstep/{room}{file.name}): {first_line(file)}" for file in files]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(write())
