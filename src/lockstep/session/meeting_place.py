"""The store at which the ranks of a session meet: of the launcher, or of rank 0."""

import contextlib
import logging
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from lockstep import network
from lockstep.errors import CommunicationError
from lockstep.session.environment import Environment
from lockstep.store import StoreLostError, bounded

CONNECT_SECONDS = 0.1
"""How often a rank looks whether the store is there."""
TELL_SECONDS = 5.0
"""After how long it says that it still waits for the store."""
RESOLVE_SECONDS = 30.0
"""For how long a name that nobody knows may become known: a cluster that has just started a host may need that."""

_log = logging.getLogger("lockstep")


def meeting_place(environment: Environment, timeout: float) -> Any:
    """Return the store; where no launcher has one, rank 0 does, and waits for nobody here.

    Raises :class:`CommunicationError` if it cannot be reached within ``timeout`` seconds.
    """
    addresses = _resolve(environment, timeout)
    if environment.launcher_has_store or environment.rank:
        _wait_for_store(environment, timeout)
    elif not any(map(network.is_own, addresses)):
        text = (
            "rank 0 hosts the store at which the ranks meet, but MASTER_ADDR=%s (%s) is not its host; trying for %g s"
        )
        _log.warning(text, environment.address, ", ".join(addresses), timeout)
    try:
        return bounded(lambda: _connect(environment, timedelta(seconds=timeout)), timeout)
    except (DistError, StoreLostError) as error:
        if isinstance(error, DistError) and environment.rank == 0 and not environment.launcher_has_store:
            raise  # its port is in use
        raise _no_store(environment, timeout, error) from error


def _resolve(environment: Environment, timeout: float) -> list[str]:
    """The addresses of the host at which the ranks meet; its name may be new, and take a moment to be known."""
    limit = min(timeout, RESOLVE_SECONDS)
    deadline, told = time.monotonic() + limit, False
    while True:
        try:
            return network.addresses_of_host(environment.address)
        except OSError as error:
            what = (
                f"rank {environment.rank}: the name in MASTER_ADDR={environment.address} cannot be resolved ({error})"
            )
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"{what}, not for {limit:g} s; give a name or an address of the host of rank 0 that this host knows"
                ) from error
            if not told:
                _log.warning("%s; trying for %g s", what, limit)
                told = True
        time.sleep(CONNECT_SECONDS)


def _connect(environment: Environment, timeout: timedelta) -> Any:
    if environment.launcher_has_store:
        found = dist.rendezvous(  # type: ignore[attr-defined]
            "env://", environment.rank, environment.world_size, timeout=timeout
        )
        return next(iter(found))[0]
    return TCPStore(
        environment.address,
        environment.port,
        environment.world_size,
        is_master=environment.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _wait_for_store(environment: Environment, timeout: float) -> None:
    """Return when somebody listens where the store should be."""
    begin, where, told = time.monotonic(), (environment.address, environment.port), False
    while True:
        left = begin + timeout - time.monotonic()
        try:
            socket.create_connection(where, timeout=max(CONNECT_SECONDS, min(left, TELL_SECONDS))).close()
            return
        except OSError as error:
            if left < 0:
                raise _no_store(environment, timeout, error) from error
            if not told and time.monotonic() > begin + TELL_SECONDS:
                text = "rank %d: nobody answers at MASTER_ADDR=%s, MASTER_PORT=%d yet (%s)%s; trying for %g s"
                _log.warning(text, environment.rank, *where, error, _hint(environment), timeout)
                told = True
        time.sleep(CONNECT_SECONDS)


def _no_store(environment: Environment, timeout: float, error: Exception) -> CommunicationError:
    host = "the launcher" if environment.launcher_has_store else f"rank 0 of {environment.world_size}"
    gist = (str(error) or type(error).__name__).splitlines()[0]
    return CommunicationError(
        f"rank {environment.rank}: {host}, at whose store {environment.address}:{environment.port} the ranks meet, did "
        f"not come within {timeout:g} s, or has ended since ({gist}); look at the errors of that process, and whether "
        f"MASTER_ADDR and MASTER_PORT are right{_hint(environment)}"
    )


def _hint(environment: Environment) -> str:
    """What is wrong with an address that leads from each host to itself."""
    with contextlib.suppress(OSError):
        if not environment.is_one_host and all(
            map(network.is_loopback, network.addresses_of_host(environment.address))
        ):
            return (
                f". {environment.address} is a loopback address here: if the store is on another host, give that one's "
                "address (under torchrun by --local-addr there)"
            )
    return ""
