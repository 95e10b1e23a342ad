"""``lockstep run``: starts a program in several processes on this host; ``--patch`` replaces PyTorch's wrappers."""

import argparse
import contextlib
import importlib
import logging
import os
import runpy
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.arguments import check_backend
from lockstep.cli.doctor import usable_cores
from lockstep.cli.parser import positive
from lockstep.errors import OptionError

DESCRIPTION = """
Run a program in several processes on this host. The processes find each other as under torchrun. Under torchrun itself
(torchrun ... -m lockstep run ...) the program runs in the process that torchrun has started. Options of the program
follow its name.
"""
_HERE = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
_TOLD = {2, 128 + signal.SIGINT, 128 + signal.SIGTERM}  # the program has given the reason: bad options, or stopped


def add_to(subparsers: Any) -> None:
    """Add the subcommand to a parser's."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run", help="run a program in several processes on this host", description=DESCRIPTION
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        help="the number of processes (default: one for each accelerator; without accelerators one for each core)",
    )
    parser.add_argument(
        "--patch",
        action="store_true",
        help="replace PyTorch's DistributedDataParallel and DataParallel by lockstep's, for programs and frameworks "
        "that wrap the model with PyTorch's (import lockstep.patch)",
    )
    parser.add_argument(
        "--backend",
        help="make the default process group before the program starts, with this backend (such as shm); frameworks "
        "then use it",
    )
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments for the program")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Run the program; return its exit status. If several processes run it, return that of the first one to fail."""
    if not Path(options.program).is_file():
        raise OptionError(f"{options.program}: there is no such file; expected a Python program")
    if options.backend:
        check_backend(options.backend, "--backend")
    if "RANK" in os.environ:
        return _run_here(options)
    ranks = options.ranks or torch.accelerator.device_count() or usable_cores()
    return _launch(options, ranks)


def _run_here(options: argparse.Namespace) -> int:
    """Run the program in this process, which is a rank."""
    if options.patch:
        importlib.import_module("lockstep.patch")
    if options.backend:
        dist.init_process_group(options.backend)
    sys.argv = [options.program, *options.arguments]
    sys.path.insert(0, str(Path(options.program).resolve().parent))
    try:
        runpy.run_path(options.program, run_name="__main__")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # the process that started the ranks says it
    except Exception as error:
        error.__traceback__ = _of_the_program(error, options.program)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        if options.backend and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the program has failed, and its error is on its way
                dist.destroy_process_group()
    return 0


def _of_the_program(error: BaseException, program: str) -> TracebackType | None:
    """Return the traceback of an error from the program's first frame on, without the frames that have started it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename != program:
        traceback = traceback.tb_next
    return traceback or error.__traceback__


def _launch(options: argparse.Namespace, ranks: int) -> int:
    """Run PyTorch's launcher, which starts this command in each process; print nothing that the program has said."""
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # of the launcher alone
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    chosen = ["--patch"] if options.patch else []
    chosen += ["--backend", options.backend] if options.backend else []
    command = ["-m", "lockstep_command", "run", *chosen, options.program, *options.arguments]
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # what ranks print is read from files
    try:
        with TemporaryDirectory(prefix="lockstep-") as logs:
            tagged = ["--tee", "3", "--log-dir", logs] if ranks > 1 else []
            launcher.main([*_HERE, *tagged, "--nproc-per-node", str(ranks), *command])
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        status = int(failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode)
        if status not in _TOLD:
            print(f"lockstep: rank {rank} failed with exit status {status}", file=sys.stderr)
        return status
    finally:
        logging.disable(logging.NOTSET)
    return 0
