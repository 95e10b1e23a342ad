"""Every benchmark runs, with sizes too small to measure anything, and prints what it would have found."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("bench_*.py"))
OPTIONS = {"bench_cuda": ["--device", "cpu"]}

pytestmark = pytest.mark.timeout(300)

# One after the other in one interpreter: PyTorch is imported once here, and once by the server of their processes.
ALL_IN_ONE = """
import contextlib, io, json, runpy, sys, traceback

for arguments in json.loads(sys.argv[1]):
    sys.argv, error = arguments, ""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([arguments[0], output.getvalue(), error]), flush=True)
"""


@pytest.fixture(scope="module")
def outputs():
    """By benchmark: what it has printed, and the traceback of its failure."""
    commands = [[str(script), "--quick", *OPTIONS.get(script.stem, [])] for script in BENCHMARKS]
    # threads that wait for each other by spinning take minutes where other tests run beside
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "error"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCHMARKS[0].parent), os.environ.get("PYTHONPATH")]))
    program = [sys.executable, "-c", ALL_IN_ONE, json.dumps(commands)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {Path(script).stem: (output, error) for script, output, error in lines}
    return {script.stem: found.get(script.stem, ("", done.stderr or "it did not run")) for script in BENCHMARKS}


def test_there_are_benchmarks():
    assert {"bench_replicate", "bench_step", "bench_cuda"} <= {script.stem for script in BENCHMARKS}


@pytest.mark.parametrize("name", [script.stem for script in BENCHMARKS])
def test_it_prints_a_ratio(name, outputs):
    output, error = outputs[name]
    assert not error, error
    assert re.search(r"^machine: .+torch \d", output, re.MULTILINE)
    assert re.search(r"^ratio .+: \d+\.\d+", output, re.MULTILINE), output


def test_the_gpu_benchmark_says_that_there_is_no_gpu():
    script = next(script for script in BENCHMARKS if script.stem == "bench_cuda")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "no CUDA device" in done.stdout
