"""Every benchmark runs, with sizes too small to measure anything, and prints what it would have found."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LEFT_OUT = "bench_restarts"  # kills ranks under torchrun; Gloo may end the survivors in DDP's rounds
FOUND = sorted((Path(__file__).parents[2] / "benchmarks").glob("bench_*.py"))
BENCHMARKS = [script for script in FOUND if script.stem != LEFT_OUT]
OPTIONS = {
    "bench_cuda": ["--device", "cpu"],
    "bench_ddp": ["--models", "many small", "unused"],
    "bench_ddp_cuda": ["--models", "encoder"],
}
NO_GPU = "the GPU benchmark as it is"

LIMIT = 1500.0  # seconds, of which all take 100 on a quiet machine; where much runs beside them, more than 280

pytestmark = pytest.mark.timeout(LIMIT + 60)

# One after the other in one interpreter: PyTorch is imported once here, and once by the server of their processes.
ALL_IN_ONE = """
import contextlib, io, json, runpy, sys, traceback

for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv, error = arguments, ""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([name, output.getvalue(), error]), flush=True)
"""


@pytest.fixture(scope="module")
def outputs():
    """By benchmark: what it has printed, and the traceback of its failure."""
    commands = {script.stem: [str(script), "--quick", *OPTIONS.get(script.stem, [])] for script in BENCHMARKS}
    commands[NO_GPU] = commands["bench_cuda"][:1]
    # threads that wait for each other by spinning take minutes where other tests run beside
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "error", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCHMARKS[0].parent), os.environ.get("PYTHONPATH")]))
    program = [sys.executable, "-c", ALL_IN_ONE, json.dumps(commands)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {name: (output, error) for name, output, error in lines}
    return {name: found.get(name, ("", done.stderr or "it did not run")) for name in commands}


def test_there_are_benchmarks():
    assert {"bench_replicate", "bench_step", "bench_cuda"} <= {script.stem for script in BENCHMARKS}


@pytest.mark.parametrize("name", [script.stem for script in BENCHMARKS])
def test_it_prints_a_ratio(name, outputs):
    output, error = outputs[name]
    assert not error, error
    assert re.search(r"^machine: .+torch \d", output, re.MULTILINE)
    assert re.search(r"^ratio .+: \d+\.\d+", output, re.MULTILINE), output


def test_the_gpu_benchmark_says_that_there_is_no_gpu(outputs):
    output, error = outputs[NO_GPU]
    assert not error, error
    assert len(output.splitlines()) == 1
    assert "no CUDA device" in output
