"""``lockstep run``: starts a program in several processes on this host; ``--patch`` replaces PyTorch's wrappers."""

import argparse
import contextlib
import ctypes
import importlib
import importlib.util
import io
import json
import logging
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import torch
import torch.distributed as dist

from lockstep._base.arguments import check_backend
from lockstep._base.debug import leave_out_own_frames
from lockstep.cli.doctor import usable_cores
from lockstep.errors import OptionError
from lockstep.failures.failure import follows_from_another

_HERE = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
_TOLD = {2, 128 + signal.SIGINT, 128 + signal.SIGTERM}  # the program has given the reason: bad options, or stopped


def run(options: argparse.Namespace) -> int:
    """Run the program; return its exit status. If several processes run it, return that of the first one to fail."""
    if options.module:
        _file_of_module(options.program)
    elif not Path(options.program).is_file():
        raise OptionError(f"{options.program}: there is no such file; expected a Python program")
    if options.backend:
        check_backend(options.backend, "--backend")
    if "RANK" in os.environ:
        return _run_here(options)
    ranks = options.ranks or torch.accelerator.device_count() or usable_cores()
    return _launch(options, ranks)


def _file_of_module(name: str) -> str:
    """Return the file that ``python -m NAME`` runs, with the current folder first among those that are searched."""
    if sys.path[:1] != [os.getcwd()]:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise OptionError(f"-m {name}: the module cannot be found ({error})") from error
    if spec is None or spec.origin is None:
        raise OptionError(f"-m {name}: there is no such module, or it is a package without __main__.py")
    return spec.origin


def _end_with(parent: int) -> None:
    """Let the system end this process together with the command that has started it, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os.kill(os.getpid(), signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def _run_here(options: argparse.Namespace) -> int:
    if options.started_by is not None:
        _end_with(options.started_by)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # The launcher reads what ranks print from files, and takes the two writes of an unbuffered ``print`` for
            # two lines if it looks between them.
            sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if options.patch:
        importlib.import_module("lockstep.patch")
    if options.backend:
        dist.init_process_group(options.backend)
    sys.argv = [options.program, *options.arguments]
    file = _file_of_module(options.program) if options.module else options.program
    if not options.module:
        sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        if options.module:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(file, run_name="__main__")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # the process that started the ranks says it
    except SystemExit as end:
        _note_failure(end, _status_of(end))
        raise
    except Exception as error:
        _note_failure(error, 1)
        error.__traceback__ = _of_the_program(error, file)
        leave_out_own_frames(error)
        _print(error)
        return 1
    finally:
        if options.backend and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the program has failed, and its error is on its way
                dist.destroy_process_group()
    return 0


@dataclass(frozen=True)
class Failed:
    """How a rank has ended: its exit status, the time of its error, and whether that follows from another rank's."""

    status: int
    time: float
    follows: bool


_RECORD = "lockstep.json"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # in which the launcher gives each rank a folder


def _note_failure(error: BaseException, status: int) -> None:
    """Record how this rank's program failed, for the command that started the ranks."""
    if status and _ERROR_FILE in os.environ:
        with contextlib.suppress(OSError):
            record = Failed(status, time.time(), follows_from_another(error))
            Path(os.environ[_ERROR_FILE]).with_name(_RECORD).write_text(json.dumps(asdict(record)))


def _status_of(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def first_failure(ended: Mapping[int, Failed], folder: Path) -> tuple[int, Failed]:
    """Return the rank that has failed first, and how.

    ``ended`` are the ranks that the launcher has found ended first, which may be several at once. Ranks that have
    failed by an exception have written it down before they ended. One that has not was killed: perhaps by Gloo, whose
    C++ code ends the process of a rank that gets something else than it waits for. So an error comes first that does
    not follow from another rank's.
    """
    written = {int(each.parent.name): Failed(**json.loads(each.read_text())) for each in folder.glob(f"**/{_RECORD}")}
    failures = {**ended, **written}
    rank = min(failures, key=lambda rank: (failures[rank].follows, rank not in written, failures[rank].time))
    return rank, failures[rank]


def _of_the_program(error: BaseException, program: str) -> TracebackType | None:
    """Return the traceback of an error from the program's first frame on, without the frames that have started it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename != program:
        traceback = traceback.tb_next
    return traceback or error.__traceback__


def _print(error: Exception) -> None:
    """Print an error as the hook of the program or of PyTorch does, without PyTorch's ``[rank1]: `` before each line:
    the launcher's prefix says it."""
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.write(re.sub(r"^\[rank\d+\]: ?", "", written.getvalue(), flags=re.MULTILINE))


def _launch(options: argparse.Namespace, ranks: int) -> int:
    """Run PyTorch's launcher, which starts this command in each process; do not repeat the program's own output."""
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # of the launcher alone
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    # The launcher starts the ranks from this thread, whose end is that of this process.
    chosen = ["--started-by", str(os.getpid())]
    chosen += ["--patch"] if options.patch else []
    chosen += ["--backend", options.backend] if options.backend else []
    chosen += ["-m"] if options.module else []
    # Python 3.11 looks for options of the launcher among those of the program, unless "--" ends them.
    command = ["-m", "--", "lockstep_command", "run", *chosen, options.program, *options.arguments]
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    logs = TemporaryDirectory(prefix="lockstep-")
    try:
        tagged = ["--tee", "3"] if ranks > 1 else []
        launcher.main([*_HERE, *tagged, "--log-dir", logs.name, "--nproc-per-node", str(ranks), *command])
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        ended = {
            rank: Failed(each.exitcode if each.exitcode >= 0 else 128 - each.exitcode, each.timestamp, follows=False)
            for rank, each in failed.failures.items()
        }
        rank, first = first_failure(ended, Path(logs.name))
        if first.status not in _TOLD:
            print(f"lockstep: rank {rank} failed with exit status {first.status}", file=sys.stderr)
        return first.status
    finally:
        logs.cleanup()
        logging.disable(logging.NOTSET)
    return 0
