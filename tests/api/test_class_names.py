"""Every class of the library has a name of its own: a name in an error or a debugger says which class it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent


def test_no_two_classes_have_one_name():
    found = defaultdict(list)
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
