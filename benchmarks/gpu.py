"""What only a GPU can show, in under nine minutes: tests, benchmarks, shares, and ranks that are killed.

    make gpu                             # with the newest PyTorch, in an environment of its own
    python benchmarks/gpu.py             # with the PyTorch that is there
    python benchmarks/gpu.py --device sim    # tries the kit on simulated accelerators: small sizes, no measurement

Runs tests/gpu, bench_cuda.py and bench_ddp_cuda.py; trains with shares on one, two and four ranks, which have to end
with the same bits; and kills a rank of two or three 50 times, which all others have to name. Several ranks are on one
GPU where there is only one: NCCL allows that from 2.30 on. All of it over each of PyTorch's backends for NCCL: 2.15 has
a new one, ``nccl``, beside ``nccl-legacy``; over Gloo where NCCL cannot. What takes longer than it may is stopped,
and the table says so. The table, with hardware and versions, goes into benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
SECONDS = 530.0
"""For all of it."""
NEEDED_NCCL = (2, 30)
"""The first NCCL that takes several ranks on one GPU."""
SEVERAL_RANKS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
PARTS = ("tests", "benchmarks", "shares", "kills")

os.environ |= {**SEVERAL_RANKS, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
SOURCE = str(ROOT / "src")  # a checkout is enough, with PyTorch and pytest
sys.path.insert(0, SOURCE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))

import gpu_ranks  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness import machine, table  # noqa: E402

import lockstep  # noqa: E402


@dataclass
class Kit:
    """What has been found so far, and how much time is left."""

    kind: str
    kills: int
    file: Path | None = None
    machine: list[str] = field(default_factory=list)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    deadline: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    @property
    def measures(self) -> bool:
        """True if this is a GPU, and no trial of the kit."""
        return self.kind == "cuda"

    def left(self, limit: float) -> float:
        """The seconds that a part may take."""
        return max(1.0, min(limit, self.deadline - time.monotonic()))

    def add(self, what: str, backend: str, result: str, since: float) -> None:
        """Add a row, show it, and write the table as far as it goes: whatever stops the kit, the rows are there."""
        self.rows.append((what, backend, result, f"{time.monotonic() - since:.0f}"))
        print(" | ".join(self.rows[-1]), flush=True)
        if self.file is not None:
            texts = ["\n".join(self.machine), lines_of_table(self), *self.outputs]
            self.file.write_text("\n\n".join(text.strip() for text in texts) + "\n")


# ------------------------------------------------------------------------------------- programs of their own


def run_program(kit: Kit, what: str, command: list[str], limit: float, **environment: str) -> str:
    """Run a program to its end, or to its limit with all its processes; returns what it has written."""
    since = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        program = subprocess.Popen(
            [sys.executable, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            status = f"exit status {program.wait(kit.left(limit))}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {time.monotonic() - since:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)  # and whatever it has left
        program.wait()
        output.seek(0)
        text = output.read()
    kit.outputs.append(f"== {what}\n{text.rstrip()}")
    last = next(
        (line for line in reversed(text.splitlines()) if re.search(r"\d (passed|failed|skipped|error)", line)), ""
    )
    ratios = re.findall(r"\((?:aim: [^;]+; )(met|MISSED)\)", text)
    aims = f"{ratios.count('met')} of {len(ratios)} aims met" if ratios else ""
    failed = "" if status == "exit status 0" else f"FAILED: {status}"
    kit.add(what, "", ", ".join(filter(None, [failed, last.strip("= "), aims])) or "ran", since)
    return text


def run_tests(kit: Kit) -> None:
    dry = {} if kit.measures else {"LOCKSTEP_GPU_TESTS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    # No plug-in of pytest is needed, and one that is missing leaves its options in pyproject.toml unknown.
    plain = ["-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning"]
    if find_spec("xdist") and (os.cpu_count() or 1) >= 8:
        plain += ["-n", "4"]
    if find_spec("pytest_benchmark"):
        plain += ["-p", "no:benchmark"]  # which warns beside xdist
    since = time.monotonic()
    text = run_program(
        kit, "tests/gpu", ["-m", "pytest", "-rfEs", *plain, "-p", "no:cacheprovider", "tests/gpu"], 200, **dry
    )
    for test, why in re.findall(r"^(?:FAILED|ERROR) tests/gpu/(\S+)(?: - (.*))?", text, re.M):
        kit.add(test, "", f"FAILED: {why}", since)
    if kit.measures and torch.cuda.device_count() < 2:
        kit.add("what needs several GPUs", "", "not tried: one GPU", since)


def run_benchmarks(kit: Kit, names: list[str], shared: bool) -> None:
    quick = ["--rounds", "5"] if kit.measures else ["--quick"]
    cpu = [] if kit.measures else ["--device", "cpu"]
    run_program(kit, "benchmarks/bench_cuda.py", ["benchmarks/bench_cuda.py", *quick, *cpu], 80)
    command = ["benchmarks/bench_ddp_cuda.py", *quick, "--models", "encoder", "encoder, bf16"]
    command += ["--nccl", *names] if names else []
    command += ["--share-gpu"] if shared and names else []
    run_program(kit, "benchmarks/bench_ddp_cuda.py", command, 150)


# --------------------------------------------------------------------------------------------------- ranks


def nccl_names() -> list[str]:
    """PyTorch's backends for NCCL here: 2.15 has two."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return []
    known = {each.name for each in entry_points(group="torch.distributed.backends")}  # PyTorch's own, from 2.14 on
    return ["nccl", *(["nccl-legacy"] if "nccl-legacy" in known else [])]


