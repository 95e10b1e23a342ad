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
from lockstep.failures.failure import Failure, Kind

LOOK_SECONDS = 0.05
"""Seconds between two looks of a rank that waits for its neighbours."""
PROBE_SECONDS = 0.5
"""Seconds between two looks whether a rank that does not connect still listens."""
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
        self.place: Place | None = None
        """Where the neighbour is, if a store has told it."""
        self.loss: OSError | None = None
        """The error that ended the link; None while it is intact, and if only the neighbour's process has ended."""
        self._socket = connected
        self._incoming = bytearray()
        self._unread: list[bytes] = []
        self._gone = False
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

    def send(self, *messages: bytes) -> None:
        """Send :func:`encoded` messages as soon as there is room; drop them if the neighbour is gone."""
        for message in messages:
            self._outgoing += _LENGTH.pack(len(message)) + message
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

    def receive(self) -> tuple[list[bytes], bool]:
        """Return the messages that have arrived, and whether the neighbour is gone."""
        self.unread()
        messages, self._unread = self._unread, []
        return messages, self.has_ended

    def unread(self) -> list[bytes]:
        """Return the messages that have arrived, which :meth:`receive` will return as well."""
        while not self.has_ended:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError as error:  # reset, lost, or closed
                self._note(error)
                data = b""
            self._gone = not data
            self._incoming += data
        self._unread.extend(self._messages())
        return self._unread

    @property
    def has_ended(self) -> bool:
        """True if the neighbour, or the link to it, is gone, as far as what was read shows."""
        return self._gone or not self.is_open

    def _note(self, error: OSError) -> None:
        """Record an error of the link: the system reports each error once, to the next send or receive."""
        if error.errno in _LINK_ERRORS:
            self.loss = error

    def _messages(self) -> Iterator[bytes]:
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > _LONGEST:
                self.close()  # not a rank
                return
            if len(self._incoming) < _LENGTH.size + length:
                return
            data = bytes(self._incoming[_LENGTH.size : _LENGTH.size + length])
            del self._incoming[: _LENGTH.size + length]
            yield data

    def end_sending(self) -> None:
        """Let the neighbour see the end once it has read everything."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def wait_to_read(sockets: Sequence[Any], seconds: float) -> list[Any]:
    """Return those of some sockets from which something can be read, within ``seconds``; any descriptors will do, also
    those above 1,023, which ``select.select`` refuses."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(seconds * 1e3)}
    return [each for each in sockets if each.fileno() in ready]


def encoded(message: dict[str, Any]) -> bytes:
    """Return a message as it is sent; its values may be dataclasses."""
    return json.dumps(message, default=asdict).encode()


class NotMetError(CommunicationError):
    """A rank has not met this one, in one of the ways that ``kind`` can have; ``what`` is as in a failure."""

    def __init__(self, rank: int, kind: Kind, what: str = "") -> None:
        super().__init__(what or f"rank {rank} has not met the others: {kind}")
        self.rank = rank
        self.kind = kind
        self.what = what


