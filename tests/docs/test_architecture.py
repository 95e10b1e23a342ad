"""The names and files in docs/architecture.md exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lockstep"
NAMED = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "architecture.md").read_text())
FILES = [file.as_posix() for folder in ("src", "tests", "docs", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
OTHERS = {
    "ProcessGroup",
    "Variable",
    "Module",
    "Tensor",
    "DTensor",
    "Node",
    "ScriptModule",
    "torch",
    "dist",
    "loss",
    "run",
}
"""What begins names of PyTorch's, or of a program's."""


def members() -> dict[str, set[str]]:
    """Return the classes of the library, and what is defined or assigned in each."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] |= set()
                for each in ast.walk(node):
                    if isinstance(each, ast.FunctionDef):
                        found[node.name].add(each.name)
                    elif isinstance(each, ast.Attribute):
                        found[node.name].add(each.attr)
                    elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        found[node.name].add(each.target.id)
    return found


def test_files_exist():
    named = {name for name in NAMED if re.fullmatch(r"[\w/]+\.py", name)}
    assert len(named) > 50
    assert [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in FILES)] == []


def test_members_of_classes_exist():
    known = members()
    named = {tuple(name.split(".")) for name in NAMED if re.fullmatch(r"_?[A-Z]\w+\.\w+", name)}
    ours = {(kind, name) for kind, name in named if kind not in OTHERS and not name.endswith("py")}
    assert len(ours) > 25
    assert [f"{kind}.{name}" for kind, name in sorted(ours) if name not in known.get(kind, set())] == []


def test_classes_exist():
    known = members()
    named = {name for name in NAMED if re.fullmatch(r"_?(?:[A-Z][a-z]+){2,}", name)}
    others = {"DeviceMesh", "ExitStack", "ProcessGroup", "TensorGuards", "_ImperativeEngine"}
    assert len(named) > 15
    assert [name for name in sorted(named - others) if name not in known] == []
