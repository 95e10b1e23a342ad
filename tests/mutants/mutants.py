"""Plants faults in the source, one at a time, and says which of them the tests catch.

    make mutants ARGS="--rooms shm local --count 20 --seed 1"

A fault is a condition negated, a number moved by one, or a statement left out: chosen by the seed, so the same source
gets the same faults whatever its tests are. Messages, annotations and `__repr__` get none. Each is planted in a copy of
the checkout and runs against the tests that execute its line, up to the first that fails: first the fastest of each
file of tests, then the next of each, until their recorded times reach half of the limit. A run that takes longer than
the limit counts as caught. Survivors are printed as `file:line  what was changed`; there are three kinds: a fault that
changes nothing, code that nothing needs, and code that lacks a test.

Which lines a test executes is recorded once (10 to 20 minutes for all rooms) and kept in build/mutants, until the
source or the tests change. It is known of threads and of processes, but not of processes that are killed and of threads
of the autograd engine. What is executed by an import belongs to all tests that execute a line of the file, and a
fixture of many tests to the first one. ROOMS says which folders of tests are asked.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from faults import Fault, choose

ROOMS = {
    "distributed": [
        *("accumulation", "agreement", "buffers", "ddp", "drift", "gradients", "hooks", "loops", "modules"),
        "second_order",
    ],
    "shm": ["shm"],
    "local": ["local"],
    "failures": ["failures", "session"],
    "session": ["session", "failures"],
}
MARKS = "not soak and not hosts and not launchers and not around"
PYTEST = [sys.executable, "-m", "pytest", "-p", "sitecustomize", "-p", "no:cacheprovider", "-m", MARKS]
NO_TEST, CAUGHT, SURVIVED = "no test executes it", "caught", "survived"


# -------------------------------------------------------------------------------------------------- runs in a copy


class Copy:
    """A copy of the checkout, in which one run at a time takes place."""

    def __init__(self, root: Path, place: Path) -> None:
        self.root, self.place = root, place
        shutil.copytree(root, place, ignore=shutil.ignore_patterns(".*", "build", "dist", "runs", "__pycache__"))
        (place / "tmp").mkdir()

    def run(self, arguments: list[str], limit: float | None = None, **variables: str) -> tuple[int | None, str]:
        """Run pytest; return its status, None if it has not come to an end in time, and what it printed."""
        places = (self.place / "src", self.place / "tests", Path(__file__).parent)
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "MUTANTS_SOURCE": f"{self.place}/src/"}
        env |= {"LOCKSTEP_SIM_CACHE": str(self.root / "build/mutants/sim"), "TMPDIR": f"{self.place}/tmp", **variables}
        output = self.place / "output"
        with (
            output.open("wb") as log,
            subprocess.Popen(
                [*PYTEST, *arguments], cwd=self.place, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            ) as process,
        ):
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self._end_all()
        return status, output.read_text(errors="replace")

    def _end_all(self) -> None:
        """Also those that were started in sessions of their own: all have the copy in their environment."""
        mark = f"MUTANTS_SOURCE={self.place}/src/\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if mark in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)

    def record(self, folder: str) -> dict[str, Any]:
        """Return the seconds of each test of a folder that passes, and the tests of each line of each file."""
        from coverage import CoverageData

        parts = self.place / "parts"
        parts.mkdir()
        _, output = self.run([f"tests/{folder}"], MUTANTS_RECORD=str(parts))
        if not (parts / "passed.json").exists():
            raise RuntimeError(f"the tests of {folder} did not come to an end:\n{output[-5000:]}")
        seconds = json.loads((parts / "passed.json").read_text())
        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for part in parts.glob("part*"):
            data = CoverageData(str(part))
            data.read()
            for file in data.measured_files():
                for line, tests in data.contexts_by_lineno(file).items():
                    lines[str(Path(file).relative_to(self.place))][line].update(
                        test for test in tests if test in seconds
                    )
            data.close()
        shutil.rmtree(parts)
        numbers = {test: number for number, test in enumerate(seconds)}
        named = {
            file: {line: sorted(map(numbers.__getitem__, tests)) for line, tests in each.items()}
            for file, each in lines.items()
        }
        return {"summary": output.strip().splitlines()[-1], "tests": list(seconds.items()), "lines": named}

    def catches(self, fault: Fault, tests: list[str], limit: float) -> tuple[str, str]:
        """Return what became of the fault, and which test has caught it."""
        path = self.place / fault.file
        source = path.read_bytes()
        chosen = self.place / "chosen.json"
        chosen.write_text(json.dumps(tests))
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        try:
            self._write(path, source[: fault.begin] + fault.text.encode() + source[fault.end :])
            status, output = self.run(["-x", *files], limit, MUTANTS_TESTS=str(chosen))
        finally:
            self._write(path, source)
        if status == 5:
            raise RuntimeError(f"none of the tests was found:\n{output}")
        by = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), f"status {status}")
        return (SURVIVED, "") if status == 0 else (CAUGHT, "no end in time" if status is None else by)

    @staticmethod
    def _write(path: Path, source: bytes) -> None:
        path.write_bytes(source)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()  # it may be of the same size and second


# ------------------------------------------------------------------------------------------------------ recordings


class Recordings:
    """Which tests execute a line; kept in build/mutants by folder of tests."""

    def __init__(self, root: Path, folders: list[str], copies: queue.Queue[Copy]) -> None:
        self.root = root
        with ThreadPoolExecutor(copies.qsize()) as pool:
            self._of = dict(zip(folders, pool.map(lambda folder: self._kept(folder, copies), folders), strict=True))

    def _kept(self, folder: str, copies: queue.Queue[Copy]) -> dict[str, Any]:
        tests = self.root / "tests"
        sources = itertools.chain((self.root / "src").rglob("*.py"), tests.glob("*.py"), (tests / folder).rglob("*.py"))
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()
        file = self.root / f"build/mutants/{folder}.json"
        if not file.exists() or json.loads(file.read_text())["digest"] != digest:
            copy = copies.get()
            try:
                recording = copy.record(folder) | {"digest": digest}
            finally:
                copies.put(copy)
            file.write_text(json.dumps(recording))
            print(f"recorded tests/{folder}: {recording['summary']}", file=sys.stderr, flush=True)
        kept: dict[str, Any] = json.loads(file.read_text())  # with keys that are text, however it came
        return kept

    def tests_of(self, fault: Fault, folders: list[str]) -> dict[str, float]:
        """Return the tests that execute the fault, each with its seconds."""
        found: dict[str, float] = {}
        for recording in map(self._of.__getitem__, folders):
            by_line = recording["lines"].get(fault.file, {})
            for lines in fault.lines or (map(int, by_line),):
                numbers = {number for line in lines for number in by_line.get(str(line), ())}
                found |= (recording["tests"][number] for number in numbers)
                if numbers:
                    break
        return found


def in_order(tests: dict[str, float], budget: float) -> list[str]:
    """Return the fastest test of each file, then the next of each, and so on, for that many seconds."""
    ranked, by_file = [], Counter[str]()
    for seconds, test in sorted((seconds, test) for test, seconds in tests.items()):
        file = test.partition("::")[0]
        ranked.append((by_file[file], seconds, test))
        by_file[file] += 1
    ranked.sort()
    spent = itertools.accumulate(seconds for _, seconds, _ in ranked)
    return [test for (_, _, test), until in zip(ranked, spent, strict=True) if until <= budget] or [ranked[0][2]]


# ---------------------------------------------------------------------------------------------------------- report


def main() -> None:
    """Plant the faults and print the report."""
    parser = argparse.ArgumentParser(description="plant faults, and say which of them the tests catch")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), help="folders of src/lockstep")
    parser.add_argument("--count", type=int, default=20, help="faults in each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each fault")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the checkout")
    options = parser.parse_args()
    root = options.root
    (root / "build/mutants/sim").mkdir(parents=True, exist_ok=True)
    folders = {room: ROOMS.get(room, [room]) for room in options.rooms}
    faults = [(room, fault) for room in folders for fault in choose(root, room, options.count, options.seed)]
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as place:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(options.jobs):
            copies.put(Copy(root, Path(place, str(number))))
        recordings = Recordings(root, sorted(set(itertools.chain(*folders.values()))), copies)

        def judge(each: tuple[str, Fault]) -> tuple[str, str]:
            room, fault = each
            where = f"{fault.file}:{fault.line}  {fault.what}"
            tests = recordings.tests_of(fault, folders[room])
            if not tests:
                return NO_TEST, where
            chosen = in_order(tests, options.limit / 2)
            copy = copies.get()
            try:
                verdict, by = copy.catches(fault, chosen, options.limit)
            finally:
                copies.put(copy)
            asked = f"{len(chosen)} of {len(tests)} tests"
            print(f"{verdict}: {where}  ({asked}) {by}", file=sys.stderr, flush=True)
            return verdict, f"{where}  ({asked})" if verdict == SURVIVED else where

        with ThreadPoolExecutor(options.jobs) as pool:
            judged = list(pool.map(judge, faults))
    for room in folders:
        count = Counter(verdict for (of, _), (verdict, _) in zip(faults, judged, strict=True) if of == room)
        print(f"{room}: {count.total()} planted; " + ", ".join(f"{count[v]} {v}" for v in (CAUGHT, SURVIVED, NO_TEST)))
    for verdict in (SURVIVED, NO_TEST):
        print(f"\n{verdict}:", *sorted(text for of, text in judged if of == verdict), sep="\n")


if __name__ == "__main__":
    main()
