"""Ranks as processes: each with its default group, Gloo's over loopback or another, and an exit code.

`run_processes(2, function)` calls the module-level `function(rank)` in two processes and gives back what they return.
They are forked off a server that has imported torch and has run nothing, which takes a few hundredths of a second. The
server starts when this module is imported, to be ready when the first test runs, and ends with this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import io
import multiprocessing
import operator
import os
import pickle
import random
import socket
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import sim as simulator
from threaded import CONNECT, CPU, Rank

GRACE = 15.0  # seconds from the time at which a rank should end itself to that at which it is killed

_SERVED = "LOCKSTEP_TEST_RANK"  # set in the environment of the ranks
_context = multiprocessing.get_context("forkserver")


class RankEndedError(RuntimeError):
    """A process ended without a result and without an error."""


class RankError(RuntimeError):
    """Stands for an error that cannot be sent between processes."""


class RankTraceback(Exception):
    """The cause of an error from another process: its traceback there, and what was written to stderr."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a rank ended. `returncode` is negative for a signal; `stderr` has what it wrote to stdout, too."""

    rank: int
    result: Any
    error: BaseException | None
    returncode: int
    stderr: str


def run_processes(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 100.0,
    group_timeout: float = 30.0,
    errors: bool = False,
    backend: str = "gloo",
    device: str = "",
    launched: bool = False,
) -> list[Any]:
    """Calls `function(Rank(...), *args)` in `world` processes and returns what they return, by rank.

    A rank that raises ends at once with exit code 1, as a script would; one that returns waits for the others, so that
    none loses its connection. If ranks fail, the error raised here is that of a process that ended without a word,
    else the one that was raised first. With `errors=True` nothing is raised, and there is an `Outcome` for each rank.
    After `timeout` seconds all are ended, and it is a TimeoutError that shows where each rank was. With
    `device="sim"` each has a simulated accelerator of its own, on which tensors are made by default. Ranks that are
    `launched` begin as processes of `torchrun` do: in its environment, which names a store here, and without a group.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if launched else None
    port = 0 if store is None else store.port
    job = pickle.dumps(args), _source(function), world, timeout, group_timeout, backend, device, port
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        deadline = time.monotonic() + timeout
        codes, messages = _run(world, job, folder, deadline + GRACE)
        late = time.monotonic() >= deadline
        ended = [_outcome(rank, codes[rank], messages.get(rank), Path(folder, f"{rank}.log")) for rank in range(world)]
    outcomes = [outcome for _, outcome in ended]
    if late and len(messages) < world:
        where = "\n".join(f"rank {o.rank}: {o.error or 'done'}\n{o.stderr}" for o in outcomes)
        raise TimeoutError(f"ranks still at work after {timeout} s\n{where}")
    failed = [outcome for _, outcome in sorted(ended, key=lambda one: one[0]) if outcome.error is not None]
    if errors or not failed:
        return outcomes if errors else [outcome.result for outcome in outcomes]
    first, *others = failed
    assert first.error is not None
    note = [f"raised by rank {first.rank} of {world}", *(f"rank {o.rank}: {type(o.error).__name__}" for o in others)]
    first.error.add_note("; ".join(note))
    raise first.error


def on_processes(world: int | None, *parameters: str, raises: Any = None, says: Any = (), **options: Any) -> Any:
    """Calls the test in each of so many processes, with the rank before its own arguments: see `on_ranks`."""
    from programs.ranks import called_by

    return called_by(run_processes, world, parameters, raises, says, options)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of loopback for a store that a rank is to host. Nobody listens there, and meanwhile the system gives it to
    no connection as its own, at which the store could not listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def be_launched(rank: Rank, port: int) -> None:
    """Set the environment that `torchrun` gives to its processes, for a program that meets at a store on that port."""
    number, world = str(rank.rank), str(rank.world)
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")


def output_of(program: str) -> str:
    """Return what a program prints in a process of its own without accelerators; its warnings and what it raises are
    errors.

    For what needs no interpreter of its own: those that tests simulate are loaded in the process of the tests alone.
    """
    (output,) = run_processes(1, _output, program)
    return output


def start(function: Callable[..., Any], *args: Any) -> Any:
    """A process that calls a module-level function, forked off the server; for the caller to end."""
    process = _context.Process(target=_call, args=(_source(function), pickle.dumps(args)), name=function.__qualname__)
    process.start()
    return process


def _call(source: tuple[str, str, str], args: bytes) -> None:
    gc.freeze()
    _find(source)(*pickle.loads(args))


def _run(world: int, job: tuple, folder: str, deadline: float) -> tuple[list[int], dict[int, bytes]]:
    """Runs the processes to their end, at the latest to the deadline. Their exit codes, and messages by rank."""
    messages: dict[int, bytes] = {}
    processes: list[Any] = []
    pipes: dict[connection.Connection, int] = {}
    grace = 0.0
    try:
        for rank in range(world):
            here, there = _context.Pipe()
            pipes[here] = rank
            with there:
                process = _context.Process(target=_main, args=(*job, rank, folder, there), name=f"rank {rank}")
                process.start()
                processes.append(process)
        talking = list(pipes)
        while talking and (ready := connection.wait(talking, max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                talking.remove(pipe)
                with contextlib.suppress(EOFError, ConnectionResetError):  # it ended without a word
                    messages[pipes[pipe]] = pipe.recv_bytes()
        grace = 0.0 if talking else GRACE
    finally:
        for pipe in pipes:
            pipe.close()  # those that have returned wait for this
        for process in processes:
            process.join(grace)
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.close()
    return codes, messages


def _outcome(rank: int, code: int, message: bytes | None, log: Path) -> tuple[float, Outcome]:
    """How the rank ended, and when it failed: by a clock that all processes share, or 0 if it does not say."""
    stderr = log.read_text(errors="replace") if log.exists() else ""
    when, result, error, text = pickle.loads(message) if message else (0.0, None, None, "")
    if error is None and (message is None or code):
        when, error = 0.0, RankEndedError(f"rank {rank} ended with exit code {code}")
    if error is not None:
        error.__cause__ = RankTraceback("\n".join(filter(None, [text, stderr and f"rank {rank} wrote:\n{stderr}"])))
    return when, Outcome(rank, result, error, code, stderr)


def _source(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return where another process finds the function, whatever name pytest has given to its module."""
    if "<" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is not defined at module level")
    return function.__module__, inspect.getfile(function), function.__qualname__


