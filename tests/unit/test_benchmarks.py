"""Every benchmark runs, with sizes too small to measure anything, and prints what it would have found."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("bench_*.py"))


def run(script: Path, *options: str) -> str:
    # threads that wait for each other by spinning take minutes where other tests run beside
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(script), "--quick", *options], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_benchmarks():
    assert {"bench_replicate", "bench_step", "bench_cuda"} <= {script.stem for script in BENCHMARKS}


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_it_prints_a_ratio(script):
    output = run(script, *(["--device", "cpu"] if script.stem == "bench_cuda" else []))
    assert re.search(r"^machine: .+torch \d", output, re.MULTILINE)
    assert re.search(r"^ratio .+: \d+\.\d+", output, re.MULTILINE), output


def test_the_gpu_benchmark_says_that_there_is_no_gpu():
    script = next(script for script in BENCHMARKS if script.stem == "bench_cuda")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "no CUDA device" in done.stdout
