"""The command line: one file for each subcommand, whose arguments ``lockstep_command.py`` has parsed."""

import argparse
import signal
import sys
from collections.abc import Sequence

from lockstep.cli import bench, check, doctor, run, stacks
from lockstep.errors import CheckError, LockstepError, OptionError
from lockstep_command import parse

_CALLS = {"run": run.run, "check": check.run, "doctor": doctor.run, "bench": bench.run, "stacks": stacks.run}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the command: see :func:`run_command`."""
    return run_command(parse(arguments))


def run_command(options: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    The code is 0 for success, 1 if something does not work, 2 for a wrong argument, and 130 after Ctrl-C.
    """
    try:
        return int(_CALLS[options.command](options))
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError | CheckError) else 1
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the pipe has ended, as `| head` does
        return 1
