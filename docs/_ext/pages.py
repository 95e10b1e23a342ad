"""What the pages have beyond what is written in them: the reference, and the texts of all error messages.

``<!-- reference: lockstep.local -->`` stands for the docstrings of every public name that is defined in there, or in
one of several packages, separated by spaces; ``<!-- messages: OptionError -->`` for the messages of an error, read from
the sources; ``<!-- other pages -->`` for the names of all pages that are not named before or after it. Links to files
of the repository that are no pages lead to the repository.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lockstep
import lockstep.check
import lockstep.checkpoints
from lockstep import errors, local

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SOURCE = Path(lockstep.__file__).parent
PAGES = Path(__file__).parents[1]
PROJECT = tomllib.loads((PAGES.parent / "pyproject.toml").read_text())["project"]
REPOSITORY = f"{PROJECT['urls']['Repository']}/blob/main/"
PUBLIC = [
    lockstep,
    lockstep.distributed,
    lockstep.loop,
    lockstep.shares,
    lockstep.sharding,
    lockstep.checkpoints,
    lockstep.check,
    lockstep.shm,
    local,
    local.comm,
]


def expand(text: str) -> str:
    """A page's text with all of this in it, and each picture's text in one line: MyST drops its line breaks."""
    text = re.sub(r"!\[[^\]]+\]", lambda found: found[0].replace("\n", " "), text)
    text = re.sub(r"<!-- reference: (.+?) -->", lambda found: reference(found[1].split()), text)
    text = text.replace("<!-- other pages -->", "\n".join(_not_named_in(text)))
    text = re.sub(r"<!-- messages: (\w+) -->", lambda found: "\n".join(_listed(found[1])), text)
    return re.sub(r"\]\(\.\./([^)]+)\)", rf"]({REPOSITORY}\1)", text)


def _not_named_in(text: str) -> list[str]:
    pages = sorted(file.stem for file in PAGES.glob("*.md") if file.stem != "index")
    return [page for page in pages if not re.search(rf"^{page}$", text, re.MULTILINE)]


# -------------------------------------------------------------------------------------- reference


def reference(packages: list[str]) -> str:
    """Directives for every public name that is defined in one of the packages; those of ``lockstep`` itself first."""
    entries = sorted(entry for name, value in _public() if (entry := _entry(name, value, packages)))
    return "\n".join(["```{eval-rst}", *(f"{directive}\n" for _, directive in entries), "```"])


def _public() -> Iterator[tuple[str, Any]]:
    """Each public object once, under the first of its names."""
    seen: set[int] = set()
    for module in PUBLIC:
        for name in getattr(module, "__all__", None) or sorted(vars(module)):
            value = getattr(module, name)
            defined = getattr(value, "__module__", module.__name__)
            own = defined.startswith(module.__name__.rpartition(".")[0] or "lockstep")
            if own and not name.startswith("_") and id(value) not in seen:
                seen.add(id(value))
                yield f"{module.__name__}.{name}", value


def _entry(name: str, value: Any, packages: list[str]) -> tuple[tuple[int, str], str] | None:
    defined = getattr(value, "__module__", "")
    if not any(defined == package or defined.startswith(f"{package}.") for package in packages):
        return None
    place = (name.count("."), name.lower())
    if inspect.isclass(value):
        return place, f".. autoclass:: {name}\n   :members:"
    return (place, f".. autofunction:: {name}") if callable(value) else None


# --------------------------------------------------------------------------------------- messages


def messages() -> dict[str, list[str]]:
    """By name of an error class: the messages with which the library raises it, ``...`` where a value is put in."""
    found: dict[str, list[str]] = {name: [] for name, value in vars(errors).items() if inspect.isclass(value)}
    for file in sorted(SOURCE.rglob("*.py")):
        for name, message in _said_in(ast.parse(file.read_text())):
            if name in found:
                text = re.sub(r"\.\.\.(\s*\.\.\.)+", "...", _template(message)).strip()
                if len(re.findall(r"[a-z]{2,}", text)) >= 3 and text not in found[name]:
                    found[name].append(text)
    return found


def _said_in(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names of classes and messages: of calls, and of pairs of a class and a function that returns the message."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[message, *_]):
                yield name, message
            case ast.Tuple(elts=[ast.Name(id=name), ast.Name(id=rule)]) if rule in functions:
                for each in ast.walk(functions[rule]):
                    if isinstance(each, ast.Return) and each.value is not None:
                        yield name, each.value


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return "..."


def _listed(name: str) -> Iterator[str]:
    for text in sorted(messages()[name], key=str.lower):
        yield "- " + re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", " ".join(text.split()))


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = expand(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
