"""Without the names that Python has on Linux alone, one process and ranks over Gloo train as they do with them."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).parent / "without_linux.py")
STARTS = {
    "one process": ([sys.executable], ["rank 0 of 1 has made 2 steps"]),
    "two ranks": (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        ["rank 0 of 2 has made 3 steps", "rank 1 of 2 has made 3 steps"],
    ),
}


@pytest.mark.around
@pytest.mark.parametrize(("start", "lines"), STARTS.values(), ids=STARTS)
def test_training_without_what_linux_alone_has(start, lines):
    ended = subprocess.run([*start, PROGRAM], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == lines
