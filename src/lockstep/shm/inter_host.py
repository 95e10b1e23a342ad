"""The hosts of a group, and the exchanges between their first ranks, the leaders."""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from lockstep._base.store import BoundedStore, StoreLostError
from lockstep._base.texts import first_line
from lockstep.errors import CommunicationError
from lockstep.shm.arithmetic import TensorReduction
from lockstep.shm.constants import FAILURE_KEY, GLOO_DTYPES, GRACE_SECONDS, LIVENESS_SECONDS
from lockstep.shm.messages import Op
from lockstep.shm.peers import Peers

POST_SECONDS = 1.0
"""Seconds that a rank that ends the group waits for the store to take the reason."""
GATHERED_BYTES = 1 << 14
"""A reduction gathers the tensors of all hosts if they have together no more bytes than this."""
ROW_BYTES = 2048
"""Size in bytes of a leader's report on its ranks; longer texts are cut."""


class FailureNotice:
    """The reason why the group ended: written to the store by a rank of one host, read by the ranks of the others."""

    def __init__(self, store: Any) -> None:
        self._bounded_store = BoundedStore(store)
        self._why = ""

    def post(self, reason: str) -> None:
        """Tell the ranks of other hosts; if the store is gone, they notice the end otherwise."""
        with suppress(StoreLostError):
            self._bounded_store.set(FAILURE_KEY, reason, POST_SECONDS)

    def check(self) -> None:
        """Raise if the group has ended on another host, according to the store's last answer; never wait.

        A lost store is no reason to raise.
        """
        if self._why:
            raise CommunicationError(self._why)
        self._bounded_store.look(FAILURE_KEY, self._note)

    def close(self) -> None:
        """Stop asking the store."""
        self._bounded_store.close()

    def _note(self, why: str) -> None:
        self._why = why

    def explain(self, host: int, hosts: int) -> tuple[str, list[int]]:
        """Return the reason why hosts are lost, if their ranks could still write it; else "" and the hosts that seem
        lost.

        A host that calls this is alive and says so in the store, as others may have lost it through the same failure.
        """
        others = {other: f"{FAILURE_KEY} on {other}" for other in range(hosts) if other != host}
        lost = list(others)
        with suppress(StoreLostError):  # the store has gone, too
            self._bounded_store.set(f"{FAILURE_KEY} on {host}", "")
            if self._bounded_store.wait([FAILURE_KEY], GRACE_SECONDS):
                return self._bounded_store.get(FAILURE_KEY), []
            lost = [other for other, key in others.items() if not self._bounded_store.check([key])] or lost
        return "", lost


def wait_alive(work: Any, check_alive: Callable[[], object]) -> None:
    """Wait until a work of Gloo is over; meanwhile check that ranks are alive, as Gloo may not notice a death."""
    done = threading.Event()
    work.get_future().add_done_callback(lambda _: done.set())
    while not done.wait(LIVENESS_SECONDS):
        check_alive()


