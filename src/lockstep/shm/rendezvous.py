"""Lets the ranks of a group meet: finds the host of each rank, and connects to each rank of this host.

Every rank opens a Unix socket without a name in any file system, and writes its address and its host to the group's
store. A connection counts only if it comes from the same user and brings the listener's secret.
"""

import errno
import hmac
import json
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

from lockstep._base import network
from lockstep._base.store import ANSWER_SECONDS, BoundedStore, StoreLostError, address_towards, own_connection
from lockstep._base.texts import ranks_in_words
from lockstep.errors import CommunicationError, OptionError
from lockstep.shm.constants import FAILURE_KEY, LIVENESS_SECONDS
from lockstep.shm.shared_memory import SharedMemory

PLACE_OF_RENDEZVOUS = "rendezvous"
"""The part of a group's store in which its ranks meet."""

_HELLO = struct.Struct("<I32s")
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Rendezvous:
    """The result of the rendezvous on one rank."""

    hosts: list[list[int]]
    """The ranks of each host, in order; hosts are ordered by their first rank."""
    sockets: dict[int, socket.socket]
    """A connection to every other rank of this host."""
    addresses: list[str]
    """The addresses of ranks on other hosts that are known and not loopback."""
    name: str
    """The same on all ranks, and different each time."""


class CannotShareMemoryError(OptionError):
    """A rank cannot share memory with the others: raised on all ranks."""


def meet(store: Any, rank: int, global_ranks: Sequence[int], host: str, timeout: float) -> Rendezvous:
    """Meet the other ranks of a group, and connect to those with the same ``host``; errors name ``global_ranks``.

    If a rank cannot share memory, all raise :class:`CannotShareMemoryError`, before they have connected.
    """
    deadline = time.monotonic() + timeout
    own_address = {"host": host, "ip": address_towards(store), "address": f"lockstep-{secrets.token_hex(16)}"}
    own_address |= {"secret": secrets.token_hex(16), "obstacle": obstacle()}
    sockets: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        bounded_store = stack.enter_context(closing(BoundedStore(store, timeout)))
        if not own_address["obstacle"]:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"\0{own_address['address']}")
            listener.listen(len(global_ranks))
        bounded_store.set(f"{rank}", json.dumps(own_address))
        addresses = _addresses(bounded_store, rank, own_address, global_ranks, timeout)
        hosts: dict[str, list[int]] = {}
        for other, address in enumerate(addresses):
            hosts.setdefault(address["host"], []).append(other)
        try:
            for other in hosts[host]:
                if other < rank:
                    sockets[other] = _connect(addresses[other], rank, global_ranks[other])
            missing = {other: addresses[other] for other in hosts[host] if other > rank}
            _accept(listener, own_address["secret"], deadline, missing, global_ranks, sockets)
        except BaseException as error:
            for each in sockets.values():
                each.close()
            if isinstance(error, CommunicationError):
                raise _first_failure(bounded_store, error) from error.__cause__
            raise
    elsewhere = (addresses[other]["ip"] for ranks in hosts.values() for other in ranks if other not in hosts[host])
    reachable = [each for each in elsewhere if not network.is_loopback(each)]
    return Rendezvous(list(hosts.values()), sockets, reachable, addresses[0]["address"])


def clear_address(store: Any, rank: int) -> None:
    """Remove this rank's address, once all have read it: a later group may meet at the same place of the store."""
    with suppress(StoreLostError), closing(BoundedStore(store)) as bounded_store:
        bounded_store.delete(f"{rank}")


def give_up(store: Any, size: int, why: str) -> None:
    """Make every rank that waits at a rendezvous raise an error with the reason ``why``.

    Communicates over a connection of its own, since a thread that waits blocks the other one.
    """
    with suppress(StoreLostError), closing(BoundedStore(own_connection(store, ANSWER_SECONDS))) as bounded_store:
        for rank in range(size):
            bounded_store.compare_set(f"{rank}", "", json.dumps({"given_up": why}))


def obstacle() -> str:
    """Return why this process cannot share memory with others, or an empty text."""
    if sys.platform != "linux":
        return f"it needs Linux (anonymous shared files, Unix sockets); this is {sys.platform}"
    try:
        SharedMemory(0, mmap.PAGESIZE).close()
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).close()
    except (OSError, AttributeError) as error:  # a forbidden system call, or a Python without os.memfd_create
        return f"memory cannot be shared here: {error!r}"
    return ""


