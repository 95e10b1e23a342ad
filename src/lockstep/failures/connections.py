"""Finds the connections that Gloo has opened in C++, and ends them under it.

A thread that waits in Gloo for a rank that does not come cannot be called back: ``abort()`` returns, and it waits on
(PyTorch 2.11 to 2.13). But it notices the end of a connection at once, and raises.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator

_FOLDER = "/proc/self/fd"
_RECOGNISED_BY = 1 << 16  # bytes: more than stores and rings send in a moment
_ATTEMPTS = 2
_BYTES_RECEIVED = 128  # where Linux has that number, of 64 bits, in what TCP_INFO gives


class Connections:
    """Sockets that were opened while :meth:`recording`, or that a group uses, as :meth:`recognise` finds.

    None are found where the system has no ``/proc``.
    """

    def __init__(self) -> None:
        self._sockets: set[tuple[int, str]] = set()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """What is opened within counts, whoever opens it."""
        before = _sockets()
        try:
            yield
        finally:
            self._sockets |= _sockets() - before

    def recognise(self, exchange: Callable[[int], object], peers: int) -> bool:
        """Find the connections of a group that is there already: one to each of its ``peers``.

        ``exchange(size)`` has each of them send ``size`` bytes to this process, which tells their connections from all
        others. It is called as often on every rank. Returns whether they are found: none are where others receive as
        much in the same moment, each time, or where the system does not count.
        """
        found: set[tuple[int, str]] = set()
        for _ in range(_ATTEMPTS):
            before = _received()
            exchange(1)  # nobody sends more before everybody has looked
            exchange(_RECOGNISED_BY)
            grown = {each for each, size in _received().items() if size - before.get(each, 0) >= _RECOGNISED_BY}
            if len(grown) == peers:
                found = grown
        self._sockets |= found
        return bool(found)

    def shut_down(self, except_port: int = 0) -> None:
        """End those that are connected and still the same; who waits for them raises. They stay their owner's.

        Those that others have made to ``except_port`` of this process are left alone.
        """
        for fd, _ in self._sockets & _sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
                each.getpeername()  # not one that listens: Gloo would end the process
                if each.family == socket.AF_UNIX or each.getsockname()[1] != except_port:
                    each.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[tuple[int, str]]:
    """Descriptors of this process's sockets, and the number that the system has given to each."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(_FOLDER):
            with contextlib.suppress(OSError):  # closed since
                link = os.readlink(f"{_FOLDER}/{name}")
                if link.startswith("socket:"):
                    found.add((int(name), link))
    return found


def _received() -> dict[tuple[int, str], int]:
    """How many bytes have come over each connection of TCP, as far as the system counts them."""
    found = {}
    for fd, link in _sockets() if hasattr(socket, "TCP_INFO") else ():
        with contextlib.suppress(OSError, struct.error), socket.socket(fileno=os.dup(fd)) as each:
            info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
            found[fd, link] = struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]
    return found
