"""``lockstep runs``: what runs have left in the memory of this host, their histories, and what is removed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import lockstep
from lockstep.checkpoints import history, memory
from lockstep.checkpoints.crash_loops import failures_in_a_row
from lockstep.checkpoints.history import BEGAN, FAILED, Event
from lockstep.cli.main import main
from lockstep.errors import CrashLoopError


@pytest.fixture(autouse=True)
def host_memory(tmp_path, monkeypatch):
    """A host of our own."""
    monkeypatch.setattr(memory, "ROOT", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def fail(path, at, **resume):
    """A run with a snapshot after each step fails in a step; return the step from which it went on."""
    x = torch.zeros(100)
    with pytest.raises(KeyError), lockstep.session() as run:
        run.resume(path, x=x, **resume)
        begin = run.step
        for _ in run.batches(range(at - begin)):
            if run.step == at:
                raise KeyError(f"of step {at}")
            run.snapshot(path, every=1, x=x)
    return begin


def told(capsys, *options):
    assert main(["runs", "--json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_nothing(capsys):
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "no run has snapshots in the memory of this host\n"
    assert told(capsys) == []


def test_what_a_run_has_left_and_its_history(tmp_path, capsys, host_memory):
    path = tmp_path / "run"
    assert [fail(path, 3), fail(path, 5)] == [0, 2]
    (run,) = told(capsys)
    assert run["path"] == str(path)
    assert run["snapshot"].items() >= {"step": 4, "ranks": 1}.items()
    assert (run["runs"], run["removed"]) == (False, False)
    assert run["bytes"] > 400
    assert [event.partition("  ")[2] for event in run["history"]] == [
        "1 ranks began after step 0",
        "rank 0 failed at step 3: KeyError: 'of step 3'",
        "1 ranks began after step 2",
        "rank 0 failed at step 5: KeyError: 'of step 5'",
    ]
    assert main(["runs", "--clean"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{path}: removed; snapshot after step 4, ")
    assert "\n  20" in text
    assert list(host_memory.iterdir()) == []


def test_what_is_used_is_not_removed(tmp_path):
    """A lock of this process does not keep this process from taking it, so the question goes to another one."""
    with lockstep.session() as run:
        run.snapshot(tmp_path / "run", every=1, x=1)
        (found,) = memory.all_folders()
        code = (
            "import sys; from pathlib import Path; from lockstep.checkpoints import memory; "
            "memory.ROOT = Path(sys.argv[1]); from lockstep.cli.main import main; main(['runs', '--clean'])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(memory.ROOT)], capture_output=True, text=True, check=True, timeout=100
        )
        assert f"{tmp_path / 'run'}: runs; snapshot after step 0" in done.stdout
        assert found.folder.is_dir()


# ---------------------------------------------------------------------------------------- circles


def test_a_step_that_fails_each_time_stops_the_run(tmp_path, capsys):
    path = tmp_path / "run"
    assert [fail(path, 3) for _ in range(3)] == [0, 2, 2]
    for _ in range(2):  # it stays so, however often the engine starts it
        failed = pytest.raises(
            CrashLoopError, match=r"the last 3 starts have failed at the same step: .* step 3: KeyErr"
        )
        with failed, lockstep.session() as run:
            run.resume(path)
    assert fail(path, 3, give_up_after=None) == 2
    assert told(capsys, "--forget")[0]["history"]
    assert fail(path, 4) == 2


def test_steps_that_differ_are_bad_luck(tmp_path):
    assert [fail(tmp_path / "run", step) for step in (3, 3, 5, 5, 3 + 3)] == [0, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("steps", "row"),
    [
        ([], []),
        ([4], [4]),
        ([4, 4, 4], [4, 4, 4]),
        ([4, 5, 5], [5, 5]),
        ([5, 5, None], []),
        ([5, None, 5], [5]),
        ([0, 0, 0], []),
    ],
)
def test_failures_in_a_row(steps, row):
    """None is a start of which nobody has heard how it ended; 0 one that has failed before its first step."""
    events = []
    for start, step in enumerate(steps):
        events.append(Event(BEGAN, str(start), "", 1, 2))
        if step is not None:
            events.append(Event(FAILED, str(start), "", step, 2))
    assert [event.step for event in failures_in_a_row(events)] == row


def test_a_history_with_half_a_line(tmp_path):
    for rank in range(2):
        history.note(tmp_path, Event(BEGAN, "a", history.now(), 3, 2, rank))
    with open(tmp_path / history.HISTORY, "a") as file:
        file.write('{"what": "fai')
    assert [event.step for event in history.read(tmp_path)] == [3]
