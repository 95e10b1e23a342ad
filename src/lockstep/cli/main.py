"""The command line: one file for each subcommand, which adds its arguments and names the function to call."""

import argparse
import sys
from collections.abc import Sequence

from lockstep.cli import bench, doctor, run, runs, stacks, trace
from lockstep.errors import LockstepError

SUBCOMMANDS = (run, doctor, bench, trace, stacks, runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 1 if it could not do all of it, 2 if it was called wrongly."""
    parser = argparse.ArgumentParser(
        prog="lockstep", description="Training runs: start one, look at the host and at a run."
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for subcommand in SUBCOMMANDS:
        subcommand.add_to(subparsers)
    options = parser.parse_args(arguments)
    try:
        return int(options.call(options))
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has read enough
        return 1
