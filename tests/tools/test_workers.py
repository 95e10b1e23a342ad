"""Workers that share the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOME_END_THEIR_WORKER = """
import os
import pytest

@pytest.mark.parametrize("number", range(60))
def test_a(number):
    if number in (20, 21, 59):
        os._exit(3)
"""


def test_tests_that_end_their_worker_run_once_and_all_others_run(tmp_path):
    pytest.importorskip("xdist")
    file = tmp_path / "test_ending.py"
    file.write_text(SOME_END_THEIR_WORKER)
    command = [sys.executable, "-m", "pytest", "-n", "3", "-p", "workers", "-p", "no:cacheprovider", "-c", os.devnull]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, f"--rootdir={tmp_path}", str(file)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "3 failed, 57 passed" in run.stdout, run.stdout + run.stderr
    assert sorted(re.findall(r"^worker '\w+' crashed while running '.*\[(\d+)\]'", run.stdout, re.M)) == [
        "20",
        "21",
        "59",
    ], run.stdout
