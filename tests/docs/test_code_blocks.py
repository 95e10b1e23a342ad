"""Every Python block of README and the documentation runs as printed, in processes; of a diff both sides do.

Each block is a program of its own. Only on a page that hides code, ``<!-- python ... -->``, blocks follow each other in
one namespace. ``<!-- ranks: 4 -->`` says in how many ranks a page's blocks run. A block that makes the default process
group gets a place of its own to meet, as torchrun would give it. Blocks that import what is not installed
(accelerate, ...) are only compiled here; `make test-clients` has it. Where ``<!-- each block is a program -->`` stands,
tests/clients or tests/launchers runs them.
"""

from __future__ import annotations

import ast
import importlib.util
import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import sim as simulator
from client_programs import let_torchvision_load
from processes import be_launched, run_processes

ROOT = Path(__file__).parents[2]
OPTIONAL = {
    "accelerate",
    "horovod",
    "lightning",
    "ray",
    "tensorboard",
    "torchft",
    "torchmetrics",
    "tqdm",
    "transformers",
    "wandb",
}
BLOCK = re.compile(r"^(?:<!-- python\n(?P<hidden>.*?)^-->|```(?P<kind>python|diff)\n(?P<shown>.*?)^```)$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """Code that stands in a page, with the number of its first line."""

    line: int
    code: str
    hidden: bool = False

    @property
    def meets(self) -> bool:
        """True if it makes the default process group."""
        return "init_process_group(" in self.code or "lockstep.session(" in self.code

    @property
    def can_run(self) -> bool:
        """True if what it imports is there; what it is written in has to be Python in any case."""
        found = [node for node in ast.walk(ast.parse(self.code)) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [
            name
            for node in found
            for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module])
        ]
        roots = {str(name).partition(".")[0] for name in names}
        return all(importlib.util.find_spec(root) is not None for root in roots & OPTIONAL)


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page; of a diff two, what was and what is."""
    found = []
    for match in BLOCK.finditer(text):
        code = match["hidden"] or match["shown"]
        line = text.count("\n", 0, match.start()) + 2
        sides = [code] if match["kind"] != "diff" else [_side(code, sign) for sign in "-+"]
        found += [Block(line, side, match["hidden"] is not None) for side in sides]
    return found


def _side(diff: str, sign: str) -> str:
    """One side of a diff; lines of the other are empty, so that numbers of lines stay."""
    lines = diff.splitlines()
    assert all(line[:1] in {"", " ", "-", "+"} for line in lines), (
        f"lines of a diff begin with a space, - or +:\n{diff}"
    )
    return "\n".join(line[1:] if line[:1] in {" ", sign} else "" for line in lines)


def pages() -> list[Path]:
    found = [(page, page.read_text()) for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]]
    return [page for page, text in found if blocks_of(text) and "<!-- each block is a program -->" not in text]


PAGES = [str(page.relative_to(ROOT)) for page in pages()]


@pytest.mark.parametrize("accelerators", [0, 1, 2])
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, accelerators, tmp_path):
    """On the CPU, and where there are accelerators in one process for each of them, as they want to be started."""
    text = (ROOT / page).read_text()
    blocks = [block for block in blocks_of(text) if block.can_run]
    if accelerators:  # PyTorch's own needs CUDA
        blocks = [block for block in blocks if "from torch.nn import DataParallel" not in block.code]
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if block.meets else None
        for block in blocks
    ]
    ports = [store.port if store else 0 for store in stores]
    ranks = re.search(r"^<!-- ranks: (\d+) -->$", text, re.M)
    world = int(ranks[1]) if ranks else accelerators or 2
    run_processes(world, run_blocks, page, blocks, ports, str(tmp_path), accelerators and world, timeout=280.0)


def run_blocks(rank: Any, page: str, blocks: list[Block], ports: list[int], folder: str, accelerators: int = 0) -> None:
    if accelerators:
        assert not isinstance(found := simulator.load(accelerators), str), found
    os.chdir(folder)
    let_torchvision_load()
    go_on = any(block.hidden for block in blocks)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ended = []  # what PyTorch's wrapper holds lives as long as the process, as in a program; else Gloo may deadlock
    for block, port in zip(blocks, ports, strict=True):
        if not go_on:
            ended.append(namespace)
            namespace = {"__name__": "__main__"}
        if dist.is_initialized() and (block.meets or not go_on):
            dist.destroy_process_group()
        if block.meets:
            be_launched(rank, port)
        source = "\n" * (block.line - 1) + block.code
        linecache.cache[page] = (len(source), None, source.splitlines(keepends=True), page)
        exec(compile(source, page, "exec"), namespace)


# ---------------------------------------------------------------------------------- of the runner itself


def test_a_block_that_is_wrong_fails_with_the_page_and_the_line(tmp_path):
    blocks = blocks_of("# Page\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_processes(1, run_blocks, "a page", blocks, [0], str(tmp_path))
    assert 'File "a page", line 5' in str(caught.value.__cause__)


def test_both_sides_of_a_diff_run():
    (before, after) = blocks_of("```diff\n a = 1\n-b = a\n+b = -a\n```\n")
    assert [side.code.split("\n") for side in (before, after)] == [["a = 1", "b = a", ""], ["a = 1", "", "b = -a"]]


def test_what_is_hidden_runs_and_what_is_not_installed_does_not():
    hidden, shown = blocks_of("<!-- python\nx = 1\n-->\ntext\n```python\nimport horovod.torch as hvd\n```\n")
    assert (hidden.line, hidden.code, hidden.can_run) == (2, "x = 1\n", True)
    assert shown.can_run == (importlib.util.find_spec("horovod") is not None)
