"""Each rank has a connection to the next rank and one to the previous: its end is the end of that rank's process.

Whoever hears of something tells both neighbours, so that it reaches all, also around a rank that has gone. The ranks
find each other through a store, and show a secret from it, so that strangers cannot join. Two connections a rank, for
any number of ranks.
"""

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.errors import CommunicationError

LOOK_SECONDS = 0.05
"""How often a rank that meets its neighbours looks whether they are there."""
PROBE_SECONDS = 0.5
"""How often it looks whether a neighbour that has not connected yet is still there."""

_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 20  # bytes of a message
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))  # a host that is gone closes nothing


@dataclass(frozen=True)
class Address:
    """Where a rank listens, and who it is."""

    host: str
    """The same for ranks of one host."""
    pid: int
    ip: str
    port: int
    secret: str


class Connection:
    """Messages to and from one neighbour; never waits."""

    def __init__(self, connected: socket.socket, peer: int) -> None:
        self.peer = peer
        self._socket = connected
        self._incoming, self._outgoing = bytearray(), bytearray()
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """For ``select``; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """Whether the neighbour is there, as far as is known."""
        return self.fileno() >= 0

    def send(self, message: dict[str, Any]) -> None:
        """Send as soon as there is room; to a neighbour that has gone, nothing."""
        data = json.dumps(message).encode()
        self._outgoing += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> bool:
        """Send what there is room for; returns whether all has been sent."""
        try:
            while self._outgoing and self.is_open:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return False
        except OSError:  # gone: what it has sent before is read first
            self._outgoing.clear()
        return True

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """The messages that have come, and whether the neighbour has gone."""
        gone = False
        while True:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError:  # reset, timed out, or closed
                data = b""
            if not data:
                gone = True
                break
            self._incoming += data
        return list(self._messages()), gone

    def _messages(self) -> Iterator[dict[str, Any]]:
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > _LONGEST:
                self.close()  # nobody of ours
                return
            if len(self._incoming) < _LENGTH.size + length:
                return
            data = self._incoming[_LENGTH.size : _LENGTH.size + length]
            del self._incoming[: _LENGTH.size + length]
            yield json.loads(data)

    def end_sending(self) -> None:
        """Let the neighbour see the end when it has read all."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close it."""
        self._socket.close()


class NeighbourHasEndedError(CommunicationError):
    """The process of a neighbour ended before it had met this one."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"the process of rank {rank} has ended before it had met the others")
        self.rank = rank


class RankHasNotComeError(CommunicationError):
    """A rank did not come to meet the others in time."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Meeting:
    """The neighbours of one rank, before they are connected."""

    def __init__(self, store: Any, rank: int, world: int, ip: str, host: str) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._next, self._previous = (rank + 1) % world, (rank - 1) % world
        self._listener = socket.create_server((ip, 0), backlog=16)
        self._listener.setblocking(False)
        self._strangers: list[Connection] = []
        self._suspect = False
        self._probed = time.monotonic()
        self.own = Address(host, os.getpid(), ip, self._listener.getsockname()[1], secrets.token_hex(16))
        self.addresses: dict[int, Address] = {}
        """Of the neighbours that have come."""
        store.set(f"address {rank}", json.dumps(vars(self.own)))

    def connect(self, timeout: float, check: Callable[[], object]) -> tuple[Connection, Connection]:
        """Connections to the next rank and to the previous one.

        Calls ``check`` every now and then, which may raise. Raises :class:`NeighbourHasEndedError`, and after
        ``timeout`` seconds :class:`RankHasNotComeError`, or :class:`CommunicationError` if all have come.
        """
        deadline = time.monotonic() + timeout
        following: Connection | None = None
        preceding: Connection | None = None
        try:
            while following is None or preceding is None:
                self._look_for_addresses()
                following = following or self._connect_to_next()
                preceding = preceding or self._accept_previous()
                if preceding is None:
                    self._probe_previous()
                if following is None or preceding is None:
                    check()
                    if time.monotonic() > deadline:
                        raise self._missing(timeout)
            self._look_for_addresses()  # who has connected has one
            return following, preceding
        except BaseException as error:
            self._strangers += filter(None, (following, preceding))  # to close, when others can read why
            if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):  # of the store
                raise store_lost(self._rank, self._world, error) from error
            raise

    def close(self) -> None:
        """Listen no more; connections that :meth:`connect` has not returned are closed."""
        self._listener.close()
        for each in self._strangers:
            each.close()

    def _look_for_addresses(self) -> None:
        for rank in {self._next, self._previous} - self.addresses.keys():
            if self._store.check([f"address {rank}"]):
                self.addresses[rank] = Address(**json.loads(self._store.get(f"address {rank}")))

    def _connect_to_next(self) -> Connection | None:
        address = self.addresses.get(self._next)
        if address is None:
            return None
        try:
            connection = Connection(socket.create_connection((address.ip, address.port), timeout=5), self._next)
        except TimeoutError:
            return None
        except ConnectionRefusedError as error:
            raise NeighbourHasEndedError(self._next) from error
        connection.send({"rank": self._rank, "secret": address.secret})
        return connection

    def _accept_previous(self) -> Connection | None:
        """The connection of the previous rank, if it has come by now; waits a moment for it."""
        waiting: list[Any] = [self._listener, *self._strangers]
        select.select(waiting, [], [], LOOK_SECONDS)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._strangers.append(Connection(self._listener.accept()[0], -1))
        for each in list(self._strangers):
            try:
                hello, gone = each.receive()
            except ValueError:  # not what a rank would send
                hello, gone = [], True
            if hello or gone:
                self._strangers.remove(each)
                if hello and _is_rank(hello[0], self._previous, self.own.secret):
                    each.peer = self._previous
                    return each
                each.close()
        return None

    def _probe_previous(self) -> None:
        """Raise if the previous rank listens no more; it had connected by then, or has ended."""
        if self._suspect:
            raise NeighbourHasEndedError(self._previous)
        address = self.addresses.get(self._previous)
        if address is None or time.monotonic() < self._probed + PROBE_SECONDS:
            return
        self._probed = time.monotonic()
        try:
            socket.create_connection((address.ip, address.port), timeout=5).close()
        except ConnectionRefusedError:
            self._suspect = True  # unless its connection is there already: one more look
        except OSError:
            pass

    def _missing(self, timeout: float) -> CommunicationError:
        absent = [rank for rank in range(self._world) if not self._store.check([f"address {rank}"])]
        if absent:
            ranks = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
            text = f"{ranks} of {self._world} did not come within {timeout:g} s; look at the errors of those processes"
            return RankHasNotComeError(absent[0], text)
        return CommunicationError(f"not all of {self._world} ranks had connected to each other after {timeout:g} s")


def ip_for(store: Any) -> str:
    """The address under which ranks of the same store reach this host: loopback, if that is where the store is."""
    host = getattr(_innermost(store), "host", None)
    if not host:
        return "127.0.0.1"  # a store in a file or in this process
    with contextlib.suppress(OSError):
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def store_lost(rank: int, world: int, error: BaseException) -> CommunicationError:
    """What to raise where the store is gone at which ranks meet."""
    gist = (str(error) or type(error).__name__).splitlines()[0]
    return CommunicationError(
        f"rank {rank}: the process that hosts the store has ended before all {world} ranks had met: that is rank 0, "
        f"unless a launcher hosts it. Look at its errors ({gist})"
    )


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _is_rank(hello: dict[str, Any], rank: int, secret: str) -> bool:
    return hello.get("rank") == rank and hmac.compare_digest(str(hello.get("secret")), secret)
