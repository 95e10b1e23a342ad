"""The store at which the ranks of a session meet: at an address, or, if all are on one host, on that host."""

import contextlib
import fcntl
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore

from lockstep._base import network
from lockstep._base.debug import log_of
from lockstep._base.store import BoundedStore, StoreLostError, bounded, own_connection
from lockstep._base.telling import telling
from lockstep._base.texts import first_line
from lockstep._base.user_folder import user_folder
from lockstep.errors import CommunicationError
from lockstep.session.environment import Environment

CONNECT_SECONDS = 0.1
"""Seconds between two attempts to reach the store."""
ATTEMPT_SECONDS = 5.0
"""Seconds that one attempt to reach the store may take."""
RESOLVE_SECONDS = 30.0
"""Seconds for which an unknown host name may become known: a cluster that has just started a host may need that."""

LOOK_SECONDS = 0.02
"""Seconds between two looks of rank 0 for processes that have come."""

_log = log_of("session")


@contextlib.contextmanager
def meeting_place(environment: Environment, timeout: float) -> Iterator[Any]:
    """Yield the store; unless a launcher has one, rank 0 makes it, without waiting for the others.

    All ranks have to meet inside the block. Without an address, a file has the port; it exists only inside the block.
    Raises :class:`CommunicationError` if the store cannot be reached within ``timeout`` seconds.
    """
    if environment.address:
        yield _store(environment, timeout)
        return
    file = _folder() / re.sub(r"[^\w.-]", "_", environment.run)
    environment = replace(environment, address=network.LOOPBACK)
    if environment.rank:
        yield _store(replace(environment, port=_published_port(file, environment, timeout)), timeout)
        return
    with _publishing(file, timeout) as publish:
        store = _store(environment, timeout)
        publish(store.port)
        yield store


# --------------------------------------------------------------------------------------------------------- on one host


def _folder() -> Path:
    root = Path(tempfile.gettempdir())
    try:
        return user_folder(root)
    except PermissionError:
        raise CommunicationError(
            f"the ranks cannot meet in {root / f'lockstep-{os.getuid()}'}: others can write there; remove it, or set "
            "MASTER_ADDR and MASTER_PORT"
        ) from None


@contextlib.contextmanager
def _publishing(path: Path, timeout: float) -> Iterator[Callable[[int], None]]:
    """Yield a function that publishes a port in a new file, which is locked while the port is valid, and then removed.

    The file that a killed process has left is never locked again.
    """
    deadline = time.monotonic() + timeout
    while _port_in(path) is not None:
        if time.monotonic() > deadline:
            raise CommunicationError(f"another process is rank 0 of the same run: it has locked {path}")
        time.sleep(CONNECT_SECONDS)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:

        def publish(port: int) -> None:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(f"{port}\n")
            file.flush()
            os.replace(file.name, path)

        try:
            yield publish
        finally:
            Path(file.name).unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def _published_port(path: Path, environment: Environment, timeout: float) -> int:
    """Wait until rank 0 has published its port, and return it."""
    deadline = time.monotonic() + timeout
    rank, world = environment.rank, environment.world_size
    with telling(lambda: f"rank {rank} waits for rank 0 of {world} to come (they meet by {path}); for {timeout:g} s"):
        while (port := _port_in(path)) is None:
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"rank {rank}: rank 0 of {world} did not come within {timeout:g} s; look at the errors of that "
                    f"process. The ranks meet by {path}: if it runs where that is another file, set MASTER_ADDR and "
                    "MASTER_PORT"
                )
            time.sleep(CONNECT_SECONDS)
    return port


def _port_in(path: Path) -> int | None:
    """Return the port in a file that another process has locked; a process that has ended does not lock its file."""
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read())
    return None


# ------------------------------------------------------------------------------------------------------- at an address


def _store(environment: Environment, timeout: float) -> Any:
    addresses = _resolve(environment, timeout)
    is_here = any(map(network.is_own, addresses))
    if environment.launcher_has_store or environment.rank:
        _wait_for_store(environment, timeout)
    elif not is_here:
        text = "rank 0 hosts the store at which the ranks meet, but %s=%s (%s) is not its host; trying for %g s"
        _log.warning(text, environment.address_variable, environment.address, ", ".join(addresses), timeout)
    try:
        return bounded(lambda: _connect(environment, timedelta(seconds=timeout)), timeout)
    except (DistError, StoreLostError) as error:
        if isinstance(error, DistError) and is_here and environment.rank == 0 and not environment.launcher_has_store:
            raise CommunicationError(
                f"rank 0 cannot make the store at which the ranks meet, at {environment.address}:{environment.port}: "
                f"{first_line(error)}. Give another port as MASTER_PORT, to all ranks, or end what listens there"
            ) from error
        raise _no_store(environment, timeout, error) from error


def _resolve(environment: Environment, timeout: float) -> list[str]:
    """Return the addresses of the host at which the ranks meet; a new name may take a moment to be known."""
    limit = min(timeout, RESOLVE_SECONDS)
    deadline, has_warned = time.monotonic() + limit, False
    while True:
        try:
            return network.addresses_of_host(environment.address)
        except OSError as error:
            name = f"{environment.address_variable}={environment.address}"
            what = f"rank {environment.rank}: the name in {name} cannot be resolved ({error})"
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"{what}, not for {limit:g} s; give a name or an address of the host of rank 0 that this host knows"
                ) from error
            if not has_warned:
                _log.warning("%s; trying for %g s", what, limit)
                has_warned = True
        time.sleep(CONNECT_SECONDS)


