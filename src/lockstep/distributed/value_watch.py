"""Compares the values of replicas in every N-th round: a digest of all rides in its report.

Parameters are looked at when backward has ended: the step of an optimizer that has made them is over on all ranks, and
the next one has not begun. Buffers that all ranks had alike are looked at when forward begins, before it changes them.
With shares a round is a step: parameters are looked at at its end, buffers when it begins.
"""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from lockstep.digests import Digests
from lockstep.distributed.agreement import all_gather_object
from lockstep.distributed.collectives import Collectives
from lockstep.errors import OutOfSyncError

NOTHING, PARAMETERS, PARAMETERS_AND_BUFFERS = 0, 1, 2
"""What a rank's digest is of: nothing on a rank that has not looked."""


class ValueWatch:
    """Looks at the values of one module."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._of_buffers: Digests | None = None
        self._of_parameters: Digests | None = None

    def is_due(self, number: int) -> bool:
        """Whether values are compared in the round of that number."""
        return number % self.every == 0

    def look_at_buffers(self, buffers: Sequence[Tensor | None]) -> None:
        """Look at buffers that all ranks have alike, as they are before the forward passes of the round; once."""
        if self._of_buffers is None:
            self._of_buffers = Digests([torch.empty(0) if tensor is None else tensor for tensor in buffers])

    def look(self, parameters: Sequence[Tensor], device: torch.device) -> tuple[int, Tensor]:
        """What this rank tells the others: what its digest is of, and the digest, one number of eight bytes."""
        self._of_parameters = Digests(parameters)
        digest = self._of_parameters.digest(device)
        if self._of_buffers is None:
            return PARAMETERS, digest
        return PARAMETERS_AND_BUFFERS, digest + 5 * self._of_buffers.digest(device)

    def forget(self) -> None:
        """The round is over."""
        self._of_buffers = self._of_parameters = None

    def check(
        self,
        told: Iterable[tuple[int, Hashable]],
        parameters: Sequence[str],
        buffers: Sequence[str],
        collectives: Collectives,
    ) -> None:
        """Raise :class:`OutOfSyncError`, on every rank, if ranks have ``told`` different digests.

        ``parameters`` and ``buffers`` are the names of what ranks look at, the same on all. Communicates what
        :func:`all_gather_object` does, of a digest for each of them, only if digests differ.
        """
        kinds: dict[int, set[Hashable]] = {}
        for kind, digest in told:
            kinds.setdefault(kind, set()).add(digest)
        kinds.pop(NOTHING, None)
        if any(len(different) > 1 for different in kinds.values()):
            raise OutOfSyncError(self._difference(parameters, buffers, collectives))

    def _difference(self, parameters: Sequence[str], buffers: Sequence[str], collectives: Collectives) -> str:
        of_parameters, of_buffers = self._of_parameters, self._of_buffers
        own = [0] * len(parameters) if of_parameters is None else of_parameters.each()
        own += [0] * len(buffers) if of_buffers is None else of_buffers.each()
        row = [of_parameters is not None, of_buffers is not None, *own]
        rows = all_gather_object(row, "digests of values", collectives)
        names = [*(f"parameter {name}" for name in parameters), *(f"buffer {name}" for name in buffers)]
        for place, name in enumerate(names):
            ranks: dict[int, list[int]] = {}
            for rank, (sees, sees_buffers, *digests) in zip(collectives.global_ranks, rows, strict=True):
                if sees and (place < len(parameters) or sees_buffers):
                    ranks.setdefault(digests[place], []).append(rank)
            if len(ranks) > 1:
                sides = sorted(ranks.values(), key=len, reverse=True)
                return (
                    f"rank {collectives.global_rank}: {name} is out of sync: "
                    f"{', '.join(_named(side) for side in sides[:-1])} {'has' if len(sides[0]) == 1 else 'have'} other "
                    f"values than {_named(sides[-1])}. Something changed it on one rank only: memory that is broken, "
                    "an optimizer step on gradients that were not synchronised, a learning rate or a random number "
                    "that differs by rank. No gradient has been handed out; load a checkpoint from before"
                )
        return (
            f"rank {collectives.global_rank}: ranks have given different digests of their values, and equal ones of "
            "each parameter and buffer: values were changed while they were looked at, or what computes digests is "
            "broken on a rank"
        )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
