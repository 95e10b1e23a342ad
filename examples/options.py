"""The options of the digits example, with errors that are one line each."""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NoReturn

import lockstep
from handwriting import TRAINING_IMAGES
from lockstep.errors import DeviceError, PeerFailure

STOPPED = 130  # the exit status of programs that were interrupted


class BadOption(Exception):
    """Options that make no sense, in one line."""


class Parser(argparse.ArgumentParser):
    """Leaves it to the program to say what is wrong: of many processes only one may speak."""

    def print_help(self, file: IO[str] | None = None) -> None:
        """Print the help, once."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, and exit with, at once."""
        raise BadOption(message)


def make_parser() -> Parser:
    parser = Parser(
        description="Train a convolutional network on handwritten digits, in many processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--epochs", type=positive_int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=positive_int, default=96, help="images of all processes together")
    parser.add_argument("--lr", type=positive_float, default=3e-3, help="highest learning rate of the cycle")
    parser.add_argument("--seed", type=seed, default=0, help="for the first weights and the order of images")
    parser.add_argument("--shares", type=positive_int, help="of a batch: the same bits on up to as many processes")
    parser.add_argument(
        "--device", help="where to train, such as cpu; None: an accelerator for each process, or the CPU"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for what is written")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in that folder")
    return parser


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**32 - 1")
    return int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


@contextmanager
def begin(arguments: Sequence[str]) -> Iterator[tuple[lockstep.Session, argparse.Namespace | BadOption]]:
    """Within: the session, and the options; or what is wrong, in a session on the CPU, so that one process can tell."""
    with ExitStack() as stack:
        try:
            options = make_parser().parse_args(arguments)
            run = stack.enter_context(lockstep.session(device=options.device))
        except (BadOption, DeviceError) as problem:
            options = BadOption(f"{problem}" + "; here that is --device cpu" * isinstance(problem, DeviceError))
            run = stack.enter_context(lockstep.session(device="cpu"))
        yield run, options


def check(options: argparse.Namespace | BadOption, processes: int) -> argparse.Namespace:
    """The options, if they go together with each other and with the number of processes."""
    if isinstance(options, BadOption):
        raise options
    if options.batch_size > TRAINING_IMAGES:
        raise BadOption(f"--batch-size is at most {TRAINING_IMAGES}, the number of training images")
    if options.shares and not processes <= options.shares <= options.batch_size:
        raise BadOption(f"--shares is from {processes}, the number of processes, to --batch-size")
    if not options.shares and options.batch_size % processes:
        raise BadOption(f"--batch-size is a multiple of {processes}, the number of processes")
    return options


def fail(problem: Exception, wanted: bool) -> int:
    """The exit status, which is argparse's, of a run that all processes end, since they all have this problem."""
    if wanted:
        print(f"{Path(sys.argv[0]).name}: error: {problem}", file=sys.stderr)
    return 2


def command_to_resume(arguments: Sequence[str], processes: int) -> str:
    """Return what goes on with this very run."""
    options = shlex.join([*(argument for argument in arguments if argument != "--resume"), "--resume"])
    return f"make train ARGS={shlex.quote(options)}" if processes > 1 else f"python examples/digits.py {options}"


def tell(failure: PeerFailure, arguments: Sequence[str]) -> int:
    """The exit status. Every process has that failure but the one that failed: the first of those tells it."""
    if int(os.environ["RANK"]) == (1 if failure.rank == 0 else 0):
        left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        command = command_to_resume(arguments, int(os.environ["WORLD_SIZE"]))
        more = f"starting again, at most {left} times" if left else f"`{command}` goes on from the newest checkpoint"
        print(f"{failure}\n{more}", file=sys.stderr)
    return 1
