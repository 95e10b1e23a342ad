"""Starts the ``lockstep`` command. It lies beside the package, whose import takes seconds: Ctrl-C ends that, too."""

import contextlib
import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Import and run the command; until the import has ended, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else Ctrl-C is ignored, as after nohup
        signal.signal(signal.SIGINT, _end)
    from lockstep.cli.main import main as run_command

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run_command()
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


if __name__ == "__main__":
    raise SystemExit(main())
