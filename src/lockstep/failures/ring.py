"""Connections to the next and the previous rank; a connection ends with that rank's process, or with the network.

Every rank passes on what it hears to both neighbours, so that it reaches all, even past a rank that is gone. The ranks
find each other through a store, and show a secret from it, so that strangers cannot join. There are two connections per
rank, for any number of ranks. A connection over which nothing comes any more, since a host or the network has failed,
ends after a limit that is set here: the system probes an idle connection, whatever its process does.
"""

import contextlib
import errno
import hmac
import json
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep._base import network
from lockstep._base.store import BoundedStore, address_towards
from lockstep._base.texts import first_line, ranks_in_words
from lockstep.errors import CommunicationError
from lockstep.failures.failure import Kind

LOOK_SECONDS = 0.05
"""Seconds between two looks of a rank that waits for its neighbours."""
CONNECT_SECONDS = 5.0
"""Seconds that one attempt to connect may take; a host that does not answer is tried again."""

_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 20  # bytes of a message
_LINK_ERRORS = frozenset(
    [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ENONET]
)


@dataclass(frozen=True)
class Place:
    """The process of a rank, and the address at which others reach it."""

    host: str
    """The same for all ranks of one host."""
    name: str
    """The name of the host in messages."""
    pid: int
    ip: str
    """An address at which the previous rank reaches it."""
    port: int = 0


class Connection:
    """Sends messages to one neighbour and receives its messages; never waits.

    The neighbour counts as gone after ``link_timeout`` seconds in which nothing has come from its host, not even the
    answer to a probe; then :attr:`loss` says why.
    """

    def __init__(self, connected: socket.socket, peer: int, link_timeout: float) -> None:
        self.peer = peer
        self.loss: OSError | None = None
        """The error that ended the link; None while it is intact, and if only the neighbour's process has ended."""
        self._socket = connected
        self._incoming = bytearray()
        self._outgoing = bytearray()
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _limit_silence(connected, link_timeout)

    def fileno(self) -> int:
        """Return the descriptor, for ``select``; -1 once the connection is closed."""
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """True if the neighbour is there, as far as is known."""
        return self.fileno() >= 0

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, whose values may be dataclasses, as soon as there is room; drop it if the neighbour is
        gone."""
        data = json.dumps(message, default=asdict).encode()
        self._outgoing += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> bool:
        """Send as much as there is room for; return True if everything has been sent."""
        try:
            while self._outgoing and self.is_open:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return False
        except OSError as error:  # the neighbour is gone: what it has sent before is read first
            self._note(error)
            self._outgoing.clear()
        return True

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that have arrived, and whether the neighbour is gone."""
        gone = False
        while True:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError as error:  # reset, lost, or closed
                self._note(error)
                data = b""
            if not data:
                gone = True
                break
            self._incoming += data
        messages = list(self._messages())
        return messages, gone or not self.is_open

    def has_ended(self) -> bool:
        """Return True if the neighbour, or the link to it, is gone; messages that have arrived are left for
        :meth:`receive`, and read before that."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError as error:
            self._note(error)
            return True

    def _note(self, error: OSError) -> None:
        """Record an error of the link: the system reports each error once, to the next send or receive."""
        if error.errno in _LINK_ERRORS:
            self.loss = error

    def _messages(self) -> Iterator[dict[str, Any]]:
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > _LONGEST:
                self.close()  # not a rank
                return
            if len(self._incoming) < _LENGTH.size + length:
                return
            data = self._incoming[_LENGTH.size : _LENGTH.size + length]
            del self._incoming[: _LENGTH.size + length]
            yield json.loads(data)

    def end_sending(self) -> None:
        """Let the neighbour see the end once it has read everything."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class NotMetError(CommunicationError):
    """A rank has not met this one, in one of the ways that ``kind`` can have; ``what`` is as in a failure."""

    def __init__(self, rank: int, kind: Kind, what: str = "") -> None:
        super().__init__(what or f"rank {rank} has not met the others: {kind}")
        self.rank = rank
        self.kind = kind
        self.what = what