class InterHost:
    """The ranks of each host and, on a leader, the group between the leaders."""

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        global_ranks: Sequence[int],
        rank: int,
        peers: Peers,
        inter_host_group: Any,
        notice: FailureNotice,
    ) -> None:
        self.hosts = [list(host) for host in hosts]
        self.global_ranks = list(global_ranks)
        self.rank = rank
        self.host = next(i for i, host in enumerate(self.hosts) if rank in host)
        self._peers = peers
        self._notice = notice
        self._group = inter_host_group  # None unless this rank leads
        self._unfinished = False

    @property
    def leads(self) -> bool:
        """True if this rank is its host's leader: it sends and receives for the host."""
        return self._group is not None

    def check_alive(self) -> None:
        """Raise if a rank of this host has died, or the group has ended on any host."""
        self._peers.check_alive()
        self._notice.check()

    def end(self, reason: str | None = None) -> None:
        """Leave the group between the hosts, and post the reason if there is one; the other hosts notice both."""
        if reason is not None:
            self._notice.post(reason)
        kept = [self._group]
        self._group = None
        if self._unfinished and kept[0] is not None:
            kept[0].abort()
            threading.Thread(target=kept.clear, daemon=True).start()  # Gloo's end waits for its collectives

    # ------------------------------------------------------------------------ collectives of leaders

    def all_reduce(self, x: Tensor, op: Op, timeout: float) -> None:
        """Reduce the tensors of all leaders, in place."""
        # Gloo's minimum and maximum may lose a NaN: test_what_is_not_finite_stays_visible_on_every_rank. It takes twice
        # as many round trips for a reduction as for gathering, which counts for what is small.
        is_small = x.nbytes * len(self.hosts) <= GATHERED_BYTES
        if x.dtype in GLOO_DTYPES and not is_small and not (op in (Op.MIN, Op.MAX) and x.is_floating_point()):
            options = _limited(dist.AllreduceOptions(), timeout)
            options.reduceOp = getattr(dist.ReduceOp, op.name)
            self._wait(self._group.allreduce([x], options))
            return
        parts = [torch.empty_like(x) for _ in self.hosts]
        self._all_gather([_as_bytes(part) for part in parts], _as_bytes(x), timeout)
        TensorReduction(op, x.dtype)(parts, x)

    def broadcast(self, x: Tensor, host: int, timeout: float) -> None:
        """Copy the tensor of one host's leader to all leaders, in place."""
        options = _limited(dist.BroadcastOptions(), timeout)
        options.rootRank, options.rootTensor = host, 0
        self._wait(self._group.broadcast([_as_bytes(x)], options))

    def all_gather(self, rows: Sequence[Tensor], timeout: float) -> None:
        """Give every leader the rows of all hosts; each leader fills the row of its own host before."""
        parts = [_as_bytes(row.view(-1)) for row in rows]
        self._all_gather(parts, parts[self.host].clone(), timeout)

    def compare(self, said: dict[str, list[int]], timeout: float) -> bytes:
        """Gather what the ranks of all hosts are about to run; return b"" if they agree."""
        text = _shortened(said)
        row = torch.zeros(ROW_BYTES, dtype=torch.uint8, device="cpu")
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in self.hosts]
        self._all_gather(rows, row, timeout)
        everybody: dict[str, list[int]] = {}
        for each in rows:
            for what, ranks in json.loads(bytes(each.tolist()).rstrip(b"\0")).items():
                everybody.setdefault(what, []).extend(ranks)
        return b"" if len(everybody) == 1 else _shortened(everybody)

    def _all_gather(self, outputs: list[Tensor], x: Tensor, timeout: float) -> None:
        self._wait(self._group.allgather([outputs], [x], _limited(AllgatherOptions(), timeout)))

    def _wait(self, work: Any) -> None:
        """Wait for the other leaders."""
        self._unfinished = True
        wait_alive(work, self.check_alive)
        self._unfinished = False
        try:
            work.wait()
        except RuntimeError as error:
            del work  # it would keep the connections open
            raise CommunicationError(self._reason_of_loss(first_line(error))) from error

    def _reason_of_loss(self, gist: str) -> str:
        """Say why another host is gone, in the words of its ranks if they could still write them."""
        why, lost = self._notice.explain(self.host, len(self.hosts))
        if why:
            return why
        ranks = "; ".join(", ".join(str(self.global_ranks[rank]) for rank in self.hosts[host]) for host in lost)
        return f"another host is lost, or did not answer in time ({gist}): the one with rank(s) {ranks}"


def _limited(options: Any, timeout: float) -> Any:
    options.timeout = timedelta(seconds=timeout)
    return options


def _shortened(said: dict[str, list[int]]) -> bytes:
    """Encode a report so that it fits in a row."""
    text = json.dumps(said).encode()
    if len(text) <= ROW_BYTES:
        return text
    ranks = sorted(rank for by in said.values() for rank in by)
    # The second entry makes sure that two reports which are both too long do not count as agreement.
    return json.dumps({f"{len(said)} different collectives, too many to list": ranks[:100], "": []}).encode()


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