def _addresses(
    bounded_store: BoundedStore, rank: int, own: dict[str, str], global_ranks: Sequence[int], timeout: float
) -> list[dict[str, str]]:
    keys = [str(other) for other in range(len(global_ranks)) if other != rank]
    values = bounded_store.wait_for(keys, timeout, is_only_reader=len(keys) == 1)
    if values is None:
        absent = ", ".join(
            str(name) for other, name in enumerate(global_ranks) if not bounded_store.check([str(other)])
        )
        raise CommunicationError(
            f"rank(s) {absent} did not come to the shm process group within {timeout:g} s; look at their errors"
        )
    addresses = list(map(json.loads, values))
    addresses.insert(rank, own)
    for other, address in enumerate(addresses):
        if why := address.get("given_up"):
            raise CommunicationError(f"rank {global_ranks[other]} did not come to the shm process group: {why}")
        if address.get("obstacle"):
            raise CannotShareMemoryError(
                f"the shm backend cannot work on rank {global_ranks[other]}: {address['obstacle']}. Use Gloo: "
                'init_process_group("gloo")'
            )
    return addresses


def _connect(address: dict[str, str], rank: int, to: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect("\0" + address["address"])
        connection.send(_HELLO.pack(rank, address["secret"].encode()))
    except ConnectionError as error:
        connection.close()
        raise CommunicationError(_have_died([to])) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _accept(
    listener: socket.socket,
    secret: str,
    deadline: float,
    missing: dict[int, dict[str, str]],
    global_ranks: Sequence[int],
    sockets: dict[int, socket.socket],
) -> None:
    """Add the connections of the ``missing`` ranks, given with their addresses, to ``sockets``."""
    strangers: dict[int, socket.socket] = {}
    suspects: set[int] = set()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    try:
        while missing:
            ready = poll.poll(LIVENESS_SECONDS * 1e3)
            for fd, _ in ready:
                if fd == listener.fileno():
                    connection, _ = listener.accept()
                    strangers[connection.fileno()] = connection
                    poll.register(connection, select.POLLIN)
                    continue
                poll.unregister(fd)
                connection = strangers.pop(fd)
                other = _hello(connection, secret)
                if other in missing:
                    sockets[other] = connection
                    del missing[other]
                else:
                    connection.close()
            if not ready:
                # A rank that had connected before its end would have been found by now.
                if suspects := suspects & missing.keys():
                    raise CommunicationError(_have_died([global_ranks[other] for other in suspects]))
                suspects = {other for other, address in missing.items() if not _listens(address)}
            if time.monotonic() > deadline:
                late = ", ".join(str(global_ranks[other]) for other in sorted(missing))
                raise CommunicationError(f"rank(s) {late} did not connect to the shm process group in time")
    finally:
        for each in strangers.values():
            each.close()


def _hello(connection: socket.socket, secret: str) -> int:
    """Return the rank that has connected; -1 for a stranger (test_strangers_are_turned_away)."""
    try:
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        other, shown = _HELLO.unpack(connection.recv(_HELLO.size))
    except (OSError, struct.error):
        return -1
    return int(other) if uid == os.getuid() and hmac.compare_digest(shown, secret.encode()) else -1


def _listens(address: dict[str, str]) -> bool:
    """Return True if the rank is alive and still accepts connections, as some rank has yet to connect."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        return probe.connect_ex("\0" + address["address"]) != errno.ECONNREFUSED


def _first_failure(bounded_store: BoundedStore, error: CommunicationError) -> CommunicationError:
    """Return the error of the first rank that gave up; the errors of the others follow from it."""
    with suppress(StoreLostError):
        if (failure := bounded_store.read(FAILURE_KEY)) is not None:
            return CommunicationError(failure)
        bounded_store.set(FAILURE_KEY, str(error))
    return error


def _have_died(global_ranks: Sequence[int]) -> str:
    who = ranks_in_words(global_ranks)
    return f"the shm process group cannot be made: {who} has died, or failed, before all had met"
