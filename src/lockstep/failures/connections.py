"""The connections that a library of C++ opens, so that they can be ended under it.

A thread that waits in Gloo for a rank that does not come cannot be called back: ``abort()`` returns, and it waits on
(PyTorch 2.11 to 2.13). But it notices the end of a connection at once, and raises.
"""

import contextlib
import os
import socket
from collections.abc import Iterator

_FOLDER = "/proc/self/fd"


class Connections:
    """Sockets that were opened while :meth:`recording`; none are found where the system has no ``/proc``."""

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
