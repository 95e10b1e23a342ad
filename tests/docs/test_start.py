"""docs/start.md, read as a newcomer does: what its programs print is what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "start.md").read_text()
BLOCK = re.compile(r"^(?:Save this as `(?P<file>\S+)`:\n\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]


@dataclass(frozen=True)
class Trial:
    """A command of the page, the files that are there by then, and what the page shows below the command."""

    command: list[str]
    files: dict[str, str]
    shown: str


def trials(page: str) -> list[Trial]:
    """The commands of a page, in order. A change (``udiff``) is made to the first file, and undone by the next one."""
    files: dict[str, str] = {}
    changed: dict[str, str] = {}
    found = []
    for block in BLOCK.finditer(page):
        if block["kind"] == "python":
            files[block["file"]] = block["text"]
        elif block["kind"] == "udiff":
            name = next(iter(files))
            old, new = ([line[1:] for line in block["text"].splitlines() if line[0] == sign] for sign in "-+")
            assert files[name].count("\n".join(old)) == 1, f"{old} is in {name} once"
            changed = {name: files[name].replace("\n".join(old), "\n".join(new))}
        elif block["kind"] == "console" and not block["text"].startswith("$ pip"):
            command, _, shown = block["text"].removeprefix("$ ").partition("\n")
            found.append(Trial(command.split(), {**files, **changed}, shown))
    return found


def matches(shown: str, printed: str) -> bool:
    """Return True if all that is shown is printed, in order; ``...`` stands for anything, and lines may be broken."""
    prefixes = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
    parts = [prefixes.sub("", part).split() for part in shown.split("...")]
    text, place = " ".join(prefixes.sub("", printed).split()), 0
    for part in parts:
        place = text.find(" ".join(part), place)
        if place < 0:
            return False
    return True


@pytest.mark.parametrize("number", range(len(trials(PAGE))))
def test_a_program_prints_what_the_page_shows(number, tmp_path):
    trial = trials(PAGE)[number]
    for name, text in trial.files.items():
        (tmp_path / name).write_text(text)
    program, *arguments = trial.command
    command = [sys.executable, *(TORCHRUN if program == "torchrun" else []), *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200, check=False
    )
    printed, _, raised = trial.shown.partition("...\n") if done.returncode else (trial.shown, "", "")
    assert all(matches(line, done.stdout) for line in printed.splitlines()), done.stdout  # ranks print in any order
    assert bool(raised) == bool(done.returncode), done.stderr
    assert matches(raised, "\n".join(line for line in done.stderr.splitlines() if line.startswith("[rank0]:")))


def test_the_page_has_five_trials():
    commands = [" ".join(trial.command) for trial in trials(PAGE)]
    alone, together, look = (
        "python train.py",
        "torchrun --nproc-per-node 2 train.py",
        "torchrun --nproc-per-node 2 look.py",
    )
    assert commands == [alone, together, together, together, look]


def test_what_is_not_printed_is_found():
    assert matches("a 1\n...\nb c", "x a 1\ny\nb\nc z")
    assert not matches("loss 1.0", "loss 1.1")
    assert not matches("b\n...\na", "a\nb")