class Meeting:
    """The neighbours of a ``rank``, by their order in ``ranks``, before they are connected.

    A rank first writes on which host it is. It listens on the loopback interface if the previous rank is on the same
    host, else at an address that the previous rank can reach. Nobody else may be able to reach it there, so each rank
    tells only of the end of the next one, to which it connects. (The hosts' test "late".)
    """

    def __init__(
        self, bounded_store: BoundedStore, rank: int, ranks: Sequence[int], host: str, link_timeout: float
    ) -> None:
        self._bounded_store = bounded_store
        self._rank = rank
        self._ranks = ranks
        place = ranks.index(rank)
        self._next = ranks[(place + 1) % len(ranks)]
        self._previous = ranks[place - 1]
        self._link_timeout = link_timeout
        self._listener: socket.socket | None = None
        self._secret = secrets.token_hex(16)
        self._known: dict[str, dict[str, Any]] = {}  # what other ranks have written
        self._strangers: list[Connection] = []
        self._trouble = ""
        self._own = Place(
            host, socket.gethostname(), os.getpid(), network.chosen_address() or address_towards(bounded_store.raw)
        )
        bounded_store.set(_HOST.format(rank), json.dumps(asdict(self._own)))

    def connect(
        self, timeout: float, check: Callable[[], object]
    ) -> tuple[tuple[Connection, Connection], socket.socket, Place]:
        """Return connections to the next and the previous rank, the listening socket, and its place.

        Calls ``check`` regularly, which may raise. Raises :class:`NotMetError`, or :class:`CommunicationError` if all
        have come, but are not connected after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        following: Connection | None = None
        preceding: Connection | None = None
        try:
            while following is None or preceding is None:
                following = following or self._connect_to_next()
                preceding = preceding or self._accept_previous()
                if following is None or preceding is None:
                    check()
                    if following is not None and following.has_ended():
                        raise self._lost(following)
                    if time.monotonic() > deadline:
                        raise self._missing(timeout)
        except BaseException:
            self._strangers += filter(None, (following, preceding))  # closed later, when others can read the reason
            raise
        listener, self._listener = self._listener, None
        assert listener is not None
        return (following, preceding), listener, self._own

    def close(self) -> None:
        """Close all sockets that :meth:`connect` has not returned."""
        if self._listener is not None:
            self._listener.close()
        for each in self._strangers:
            each.close()

    def _place_of(self, rank: int, key: str) -> dict[str, Any] | None:
        name = key.format(rank)
        if name not in self._known and self._bounded_store.check([name]):
            self._known[name] = json.loads(self._bounded_store.get(name))
        return self._known.get(name)

    def _connect_to_next(self) -> Connection | None:
        address = self._place_of(self._next, _ADDRESS)
        if address is None:
            return None
        where = address["ip"], address["port"]
        try:
            connected = socket.create_connection(where, timeout=CONNECT_SECONDS)
        except ConnectionRefusedError as error:
            raise NotMetError(self._next, Kind.ENDED) from error
        except OSError as error:  # the host does not answer, or not yet
            self._trouble = f"rank {self._next} cannot be reached at {where[0]}:{where[1]} ({error})"
            return None
        connection = Connection(connected, self._next, self._link_timeout)
        connection.send({"rank": self._rank, "secret": address["secret"]})
        return connection

    def _listen(self) -> None:
        """Listen at an address that the previous rank can reach, as soon as it has written on which host it is."""
        previous = self._place_of(self._previous, _HOST)
        if previous is None:
            return
        ip = network.LOOPBACK if previous["host"] == self._own.host else self._ip_towards(previous["ip"])
        self._listener = socket.create_server((ip, 0), family=network.family_of(ip), backlog=16)
        self._listener.setblocking(False)
        self._own = replace(self._own, ip=ip, port=self._listener.getsockname()[1])
        self._bounded_store.set(_ADDRESS.format(self._rank), json.dumps(asdict(self._own) | {"secret": self._secret}))

    def _ip_towards(self, other: str) -> str:
        """Return the address of this host that is reachable from another host, whose address is given."""
        if not network.is_loopback(self._own.ip):
            return self._own.ip
        found = network.reachable_address([other])
        if found is None or network.is_loopback(found):
            raise CommunicationError(
                f"rank {self._rank}: rank {self._previous} is on another host, but of this host, {self._own.name}, "
                f"only a loopback address is known ({self._own.ip}): {network.SET_INTERFACE}"
            )
        return found

    def _accept_previous(self) -> Connection | None:
        """Return the connection of the previous rank if it has arrived; waits a moment for it."""
        if self._listener is None:
            self._listen()
        if self._listener is None:
            time.sleep(LOOK_SECONDS)
            return None
        waiting: list[Any] = [self._listener, *self._strangers]
        select.select(waiting, [], [], LOOK_SECONDS)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._strangers.append(Connection(self._listener.accept()[0], self._previous, self._link_timeout))
        expected = json.dumps({"rank": self._previous, "secret": self._secret})
        for each in list(self._strangers):
            try:
                hello, gone = each.receive()
            except (ValueError, RecursionError):  # no rank sends this
                hello, gone = [], True
            if hello or gone:
                self._strangers.remove(each)
                if hello and hmac.compare_digest(json.dumps(hello[0]), expected):
                    return each
                each.close()
        return None

    def _lost(self, following: Connection) -> NotMetError:
        """Return the error to raise where the next rank was reached, and is gone before the previous one has come."""
        if following.loss is None:
            return NotMetError(self._next, Kind.ENDED)
        host = (self._place_of(self._next, _HOST) or {}).get("name")
        gist = os.strerror(following.loss.errno or 0)
        what = f"rank {self._rank}, on {self._own.name}, has lost the connection to its host {host} ({gist})"
        return NotMetError(self._next, Kind.UNREACHABLE, what)

    def _missing(self, timeout: float) -> CommunicationError:
        missing = [rank for rank in self._ranks if self._place_of(rank, _HOST) is None]
        if missing:
            return NotMetError(missing[0], Kind.ABSENT, absent(missing, len(self._ranks), timeout))
        text = f"not all of {len(self._ranks)} ranks had connected to each other after {timeout:g} s"
        if self._trouble:
            text += f". {self._trouble}: look at the network between the hosts, or {network.SET_INTERFACE}"
        return CommunicationError(text)


_HOST = "host {}"
"""The key under which a rank writes on which host it is."""
_ADDRESS = "address {}"
"""The key under which a rank writes where it listens."""


def _limit_silence(connected: socket.socket, seconds: float) -> None:
    """Let the system end a connection over which nothing has come for ``seconds``, whether or not anything was sent.

    The system probes an idle connection each twentieth of that time. (It counts from the last answer: if it probed less
    often, a pause of the network that is shorter by the time between two probes could already be too long.)
    """
    interval = max(1, int(seconds / 20))
    options = {
        "TCP_KEEPIDLE": interval,
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": max(1, math.ceil(seconds / interval) - 1),  # for systems without the next option
        "TCP_USER_TIMEOUT": int(seconds * 1000),  # on Linux it limits unacknowledged data, and replaces the count
    }
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def absent(ranks: Sequence[int], world: int, timeout: float) -> str:
    """Return the message about ranks that have not come to meet the others."""
    who = f"{ranks_in_words(ranks)} of {world}"
    return f"{who} did not come within {timeout:g} s; look at the errors of those processes"


def store_lost(rank: int, world: int, error: BaseException) -> CommunicationError:
    """Return the error to raise where the store at which ranks meet is gone."""
    gist = first_line(error)
    return CommunicationError(
        f"rank {rank}: the process that hosts the store has ended before all {world} ranks had met: that is rank 0, "
        f"unless a launcher hosts it. Look at its errors ({gist})"
    )
