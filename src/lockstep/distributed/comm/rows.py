"""The sum over the ranks of a gradient of which each rank has some rows, as of an embedding.

Ranks have different numbers of rows, so they tell each other these numbers first. The rows follow in a second step,
which has to be asked for, on all ranks or on none. Every rank gets the rows of all, and adds them in the order of the
ranks. The all-reduce of sparse tensors that some backends have is not used: NCCL has none.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep._base.inner_tensors import as_bytes
from lockstep.distributed.comm.collectives import Collectives, Pending

_DENSE = -1
"""What a rank tells instead of its number of rows."""


class SumOfRows:
    """The sum of one gradient over the ranks, under way: :meth:`wait`, :meth:`gather` and :meth:`finish` follow.

    It is sparse, or dense if the gradient of any rank is: a dense term of the loss, such as a regulariser, has come to
    the same parameter.
    """

    def __init__(
        self, collectives: Collectives, gradient: Tensor, dense: bool, what: str, accept: Callable[[Tensor], object]
    ) -> None:
        """``gradient``: coalesced, with one sparse dimension, unless this rank's is ``dense``; ``accept`` gets the sum,
        in :meth:`finish`."""
        self._collectives = collectives
        self._gradient = gradient
        self._what = what
        self._accept = accept
        self._rows: list[Tensor] = []  # of all ranks: their numbers, and their values
        rank = collectives.rank
        self._counts = torch.zeros(collectives.world, dtype=torch.int64, device=collectives.device)
        self._counts[rank] = _DENSE if dense else gradient.values().shape[0]
        own = self._counts[rank : rank + 1]
        self._pending: list[Pending] = [collectives.all_gather_flat(self._counts, own, f"numbers of rows, {what}")]

    def done(self) -> bool:
        """Return True if :meth:`wait` does not have to wait for another rank."""
        return all(pending.done() for pending in self._pending)

    def wait(self) -> None:
        """Return when the last step has been taken by all ranks."""
        while self._pending:
            self._pending.pop(0).wait()

    def gather(self) -> None:
        """Start to exchange the rows. All ranks do it in the same order, or none."""
        ranks, counts = self._collectives, self._counts.tolist()
        if _DENSE in counts:
            self._gradient = self._gradient.to_dense().contiguous()
            self._pending.append(ranks.all_reduce(self._gradient, self._what))
            return
        ranks.comm_stats.bytes_reduced += self._gradient.values().nbytes
        for part in (self._gradient.indices()[0], self._gradient.values()):
            rows = part.new_empty(ranks.world, max(counts), *part.shape[1:])
            rows[ranks.rank, : len(part)] = part
            self._rows.append(rows)
            if rows.numel():
                self._pending.append(ranks.all_gather_flat(as_bytes(rows), as_bytes(rows[ranks.rank]), self._what))

    def finish(self) -> None:
        """Wait for the rows, and hand over their sum."""
        self.wait()
        if self._rows:
            counts = self._counts.tolist()
            numbers, values = (torch.cat([r[:n] for r, n in zip(rows, counts, strict=True)]) for rows in self._rows)
            total = torch.sparse_coo_tensor(numbers[None], values, self._gradient.shape, check_invariants=False)
            self._gradient = total.coalesce()
        self._accept(self._gradient)
