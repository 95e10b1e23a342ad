"""The last moments of a process that stops because another has failed, in which a launcher may end it, too."""

import logging
import os
import signal
import threading
import time
from types import FrameType

from lockstep.failures.failure import Failure, Kind

LAUNCHER_SECONDS = 1.0
"""How long the launcher is left to notice the process that has failed first."""
PRINT_SECONDS = 3.0
"""For how long SIGTERM does not keep this process from saying why it ends."""


def has_launcher() -> bool:
    """Whether ``torchrun`` has started this process: it ends all processes when it notices that one has failed."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def say_at_once(failure: Failure, here: int) -> None:
    """Log why this rank will stop, if the launcher may end it before it can raise: another process has just ended."""
    if has_launcher() and failure.kind is Kind.ENDED:
        logging.getLogger("lockstep").error("rank %d stops, because %s", here, failure.summary)


class LastWords:
    """Holds ``torchrun``'s SIGTERM back for some seconds from now, so that this process ends with its own error.

    Without ``torchrun``, or if the program does something else at SIGTERM, nothing is done.
    """

    def __init__(self) -> None:
        self._until = time.monotonic() + PRINT_SECONDS
        self._came = False
        in_main = threading.current_thread() is threading.main_thread()
        self._holds = in_main and has_launcher() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._holds:
            signal.signal(signal.SIGTERM, self._note)

    def wait_for_launcher(self) -> None:
        """Let the launcher notice the process that has failed first: it blames the first that it finds ended."""
        until = time.monotonic() + LAUNCHER_SECONDS
        while self._holds and not self._came and time.monotonic() < until:
            time.sleep(0.02)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if time.monotonic() > self._until:  # the program has gone on after the error
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
