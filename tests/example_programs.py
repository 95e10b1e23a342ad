"""The examples, as a user starts them, by torchrun or alone; and as ranks that have imported torch before."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from processes import be_launched, run_processes

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DIGITS, CHARACTERS = str(EXAMPLES / "digits.py"), str(EXAMPLES / "characters.py")
LAUNCH = str(EXAMPLES / "launch.py")
TORCHRUN = (LAUNCH, "--processes", "2")


def start(*command: str, **options: Any) -> subprocess.Popen[str]:
    """A program under way, with a pipe from its stdout."""
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, **options)


def run(*command: str, status: int = 0) -> tuple[str, str]:
    """Return what a program that ends with this status writes to stdout and to stderr."""
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, check=False)
    assert process.returncode == status, process.stderr
    return process.stdout, process.stderr


def run_in_ranks(
    world: int, program: str, *runs: list[str], timeout: float = 150.0, torchrun: bool | None = None
) -> list[list[tuple]]:
    """(status, stdout, stderr) by rank of each run of an example's `main`, one after the other in the same processes.

    They find each other as torchrun's processes do. With `world=1` it is a program that was started alone, unless
    `torchrun` says that it is the only process of torchrun's.
    """
    by_torchrun = world > 1 if torchrun is None else torchrun
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in runs]
    by_rank = run_processes(
        world,
        _run_each,
        program,
        [(s.port, r) for s, r in zip(stores, runs, strict=True)],
        by_torchrun,
        timeout=timeout,
    )
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def stop_in_ranks(
    world: int, program: str, arguments: list[str], number: int, receiver: int = 0, timeout: float = 150.0
) -> list[tuple]:
    """(status, stdout, stderr) by rank of a run in which one of the ranks gets a signal after the first epoch."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_processes(world, _run_stopped, program, store.port, arguments, number, receiver, timeout=timeout)


def run_with_rank_0_late(world: int, program: str, arguments: list[str], timeout: float = 150.0) -> list[tuple]:
    """(status, stdout, stderr) by rank of a run in which rank 0 has not begun when another one is at its end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_processes(world, _run_late, program, store.port, arguments, timeout=timeout)


def run_script_in_ranks(world: int, script: str, *arguments: str, timeout: float = 150.0) -> list[str]:
    """Return what each rank prints of an example that these ranks run as torchrun's processes would."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_processes(world, _run_script, script, store.port, arguments, timeout=timeout)


def _run_script(rank: Any, script: str, port: int, arguments: list[str]) -> str:
    dist.destroy_process_group()  # a program makes its own
    be_launched(rank, port)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv[:] = [script, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return output.getvalue()


def _run_each(
    rank: Any, program: str, runs: list[tuple[int, list[str]]], by_torchrun: bool
) -> list[tuple[int, str, str]]:
    dist.destroy_process_group()  # a program makes its own
    main = _main_of(program)
    return [_run_one(rank, main, port if by_torchrun else None, arguments, io.StringIO()) for port, arguments in runs]


def _run_stopped(
    rank: Any, program: str, port: int, arguments: list[str], number: int, receiver: int
) -> tuple[int, str, str]:
    pids = [int(pid) for pid in rank.gather(torch.tensor([os.getpid()]))]
    dist.destroy_process_group()
    output = _Stopping(pids[receiver], number)
    return _run_one(rank, _main_of(program), port if rank.world > 1 else None, arguments, output)


def _run_late(rank: Any, program: str, port: int, arguments: list[str]) -> tuple[int, str, str]:
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port)
    begin, end = dist.init_process_group, dist.destroy_process_group

    def begin_late(*args: Any, **options: Any) -> None:
        begin(*args, **options)
        store.wait(["at its end"])

    def tell_and_end() -> None:
        store.set("at its end", "")
        end()

    if rank.rank == 0:
        dist.init_process_group = begin_late
    else:
        dist.destroy_process_group = tell_and_end
    return _run_one(rank, _main_of(program), port, arguments, io.StringIO())


class _Stopping(io.StringIO):
    """Sends a signal to a process when the first epoch is told of."""

    def __init__(self, pid: int, number: int) -> None:
        super().__init__()
        self._pid, self._number = pid, number

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._pid and "epoch 1/" in self.getvalue():
            os.kill(self._pid, self._number)
            self._pid = 0
        return written


def _main_of(program: str) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    sys.argv[0] = f"{program}.py"
    return importlib.import_module(program).main


def run_one(rank: Any, program: str, port: int, arguments: list[str]) -> tuple[int, str, str]:
    """(status, stdout, stderr) of an example's `main` in this rank, whose default group has been destroyed."""
    return _run_one(rank, _main_of(program), port, arguments, io.StringIO())


def _run_one(rank: Any, main: Any, port: int | None, arguments: list[str], output: io.StringIO) -> tuple[int, str, str]:
    if port is not None:
        be_launched(rank, port)
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(io.StringIO()) as error,
        warnings.catch_warnings(action="default"),  # in the ranks of tests they are errors
    ):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    return status, output.getvalue(), error.getvalue()
