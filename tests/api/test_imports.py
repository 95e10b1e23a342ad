"""Imports point downwards: from a room to those listed above it in docs/architecture.md, and in no circle."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent
REDUCTION = {f"lockstep.distributed.reduction{each}" for each in ("", ".autograd", ".buckets", ".module", ".report")}
CORE = {"lockstep.distributed.comm", "lockstep.distributed.replication"} | REDUCTION
USES = {
    "lockstep": set(),
    "lockstep._base": set(),
    "lockstep.failures": set(),
    "lockstep.shm": set(),
    "lockstep.distributed.comm": {"lockstep.shm"},
    "lockstep.distributed.reduction.report": {"lockstep.distributed.comm"},
    "lockstep.distributed.reduction.autograd": {"lockstep.distributed.comm"},
    "lockstep.distributed.reduction.module": {
        "lockstep.distributed.comm",
        "lockstep.distributed.reduction.autograd",
    },
    "lockstep.distributed.reduction.buckets": {
        "lockstep.distributed.comm",
        "lockstep.distributed.reduction.autograd",
        "lockstep.distributed.reduction.module",
    },
    "lockstep.distributed.reduction": {"lockstep.distributed.comm"} | REDUCTION - {"lockstep.distributed.reduction"},
    "lockstep.distributed.replication": {"lockstep.distributed.comm"} | REDUCTION,
    "lockstep.distributed": set(),
    "lockstep.loop": CORE - {"lockstep.distributed.reduction.buckets", "lockstep.distributed.reduction.module"},
    "lockstep.local": {
        "lockstep.distributed.comm",
        "lockstep.distributed.reduction.autograd",
        "lockstep.loop",
    },
    "lockstep.shares": CORE - {"lockstep.distributed.reduction", "lockstep.distributed.reduction.autograd"}
    | {"lockstep.local"},
    "lockstep.sharding": {"lockstep.distributed.comm", "lockstep.distributed.replication"},
    "lockstep.checkpoints": {"lockstep.distributed.comm", "lockstep.distributed.replication"},
    "lockstep.session": {
        "lockstep.checkpoints",
        "lockstep.distributed.comm",
        "lockstep.distributed.reduction.report",
        "lockstep.distributed.replication",
        "lockstep.failures",
        "lockstep.loop",
    },
    "lockstep.check": {"lockstep.distributed"},
    "lockstep.cli": {"lockstep.check", "lockstep.failures"},
}
"""The rooms, and which others the files of each import; all use the files beside them, which are the first room.

Nothing but ``lockstep.session`` knows both what trains and who watches it, and only ``comm`` knows the ``shm`` backend.
"""
ROOMS = list(USES)


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
    """Return what each file imports; not when this file is imported, which all workers do."""
    return {module: set(imports_of(module)) for module in FILES}


def room_of(module: str) -> int:
    """The room's number; a package's own file is above all that is in it."""
    if module in ("lockstep", "lockstep.__main__"):
        return len(ROOMS) + 1
    return ROOMS.index(module if module in ROOMS else module.rpartition(".")[0])


def test_no_import_leads_back():
    assert list(TopologicalSorter(graph()).static_order())


def test_imports_point_downwards():
    assert [(m, each) for m, found in graph().items() for each in found if room_of(each) > room_of(m)] == []


def test_a_room_uses_no_other_rooms_than_these():
    used = {room: set() for room in USES}
    for module, found in graph().items():
        room = module.rpartition(".")[0]
        if room in USES and module not in {"lockstep.__main__", *USES}:
            rooms = {each if each in USES else each.rpartition(".")[0] for each in found}
            used[room] |= rooms - {room, "lockstep", "lockstep._base"}
    assert used == USES


FROM_REDUCTION = {
    "loop": "Decisions GroupScheduler MEANS MeanInPass Reducer current_pass decisions_of mark_output reach_of "
    "scheduler_of",
    "shares": "Buffer BufferGroup Contents DriftWatch LoopVerdict Owner Selection SlotSnapshot Told assign_all "
    "check_equal_values check_optimizers decisions_of travels_in_half",
    "session": "Decisions",
    "local": "keep_means",
}
"""The names that rooms take from the reduction. A name more ties a room to how rounds are made."""


def test_rooms_take_no_other_names_from_the_reduction_than_these():
    taken: dict[str, set[str]] = {}
    for module, file in FILES.items():
        room = module.split(".")[1] if module.count(".") > 1 else "distributed"  # or public names
        for node in ast.walk(ast.parse(file.read_text())) if room != "distributed" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep.distributed.reduction"):
                taken.setdefault(room, set()).update(alias.name for alias in node.names)
    assert {room: " ".join(sorted(names)) for room, names in taken.items()} == FROM_REDUCTION
    assert len({name for names in taken.values() for name in names}) <= 25


NEEDED_AT_ONCE = ("lockstep._base", "lockstep.errors", "lockstep.phases", "lockstep.session", "lockstep.shm")


def test_import_lockstep_imports_no_room_before_it_is_used():
    program = (
        "import sys, lockstep\n"
        "print(*[name for name in sys.modules if name.startswith('lockstep.')])\n"
        "from lockstep.session import watch\n"  # binds no package to the function's name
        "print(lockstep.session.__name__, lockstep.watch is watch.watch)\n"
        "print(lockstep.shares.__name__, lockstep.checkpoints.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported, *used = done.stdout.splitlines()
    assert [
        name for name in imported.split() if not (name in NEEDED_AT_ONCE or name.startswith("lockstep._base."))
    ] == []
    assert used == ["session True", "lockstep.shares lockstep.checkpoints"]


def test_the_names_of_the_top_level_are_where_it_looks_for_them():
    [block] = [node for node in ast.parse(FILES["lockstep"].read_text()).body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == lockstep._WHERE | dict.fromkeys(lockstep._PACKAGES, "lockstep")
    assert sorted(lockstep._WHERE) == lockstep.__all__
