"""PyTorch finds the backend by its entry point, in a process that has not imported the library."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import lockstep

GROUP = "torch.distributed.backends"
PROGRAM = """
import sys
import torch
import torch.distributed as dist

assert "lockstep" not in sys.modules
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
numbers = torch.ones(3)
dist.all_reduce(numbers)
print(numbers.tolist(), dist.get_backend(), type(dist.group.WORLD).__name__)
dist.destroy_process_group()
"""


def test_shm_needs_no_import(tmp_path):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        pytest.skip("PyTorch looks for entry points of backends from 2.14 on")
    root = Path(__file__).parents[2]
    entries = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    installed = tmp_path / "lockstep-0.1.0.dist-info"  # as pip writes it
    installed.mkdir()
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (installed / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep\nVersion: 0.1.0\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(lockstep.__file__).parents[1])])
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert ended.stdout.split("\n")[0] == "[1.0, 1.0, 1.0] shm ProcessGroupShm", ended.stderr
