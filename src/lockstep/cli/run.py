"""``lockstep run``: starts a program in several processes on this host, with our wrappers in place of PyTorch's."""

import argparse
import contextlib
import importlib
import logging
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.cli.doctor import usable_cores
from lockstep.errors import OptionError

DESCRIPTION = """
Run a program in several processes on this host, which find each other as under torchrun; under torchrun itself
(torchrun ... -m lockstep run ...) run it in this process. Options of the program follow its name.
"""
_HERE = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
_TOLD = {2, 128 + signal.SIGINT, 128 + signal.SIGTERM}  # the program has given the reason: bad options, or stopped


def add_to(subparsers: Any) -> None:
    """Add the subcommand to a parser's."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run", help="run a program in several processes on this host", description=DESCRIPTION
    )
    parser.add_argument("--ranks", type=int, help="how many processes (default: one an accelerator, or one a core)")
    parser.add_argument(
        "--patch",
        action="store_true",
        help="for programs and frameworks that wrap with PyTorch's DistributedDataParallel or DataParallel: give them "
        "ours (import lockstep.patch)",
    )
    parser.add_argument(
        "--backend", help="make the default process group of this backend first, such as shm, for a framework to find"
    )
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program is given")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Run the program; return its exit status, that of the process that failed first if there are several."""
    if not Path(options.program).is_file():
        raise OptionError(f"{options.program}: there is no such file; expected a Python program")
    if options.ranks is not None and options.ranks < 1:
        raise OptionError(f"--ranks {options.ranks}: expected at least 1")
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
    finally:
        if options.backend and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the program has failed, and its error is on its way
                dist.destroy_process_group()
    return 0


def _launch(options: argparse.Namespace, ranks: int) -> int:
    """Run PyTorch's launcher, which starts this command in each of its processes; it ends as quietly as the program."""
    from torch.distributed import run as launcher
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # of the launcher alone
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    chosen = ["--patch"] if options.patch else []
    chosen += ["--backend", options.backend] if options.backend else []
    command = ["-m", "lockstep", "run", *chosen, options.program, *options.arguments]
    try:
        launcher.main([*_HERE, "--nproc-per-node", str(ranks), *command])
    except SignalException as stopped:
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
