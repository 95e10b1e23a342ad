"""Finds the connections that Gloo has opened in C++, and ends them.

A thread that waits in Gloo for a rank that does not come cannot be interrupted: ``abort()`` returns, but the thread
waits on (PyTorch 2.11 to 2.13). However, it notices the end of a connection at once, and raises.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

_FOLDER = "/proc/self/fd"
_RECOGNISED_BY = 1 << 16  # bytes: more than stores and rings send in the same moment
_ATTEMPTS = 2
# Offsets of numbers in Linux's TCP_INFO: of unanswered probes, 8 bits; of segments that were not acknowledged, 32 bits;
# of bytes acknowledged and received, 64 bits.
_PROBES, _UNACKNOWLEDGED, _BYTES_ACKNOWLEDGED, _BYTES_RECEIVED = 3, 24, 120, 128


class Connections:
    """Sockets that were opened while :meth:`recording`, or that a group uses, as found by :meth:`recognise`.

    None are found on systems without ``/proc``.
    """

    def __init__(self) -> None:
        self._sockets: set[tuple[int, str]] = set()
        self._kept: list[int] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Add all sockets opened inside the block, by whatever code."""
        before = _sockets()
        try:
            yield
        finally:
            self._sockets |= _sockets() - before

    def recognise(self, exchange: Callable[[int], object], peers: int) -> bool:
        """Find the connections of an existing group: one to each of its ``peers``.

        ``exchange(size)`` makes each peer send ``size`` bytes to this process, which distinguishes their connections
        from all others. It is called equally often on every rank. Returns True if the connections are found; they are
        not if other sockets receive as much at the same moment, each time, or if the system does not count bytes.
        """
        found: set[tuple[int, str]] = set()
        for _ in range(_ATTEMPTS):
            before = _received()
            exchange(1)  # no rank sends more before all have read their counts
            exchange(_RECOGNISED_BY)
            grown = {each for each, size in _received().items() if size - before.get(each, 0) >= _RECOGNISED_BY}
            if len(grown) == peers:
                found = grown
        self._sockets |= found
        return bool(found)

    def shut_down(self, except_port: int = 0) -> None:
        """Let the threads raise that wait on these connections, if they are still open; peers notice it after
        :meth:`close`.

        Connections that others opened to ``except_port`` of this process are left alone.

        If sending fails before Gloo has noticed the end of what it receives, Gloo forgets what it was about to send,
        and the thread that waits for it waits until the time-out of the group. So only receiving is shut down here,
        and the connection is kept open when Gloo has closed it, so that what peers send does not fail either.
        """
        for fd, _ in self._sockets & _sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
                each.getpeername()  # raises for one that listens, whose end would make Gloo end the process
                if each.family == socket.AF_UNIX or each.getsockname()[1] != except_port:
                    self._kept.append(os.dup(fd))
                    each.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the connections that were shut down, once every rank has had the time to do the same."""
        while self._kept:
            os.close(self._kept.pop())

    __del__ = close


def _sockets() -> set[tuple[int, str]]:
    """Return the descriptors of this process's sockets, with the number that the system gave to each socket."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(_FOLDER):
            with contextlib.suppress(OSError):  # closed since
                link = os.readlink(f"{_FOLDER}/{name}")
                if link.startswith("socket:"):
                    found.add((int(name), link))
    return found


def _received() -> dict[tuple[int, str], int]:
    """Return the number of bytes received over each TCP connection, as far as the system counts them."""
    return {found: struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0] for found, _, info in _tcp_connections()}


class SilentPeers:
    """Finds the addresses to which this process has sent something that was not acknowledged; ask once a second."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], tuple[int, float]] = {}

    def find(self, seconds: float) -> set[str]:
        """Return the addresses that have acknowledged nothing for some seconds, while there was something to
        acknowledge: the number of acknowledged bytes has stayed the same.

        The time of the last acknowledgement says less: after a pause of the program it is long ago, and where only what
        this host sends is lost, acknowledgements of earlier data still come. A peer that is stopped, or busy, is not
        silent: its system answers, also to the probes that are sent while its buffers are full. None are found on
        systems without ``/proc``.
        """
        found, now, before, self._since = set(), time.monotonic(), self._since, {}
        for key, connection, info in _tcp_connections():
            if not (struct.unpack_from("=I", info, _UNACKNOWLEDGED)[0] or info[_PROBES]):
                continue
            (acknowledged,) = struct.unpack_from("=Q", info, _BYTES_ACKNOWLEDGED)
            same, since = before.get(key, (-1, now))
            self._since[key] = acknowledged, since if same == acknowledged else now
            if now - self._since[key][1] >= seconds:
                with contextlib.suppress(OSError):  # closed since
                    found.add(connection.getpeername()[0].removeprefix("::ffff:"))  # IPv4 over a socket for both
        return found


def _tcp_connections() -> Iterator[tuple[tuple[int, str], socket.socket, bytes]]:
    """Yield this process's TCP connections, each as in :func:`_sockets`, as a socket, and with its ``TCP_INFO``."""
    for fd, link in _sockets() if hasattr(socket, "TCP_INFO") else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
            info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
            if len(info) == _BYTES_RECEIVED + 8:
                yield (fd, link), each, info