class ToldError(CommunicationError):
    """A neighbour has told of a ``failure`` before this rank had met both of its neighbours."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary)
        self.failure = failure


class Meeting:
    """The neighbours of a ``rank``, by their order in ``ranks``, before they are connected.

    A rank listens on the loopback interface, and writes that, with its host, to the store. If the previous rank is on
    another host, it then listens at an address that is reachable from there as well, and writes that, too; other ranks
    may not be able to reach it there. (The hosts' test "late".) So its neighbours on its host can connect from the
    moment at which they know of it, and notice its end: nobody listens any more.
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
        self._following: Connection | None = None
        self._preceding: Connection | None = None
        self._link_timeout = link_timeout
        self._secret = secrets.token_hex(16)
        self._known: dict[str, dict[str, Any]] = {}  # what other ranks have written
        self._strangers: list[Connection] = []
        self._trouble = ""
        ip = network.chosen_address() or address_towards(bounded_store.raw)
        self._own = Place(host, socket.gethostname(), os.getpid(), ip)
        self._probe_at = 0.0
        self._doors = [_listening_at(network.LOOPBACK)]
        self._listener: socket.socket | None = None
        """Where the previous rank connects, once it is known on which host that is."""
        self._write(_HOST, self._doors[0])

    def connect(
        self, timeout: float, check: Callable[[], object]
    ) -> tuple[tuple[Connection, Connection], socket.socket, Place]:
        """Return connections to the next and the previous rank, the listening socket, and its place.

        Calls ``check`` regularly, which may raise. Raises :class:`NotMetError`, or :class:`ToldError` if a neighbour
        has told of a failure.
        """
        deadline = time.monotonic() + timeout
        while self._following is None or self._preceding is None:
            if self._listener is None:
                self._listen()  # before it connects, which takes time where the next rank is far
            self._following = self._following or self._connect_to_next()
            self._preceding = self._preceding or self._accept_previous()
            if self._following is None or self._preceding is None:
                check()
                for each in filter(None, (self._following, self._preceding)):
                    self._look_at(each)
                if self._preceding is None:
                    self._probe_previous()
                if time.monotonic() > deadline:
                    raise not_met(self._bounded_store, self._rank, self._ranks, timeout, self._trouble)
        met, listener = (self._following, self._preceding), self._listener
        assert listener is not None
        for each in met:
            address = self._known.get(_ADDRESS.format(each.peer)) or self._told_by(each.peer, _HOST) or {}
            ip, port = address["door"]
            each.place = Place(**{**address["place"], "ip": ip, "port": port})
        self._following = self._preceding = self._listener = None
        self._doors.remove(listener)
        return met, listener, self._own

    def tell(self, messages: Sequence[dict[str, Any]], seconds: float) -> None:
        """Send messages to the neighbours that are connected, or will connect to this rank in the next seconds."""
        until, untold = time.monotonic() + seconds, [self._following, self._preceding]
        self._listener = self._listener or self._doors[0]  # the previous rank may have connected to that one
        while True:
            if self._preceding is None:
                with contextlib.suppress(CommunicationError, OSError):
                    self._preceding = self._accept_previous()
                    untold.append(self._preceding)
            for each in filter(None, untold):
                each.send(*map(encoded, messages))
            untold = []
            if time.monotonic() >= until:
                return
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Close all sockets that :meth:`connect` has not returned; what was sent over them arrives."""
        for each in filter(None, (self._following, self._preceding)):
            each.end_sending()
            each.unread()  # else the system tells the neighbour of an error, in place of what was sent
            each.close()
        for stranger in self._strangers:
            stranger.close()
        for door in self._doors:
            door.close()

    def _write(self, key: str, listener: socket.socket) -> None:
        """Write the place of this rank, and where it listens."""
        address = {"place": asdict(self._own), "door": listener.getsockname()[:2], "secret": self._secret}
        self._bounded_store.set(key.format(self._rank), json.dumps(address))

    def _told_by(self, rank: int, key: str) -> dict[str, Any] | None:
        name = key.format(rank)
        if name not in self._known and (text := self._bounded_store.read(name)) is not None:
            self._known[name] = json.loads(text)
        return self._known.get(name)

    def _connect_to_next(self) -> Connection | None:
        address = self._told_by(self._next, _HOST)
        if address is not None and address["place"]["host"] != self._own.host:
            address = self._told_by(self._next, _ADDRESS)
        if address is None:
            return None
        where = tuple(address["door"])
        try:
            connected = socket.create_connection(where, timeout=CONNECT_SECONDS)
        except ConnectionRefusedError as error:
            raise NotMetError(self._next, Kind.ENDED) from error
        except OSError as error:  # the host does not answer, or not yet
            self._trouble = f"rank {self._next} cannot be reached at {where[0]}:{where[1]} ({error})"
            return None
        connection = Connection(connected, self._next, self._link_timeout)
        connection.send(encoded({"rank": self._rank, "secret": address["secret"]}))
        return connection

    def _listen(self) -> None:
        """Listen at an address that the previous rank can reach, as soon as it has written on which host it is."""
        previous = self._told_by(self._previous, _HOST)
        if previous is None:
            return
        there = previous["place"]
        if there["host"] == self._own.host:
            self._listener = self._doors[0]
        else:
            self._listener = _listening_at(self._ip_towards(there["ip"]))
            self._doors.append(self._listener)
            self._write(_ADDRESS, self._listener)
        ip, port, *_ = self._listener.getsockname()
        self._own = replace(self._own, ip=ip, port=port)

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
        wait_to_read([self._listener, *self._strangers], LOOK_SECONDS)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._strangers.append(Connection(self._listener.accept()[0], self._previous, self._link_timeout))
        expected = encoded({"rank": self._previous, "secret": self._secret})
        for each in list(self._strangers):
            messages = each.unread()
            if messages or each.has_ended:
                self._strangers.remove(each)
                if messages and hmac.compare_digest(messages.pop(0), expected):
                    return each
                each.close()
        return None

    def _probe_previous(self) -> None:
        """Raise if the previous rank has come to this host, and is gone, though it has not connected."""
        address = self._told_by(self._previous, _HOST)
        if address is None or address["place"]["host"] != self._own.host or time.monotonic() < self._probe_at:
            return
        self._probe_at = time.monotonic() + PROBE_SECONDS
        try:
            socket.create_connection(tuple(address["door"]), timeout=LOOK_SECONDS).close()
        except ConnectionRefusedError as error:
            self._preceding = self._accept_previous()  # it may have connected, and gone on, since
            if self._preceding is None:
                raise NotMetError(self._previous, Kind.ENDED) from error
        except OSError:  # too many wait to be accepted
            pass

    def _look_at(self, neighbour: Connection) -> None:
        """Raise if a neighbour has told of a failure, or is gone, while this rank waits for the other one."""
        for message in map(json.loads, neighbour.unread()):
            if message["kind"] == "failure":
                raise ToldError(Failure.of_fields(message.get("first", message["failure"])))
        if neighbour.has_ended:
            raise self._lost(neighbour)

    def _lost(self, neighbour: Connection) -> NotMetError:
        """Return the error to raise where a neighbour was met, and is gone before the other one has come."""
        if neighbour.loss is None:
            return NotMetError(neighbour.peer, Kind.ENDED)
        address = self._told_by(neighbour.peer, _HOST)
        host = address["place"]["name"] if address is not None else ""
        gist = os.strerror(neighbour.loss.errno or 0)
        what = f"rank {self._rank}, on {self._own.name}, has lost the connection to its host {host} ({gist})"
        return NotMetError(neighbour.peer, Kind.UNREACHABLE, what)


def not_come(bounded_store: BoundedStore, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have not come to meet the others."""
    if bounded_store.check([_HOST.format(each) for each in ranks]):
        return []
    return [each for each in ranks if not bounded_store.check([_HOST.format(each)])]


def not_met(
    bounded_store: BoundedStore, rank: int, ranks: Sequence[int], timeout: float, trouble: str = ""
) -> NotMetError:
    """Return the error of a ``rank`` that has waited until its time-out for all to be connected: it names those that
    have not come, and nobody if all have."""
    missing = not_come(bounded_store, ranks)
    if missing:
        return NotMetError(missing[0], Kind.ABSENT, absent(missing, len(ranks), timeout))
    text = f"not all of {len(ranks)} ranks had connected to each other after {timeout:g} s"
    if trouble:
        text += f". {trouble}: look at the network between the hosts, or {network.SET_INTERFACE}"
    else:
        text += "; look at the errors of all of them"
    return NotMetError(rank, Kind.ABSENT, text)


def _listening_at(ip: str) -> socket.socket:
    listener = socket.create_server((ip, 0), family=network.family_of(ip), backlog=16)
    listener.setblocking(False)
    return listener


_HOST = "host {}"
"""The key under which a rank writes on which host it is, and where it listens there."""
_ADDRESS = "address {}"
"""The key under which a rank writes where it listens for a previous rank on another host."""


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
