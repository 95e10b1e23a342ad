"""Requests to stop training: SIGINT, SIGTERM or other signals, or the end of the time that the process was given.

This module has only the requests to this rank; other modules make them known to all ranks.

Signals are noticed at once, even while the main thread waits in a collective. Python runs a handler only when the main
thread executes Python code. But Python's C handler writes the signal's number to a descriptor at once
(``signal.set_wakeup_fd``), and a thread reads it.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from lockstep.errors import OptionError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The signals that are requests to stop by default."""
_BEFORE_THE_END: dict[int, int] = {signal.SIGINT: 2, signal.SIGTERM: 1}
"""The number of times that a signal may arrive before it ends the process; others never do."""
_AT_ONCE = 0.5
"""Seconds in which a repeated signal counts as the same one: a terminal and a launcher may both pass on a Ctrl-C."""


class StopRequests:
    """The requests to this process to stop; ``requested`` is None, or the reason.

    Until :meth:`take_over`, signals have their usual effect. From then on the first signal is a request. A second
    SIGINT raises ``KeyboardInterrupt`` in the main thread; a third SIGINT, or a second SIGTERM, ends the process. Other
    signals, which schedulers send as a notice, stay requests. A handler that the program had installed before is still
    called, in the main thread. Signals that were ignored, or that C code handles, stay as they are. :meth:`end`
    restores everything.

    Args:
        time_limit: seconds from now after which there is a request. None for no limit.
        name: the name of this process in the line that it writes to stderr when a signal arrives.
        signals: the signals that are requests.

    Example::

        requests = StopRequests(time_limit=3600, name="rank 0")
        requests.take_over()
        try:
            while requests.requested is None:
                step()
        finally:
            requests.end()
    """

    def __init__(
        self,
        time_limit: float | None = None,
        name: str = "this process",
        signals: Sequence[signal.Signals] = STOP_SIGNALS,
    ) -> None:
        self._limit = time_limit
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._name = name
        self._signals = signals
        self._reason: str | None = None
        self._tried = False
        self._over = False
        self._arrivals: list[tuple[int, float]] = []
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    @property
    def requested(self) -> str | None:
        """The reason to stop, such as ``SIGTERM``; None if there is no request."""
        if self._reason is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._reason = f"the time limit of {self._limit:g} s"
        return self._reason

    def request(self, reason: str) -> None:
        """Ask this process to stop, from any thread; the first reason counts."""
        if self._reason is None:
            self._reason = reason

    def take_over(self) -> None:
        """Turn the signals into requests from now on; only the first call has an effect.

        Python allows this only in the main thread. In another thread there is a warning, and signals keep their effect.
        """
        if self._tried:
            return
        self._tried = True
        if threading.current_thread() is not threading.main_thread():
            names = " and ".join(each.name for each in self._signals)
            warnings.warn(
                f"{self._name} cannot take over {names} in thread {threading.current_thread().name!r}: "
                "Python allows that in the main thread only. They do what they did before; time limits count",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        read, written = self._sockets = socket.socketpair()
        written.setblocking(False)
        self._thread = threading.Thread(target=self._listen, args=(read,), name="lockstep signals", daemon=True)
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            before = signal.getsignal(number)
            if before is not None and before != signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._called)
        _taken_over.add(self)

    def former(self, number: signal.Signals) -> Any:
        """Return the handler of a signal that is there once this has ended."""
        return self._before.get(number, signal.getsignal(number))

    def end(self) -> None:
        """Restore handlers and wake-up descriptor, and end the thread; handlers that others installed since stay.

        Outside the main thread, that happens at the next signal, which then has its former effect.
        """
        self._tried = self._over = True
        if self._sockets is None or threading.current_thread() is not threading.main_thread():
            return
        _taken_over.discard(self)
        self._restore_handlers()
        read, written = self._sockets
        self._restore_wakeup(written.fileno())
        written.send(b"\0")
        self._thread.join()
        read.close()
        written.close()
        self._sockets = None

    def _restore_handlers(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._called:
                signal.signal(number, before)
        self._before.clear()

    def _restore_wakeup(self, own: int) -> None:
        installed = signal.set_wakeup_fd(self._wakeup_before, warn_on_full_buffer=False)
        if installed != own:
            signal.set_wakeup_fd(installed, warn_on_full_buffer=False)

    def _listen(self, read: socket.socket) -> None:
        """Read every signal in a thread, and pass it on to the descriptor that the program had set before."""
        while True:
            numbers = read.recv(4096)
            if 0 in numbers:
                return
            if self._wakeup_before >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._wakeup_before, numbers)
            for number in numbers:
                if number in self._before and not self._over:
                    self._arrivals.append((number, time.monotonic()))
                    self._heard(number, self._times(number))

    def _heard(self, number: int, times: int) -> None:
        """Take a signal, which has arrived that many times by now, for a request; called at once, in the thread."""
        name = signal.Signals(number).name
        if times > _BEFORE_THE_END.get(number, times):
            _say(f"{self._name} has received {name} again, and ends at once")
            os._exit(128 + number)
        if self._reason is None:
            _say(f"{self._name} has received {name}: training stops at the next step at which all ranks can")
        self.request(name)

    def _times(self, number: int) -> int:
        """Return the number of times that a signal has arrived by now."""
        times, last = 0, float("-inf")
        for other, when in list(self._arrivals):
            if other == number and when > last + _AT_ONCE:
                times, last = times + 1, when
        return times

    def _called(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, in the main thread, as soon as that runs Python code."""
        before = self._before.get(number)
        if self._over:  # another thread has called end()
            self.end()
            signal.raise_signal(number)
        elif callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        elif number == signal.SIGINT and self._times(number) > 1:
            raise KeyboardInterrupt

    def forked(self) -> None:
        """Restore the former effects of signals in a forked process, without a message to its parent."""
        assert self._sockets is not None
        self._restore_wakeup(self._sockets[1].fileno())
        self._restore_handlers()
        for each in self._sockets:
            each.close()
        self._sockets = None

    @property
    def numbers(self) -> set[int]:
        """The signals that were taken over."""
        return set(self._before)


def known_signals(numbers: Iterable[int]) -> tuple[signal.Signals, ...]:
    """Return signals that a program can take over; raises :class:`OptionError` for anything else."""
    try:
        found = tuple(map(signal.Signals, numbers))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"session(): stop_signals has what is no signal ({error}); give signal.SIGUSR1, ..."
        ) from None
    for each in found:
        if each in (signal.SIGKILL, signal.SIGSTOP):
            raise OptionError(f"session(): stop_signals has {each.name}, which no program can take over")
    return found


def _say(text: str) -> None:
    """Write a line straight to the descriptor: the main thread may hold the stream's lock."""
    try:
        os.write(sys.stderr.fileno(), f"lockstep: {text}\n".encode())
    except (OSError, ValueError, AttributeError):  # there is no stderr, or it is not a file
        return


_taken_over: "weakref.WeakSet[StopRequests]" = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    """Block the signals during a fork: the child would send its parent those that arrive before :meth:`forked`."""
    numbers = {number for each in _taken_over for number in each.numbers}
    if numbers:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _in_parent() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    for each in list(_taken_over):
        each.forked()
    _taken_over.clear()
    _in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