# -------------------------------------------------------------------------------- in the processes


def _main(
    args: bytes,
    source: tuple[str, str, str],
    world: int,
    timeout: float,
    group_timeout: float,
    backend: str,
    device: str,
    port: int,
    rank: int,
    folder: str,
    pipe: connection.Connection,
) -> None:
    gc.freeze()  # of what the server has imported, collections find nothing, and would copy it into this process
    with open(Path(folder, f"{rank}.log"), "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    faulthandler.enable()  # shows where it crashes
    # Shows where it hangs, and sees to it that it ends, even if the process that has started it is gone.
    faulthandler.dump_traceback_later(timeout, exit=True)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")  # as in pyproject.toml
    warnings.filterwarnings("ignore", message="rank .* each rank trains its own")
    warnings.filterwarnings("ignore", message="Guards may run slower on Python 3.13.0")
    torch.manual_seed(0)
    random.seed(0)
    result, error, text = None, None, ""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
        place = _place(device, rank)
        importlib.import_module("lockstep")  # a backend of its own
        me = Rank(rank, world, None, place)
        if port:
            be_launched(me, port)
        else:
            store = dist.FileStore(str(Path(folder, "store")), world)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=CONNECT)
            dist.group.WORLD.set_timeout(timedelta(seconds=group_timeout))
            me = dataclasses.replace(me, group=dist.group.WORLD)
        result = _find(source)(me, *pickle.loads(args))
        message = pickle.dumps((0.0, result, None, ""))
    except SystemExit:
        raise
    except BaseException as raised:
        # What a test asserts here has not been rewritten by pytest: its local variables say what it was about.
        told = traceback.TracebackException.from_exception(raised, capture_locals=isinstance(raised, AssertionError))
        error, text = raised, "".join(told.format())
        message = pickle.dumps((time.monotonic(), None, _sendable(raised), text))
    pipe.send_bytes(message)
    faulthandler.cancel_dump_traceback_later()
    if error is not None:
        sys.exit(1)
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()  # until the others have returned, too
    if dist.is_initialized():
        dist.destroy_process_group()


def _place(device: str, rank: int) -> torch.device:
    """Return where tensors are made by default, from now on."""
    if not device:
        return CPU
    backend = simulator.load()
    if isinstance(backend, str):
        raise RuntimeError(backend)
    place = torch.device(device, rank)
    torch.accelerator.set_device_index(rank)
    torch.set_default_device(place)
    return place


def _output(_rank: Rank, program: str) -> str:
    dist.destroy_process_group()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def _find(source: tuple[str, str, str]) -> Callable[..., Any]:
    name, file, function = source
    if name not in sys.modules:
        for end, letter in enumerate(name):
            if letter == "." and name[:end] not in sys.modules:  # a folder of tests need not be a package
                folder = sys.modules[name[:end]] = types.ModuleType(name[:end])
                folder.__path__ = [str(Path(file).parents[name.count(".", end) - 1])]
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return operator.attrgetter(function)(sys.modules[name])


def _sendable(error: BaseException) -> BaseException:
    """The error itself if it survives the way, else its name and message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RankError(f"{type(error).__name__}: {error}")
    return error


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


_ROOMS = ["lockstep.session.session", "lockstep.local", "lockstep.shares", "lockstep.sharding"]  # and all that they use
_PRELOAD = ["torch.distributed", "torch._dynamo", "lockstep", *_ROOMS, "pytest"]
# What many ranks would import each for itself, for a second: worth the server's time where it serves all tests.
_PRELOAD_FOR_ALL_TESTS = [
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
]
_PRELOAD_FOR_COMPILED_PROGRAMS = ["torch._dynamo.backends.debugging", "torch._functorch.aot_autograd"]
_PRELOAD_FOR_EXAMPLES = ["sklearn.datasets", "matplotlib.figure", "matplotlib.backends.backend_agg"]

# At import: at the first run, the server would be a process that a test leaves behind. Ranks import this module, too.
if _SERVED not in os.environ:
    if "PYTEST_XDIST_WORKER" in os.environ:
        _PRELOAD += _PRELOAD_FOR_ALL_TESTS
        if "LOCKSTEP_TEST_EXAMPLES" in os.environ:
            _PRELOAD += _PRELOAD_FOR_COMPILED_PROGRAMS + _PRELOAD_FOR_EXAMPLES
    _context.set_forkserver_preload(_PRELOAD)
    with mock.patch.dict(os.environ, {_SERVED: "1", "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()


def in_child(function):
    """Run it in a forked process, whose exit code is what it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads
        pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
