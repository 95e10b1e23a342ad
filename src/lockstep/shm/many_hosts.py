"""Two levels: shared memory inside each host, and another group between one rank of each.

The first rank of a host is its leader. What the ranks of a host have reduced is sent once, by the leader, and what the
leaders receive is handed on in shared memory. Before anything moves the leaders compare what their ranks are about to
run, so that a difference is an error on every rank.
"""

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from lockstep.errors import CommunicationError
from lockstep.shm.arithmetic import Reduction, divide
from lockstep.shm.descriptor import Descriptor, Kind, Op, disagreement, said_by
from lockstep.shm.meeting import LOOK_SECONDS
from lockstep.shm.one_host import OneHost

ROW_BYTES = 2048
"""What a leader says of its ranks; longer texts are cut."""
BOARD = "failed"
"""The key of the store under which a rank writes why the group has ended."""
GRACE_SECONDS = 0.5
"""How long a leader that has lost another one waits for that one's ranks to say why."""

GLOO_DTYPES = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]
)


class ManyHosts:
    """Runs collectives over the ranks of several hosts; the methods are those of ``OneHost``."""

    def __init__(
        self,
        local: OneHost,
        hosts: Sequence[Sequence[int]],
        names: Sequence[int],
        rank: int,
        between: Any,
        store: Any,
    ) -> None:
        self.local, self.hosts, self.rank, self.store = local, [list(host) for host in hosts], rank, store
        self._names = [[names[rank] for rank in host] for host in hosts]  # in messages
        self._name_of = list(names)
        self.size = sum(map(len, self.hosts))
        self._host = next(i for i, host in enumerate(self.hosts) if rank in host)
        self._between = between  # None unless this rank leads
        self._timeout = local.table.timeout
        self._unfinished = False
        if between is not None:
            local.table.peers.look = self._look

    def end(self) -> None:
        """Let go of the other hosts, which notice that."""
        kept = [self._between]
        self._between = self.local.table.peers.look = None
        if self._unfinished and kept[0] is not None:
            kept[0].abort()
            threading.Thread(target=kept.clear, daemon=True).start()  # Gloo's end waits for what is under way

    # ------------------------------------------------------------------------------- collectives

    def barrier(self) -> None:
        """See ``OneHost``."""
        self.agree(Descriptor(Kind.BARRIER))

    def all_reduce(self, x: Tensor, op: Op, tensors: int = 1, factor: float = 1.0) -> None:
        """See ``OneHost``; each host sends its sum once."""
        self.agree(Descriptor(Kind.ALL_REDUCE, x.dtype, x.numel(), op, tensors=tensors))
        self._all_reduce(x, op, factor)

    def reduce(self, x: Tensor, op: Op, root: int) -> None:
        """See ``OneHost``."""
        self.agree(Descriptor(Kind.REDUCE, x.dtype, x.numel(), op, self._name_of[root]))
        work = x if self.rank == root else x.clone()
        self._all_reduce(work, op)

    def broadcast(self, x: Tensor, root: int, tensors: int = 1) -> None:
        """See ``OneHost``."""
        self.agree(Descriptor(Kind.BROADCAST, x.dtype, x.numel(), root=self._name_of[root], tensors=tensors))
        source = next(i for i, host in enumerate(self.hosts) if root in host)
        if self._host == source:
            self.local.broadcast(x, self.hosts[source].index(root))
        if self._between is not None and x.numel():
            options = self._limited(dist.BroadcastOptions())
            options.rootRank, options.rootTensor = source, 0
            self._wait(self._between.broadcast([_as_bytes(x)], options))
        if self._host != source:
            self.local.broadcast(x, 0)

    def all_gather(self, outputs: Sequence[Tensor], x: Tensor, tensors: int = 1) -> None:
        """See ``OneHost``; each host sends what its ranks have once."""
        self.agree(Descriptor(Kind.ALL_GATHER, x.dtype, x.numel(), tensors=tensors))
        largest = max(map(len, self.hosts))
        rows = x.new_empty(len(self.hosts), largest, x.numel())
        own = rows[self._host]
        self.local.all_gather([own[place] for place in range(len(self.hosts[self._host]))], x)
        if self._between is not None and x.numel():
            parts = [_as_bytes(row.view(-1)) for row in rows]
            options = self._limited(AllgatherOptions())
            self._wait(self._between.allgather([parts], [parts[self._host].clone()], options))
        self.local.broadcast(rows.view(-1), 0)
        for host, row in zip(self.hosts, rows, strict=True):
            for rank, given in zip(host, row, strict=False):
                outputs[rank].copy_(given)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Op, tensors: int = 1) -> None:
        """See ``OneHost``; each host sends the sum of all inputs once."""
        self.agree(Descriptor(Kind.REDUCE_SCATTER, output.dtype, output.numel(), op, tensors=tensors))
        whole = torch.cat(list(inputs))
        self._all_reduce(whole, op)
        output.copy_(whole[self.rank * output.numel() :][: output.numel()])

    # --------------------------------------------------------------------------------- two levels

    def _all_reduce(self, x: Tensor, op: Op, factor: float = 1.0) -> None:
        Reduction(op, x.dtype)  # raises on every rank what cannot be reduced
        mean = op is Op.AVG
        op = Op.SUM if mean else op
        if mean and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.int64):
            wide = x.to(torch.int64)  # the sum may be larger than any mean
            self._all_reduce(wide, Op.AVG, factor)
            x.copy_(wide)
            return
        self.local.all_reduce(x, op, factor=factor)
        if self._between is not None and x.numel():
            self._reduce_between(x, op)
        self.local.broadcast(x, 0)
        if mean:
            divide(x, self.size)

    def _reduce_between(self, x: Tensor, op: Op) -> None:
        assert self._between is not None
        # Gloo's minimum and maximum may lose a NaN.
        if x.dtype in GLOO_DTYPES and not (op in (Op.MIN, Op.MAX) and x.is_floating_point()):
            options = self._limited(dist.AllreduceOptions())
            options.reduceOp = getattr(dist.ReduceOp, op.name)
            self._wait(self._between.allreduce([x], options))
            return
        parts = [torch.empty_like(x) for _ in self.hosts]
        options = self._limited(AllgatherOptions())
        self._wait(self._between.allgather([[_as_bytes(part) for part in parts]], [_as_bytes(x)], options))
        Reduction(op, x.dtype)(parts, x)

    def agree(self, descriptor: Descriptor) -> None:
        """Compare what all ranks are about to run; raises the same error on each."""
        table = self.local.table
        self._timeout = table.timeout
        messages = table.exchange(descriptor.pack())
        verdict = b"P"
        if self._between is not None:
            verdict += self._compare_hosts(said_by(messages, table.peers.ranks))
        # The others wait for the leader, which may have to wait for other hosts, and for what their ranks have to say.
        table.timeout = 2 * table.timeout + 2 * GRACE_SECONDS
        said = json.loads(table.exchange(verdict)[0][1:] or b"{}")
        if said:
            raise disagreement(said)

    def _compare_hosts(self, said: dict[str, list[int]]) -> bytes:
        """What the ranks of all hosts say, or nothing if they agree."""
        text = _short(said)
        row = torch.zeros(ROW_BYTES, dtype=torch.uint8, device="cpu")
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in self.hosts]
        self._wait(self._between.allgather([rows], [row], self._limited(AllgatherOptions())))
        everybody: dict[str, list[int]] = {}
        for each in rows:
            for what, ranks in json.loads(bytes(each.tolist()).rstrip(b"\0")).items():
                everybody.setdefault(what, []).extend(ranks)
        return b"" if len(everybody) == 1 else _short(everybody)

    # ----------------------------------------------------------------------------------- failures

    def _limited(self, options: Any) -> Any:
        options.timeout = timedelta(seconds=self._timeout)
        return options

    def _wait(self, work: Any) -> None:
        """Wait for the other hosts; look up now and then, as a rank may die, or the group end, without their notice."""
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        self._unfinished = True
        while not done.wait(LOOK_SECONDS):
            self.local.table.peers.check_alive()
            self._look()
        self._unfinished = False
        try:
            work.wait()
        except RuntimeError as error:
            del work  # it would keep the connections open
            raise CommunicationError(self._lost(str(error).splitlines()[0])) from error

    def look(self) -> None:
        """See ``OneHost``."""
        self.local.look()
        self._look()

    def _look(self) -> None:
        """Raise if the group has ended on another host; that the store is gone is no reason to."""
        why = ""
        with suppress(RuntimeError):
            if self.store.check([BOARD]):
                why = str(self.store.get(BOARD).decode())
        if why:
            raise CommunicationError(why)

    def _lost(self, gist: str) -> str:
        """Why another host is gone, in the words of its ranks if they could still write."""
        others = {host: f"{BOARD} on {host}" for host in range(len(self.hosts)) if host != self._host}
        lost = list(others)
        try:
            self.store.set(f"{BOARD} on {self._host}", "")  # this host is there, and has lost one, too
            self.store.wait([BOARD], timedelta(seconds=GRACE_SECONDS))
            return str(self.store.get(BOARD).decode())
        except RuntimeError:  # nobody has written, or the store has gone, too
            with suppress(RuntimeError):
                lost = [host for host, key in others.items() if not self.store.check([key])] or lost
        ranks = "; ".join(", ".join(map(str, self._names[host])) for host in lost)
        return f"another host is lost, or did not answer in time ({gist}): the one with rank(s) {ranks}"


def _short(said: dict[str, list[int]]) -> bytes:
    """As much as a row holds."""
    text = json.dumps(said).encode()
    if len(text) <= ROW_BYTES:
        return text
    ranks = sorted(rank for by in said.values() for rank in by)
    # The second entry: what two hosts have too much of is no agreement.
    return json.dumps({f"{len(said)} different collectives, too many to list": ranks[:100], "": []}).encode()


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