def nccl_version() -> tuple[int, int, int]:
    """That of the library that is loaded: PyTorch tells the one that it was built with."""
    number = ctypes.c_int()
    if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)):
        return torch.cuda.nccl.version()
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def for_several_ranks(kit: Kit, names: list[str]) -> list[str]:
    """Those with which two ranks can sum: each is tried."""
    found, nccl = [], nccl_version() if names else ()
    for name in names:
        since = time.monotonic()
        if torch.cuda.device_count() < 2 and nccl < NEEDED_NCCL:
            kit.add("two ranks on one GPU", name, f"not with NCCL {'.'.join(map(str, nccl))}: Gloo instead", since)
            continue
        ended = gpu_ranks.run(gpu_ranks.add, 2, kit.kind, backend_of(name), limit=kit.left(60))
        works = all(each.code == 0 and each.result == 2.0 for each in ended)
        kit.add("two ranks on one GPU", name, "works" if works else f"FAILED: {ended}", since)
        found += [name] if works else []
    return found or ["gloo"]


def backend_of(name: str) -> str:
    """The backend of a group: ranks also send tensors on the CPU."""
    return name if name == "gloo" else f"cpu:gloo,cuda:{name}"


def run_shares(kit: Kit, alone: list[str], together: list[str]) -> None:
    """One, two and four ranks; all have to come to the same bits."""
    prints: dict[str, str] = {}
    for world, names in ((1, alone or ["gloo"]), (2, together), (4, together)):
        what = f"shares, {world} rank{'s' * (world > 1)}"
        for name in names:
            since = time.monotonic()
            ended = gpu_ranks.run(gpu_ranks.shares, world, kit.kind, backend_of(name), limit=kit.left(60))
            found = {each.result for each in ended}
            if any(each.code != 0 for each in ended) or len(found) != 1:
                kit.add(what, name, f"FAILED: {ended}", since)
                continue
            (text,) = found
            prints[f"{world} over {name}"] = text
            kit.add(what, name, f"fingerprint {text[:16]}", since)
    same = len(set(prints.values())) == 1
    kit.add("shares, bits", "all", "the same" if same else f"FAILED: they differ: {prints}", time.monotonic())


