"""Starts ranks on this host for a measurement: processes that each return one JSON value."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from lockstep.cli.printing import ProgressLine
from lockstep.errors import CommunicationError

_RESULT = "LOCKSTEP_RESULT_FILE"
_PROGRESS = "progress"


def run_ranks(module: str, options: dict[str, Any], ranks: int, timeout: float) -> list[Any]:
    """Run ``python -m module`` in ``ranks`` processes; return the results of their :func:`as_rank`, by rank.

    The processes meet over the loopback interface and find their places in the environment, as under ``torchrun``. If
    one fails the others are ended. Raises :class:`~lockstep.errors.CommunicationError` with the end of its output.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder, contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(_started(module, options, rank, ranks, store.port, Path(folder)))
            for rank in range(ranks)
        ]
        with ProgressLine(f"measuring between {ranks} ranks" if ranks > 1 else "measuring in one process") as line:
            _wait(processes, Path(folder), time.monotonic() + timeout, line)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def as_rank(measure: Callable[[dict[str, Any]], Any]) -> None:
    """Call ``measure`` with the options, in a process of :func:`run_ranks`, and hand back its result."""
    result = measure(json.loads(sys.argv[1]))
    Path(os.environ[_RESULT]).write_text(json.dumps(result))


def say(part: str) -> None:
    """Report the progress of the measurement to the command; only rank 0 does."""
    if os.environ["RANK"] == "0":
        Path(os.environ[_RESULT]).with_name(_PROGRESS).write_text(part)


@contextlib.contextmanager
def _started(
    module: str, options: dict[str, Any], rank: int, ranks: int, port: int, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    threads = max(1, len(os.sched_getaffinity(0)) // ranks) if hasattr(os, "sched_getaffinity") else 1
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        _RESULT: str(folder / f"{rank}.json"),
    }
    command = [sys.executable, "-m", module, json.dumps(options)]
    with open(folder / f"{rank}.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float, line: ProgressLine) -> None:
    """Wait until all processes have ended; raise as soon as one has failed, or at the deadline."""
    running = dict(enumerate(processes))
    while running:
        progress = folder / _PROGRESS
        line.show(progress.read_text() if progress.exists() else "starting")
        for rank, process in list(running.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(0.05)
                del running[rank]
                if status:
                    output = (folder / f"{rank}.log").read_text(errors="replace").strip()[-2000:]
                    raise CommunicationError(
                        f"rank {rank} of {len(processes)} ended with exit status {status}: {output}"
                    )
        if running and time.monotonic() > deadline:
            late = ", ".join(map(str, running))
            raise CommunicationError(f"rank(s) {late} of {len(processes)} have not ended in time; see --timeout")
