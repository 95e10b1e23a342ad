"""Imports point downwards: from a room to those listed above it in docs/architecture.md, and in no circle."""

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent
USES = {
    "lockstep": set(),
    "lockstep.local": set(),
    "lockstep.failures": set(),
    "lockstep.shm": set(),
    "lockstep.distributed.reduction": {"lockstep.distributed"},
    "lockstep.distributed": {"lockstep.distributed.reduction", "lockstep.shares"},
    "lockstep.shares": {"lockstep.distributed", "lockstep.distributed.reduction", "lockstep.local"},
    "lockstep.data": {"lockstep.distributed", "lockstep.shares"},
    "lockstep.checkpoints": {"lockstep.distributed"},
    "lockstep.session": {"lockstep.checkpoints", "lockstep.distributed", "lockstep.failures"},
    "lockstep.cli": {"lockstep.failures"},
}
"""The rooms, and which others the files of each import; all use the files beside them, which are the first room.

Nothing but ``lockstep.session`` knows both what trains and who watches it, and nothing knows the ``shm`` backend.
"""
ROOMS = list(USES)
FOUNDATION = {
    "agreement",
    "buffers",
    "collectives",
    "decisions",
    "group_state",
    "one_by_one",
    "pace",
    "traffic",
    "value_watch",
    "values",
}
"""Files of ``lockstep.distributed`` that ``lockstep.distributed.reduction`` rests on."""
FACES = {"replicate"}
"""Files of ``lockstep.distributed`` that rest on ``lockstep.shares``."""


def name_of(file: Path) -> str:
    return ".".join(("lockstep", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


FILES = {name_of(file): file for file in SOURCE.rglob("*.py")}


def imports_of(module: str) -> Iterator[str]:
    """What a file imports of the library, under ``TYPE_CHECKING`` or anywhere else, too."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from {each if each in FILES else node.module for each in found} & FILES.keys()


@functools.cache
def graph() -> dict[str, set[str]]:
    """What each file imports; not when this file is imported, which all workers do."""
    return {module: set(imports_of(module)) for module in FILES}


def room_of(module: str) -> int:
    """The room's number; a package's own file is above all that is in it."""
    if module in ("lockstep", "lockstep.__main__"):
        return len(ROOMS) + 1
    package, _, file = module.rpartition(".")
    if module == "lockstep.distributed":
        return ROOMS.index("lockstep.shares")
    if module in ROOMS:
        return ROOMS.index(module)
    if package == "lockstep.distributed" and file in FACES:
        return ROOMS.index("lockstep.shares")
    if package == "lockstep.distributed" and file in FOUNDATION:
        return ROOMS.index("lockstep.shm")
    return ROOMS.index(package)


def test_no_import_leads_back():
    assert list(TopologicalSorter(graph()).static_order())


def test_imports_point_downwards():
    assert [(m, each) for m, found in graph().items() for each in found if room_of(each) > room_of(m)] == []


def test_a_room_uses_no_other_rooms_than_these():
    used = {room: set() for room in USES}
    for module, found in graph().items():
        room = module.rpartition(".")[0]
        if room in USES and module not in {"lockstep.__main__", *USES}:
            used[room] |= {each if each in USES else each.rpartition(".")[0] for each in found} - {room, "lockstep"}
    assert used == USES