def run_kills(kit: Kit, names: list[str]) -> None:
    """Kill a rank of two or three, at a random place; several trials at a time."""
    numbers, since = random.Random(0), time.monotonic()
    for number, name in enumerate(names):
        share = kit.kills // len(names) + (number < kit.kills % len(names))
        plans = []
        for _ in range(share):
            world = numbers.choice([2, 3])
            kill = gpu_ranks.Kill(numbers.randrange(world), numbers.randint(1, 8), numbers.choice(gpu_ranks.PLACES))
            plans.append((world, kill))
        limit = kit.left(110) / (len(names) - number)
        until = time.monotonic() + limit

        def trial(plan: tuple[int, gpu_ranks.Kill], name: str = name, until: float = until) -> Any:
            return run_kill(kit, *plan, name) if time.monotonic() < until else None

        with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4))) as pool:
            found = list(pool.map(trial, plans))
        named = [each[0] for each in found if isinstance(each, tuple)]
        over = [each[1] for each in found if isinstance(each, tuple)]
        problems = [each for each in found if isinstance(each, str)]
        left = found.count(None)
        text = f"{len(named)} of {share - left} named by all others"
        if named:
            text += f", after {median(named):.3f} s (median), {max(named):.3f} s at most"
            text += f", sessions over after {median(over):.3f} s, {max(over):.3f} s at most"
        text += f"; {left} not tried, for want of time" if left else ""
        kit.add("kills", name, f"FAILED: {text}; first: {problems[0]}" if problems else text, since)


def run_kill(kit: Kit, world: int, kill: gpu_ranks.Kill, name: str) -> str | tuple[float, float]:
    """The seconds after which the last one has named the killed rank and ended its session, or what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        ended = gpu_ranks.run(
            gpu_ranks.until_killed, world, kit.kind, backend_of(name), kill, folder, limit=kit.left(45)
        )
    others = [each for rank, each in enumerate(ended) if rank != kill.rank]
    if ended[kill.rank].code != -signal.SIGKILL or any(e.code != 0 or e.result[0] != kill.rank for e in others):
        return f"{kill} of {world}: {ended}"
    return max(each.result[2] for each in others), max(each.result[3] for each in others)


# -------------------------------------------------------------------------------------------------- the table


def describe(kit: Kit) -> list[str]:
    """Hardware and versions, one to a line."""
    lines = [date.today().isoformat(), machine(), f"lockstep {lockstep.__version__}"]
    if kit.measures:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            lines += subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            lines.append(f"nvidia-smi: {error}")
        if dist.is_nccl_available():
            settings = " ".join(map("=".join, SEVERAL_RANKS.items()))
            lines.append(f"NCCL {'.'.join(map(str, nccl_version()))}, {settings}")
    else:
        lines.append(f"a trial of the kit without a GPU (--device {kit.kind}): nothing here is a measurement")
    return lines


def file_of(kit: Kit) -> Path:
    """Return where the table goes: named after the GPU and PyTorch."""
    name = torch.cuda.get_device_name(0) if kit.measures else f"trial-{kit.kind}"
    version = ".".join(torch.__version__.split(".")[:2])
    return RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower())}-torch-{version}.txt"


def main() -> int:
    """The exit status: 1 if anything has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "sim", "cpu"], default="cuda", help="cuda, or a trial without")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    parser.add_argument("--kills", type=int, default=50, help="how many ranks are killed (default 50)")
    parser.add_argument("--out", type=Path, help="the file for the table (default: in benchmarks/results)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure (--device sim tries the kit)")
        return 0
    kit, begin = Kit(args.device, args.kills), time.monotonic()
    kit.file, kit.machine = args.out or file_of(kit), describe(kit)
    names = nccl_names() if kit.measures else []
    together = for_several_ranks(kit, names) if {"benchmarks", "shares", "kills"} & set(args.parts) else ["gloo"]
    shared = together != ["gloo"]
    parts = {
        "shares": lambda: run_shares(kit, names, together),
        "kills": lambda: run_kills(kit, together),
        "tests": lambda: run_tests(kit),
        "benchmarks": lambda: run_benchmarks(kit, together if shared else names, shared),
    }
    for name, part in parts.items():
        if name in args.parts:
            part()
    kit.add("all of it", "", "", begin)
    print(f"wrote {kit.file}")
    return int(any("FAILED" in row[2] for row in kit.rows))


def lines_of_table(kit: Kit) -> str:
    """The table, as text."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        table("What was tried", ("what", "backend", "result", "s"), kit.rows)
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
