"""The command line: one file for each subcommand, which adds its arguments and names the function to call."""

import signal
import sys
from collections.abc import Sequence

import torch

import lockstep
from lockstep.cli import bench, check, doctor, run, stacks
from lockstep.cli.parser import Parser
from lockstep.errors import CheckError, LockstepError, OptionError

SUBCOMMANDS = (run, check, doctor, bench, stacks)
_REMOVED = {
    "runs": "snapshots that runs have left are folders in /dev/shm/lockstep-UID, whose PATH says of which run",
    "trace": (
        "record the ranks with torch.profiler, and read what they have written as docs/command.md shows "
        '("Who waited for whom")'
    ),
}
"""Subcommands of earlier versions, and what to do instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    The code is 0 for success, 1 if something does not work, 2 for a wrong argument, and 130 after Ctrl-C.
    """
    parser = Parser(prog="lockstep", description="Start a training, check this host, and look into a running training.")
    version = f"lockstep {lockstep.__version__}, PyTorch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for subcommand in SUBCOMMANDS:
        subcommand.add_to(subparsers)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _REMOVED:
        parser.error(f"there is no {words[0]!r} any more: {_REMOVED[words[0]]}")
    options = parser.parse_args(words)
    try:
        return int(options.call(options))
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError | CheckError) else 1
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the pipe has ended, as `| head` does
        return 1
