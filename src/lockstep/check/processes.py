"""Starts the processes of a check, and collects their records."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lockstep._base import network
from lockstep.check.job import Job, JobRecord

_SHOWN = 2000  # characters of what a process has printed
_TO_WRITE = 0.5  # seconds that a process has to write where it is
_GRACE = 10.0
"""Seconds that the other ranks have to end after one has failed."""


class Processes:
    """The processes of one check: a server imports the case once, and forks a process for each job off itself."""

    def __init__(self, folder: Path, server: "subprocess.Popen[bytes]", timeout: float) -> None:
        self._folder = folder
        self._server = server
        self._timeout = timeout
        self._begun = 0

    def run(self, jobs: Sequence[Job]) -> list[JobRecord]:
        """Run each job in a process of its own; return their records, in order.

        A process that ends without a record, or not in time, has a record with an error. The other ranks are not waited
        for long then.
        """
        numbers = range(self._begun, self._begun + len(jobs))
        self._begun = numbers.stop
        for number, job in zip(numbers, jobs, strict=True):
            self._path(number, "job").write_bytes(pickle.dumps(job))
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.write(b" ".join(b"%d" % number for number in numbers) + b"\n")
            self._server.stdin.flush()
        late = self._wait(dict(zip(numbers, jobs, strict=True)))
        for number in late:
            self._end(number)
        return [self._record(number) for number in numbers]

    def _wait(self, running: dict[int, Job]) -> list[int]:
        """Wait until all processes have ended, or the time is over: it gets short when a rank has failed.

        Returns those that have not ended.
        """
        deadline = time.monotonic() + self._timeout
        while running and time.monotonic() < deadline and self._server.poll() is None:
            time.sleep(0.02)
            for number, job in list(running.items()):
                if self._path(number, "ended").exists():
                    del running[number]
                    if job.place[1] > 1 and self._record(number).error:
                        deadline = min(deadline, time.monotonic() + _GRACE)
        return list(running)

    def _end(self, number: int) -> None:
        """End a process that takes too long, after it has written where it is."""
        with contextlib.suppress(OSError):
            process = int(self._path(number, "pid").read_text())
            os.kill(process, signal.SIGUSR1)
            time.sleep(_TO_WRITE)
            os.kill(process, signal.SIGKILL)

    def _record(self, number: int) -> JobRecord:
        path, ended = self._path(number, "record"), self._path(number, "ended")
        if path.exists():
            record: JobRecord = torch.load(path, weights_only=False)  # written by this check
            return record
        logs = [log for log in (self._path(number, "log"), self._folder / "server.log") if log.exists()]
        output = logs[0].read_text(errors="replace").strip()[-_SHOWN:] if logs else ""
        how = f"ended with exit status {ended.read_text()}" if ended.exists() else "did not end in time"
        return JobRecord(error=f"{output}\nthe process {how}".strip())

    def _path(self, number: int, kind: str) -> Path:
        return self._folder / f"{number}.{kind}"


@contextlib.contextmanager
def started(timeout: float) -> Iterator[Processes]:
    """Start the server; end it, and all that it has started, at the end of the block."""
    environment = {
        network.INTERFACE_VARIABLE: _loopback(),
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # a check computes on the CPU
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([each for each in sys.path if each]),
    }
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as name:
        folder = Path(name)
        (folder / "path").write_bytes(pickle.dumps(sys.path))
        command = [sys.executable, "-m", "lockstep.check.process", name]
        with open(folder / "server.log", "wb") as log:
            server = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield Processes(folder, server, timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.communicate()


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
