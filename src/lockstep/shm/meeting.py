"""How the ranks of a group find each other: who is on which host, and a connection to each rank of the own one.

Every rank opens a Unix socket without a name in any file system, and writes its address and its host to the group's
store. A connection counts only if it comes from the same user and brings the listener's secret.
"""

import errno
import hmac
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lockstep.errors import CommunicationError, OptionError

_HELLO = struct.Struct("<I32s")
_CREDENTIALS = struct.Struct("3i")
_FAILED = "failed"
"""The key of the store under which a rank writes why it has given up."""
LOOK_SECONDS = 0.2
"""How often a rank that waits for others looks whether they are alive."""


@dataclass(frozen=True)
class Meeting:
    """What a rank knows when all have met."""

    hosts: list[list[int]]
    """The ranks of each host, in order; the hosts by their first rank."""
    sockets: dict[int, socket.socket]
    """A connection to every other rank of the own host."""


def meet(store: Any, rank: int, names: Sequence[int], host: str, timeout: float) -> Meeting:
    """Meet the other ranks of a group, ``names`` in messages; ranks with the same ``host`` get connected."""
    deadline = time.monotonic() + timeout
    address, secret = f"\0lockstep-{secrets.token_hex(16)}", secrets.token_hex(16)
    sockets: dict[int, socket.socket] = {}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(len(names))
            store.set(f"{rank}", json.dumps({"host": host, "address": address[1:], "secret": secret}))
            cards = _cards(store, names, timeout)
            hosts: dict[str, list[int]] = {}
            for other, card in enumerate(cards):
                hosts.setdefault(card["host"], []).append(other)
            try:
                for other in hosts[host]:
                    if other < rank:
                        sockets[other] = _connect(cards[other], rank, names[other])
                waiting = {other: cards[other] for other in hosts[host] if other > rank}
                _accept(listener, secret, deadline, waiting, names, sockets)
            except CommunicationError as error:
                raise _first(store, error) from error.__cause__
    except BaseException:
        for each in sockets.values():
            each.close()
        raise
    return Meeting(list(hosts.values()), sockets)


def host_identity() -> str:
    """What is the same for processes that can share memory, and differs else."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{machine}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


def check_platform() -> None:
    """Raise where shared memory cannot work as this backend needs it."""
    if sys.platform != "linux":
        raise OptionError(
            f'the shm backend needs Linux (anonymous shared files, Unix sockets); this is {sys.platform}. Use "gloo" '
            'here: init_process_group("gloo")'
        )


def _cards(store: Any, names: Sequence[int], timeout: float) -> list[dict[str, str]]:
    keys = [str(other) for other in range(len(names))]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = ", ".join(str(name) for key, name in zip(keys, names, strict=True) if not store.check([key]))
        raise CommunicationError(
            f"rank(s) {absent} did not come to the shm process group within {timeout:g} s; look at their errors"
        ) from error
    return [json.loads(store.get(key)) for key in keys]


def _connect(card: dict[str, str], rank: int, name: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect("\0" + card["address"])
        connection.send(_HELLO.pack(rank, card["secret"].encode()))
    except ConnectionError as error:
        connection.close()
        raise CommunicationError(_gone([name])) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _accept(
    listener: socket.socket,
    secret: str,
    deadline: float,
    waiting: dict[int, dict[str, str]],
    names: Sequence[int],
    sockets: dict[int, socket.socket],
) -> None:
    """Put the connections from the ranks waited for, given with their cards, to ``sockets``."""
    strangers: dict[int, socket.socket] = {}
    suspects: set[int] = set()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    try:
        while waiting:
            ready = poll.poll(LOOK_SECONDS * 1e3)
            for fd, _ in ready:
                if fd == listener.fileno():
                    connection, _ = listener.accept()
                    strangers[connection.fileno()] = connection
                    poll.register(connection, select.POLLIN)
                    continue
                poll.unregister(fd)
                connection = strangers.pop(fd)
                other = _hello(connection, secret)
                if other in waiting:
                    sockets[other] = connection
                    del waiting[other]
                else:
                    connection.close()
            if not ready:
                # Whoever had connected before its end would have been found by now.
                if suspects := suspects & waiting.keys():
                    raise CommunicationError(_gone([names[other] for other in suspects]))
                suspects = {other for other, card in waiting.items() if not _listens(card)}
            if time.monotonic() > deadline:
                late = ", ".join(str(names[other]) for other in sorted(waiting))
                raise CommunicationError(f"rank(s) {late} did not connect to the shm process group in time")
    finally:
        for each in strangers.values():
            each.close()


def _hello(connection: socket.socket, secret: str) -> int:
    """Which rank it is; -1 for a stranger."""
    try:
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        other, shown = _HELLO.unpack(connection.recv(_HELLO.size))
    except (OSError, struct.error):
        return -1
    return int(other) if uid == os.getuid() and hmac.compare_digest(shown, secret.encode()) else -1


def _listens(card: dict[str, str]) -> bool:
    """Whether the rank is still there, and has not met everybody yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        return probe.connect_ex("\0" + card["address"]) != errno.ECONNREFUSED


def _first(store: Any, error: CommunicationError) -> CommunicationError:
    """The error of the rank that was the first to give up; what others see follows from that."""
    with suppress(RuntimeError):
        if store.check([_FAILED]):
            return CommunicationError(store.get(_FAILED).decode())
        store.set(_FAILED, str(error))
    return error


def _gone(names: Sequence[int]) -> str:
    ranks = f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, sorted(names)))}"
    return f"the shm process group cannot be made: {ranks} has died, or failed, before all had met"
