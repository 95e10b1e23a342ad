"""From a store to what runs the collectives: who is where, connected, with memory in common."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from lockstep.shm.many_hosts import BOARD, ManyHosts
from lockstep.shm.meeting import LOOK_SECONDS, Meeting, check_platform, host_identity, meet
from lockstep.shm.memory import Piece
from lockstep.shm.one_host import OneHost
from lockstep.shm.peers import Peers
from lockstep.shm.rest import gloo
from lockstep.shm.table import STAGING, Table

Between = Callable[[Any, int, int, timedelta], Any]


@dataclass(frozen=True, kw_only=True)
class ShmOptions:
    """Options of a ``shm`` group: ``init_process_group("shm", pg_options=ShmOptions(...))``."""

    host: str | None = None
    """The host of this rank; ranks that give the same name share memory. Default: found out."""
    between: Between | None = None
    """Makes the group between hosts; called on one rank of each with (store, rank, size, timeout). Default: Gloo."""


class Assembly:
    """The parts of a group that are shared with its queue: everything but PyTorch's interface."""

    def __init__(self, store: Any, rank: int, names: Sequence[int], timeout: float, options: ShmOptions) -> None:
        check_platform()
        meeting = meet(PrefixStore("meeting", store), rank, names, options.host or host_identity(), timeout)
        near = next(host for host in meeting.hosts if rank in host)
        sockets = {near.index(other): each for other, each in meeting.sockets.items()}
        self.peers = Peers([names[other] for other in near], near.index(rank), sockets)
        self.store = store
        try:
            self._prepare(meeting, rank, names, timeout, options)
        except BaseException as error:
            if self.peers.reason is None:
                self.peers.abort(f"the shm process group cannot be made: rank {names[rank]} failed: {error!r}")
            self.peers.close()
            raise

    def _prepare(self, meeting: Meeting, rank: int, names: Sequence[int], timeout: float, options: ShmOptions) -> None:
        size, near, store = len(names), self.peers.size, self.store
        staging = Piece(STAGING, Table.staging_bytes(near))
        self.peers.share(STAGING, staging.size, staging.fd)
        staging.close()
        self.peers.exchange(b"P", timeout)  # everybody's is here
        self.table = Table(self.peers, staging, timeout)
        one = len(meeting.hosts) == 1
        self.rest = self._alive(lambda: gloo(PrefixStore("rest", store), rank, size, timeout, one))
        between = None
        host = next(i for i, ranks in enumerate(meeting.hosts) if rank in ranks)
        if not one and meeting.hosts[host][0] == rank:
            make, limit = options.between or _gloo_between, timedelta(seconds=timeout)
            between = self._alive(lambda: make(PrefixStore("between", store), host, len(meeting.hosts), limit))
        local = OneHost(self.table)
        self.run: OneHost | ManyHosts = local
        if not one:
            self.run = ManyHosts(local, meeting.hosts, names, rank, between, store)
        self.run.barrier()  # who has made the group may leave it at once, and no other rank is still on its way then

    def _alive(self, make: Callable[[], Any]) -> Any:
        """What ``make()`` returns, which waits for other ranks; raises if one of this host dies meanwhile."""
        made: Future[Any] = Future()

        def work() -> None:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=work, name="lockstep: connects", daemon=True).start()
        while not wait([made], LOOK_SECONDS).done:
            self.peers.check_alive()
        return made.result()

    def abort(self, reason: str, at_work: bool = False) -> None:
        """End the group on every rank of every host; ``at_work`` if another thread may wait in a collective."""
        if at_work:
            self.peers.leave(reason)
        elif self.peers.reason is None:
            self.peers.abort(reason)
        if isinstance(self.run, ManyHosts):
            with suppress(RuntimeError):
                self.store.set(BOARD, self.peers.reason or reason)
            self.run.end()

    def leave(self) -> None:
        """Tell the others that this rank uses the group no more."""
        self.peers.leave()

    def close(self) -> None:
        """Close everything; no thread may be at work in it."""
        self.peers.close()
        self.table.close()
        self.rest = None
        if isinstance(self.run, ManyHosts):
            self.run.end()


def _gloo_between(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return gloo(store, rank, size, timeout.total_seconds(), one_host=False)
