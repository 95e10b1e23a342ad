"""README's program under real launchers: the same bits as under torchrun, and a rank that is killed is named."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.launchers
PROGRAM = Path(__file__).parent / "program.py"
LAUNCHERS = ["torchrun", "open_mpi", "mpich", "slurm", "ray"]
RANK_OF = {"open_mpi": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK", "slurm": "SLURM_PROCID"}


def start(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def told(folder: Path) -> dict[int, dict]:
    """Return what the ranks have written, by rank."""
    return {int(file.stem): json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_three_ranks_come_to_the_bits_of_torchrun(name, torchrun, request, tmp_path):
    found = []
    for launch in (torchrun, request.getfixturevalue(name)):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        ended = start(launch(3, [str(PROGRAM), str(folder)]))
        assert ended.returncode == 0, ended.stderr
        found.append(told(folder))
    assert list(found[1]) == [0, 1, 2]
    assert {each["world"] for each in found[1].values()} == {3}
    assert found[1] == found[0]
    assert len({each["fingerprint"] for each in found[1].values()}) == 1


@pytest.mark.parametrize(
    ("name", "how"),
    # MPICH's mpiexec kills all ranks by SIGKILL as soon as one has ended by a signal: none could say anything.
    [(name, how) for name in LAUNCHERS for how in ("--kill", "--fail") if (name, how) != ("mpich", "--kill")],
)
def test_a_rank_that_ends_is_named_by_all_others_within_two_seconds(name, how, request, tmp_path):
    ended = start(request.getfixturevalue(name)(3, [str(PROGRAM), str(tmp_path), how, "1"]))
    found = told(tmp_path)
    time_of_end = float((tmp_path / "ended").read_text())
    assert ended.returncode != 0
    assert list(found) == [0, 2], ended.stderr
    for each in found.values():
        assert "rank 1" in each["failure"]
        assert each["time"] - time_of_end < 2


@pytest.mark.parametrize("name", RANK_OF)
def test_ranks_that_are_not_told_who_they_are_are_no_worlds_of_one(name, request, tmp_path):
    lacking = [
        "-c",
        f"import os, runpy, sys; del os.environ[{RANK_OF[name]!r}]; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')",
    ]
    ended = start(request.getfixturevalue(name)(2, [*lacking, str(PROGRAM), str(tmp_path)]))
    assert ended.returncode != 0
    assert "lockstep.errors.OptionError" in ended.stderr
    assert "session(alone=True)" in ended.stderr
    assert "fingerprint" not in str(told(tmp_path) if list(tmp_path.glob("[0-9].json")) else "")
