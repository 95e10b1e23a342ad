"""Signals that a program takes over for a while: heard at once, also while its main thread waits in C.

Python runs a handler when the main thread is next in Python, which a thread that waits in a collective is not. But its
handler in C writes the signal's number to a descriptor at once (``signal.set_wakeup_fd``), and a thread reads that.
"""

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_AT_ONCE = 0.5
"""Seconds in which a signal that comes again is the same one: a terminal and a launcher may both pass on a Ctrl-C."""


class TakenSignals:
    """Some signals, from :meth:`take` to :meth:`give_back`.

    ``heard(signal, times)`` is called from a thread of its own as soon as one arrives, with how many times it has by
    now. A handler that the program had installed before is still called, in the main thread. ``raising(signal, times)``
    is called there, too, as Python calls handlers, and may raise.

    Signals that were ignored, or that C code handles, stay as they are.
    """

    def __init__(
        self,
        signals: Iterable[int],
        heard: Callable[[int, int], object],
        raising: Callable[[int, int], object] = lambda number, times: None,
    ) -> None:
        self._signals, self._heard, self._raising = tuple(signals), heard, raising
        self._arrivals: list[tuple[int, float]] = []
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._over = False
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    def take(self) -> None:
        """From now on, signals are heard here. Only for the main thread: no other may install handlers."""
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
        _taken.add(self)

    def give_back(self) -> None:
        """Put everything back as it was, and end the thread; what others have installed since stays.

        Outside of the main thread this waits for the next signal, which then does what it did before.
        """
        self._over = True
        if self._sockets is None or threading.current_thread() is not threading.main_thread():
            return
        _taken.discard(self)
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
        """The thread: hear of every signal, and pass it on to whom the program had set before."""
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

    def _times(self, number: int) -> int:
        """How many times a signal has come by now."""
        times, last = 0, float("-inf")
        for other, when in list(self._arrivals):
            if other == number and when > last + _AT_ONCE:
                times, last = times + 1, when
        return times

    def _called(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread, as soon as that is in Python."""
        before = self._before.get(number)
        if self._over:  # and another thread has said so
            self.give_back()
            signal.raise_signal(number)
        elif callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        else:
            self._raising(number, self._times(number))

    def forked(self) -> None:
        """In a process that was forked: signals do what they did before, and its parent hears nothing of them."""
        assert self._sockets is not None
        self._restore_wakeup(self._sockets[1].fileno())
        self._restore_handlers()
        for each in self._sockets:
            each.close()
        self._sockets = None

    @property
    def numbers(self) -> set[int]:
        """Those that were taken."""
        return set(self._before)


_taken: "weakref.WeakSet[TakenSignals]" = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    """A process that has just been forked would tell its parent of a signal: none arrives until that is put right."""
    numbers = {number for each in _taken for number in each.numbers}
    if numbers:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _in_parent() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    for each in list(_taken):
        each.forked()
    _taken.clear()
    _in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
