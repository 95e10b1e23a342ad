"""A job of SLURM that is told in advance of its end: it saves, is queued again, and goes on from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.checkpoints.memory import MemoryFolder

pytestmark = pytest.mark.launchers
HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "hosts.md"
SECONDS = 700.0


def job_of_the_page(folder: Path) -> str:
    """The script of the page, for this machine: two tasks, three minutes, and a notice at most two minutes before."""
    (script,) = [
        each for each in re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.M | re.S) if "requeue" in each
    ]
    for old, new in {
        "--nodes=2 --ntasks-per-node=4": f"--ntasks=2 --overcommit --time=3 --output={folder}/output",
        "USR1@120": "USR1@60",
        "python train.py": f"{sys.executable} {HERE / 'requeued.py'} {folder} hold",
    }.items():
        assert old in script
        script = script.replace(old, new)
    return script


@pytest.mark.timeout(900)
def test_a_job_that_is_queued_again_goes_on_where_it_was(slurm_cluster, tmp_path):
    environment = os.environ | {"SLURM_CONF": slurm_cluster, "OMP_NUM_THREADS": "1"}
    (tmp_path / "job").write_text(job_of_the_page(tmp_path))
    output = tmp_path / "output"
    subprocess.run(["sbatch", str(tmp_path / "job")], env=environment, check=True, cwd=tmp_path)
    deadline = time.monotonic() + SECONDS
    while subprocess.run(["squeue", "--noheader"], env=environment, check=True, capture_output=True).stdout:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.5)
    told = output.read_text()
    command = [sys.executable, str(HERE / "requeued.py"), str(tmp_path / "undisturbed")]
    alone = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert re.findall(r"from step (\d+)", told) == ["0", "6"]
    assert re.findall(r"fingerprint .*", told) == re.findall(r"fingerprint .*", alone.stdout)
    assert not MemoryFolder.of(tmp_path / "run").folder.exists()
