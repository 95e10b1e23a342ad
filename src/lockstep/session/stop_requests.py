"""Who wants this process to stop training: SIGINT, SIGTERM, or the time that it was given.

What all ranks make of it is for others to say: here is what this one has been asked.
"""

import os
import signal
import sys
import threading
import time
import warnings

from lockstep.session.taken_signals import TakenSignals


class StopRequests:
    """Whether this process has been asked to stop, and by what: ``requested`` is None, or says it.

    Until :meth:`take_over`, SIGINT and SIGTERM do what they always do. From then on the first one is a request. A
    second SIGINT raises ``KeyboardInterrupt`` in the main thread, a third one ends the process; so does a second
    SIGTERM. :meth:`end` puts everything back.

    Args:
        time_limit: seconds from now, after which it is a request that this time is over; None for no limit.
        name: of this process, in what it writes to stderr when a signal comes.

    Example::

        requests = StopRequests(time_limit=3600, name="rank 0")
        requests.take_over()
        try:
            while requests.requested is None:
                step()
        finally:
            requests.end()
    """

    def __init__(self, time_limit: float | None = None, name: str = "this process") -> None:
        self._limit = time_limit
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._name = name
        self._reason: str | None = None
        self._taken: TakenSignals | None = None
        self._tried = False

    @property
    def requested(self) -> str | None:
        """What has asked this process to stop, such as ``SIGTERM``; None if nothing has."""
        if self._reason is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._reason = f"the time limit of {self._limit:g} s"
        return self._reason

    def request(self, reason: str) -> None:
        """Ask this process to stop, from any thread; the first reason counts."""
        if self._reason is None:
            self._reason = reason

    def take_over(self) -> None:
        """From now on, SIGINT and SIGTERM are requests; done once, by whichever call is the first.

        Python lets only the main thread do that: in another one there is a warning, and signals do what they did.
        """
        if self._tried:
            return
        self._tried = True
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                f"{self._name} cannot take over SIGINT and SIGTERM in thread {threading.current_thread().name!r}: "
                "Python allows that in the main thread only. They do what they did before; time limits count",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        self._taken = TakenSignals((signal.SIGINT, signal.SIGTERM), self._heard, _interrupt)
        self._taken.take()

    def end(self) -> None:
        """Signals do what they did before."""
        self._tried = True
        if self._taken is not None:
            self._taken.give_back()
            self._taken = None

    def _heard(self, number: int, times: int) -> None:
        name = signal.Signals(number).name
        if times > (2 if number == signal.SIGINT else 1):
            _say(f"{self._name} has received {name} again, and ends at once")
            os._exit(128 + number)
        if self._reason is None:
            _say(f"{self._name} has received {name}: training stops at the next step at which all ranks can")
        self.request(name)


def _interrupt(number: int, times: int) -> None:
    if number == signal.SIGINT and times > 1:
        raise KeyboardInterrupt


def _say(text: str) -> None:
    """Straight to the descriptor: the main thread may hold the stream's lock."""
    try:
        os.write(sys.stderr.fileno(), f"lockstep: {text}\n".encode())
    except (OSError, ValueError, AttributeError):  # there is none, or it is no file
        return
