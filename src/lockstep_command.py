"""The ``lockstep`` command's words. It lies beside the package, whose import takes seconds: ``--help`` and mistakes do
not wait for that, and Ctrl-C ends it."""

import argparse
import contextlib
import difflib
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

WRAPS = ("lockstep", "ddp", "fsdp2", "accelerate")
PRECISIONS = ("float64", "float32", "bf16")
DROPOUTS = ("off", "rows", "on")
_REMOVED = {
    "runs": "snapshots that runs have left are folders in /dev/shm/lockstep-UID, whose PATH says of which run",
    "trace": (
        "record the ranks with torch.profiler, and read what they have written as docs/command.md shows "
        '("Who waited for whom")'
    ),
}
"""Subcommands of earlier versions, and what to do instead."""

_SECONDS = {"bench": (15, 3), "doctor": (10, 1)}
"""The seconds that a subcommand which measures takes to start, and for each of its rounds; said before PyTorch, which
takes seconds itself, is imported."""


def main() -> int:
    """Parse the arguments, import the command and run it; until that is imported, Ctrl-C leaves no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else Ctrl-C is ignored, as after nohup
        signal.signal(signal.SIGINT, _end)
    options = parse()
    if options.command in _SECONDS and "RANK" not in os.environ and not getattr(options, "no_timing", False):
        start, each = _SECONDS[options.command]
        seconds = start + each * options.rounds
        print(f"lockstep: measuring takes about {seconds} s, on two cores and with small models", file=sys.stderr)
    from lockstep.cli.main import run_command

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run_command(options)
    if code == 128 + signal.SIGINT and "RANK" not in os.environ:
        with contextlib.suppress(OSError):  # the reader of a pipe is interrupted as well
            sys.stdout.flush()
        os._exit(code)  # the launcher's threads, which still run, print when the interpreter stops them
    return code


def _end(signal_number: int, frame: FrameType | None) -> None:
    """Say that the command was interrupted, and end: nothing has been started that would have to be ended first."""
    if "RANK" not in os.environ:  # else the process that started the ranks says it
        os.write(2, b"lockstep: interrupted\n")
    os._exit(128 + signal_number)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, with the name of the ``command``; end the process, with exit code 2, for wrong ones."""
    parser = _Parser(
        prog="lockstep", description="Start a training, check this host, and look into a running training."
    )
    parser.add_argument("--version", action="version", version="")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for add in (_add_run, _add_check, _add_doctor, _add_bench, _add_stacks):
        add(subparsers)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _REMOVED:
        parser.error(f"there is no {words[0]!r} any more: {_REMOVED[words[0]]}")
    if words[:1] == ["--version"]:
        print(f"lockstep {version('torch-lockstep')}, PyTorch {version('torch')}")
        parser.exit()
    options = parser.parse_args(words)
    if options.command == "run":
        behind = ["--", *options.arguments]
        if words[-1 - len(behind) :] == [options.program, *behind]:
            options.arguments = behind  # argparse takes a "--" behind the program's name for its own
    if options.command == "run" and not options.module and not Path(options.program).is_file():
        parser.exit(2, f"lockstep: {options.program}: there is no such file; expected a Python program\n")
    return options


_RUN = """
Run a program in several processes on this host. The processes find each other as under torchrun. Under torchrun itself
(torchrun ... -m lockstep run ...) the program runs in the process that torchrun has started. Options of the program
follow its name.
"""


