"""Collectives over several hosts: shared memory inside each host, another process group between their first ranks.

Each host reduces in shared memory and sends its result once, by its first rank, the leader. The leader passes on in
shared memory what it receives. Before anything moves, the leaders compare the collectives that their ranks are about to
run, so that a difference is an error on every rank.
"""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep._base.abilities import Addition, Chunks
from lockstep.errors import OptionError
from lockstep.shm.arithmetic import TensorReduction, divide
from lockstep.shm.constants import GRACE_SECONDS
from lockstep.shm.inter_host import InterHost
from lockstep.shm.messages import CollectiveKind, Descriptor, MessageKind, Op, disagreement, said_by
from lockstep.shm.one_host import OneHost
from lockstep.shm.staging import Staging


class ManyHosts:
    """Runs the collectives of :class:`OneHost` over the ranks of several hosts; each exchange may take ``timeout``
    seconds."""

    def __init__(self, staging: Staging, inter_host: InterHost, timeout: float) -> None:
        self._staging = staging
        self._inter_host = inter_host
        self._timeout = timeout
        # The ranks of a host wait for their leader, which may have to wait in turn for other hosts, and for the reason
        # that the ranks there give.
        self._local = OneHost(staging, 2 * timeout + 2 * GRACE_SECONDS)

    def agree(self, descriptor: Descriptor) -> None:
        """See :class:`OneHost`."""
        messages = self._staging.exchange(descriptor.pack(), self._timeout)
        verdict: bytes = MessageKind.STEP
        if self._inter_host.leads:
            collectives = said_by(messages, self._staging.peers.global_ranks)
            verdict += self._inter_host.compare(collectives, self._timeout)
        of_leader = self._staging.exchange(verdict, self._local.timeout)[0][1:]
        if of_leader:
            raise disagreement(json.loads(of_leader))

    def check_alive(self) -> None:
        """See :class:`OneHost`."""
        self._inter_host.check_alive()

    # ------------------------------------------------------------------------------- collectives

    def barrier(self) -> None:
        """See :class:`OneHost`."""
        self.agree(Descriptor(CollectiveKind.BARRIER))

    def all_reduce(
        self, x: Tensor, op: Op, tensors: int = 1, factor: float = 1.0, rounded_to: torch.dtype | None = None
    ) -> None:
        """See :class:`OneHost`; each host sends its sum once, and rounds nothing."""
        if rounded_to is not None:
            raise OptionError("all_reduce: the ranks are on several hosts, which would round again; use all-to-all")
        self.agree(Descriptor(CollectiveKind.ALL_REDUCE, x.dtype, x.numel(), op, tensors=tensors))
        self._all_reduce(x, op, factor)

    def reduce(self, x: Tensor, op: Op, root: int) -> None:
        """See :class:`OneHost`; every host gets the result."""
        self.agree(Descriptor(CollectiveKind.REDUCE, x.dtype, x.numel(), op, self._inter_host.global_ranks[root]))
        work = x if self._inter_host.rank == root else x.clone()
        self._all_reduce(work, op)

    def broadcast(self, x: Tensor, root: int) -> None:
        """See :class:`OneHost`; it goes to each other host once."""
        between = self._inter_host
        global_root = between.global_ranks[root]
        self.agree(Descriptor(CollectiveKind.BROADCAST, x.dtype, x.numel(), root=global_root))
        source = next(i for i, host in enumerate(between.hosts) if root in host)
        if between.host == source:
            self._local.broadcast(x, between.hosts[source].index(root))
        if between.leads and x.numel():
            between.broadcast(x, source, self._timeout)
        if between.host != source:
            self._local.broadcast(x, 0)

    def all_gather(self, outputs: Sequence[Tensor], x: Tensor, tensors: int = 1) -> None:
        """See :class:`OneHost`; each host sends what its ranks have once."""
        between = self._inter_host
        self.agree(Descriptor(CollectiveKind.ALL_GATHER, x.dtype, x.numel(), tensors=tensors))
        largest = max(map(len, between.hosts))
        rows = x.new_empty(len(between.hosts), largest, x.numel())
        host_row = rows[between.host]
        self._local.all_gather([host_row[i] for i in range(len(between.hosts[between.host]))], x)
        if between.leads and x.numel():
            between.all_gather(rows.unbind(), self._timeout)
        self._local.broadcast(rows.view(-1), 0)
        for host, row in zip(between.hosts, rows, strict=True):
            for rank, tensor in zip(host, row, strict=False):
                outputs[rank].copy_(tensor)

    def add_in_order(self, x: Tensor, numel: int, additions: Sequence[Addition], gathered: int = 0) -> None:
        """See :class:`OneHost`: not over several hosts."""
        raise OptionError("add_in_order: the ranks are on several hosts, and have no memory in common; use all-to-all")

    def gather_in_chunks(self, chunks: Chunks) -> None:
        """See :class:`OneHost`: not over several hosts."""
        raise OptionError("gather_in_chunks: the ranks are on several hosts, and have no memory in common")

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Op, tensors: int = 1) -> None:
        """See :class:`OneHost`; each host sends the sum of all inputs once."""
        self.agree(Descriptor(CollectiveKind.REDUCE_SCATTER, output.dtype, output.numel(), op, tensors=tensors))
        whole = torch.cat(list(inputs))
        self._all_reduce(whole, op)
        output.copy_(whole[self._inter_host.rank * output.numel() :][: output.numel()])

    def _all_reduce(self, x: Tensor, op: Op, factor: float = 1.0) -> None:
        TensorReduction(op, x.dtype)  # raises on every rank what cannot be reduced
        mean = op is Op.AVG
        op = Op.SUM if mean else op
        if mean and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.int64):
            wide = x.to(torch.int64)  # the sum may be larger than any mean
            self._all_reduce(wide, Op.AVG, factor)
            x.copy_(wide)
            return
        self._local.all_reduce(x, op, factor=factor)
        if self._inter_host.leads and x.numel():
            self._inter_host.all_reduce(x, op, self._timeout)
        self._local.broadcast(x, 0)
        if mean:
            divide(x, len(self._inter_host.global_ranks))


Algorithm = OneHost | ManyHosts
"""What runs the collectives of a group."""
