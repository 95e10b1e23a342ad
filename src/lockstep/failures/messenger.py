"""Sends messages around the ring of ranks: each rank passes them on, so that every rank gets them once.

One thread per rank sleeps until a neighbour has sent something or is gone, or until there is something to send.
"""

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep._base.debug import log_of
from lockstep.failures.ring import Connection, encoded, wait_to_read

LOOK_SECONDS = 1.0
"""``look`` is called after this many seconds without a message."""
END_SECONDS = 2.0
"""Seconds that :meth:`Messenger.close` waits for the thread."""
_READ_SECONDS = 0.2  # seconds for which the messages of a neighbour that also ends are read to the last

Message = dict[str, Any]

_log = log_of("failures")


class Messenger:
    """Sends a rank's messages to all others, and receives theirs, through its neighbours in the ring."""

    def __init__(
        self,
        rank: int,
        neighbours: Sequence[Connection],
        listener: socket.socket | None,
        hear: Callable[[Message], object],
        has_gone: Callable[[Connection], object],
        look: Callable[[], object],
    ) -> None:
        """Call the given functions from a thread of its own: ``hear`` with each message of another rank, ``has_gone``
        with the connection to a neighbour that has ended, and ``look`` while nothing happens. None of these may wait.

        ``rank`` must be unique in the ring. Other ranks connect to ``listener`` to find out if this host answers.
        """
        self._rank = rank
        self._neighbours = neighbours
        self._listener = listener
        self._hear = hear
        self._has_gone = has_gone
        self._look = look
        self._changed = threading.Condition()
        self._heard: dict[int, int] = {}  # the last message of each rank: they come in order, from both sides
        self._said = 0
        self._to_send: list[bytes] = []
        self._sending = self._closing = False
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="lockstep failures", daemon=True)

    def start(self) -> None:
        """Begin to receive and to send."""
        self._thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message to all ranks, without waiting."""
        with self._changed:
            self._said += 1
            self._to_send.append(encoded({"kind": kind, "id": [self._rank, self._said], **fields}))
        self._wake_up()

    def send_first(self) -> None:
        """If this is the messenger's thread: send queued messages now, before anything that may take long."""
        if threading.current_thread() is self._thread:
            self._send_what_waits()

    def wait_until_sent(self, seconds: float) -> None:
        """Return when no message is queued, or after some seconds."""
        until = time.monotonic() + seconds
        with self._changed:
            while (self._to_send or self._sending) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def close(self) -> bool:
        """Send queued messages, close the connections, and end the thread; return True if it has ended in time."""
        self._closing = True
        self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_SECONDS)
        return not self._thread.is_alive()

    def close_connections(self) -> None:
        """Close all connections, as a forked process does with its copies of its parent's."""
        for each in self._neighbours:
            each.close()
        if self._listener is not None:
            self._listener.close()
        self._wake.close()
        self._woken.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    # ------------------------------------------------------------------------------------ its thread

    def _run(self) -> None:
        for each in self._neighbours:
            self._take(each)  # what was read while the ranks met
        while not self._closing:
            self._send_what_waits()
            self._wait()
        self._send_what_waits()
        self._hang_up()

    def _send_what_waits(self) -> None:
        with self._changed:
            messages, self._to_send = self._to_send, []
            self._sending = bool(messages)
        for each in self._neighbours:
            each.send(*messages)
        if messages:
            with self._changed:
                self._sending = False
                self._changed.notify_all()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        for each in self._neighbours:
            if each.is_open:
                poll.register(each, select.POLLIN | (0 if each.flush() else select.POLLOUT))
        ready = {fd for fd, _ in poll.poll(LOOK_SECONDS * 1e3)}
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        if self._listener is not None and self._listener.fileno() in ready:
            with contextlib.suppress(OSError):  # gone since
                self._listener.accept()[0].close()
        for each in self._neighbours:
            if each.fileno() in ready:
                self._take(each)
        if not ready:
            self._look()

    def _take(self, neighbour: Connection) -> None:
        if self._receive(neighbour):
            self._has_gone(neighbour)

    def _receive(self, neighbour: Connection) -> bool:
        """Receive a neighbour's messages, and pass them on; return True if the neighbour is gone."""
        messages, gone = neighbour.receive()
        heard, passed_on = [], []
        for data in messages:
            message = json.loads(data)
            rank, number = message["id"]
            if rank != self._rank and number > self._heard.get(rank, 0):
                self._heard[rank] = number
                heard.append(message)
                passed_on.append(data)
        for each in self._neighbours:
            if each is not neighbour and each.is_open:
                each.send(*passed_on)  # at once, before anything here takes time
        for message in heard:
            _log.debug("rank %d is told: %.200s", self._rank, message)
            try:
                self._hear(message)
            except Exception:  # others may wait for the next message
                _log.exception("rank %d cannot take a message about a failure: %.200s", self._rank, message)
        if gone:
            neighbour.close()
        return gone

    def _hang_up(self) -> None:
        """Close the connections without losing messages that were sent: both sides read to the end."""
        for each in self._neighbours:
            if each.is_open:
                each.end_sending()
        until = time.monotonic() + _READ_SECONDS
        while time.monotonic() < until and (waiting := [each for each in self._neighbours if each.is_open]):
            for each in wait_to_read(waiting, 0.02):
                self._receive(each)
        self.close_connections()