def _add_run(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run a program in several processes on this host",
        description=_RUN,
        usage="%(prog)s [options] [-m] PROGRAM [ARGUMENT ...]",
    )
    parser.add_argument(
        "--ranks",
        "-n",
        "--nproc-per-node",
        type=_positive,
        metavar="N",
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
    parser.add_argument("--started-by", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as for python -m")
    parser.add_argument("program", help="a Python file; with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments for the program")


_CHECK = """
Compare N ranks with one process. CASE is a function that returns a lockstep.check.Case: a model, its batches, and a
loss. One process trains it on whole batches, the ranks train it wrapped, each on its rows, on the CPU of this host.
Gradients, weights and buffers are compared on every rank. The exit code is 0 if all is equal, 1 if not, and 2 if the
case cannot be checked.
"""


def _add_check(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check", help="compare N ranks with one process", description=_CHECK
    )
    parser.add_argument("case", metavar="CASE", help="FILE.py:FUNCTION, which returns a lockstep.check.Case")
    parser.add_argument("--ranks", type=_positive, default=2, help="the number of ranks (default: %(default)s)")
    parser.add_argument(
        "--wrap",
        default="lockstep",
        help=f"what wraps the model: {', '.join(WRAPS)}, or FILE.py:FUNCTION(model) -> model (default: %(default)s)",
    )
    parser.add_argument(
        "--split", default="even", help="even, strided, or rows for each rank in proportion: 6,2 (default: %(default)s)"
    )
    parser.add_argument("--precision", default="float64", choices=PRECISIONS, help="(default: %(default)s)")
    parser.add_argument(
        "--dropout", default="off", choices=DROPOUTS, help="off, masks by row, or as drawn (default: %(default)s)"
    )
    parser.add_argument("--tolerance", type=float, help="the largest difference that is equal, relative to a norm")
    parser.add_argument("--backend", help="of the process group (default: shm for lockstep, and gloo)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for all (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


_DOCTOR = """
Check the versions, devices, backends, shared memory, limits and threads of this host. Time an all-reduce between ranks
on each usable backend, and compare it with one copy of the same memory. A finding that needs action says which. The
exit code is 1 if something will not work. Add the output of `lockstep doctor --json` to a report of a bug.
"""


def _add_doctor(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="check this host, and time its communication", description=_DOCTOR
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--ranks", type=_positive, default=2, help="the number of ranks in the all-reduce (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=_positive, default=5, help="the number of repetitions (default: %(default)s)")
    parser.add_argument("--no-timing", action="store_true", help="time nothing, and start no processes")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the timing (default: %(default)s)")


_BENCH = """
Time a training step in several ways, which take turns in one run: alone (no communication), with PyTorch's
DistributedDataParallel, and with lockstep, on each backend for the model's device. Print for each way the time of a
step, the time and the processor time that communication adds to the step alone, and the memory. --one-process compares
alone, torch.nn.DataParallel (if there are accelerators) and lockstep.DataParallel.
"""
_MODEL = """
your model, as MODULE:FUNCTION. The function takes no arguments. It returns a module, and a function that takes the
module and returns the loss of one batch (default: a small encoder)
"""


def _add_bench(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="time a training step: alone, with PyTorch's wrapper, with lockstep",
        description=_BENCH,
    )
    parser.add_argument("--model", default="", help=_MODEL)
    parser.add_argument(
        "--ranks",
        type=_positive,
        default=2,
        help="the number of processes; with --one-process, of replicas (default: %(default)s)",
    )
    parser.add_argument("--one-process", action="store_true", help="run all replicas in one process, on threads")
    parser.add_argument(
        "--rounds", type=_positive, default=15, help="the steps to time of each way (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="the limit in seconds for the whole command (default: %(default)s)"
    )


_STACKS = """
Print a line for each rank of a run, first the rank for which others wait, and where each is in the program's own code,
even in an endless loop, a deadlock, a collective, or a call that never returns. The processes go on undisturbed.
Without a target, list the runs on this host.
"""


def _add_stacks(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "stacks", help="show what each rank of a run is doing, if the run seems to hang", description=_STACKS
    )
    parser.add_argument("target", nargs="?", help="the process id of a rank on this host, or the name of a run")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="seconds to wait for each process (default: %(default)s)"
    )
    parser.add_argument(
        "--all", action="store_true", help="show all threads, and frames of libraries too, not the program's own alone"
    )


class _Parser(argparse.ArgumentParser):
    """A parser that ends the command with one line on stderr and exit code 2, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and end the process."""
        message = message.removesuffix(", arguments")  # of `run`, which needs none
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message = f"there is no {wrong[1]!r}{_near(wrong[1], re.findall(r'[a-z]+', wrong[2]))}"
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; let the subcommand refuse an unknown one, since it knows its options."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"there is no {unknown[0]!r}{_near(unknown[0], list(self._option_string_actions))}")
        return parsed, unknown


def _positive(text: str) -> int:
    """Convert the text of an argument to a number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return number


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else f" among {', '.join(known)}"


if __name__ == "__main__":
    raise SystemExit(main())
