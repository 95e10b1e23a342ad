"""The process that starts the ranks of a simulated host: forked, so that a start costs no import of PyTorch.

    python launcher.py SOCKET PATH OWN_DISK

Runs on a host of `hosts.network`, whose mounts are its own: `/dev/shm` is memory of this host, and PATH a folder on its
disk, if OWN_DISK is not empty. What it is asked for comes over the socket: see :class:`Host`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch._dynamo  # (what an optimizer imports when the first one is made)
import torch.distributed as dist

import lockstep.shares  # noqa: F401  (imported once for all ranks)
from chaos import restarted


class Host:
    """A host, from outside."""

    def __init__(self, socket: Path) -> None:
        until = time.monotonic() + 60
        while not socket.exists() and time.monotonic() < until:
            time.sleep(0.02)
        self._connection: Connection = Client(str(socket), "AF_UNIX")

    def _ask(self, *question: Any) -> Any:
        self._connection.send(question)
        return self._connection.recv()

    def start(self, job: restarted.Job, variables: dict[str, str], log: Path) -> int:
        """Start a rank; return its process id."""
        return int(self._ask("start", job, variables, str(log)))

    def start_store(self, port: int, log: Path) -> int:
        """Start a process that hosts a store, as launchers do; return its process id."""
        return int(self._ask("store", port, str(log)))

    def codes(self) -> dict[int, int]:
        """Return the exit codes of what has ended."""
        return dict(self._ask("codes"))

    def lose(self) -> None:
        """End all processes of the host; its memory, and its disk if it has one of its own, are lost."""
        self._ask("lose")

    def kill(self) -> list[str]:
        """End all processes that it has started; return what their last lines were, of those that were left."""
        return list(self._ask("kill"))

    def left(self) -> list[str]:
        """Return what is in the memory of the host."""
        return list(self._ask("left"))


class _Launcher:
    def __init__(self, path: Path, own_disk: bool) -> None:
        self._path, self._own_disk = path, own_disk
        self._alive: set[int] = set()
        self._codes: dict[int, int] = {}
        self._new_memory()

    def _new_memory(self) -> None:
        for place in ["/dev/shm", *([str(self._path)] if self._own_disk else [])]:
            subprocess.run(["umount", "--lazy", place], capture_output=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)

    def _fork(self, work: Callable[[], object], log: str) -> int:
        pid = os.fork()
        if pid:
            self._alive.add(pid)
            return pid
        code = 1
        try:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def start(self, job: restarted.Job, variables: dict[str, str], log: str) -> int:
        def work() -> None:
            os.environ.update(variables)
            restarted.main(job)

        return self._fork(work, log)

    def store(self, port: int, log: str) -> int:
        def work() -> None:
            store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
            signal.pause()
            del store

        return self._fork(work, log)

    def codes(self) -> dict[int, int]:
        for pid in list(self._alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._alive.remove(pid)
                self._codes[pid] = os.waitstatus_to_exitcode(status)
        return self._codes

    def kill(self) -> list[str]:
        self.codes()
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._alive.clear()
        return []

    def lose(self) -> None:
        self.kill()
        self._new_memory()

    def left(self) -> list[str]:
        return [str(each) for each in Path("/dev/shm").rglob("*") if not each.name.startswith("sem.")]


def serve(socket: str, path: Path, own_disk: bool) -> None:
    """Answer until nobody asks any more."""
    launcher = _Launcher(path, own_disk)
    with Listener(socket, "AF_UNIX") as listener, listener.accept() as asked:
        with contextlib.suppress(EOFError):
            while True:
                what, *arguments = asked.recv()
                asked.send(getattr(launcher, what)(*arguments))
        launcher.kill()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(sys.argv[1], Path(sys.argv[2]), bool(sys.argv[3]))