def _connect(environment: Environment, timeout: timedelta) -> Any:
    limit = timeout / 2  # where nobody listens any more, PyTorch tries for twice as long
    if environment.launcher_has_store:
        found = dist.rendezvous(  # type: ignore[attr-defined]
            "env://", environment.rank, environment.world_size, timeout=limit
        )
        store = next(iter(found))[0]
    else:
        listening = _listening_here_alone(environment) if environment.rank == 0 else None
        port = environment.port if listening is None else listening.getsockname()[1]
        given: dict[str, Any] = {} if listening is None else {"master_listen_fd": listening.detach()}
        store = TCPStore(
            environment.address,
            port,
            environment.world_size,
            is_master=environment.rank == 0,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
            **given,
        )
    store.set_timeout(timeout)
    return store


def _listening_here_alone(environment: Environment) -> socket.socket | None:
    """Return a socket for the store of ranks that are all on this host and meet at a loopback address: whoever reaches
    the store could take part. None if others have to reach it, or if a store of this process listens there already."""
    addresses = network.addresses_of_host(environment.address)
    on_loopback = all(map(network.is_loopback, addresses))
    if on_loopback and (environment.is_one_host or environment.address in addresses):
        for address in sorted(addresses, key=network.family_of, reverse=True):  # PyTorch tries IPv6 first
            with contextlib.suppress(OSError):
                return socket.create_server((address, environment.port), family=network.family_of(address))
    return None


def _wait_for_store(environment: Environment, timeout: float) -> None:
    """Wait until a process listens at the address of the store."""
    deadline, where = time.monotonic() + timeout, (environment.address, environment.port)
    refused: OSError | None = None

    def waits() -> str:
        place = f"{environment.address_variable}={where[0]}, MASTER_PORT={where[1]}"
        why = f" ({refused})" if refused is not None else ""
        return (
            f"rank {environment.rank} waits for {_host_of_store(environment)} to come: nobody answers at {place} yet"
            f"{why}{_hint(environment)}; trying for {timeout:g} s"
        )

    with telling(waits):
        while True:
            left = deadline - time.monotonic()
            try:
                socket.create_connection(where, timeout=max(CONNECT_SECONDS, min(left, ATTEMPT_SECONDS))).close()
                return
            except OSError as error:
                refused = error
                if left < 0:
                    raise _no_store(environment, timeout, error) from error
            time.sleep(CONNECT_SECONDS)


def _host_of_store(environment: Environment) -> str:
    return "the launcher" if environment.launcher_has_store else f"rank 0 of {environment.world_size}"


def _no_store(environment: Environment, timeout: float, error: Exception) -> CommunicationError:
    gist = first_line(error)
    return CommunicationError(
        f"rank {environment.rank}: {_host_of_store(environment)}, at whose store "
        f"{environment.address}:{environment.port} the ranks meet, did not come within {timeout:g} s, or has ended "
        f"since ({gist}); look at the errors of that process, and whether MASTER_ADDR and MASTER_PORT are "
        f"right{_hint(environment)}"
    )


def _hint(environment: Environment) -> str:
    """Return a hint if the address is one that leads from each host to itself."""
    with contextlib.suppress(OSError):
        if not environment.is_one_host and all(
            map(network.is_loopback, network.addresses_of_host(environment.address))
        ):
            return (
                f". {environment.address} is a loopback address here: if the store is on another host, give that one's "
                "address (under torchrun by --local-addr there)"
            )
    return ""


# ------------------------------------------------------------------------------------------- ranks that start again


@contextlib.contextmanager
def part_of_incarnation(store: Any, rank: int, world: int, timeout: float) -> Iterator[Any]:
    """Yield a part of the store that only the ranks of this start use; all have to meet inside the block.

    ``torchrun`` hosts one store for all its restarts, so the keys of killed processes are still there. It does not tell
    how often it has started the ranks: each host counts its own restarts. So each process draws a random number, and
    rank 0 gives a token, the name of a new part of the store, to each number that it finds. A token for a process that
    has ended is never read.

    Communicates two values of each rank through the store. Raises :class:`CommunicationError` if rank 0 does not come
    within ``timeout`` seconds.
    """
    # Rank 0 answers the others while it uses the store itself.
    bounded = BoundedStore(store if rank else own_connection(store, timeout), timeout)
    try:
        if rank:
            yield PrefixStore(_ask(bounded, rank, world, timeout), store)
            return
        token, met = secrets.token_hex(8), threading.Event()
        thread = threading.Thread(target=_serve, args=(bounded, world, token, met), name="lockstep meets", daemon=True)
        thread.start()
        try:
            yield PrefixStore(token, store)
        finally:
            met.set()
            thread.join()
    finally:
        bounded.close()


def _ask(bounded_store: BoundedStore, rank: int, world: int, timeout: float) -> str:
    number = secrets.token_hex(8)
    bounded_store.set(f"of rank {rank}", number)
    with telling(lambda: f"rank {rank} waits for rank 0 of {world} to come; for {timeout:g} s"):
        has_come = bounded_store.wait([number], timeout)
    if not has_come:
        raise CommunicationError(
            f"rank {rank}: rank 0 of {world} has not come within {timeout:g} s, or has ended since; look at the errors "
            "of all ranks"
        )
    return bounded_store.get(number)


def _serve(bounded_store: BoundedStore, world: int, token: str, met: threading.Event) -> None:
    """Give the token to each number that appears, until all ranks have met; some numbers belong to killed processes."""
    keys, served = [f"of rank {rank}" for rank in range(1, world)], set[str]()
    while True:
        with contextlib.suppress(StoreLostError):  # it may answer again; whoever waits for it hears if it does not
            for key in keys:
                if (number := bounded_store.read(key)) is not None and number not in served:
                    bounded_store.set(number, token)
                    served.add(number)
        if met.wait(LOOK_SECONDS):
            return
