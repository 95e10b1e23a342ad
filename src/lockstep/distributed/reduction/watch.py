"""Whether replicas are still equal, looked at in every N-th round: a digest of all values rides in its report.

Parameters are looked at when backward has ended: the step of an optimizer that has made them is over on all ranks, and
the next one has not begun. Buffers that all ranks had alike are looked at when forward begins, before it changes them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.distributed.buffers import BufferSync
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.digests import Look
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.report import Report
from lockstep.errors import OutOfSyncError

_WITHOUT_BUFFERS, _WITH_BUFFERS = 1, 2
"""The first byte in a report: what the digest behind it is of. 0 is what a rank says that has not looked."""


class ValueWatch:
    """Looks at the values of one module."""

    def __init__(self, every: int, buffers: BufferSync) -> None:
        self.every = every
        self._buffers = buffers
        self._of_buffers: Look | None = None
        self._of_parameters: Look | None = None
        self._names: list[str] = []

    def is_due(self, number: int) -> bool:
        """Whether values are compared in the round of that number."""
        return number % self.every == 0

    def forward_begins(self, number: int) -> None:
        """A forward begins, and the round of that number comes next."""
        if self.is_due(number) and self._of_buffers is None and self._buffers.are_equal:
            self._of_buffers = Look([_value(buffer.current()) for buffer in self._buffers.buffers])

    def look(self, parameters: Sequence[ManagedParameter], device: torch.device) -> Tensor:
        """The digest for the report."""
        self._names = [f"parameter {each.name}" for each in parameters]
        self._names += [f"buffer {buffer.name}" for buffer in self._buffers.buffers]
        self._of_parameters = Look([each.parameter for each in parameters])
        digest = self._of_parameters.digest(device)
        if self._of_buffers is not None:
            digest = digest + 5 * self._of_buffers.digest(device)
        kind = _WITHOUT_BUFFERS if self._of_buffers is None else _WITH_BUFFERS
        return torch.nn.functional.pad(digest.view(1).view(torch.uint8), (1, 0), value=kind)

    def forget(self) -> None:
        """The round is over."""
        self._of_buffers = self._of_parameters = None

    def check(self, report: Report, collectives: Collectives) -> None:
        """Raise :class:`OutOfSyncError`, on every rank, if the report has different digests.

        Communicates one all-gather of eight bytes for each parameter and buffer, only if it has.
        """
        kinds: dict[int, set[bytes]] = {}
        for digest in report.digests:
            kinds.setdefault(digest[0], set()).add(digest)
        kinds.pop(0, None)
        if not any(len(different) > 1 for different in kinds.values()):
            return
        raise OutOfSyncError(self._difference(collectives))

    def _difference(self, collectives: Collectives) -> str:
        parameters, buffers = self._of_parameters, self._of_buffers
        of_buffers = len(self._buffers.buffers)
        own = [] if parameters is None else parameters.each()
        own += [0] * of_buffers if buffers is None else buffers.each()
        own += [0] * (len(self._names) - len(own))
        row = torch.tensor([parameters is not None, buffers is not None, *own], dtype=torch.int64)
        rows = [each.tolist() for each in collectives.all_gather(row.to(collectives.device), "digests of values")]
        first_buffer = len(self._names) - of_buffers
        for place, name in enumerate(self._names):
            ranks: dict[int, list[int]] = {}
            for rank, (sees, sees_buffers, *digests) in zip(collectives.global_ranks, rows, strict=True):
                if sees and (place < first_buffer or sees_buffers):
                    ranks.setdefault(digests[place], []).append(rank)
            if len(ranks) > 1:
                sides = sorted(ranks.values(), key=len, reverse=True)
                return (
                    f"rank {collectives.global_rank}: {name} is out of sync: "
                    f"{', '.join(_named(side) for side in sides[:-1])} {'has' if len(sides[0]) == 1 else 'have'} other "
                    f"values than {_named(sides[-1])}. Something changed it on one rank only: memory that is broken, "
                    "an optimizer step on gradients that were not synchronised, a random number that differs by rank. "
                    "No gradient has been handed out; load a checkpoint from before"
                )
        return (
            f"rank {collectives.global_rank}: ranks have given different digests of their values, and equal ones of "
            "each parameter and buffer: values were changed while they were looked at, or what computes digests is "
            "broken on a rank"
        )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _value(tensor: Tensor | None) -> Tensor:
    return torch.empty(0) if tensor is None else tensor
