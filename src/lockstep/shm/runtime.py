"""Builds what a group needs to run collectives: connections, shared memory, a Gloo group."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from lockstep._base import network
from lockstep._base.debug import log_of
from lockstep._base.store import ANSWER_SECONDS, in_background
from lockstep._base.texts import first_line
from lockstep.errors import CommunicationError
from lockstep.shm.constants import LIVENESS_SECONDS
from lockstep.shm.gloo import make_gloo_group
from lockstep.shm.inter_host import FailureNotice, InterHost
from lockstep.shm.many_hosts import Algorithm, ManyHosts
from lockstep.shm.messages import MessageKind
from lockstep.shm.one_host import OneHost
from lockstep.shm.peers import Peers
from lockstep.shm.rendezvous import PLACE_OF_RENDEZVOUS, Rendezvous, clear_address, meet
from lockstep.shm.shared_memory import SharedMemory
from lockstep.shm.staging import STAGING, Staging

Between = Callable[[Any, int, int, timedelta], Any]


@dataclass(frozen=True, kw_only=True)
class ShmOptions:
    """Options of a ``shm`` group: ``init_process_group("shm", pg_options=ShmOptions(...))``."""

    host: str | None = None
    """The host of this rank; ranks that give the same name share memory. Detected by default."""
    between: Between | None = None
    """Makes the group between hosts; called on one rank of each with (store, rank, size, timeout). Default: Gloo."""


class Runtime:
    """Everything that belongs to a group except PyTorch's interface, so that its queue may outlive the group object."""

    def __init__(
        self,
        store: Any,
        rank: int,
        global_ranks: Sequence[int],
        timeout: float,
        options: ShmOptions,
        program_waits: Callable[[], bool],
    ) -> None:
        place = PrefixStore(PLACE_OF_RENDEZVOUS, store)
        rendezvous = meet(place, rank, global_ranks, options.host or network.host_identity(), timeout)
        # What an earlier group of this name has left there is not found.
        store = PrefixStore(rendezvous.name, store)
        self._notice = FailureNotice(store)
        on_host = next(host for host in rendezvous.hosts if rank in host)
        leads = len(rendezvous.hosts) > 1 and on_host[0] == rank
        self.peers = Peers(
            [global_ranks[other] for other in on_host],
            on_host.index(rank),
            {on_host.index(other): each for other, each in rendezvous.sockets.items()},
            program_waits=program_waits,
            check_elsewhere=self._notice.check if leads else None,
        )
        try:
            self._prepare(store, rendezvous, rank, global_ranks, timeout, options)
            cleared = None
            if options.between is None:
                # All have read all addresses: each leader tells its own, for Gloo, when its host has.
                self.peers.exchange(MessageKind.STEP, timeout)
                cleared = in_background(partial(clear_address, place, rank))
            # A rank that has made the group may leave it at once, and clears the address where they have met: by then
            # no other rank is still making it.
            self.algorithm(timeout).barrier()
            wait([cleared or in_background(partial(clear_address, place, rank))])
            log_of("shm").debug("a group of ranks %s, by host: %s", list(global_ranks), rendezvous.hosts)
        except BaseException as error:
            if self.peers.reason is None:
                self.peers.abort(f"the shm process group cannot be made: rank {global_ranks[rank]} failed: {error!r}")
            self.peers.close()
            self._notice.close()
            raise

    def _prepare(
        self,
        store: Any,
        found: Rendezvous,
        rank: int,
        global_ranks: Sequence[int],
        timeout: float,
        options: ShmOptions,
    ) -> None:
        memory = SharedMemory(STAGING, Staging.staging_bytes(self.peers.size))
        self.peers.send_memory(STAGING, memory.size, memory.fd)
        memory.close()
        self.peers.exchange(MessageKind.STEP, timeout)  # the memory of every rank is mapped here after this
        self.staging = Staging(self.peers, memory)
        hosts = found.hosts
        address = network.LOOPBACK if len(hosts) == 1 else network.address_for_gloo(found.addresses)
        limit = timedelta(seconds=timeout)
        self.gloo: Any = self._while_alive(
            lambda: make_gloo_group(PrefixStore("gloo", store), rank, len(global_ranks), limit, address, lazy=True),
            timeout,
        )
        self.inter_host: InterHost | None = None
        if len(hosts) > 1:
            group, host = None, next(i for i, ranks in enumerate(hosts) if rank in ranks)
            if hosts[host][0] == rank:
                make = options.between or partial(make_gloo_group, address=address)
                group = self._while_alive(lambda: make(PrefixStore("between", store), host, len(hosts), limit), timeout)
            self.inter_host = InterHost(hosts, global_ranks, rank, self.peers, group, self._notice)

    def algorithm(self, timeout: float) -> Algorithm:
        """Return the algorithm that runs collectives; each wait for other ranks may take ``timeout`` seconds."""
        if self.inter_host is None:
            return OneHost(self.staging, timeout)
        return ManyHosts(self.staging, self.inter_host, timeout)

    def _while_alive(self, make: Callable[[], Any], timeout: float) -> Any:
        """Return the result of ``make()``, which waits for other ranks; raise if a rank of this host dies meanwhile.

        ``make`` has a time-out of its own, but that does not cover its questions to a store that is gone.
        """
        deadline = time.monotonic() + timeout + ANSWER_SECONDS
        future = in_background(make)
        while not wait([future], LIVENESS_SECONDS).done:
            self.peers.check_alive()
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"the shm process group cannot be made: not all ranks were connected within {timeout:g} s, and the "
                    "store at which they meet does not answer"
                )
        try:
            return future.result()
        except RuntimeError as error:
            raise _not_made(error) from error

    def check_in_use(self) -> None:
        """Raise if the group has ended, on any host; any thread may call it."""
        self.peers.check_in_use()
        if self.inter_host is not None:
            self._notice.check()

    def abort(self, reason: str, collective_may_run: bool = False) -> None:
        """End the group on every rank of every host; pass ``collective_may_run`` if one may run in another thread."""
        log_of("shm").debug("a group is ended: %s", reason)
        if collective_may_run:
            self.peers.leave(reason)
        elif self.peers.reason is None:
            self.peers.abort(reason)
        if self.inter_host is not None:
            self.inter_host.end(self.peers.reason or reason)

    def leave(self) -> None:
        """Tell the others that this rank no longer uses the group."""
        self.peers.leave()

    def close(self) -> None:
        """Close everything; call when no thread uses it any more."""
        self.peers.close()
        self.staging.close()
        self.gloo = None
        if self.inter_host is not None:
            self.inter_host.end()
        self._notice.close()


def _not_made(error: RuntimeError) -> CommunicationError:
    gist = first_line(error)
    text = f"the shm process group cannot be made: {gist}"
    if "connectFullMesh" in gist:
        text += f". If the hosts cannot reach each other under the addresses in it, {network.SET_INTERFACE}"
    return CommunicationError(text)
