"""The kit for GPUs runs on simulated accelerators, ends what takes too long, and says what has failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def start(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, env=environment)


def test_shares_and_kills_on_simulated_accelerators(sim, tmp_path):
    command = [str(BENCHMARKS / "gpu.py"), "--device", "sim", "--parts", "shares", "kills", "--kills", "3"]
    ended = start(*command, "--out", str(tmp_path / "table.txt"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = (tmp_path / "table.txt").read_text()
    assert re.search(r"^machine: .+torch \d", table, re.M)
    assert len(set(re.findall(r"fingerprint (\w{16})", table))) == 1
    assert len(re.findall(r"^shares, [124] ranks? ", table, re.M)) == 3
    assert re.search(r"^kills +gloo +3 of 3 named by all others", table, re.M)


def test_without_a_gpu_it_says_so():
    assert start(str(BENCHMARKS / "gpu.py")).stdout.startswith("no CUDA device here")


PROGRAM = """
import sys, time, gpu
kit = gpu.Kit("cpu", 1)
gpu.run_program(kit, "fails", ["-c", "raise SystemExit(3)"], 30)
sleeps = "import subprocess; subprocess.run(['sleep', '500']); print('never')"
gpu.run_program(kit, "hangs", ["-c", sleeps], 2)
kit.deadline = time.monotonic()
gpu.run_program(kit, "comes too late", ["-c", sleeps], 100)
print("table", [row[2] for row in kit.rows])
"""


def test_a_program_that_fails_or_hangs_is_told_of():
    ended = start("-c", PROGRAM)
    results = ended.stdout.rpartition("table ")[2]
    assert results.count("FAILED") == 3, ended.stdout + ended.stderr
    assert results.count("FAILED: stopped after") == 2
    assert "FAILED: exit status 3" in results


BITS_THAT_DIFFER = """
import gpu
kit = gpu.Kit("cpu", 1)
values = iter("abc")
gpu.gpu_ranks.run = lambda function, world, *args, limit: [gpu.gpu_ranks.Ended(0, next(values))] * world
gpu.run_shares(kit, [], ["gloo"])
gpu.gpu_ranks.run = lambda function, world, *args, limit: [gpu.gpu_ranks.Ended(0, (2, "another", 0.1, 0.2))] * world
gpu.run_kills(kit, ["gloo"])
print("table", [row[2] for row in kit.rows])
"""


@pytest.mark.parametrize("what", ["they differ", "0 of 1 named"])
def test_bits_that_differ_and_kills_that_nobody_names_have_failed(what):
    assert f"FAILED: {what}" in start("-c", BITS_THAT_DIFFER).stdout


TWO_RANKS = """
import gpu, torch
kit = gpu.Kit("cpu", 1)
torch.cuda.device_count = lambda: 1
gpu.nccl_version = lambda: (2, 28, 9)
print("old", gpu.for_several_ranks(kit, ["nccl"]))
gpu.nccl_version = lambda: (2, 30, 7)
gpu.backend_of = {"nccl": "gloo", "nccl-legacy": "no such backend"}.get
print("new", gpu.for_several_ranks(kit, ["nccl", "nccl-legacy"]))
print("table", [row[2] for row in kit.rows])
"""


def test_ranks_share_a_gpu_where_nccl_lets_them():
    output = start("-c", TWO_RANKS).stdout
    assert "old ['gloo']" in output
    assert "new ['nccl']" in output
    assert "not with NCCL 2.28.9: Gloo instead" in output
    assert "'works', " in output
    assert "FAILED: " in output.rpartition("table ")[2]
