"""What can be changed in the source: conditions, numbers and statements; no messages, annotations and `__repr__`."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MESSAGES = re.compile(r"(Error|Warning|Exception)$|^(logging|warnings|_log)\b")  # functions that are called with them
UNTOUCHED = ("annotation", "returns", "decorator_list", "bases", "exc", "cause")


class Fault(NamedTuple):
    """In a file, the bytes from `begin` to `end` give way to `text`. `lines`: its own, else those of its statement."""

    file: str
    line: int
    what: str
    begin: int
    end: int
    text: str
    lines: tuple[range, ...]  # empty: an import executes it


def changes(node: ast.AST, head: range | None = None) -> Iterator[tuple[Any, str, str, range | None]]:
    """Yield a node, what is changed, what it gives way to, and the lines of its statement (None: an import runs it)."""
    if head is not None and isinstance(node, ast.stmt):
        body = getattr(node, "body", None)  # of a compound statement, whose head alone counts
        head = range(node.lineno, max(node.lineno, body[0].lineno - 1 if body else node.end_lineno or 0) + 1)
    conditions: list[ast.expr] = []
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.FunctionDef(name="__repr__"):
            return
        case ast.Call(func=func) if MESSAGES.search(ast.unparse(func)):
            return
        case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
            return
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.AugAssign():
            yield node, "left out: {}", "pass", head
        case (
            ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_])
            | ast.AnnAssign(target=ast.Attribute(), value=ast.expr())
        ):
            yield node, "left out: {}", "pass", head
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "left out: {}", "return None", head
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            yield node, f"{{}} -> {number + 1!r}", repr(number + 1), head
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            conditions = [test]
        case ast.BoolOp(values=conditions) | ast.comprehension(ifs=conditions):
            pass
        case ast.Compare():
            conditions = [node]
    for condition in conditions:
        yield condition, "negated: {}", "(not ({}))", head
    for name, value in ast.iter_fields(node):
        inside = range(0) if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else head
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in UNTOUCHED:
                yield from changes(child, inside)


def faults_in(file: str, source: bytes) -> list[Fault]:
    """Return all that can be planted in a file."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    found: dict[tuple[int, int, str], Fault] = {}
    for node, what, text, head in changes(ast.parse(source)):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        old = source[begin:end].decode()
        new = text.format(old)
        new += "\n" * (old.count("\n") - new.count("\n"))  # other lines keep their numbers
        lines = () if head is None else (range(node.lineno, node.end_lineno + 1), head)
        fault = Fault(file, node.lineno, what.format(" ".join(old.split())), begin, end, new, lines)
        found.setdefault((begin, end, new), fault)
    return list(found.values())


def choose(root: Path, room: str, count: int, seed: int) -> list[Fault]:
    """Return that many faults of a room, or all that there are."""
    found: list[Fault] = []
    for path in sorted((root / "src/lockstep" / room).rglob("*.py")):
        found += faults_in(str(path.relative_to(root)), path.read_bytes())
    return random.Random(f"{seed} {room}").sample(found, min(count, len(found)))
