"""Faults that are planted in the source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "mutants" / "mutants.py"

PACKAGE = """
def is_large(number: int) -> bool:
    if number < 0:
        raise ValueError(f"{number} is less than 0")
    return number > 10


def forgotten(numbers):
    numbers.clear()
"""

TESTS = """
import threading

from lockstep.tiny import is_large


def test_small():
    assert not is_large(5)


def test_large_in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(is_large(50)))
    thread.start()
    thread.join()
    assert found == [True]
"""


def test_faults_are_caught_or_survive_or_have_no_test(tmp_path):
    pytest.importorskip("coverage")
    for file, text in {
        "src/lockstep/__init__.py": "",
        "src/lockstep/tiny/__init__.py": PACKAGE,
        "tests/tiny/test_tiny.py": TESTS,
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    command = [sys.executable, str(SCRIPT), "--root", str(tmp_path), "--rooms", "tiny", "--limit", "60"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert run.stdout.splitlines() == [
        "tiny: 7 planted; 3 caught, 2 survived, 2 no test executes it",
        "",
        "survived:",
        "src/lockstep/tiny/__init__.py:3  0 -> 1  (2 of 2 tests)",
        "src/lockstep/tiny/__init__.py:5  10 -> 11  (2 of 2 tests)",
        "",
        "no test executes it:",
        'src/lockstep/tiny/__init__.py:4  left out: raise ValueError(f"{number} is less than 0")',
        "src/lockstep/tiny/__init__.py:9  left out: numbers.clear()",
    ], run.stderr
