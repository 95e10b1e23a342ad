"""Uneven inputs: what ``Join`` has a rank do that has run out of batches.

In each forward inside ``join()`` the ranks tell each other, in one all-reduce of one number a rank, who still has
batches and whether this iteration synchronises. A rank that has run out then takes part in the round without
gradients.
"""

from typing import Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook

from lockstep.distributed.reducer import Reducer
from lockstep.distributed.replication import Replication
from lockstep.distributed.start import broadcast_values

_GONE, _LOCAL, _SYNCHRONISES = 0, 1, 2


def enter_iteration(wrapper: Any, replication: Replication) -> None:
    """An active rank begins an iteration."""
    work = Join.notify_join_context(wrapper)
    if work is None:  # another Joinable of the same context has told the others
        return
    work.wait()
    synchronises = torch.is_grad_enabled() and replication.requires_sync
    marks = _tell(replication, _SYNCHRONISES if synchronises else _LOCAL)
    reducer = replication.reducer
    assert reducer is not None
    _count_only_active(wrapper, reducer, marks)


def _tell(replication: Replication, mark: int) -> list[int]:
    reducer = replication.reducer
    assert reducer is not None
    collectives = reducer.collectives
    row = torch.zeros(collectives.world, dtype=torch.int64)
    row[collectives.rank] = mark
    row = row.to(collectives.device)
    collectives.all_reduce(row, "who still has batches").wait()
    return [int(each) for each in row.tolist()]


def _count_only_active(wrapper: Any, reducer: Reducer, marks: list[int]) -> None:
    """Divide by the ranks that have batches, if so wished; buffers are those of the first of them."""
    active = [rank for rank, mark in enumerate(marks) if mark != _GONE]
    if active:
        reducer.buffers.source = active[0]
        if not wrapper._divide_by_initial_world_size:
            reducer.divisor = float(len(active))


class ShadowHook(JoinHook):
    """A rank without batches."""

    def __init__(self, wrapper: Any, replication: Replication) -> None:
        self._wrapper, self._replication = wrapper, replication

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        marks = _tell(self._replication, _GONE)
        reducer = self._replication.reducer
        assert reducer is not None
        _count_only_active(self._wrapper, reducer, marks)
        if _SYNCHRONISES in marks:
            reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the values of a rank that ended last."""
        reducer = self._replication.reducer
        assert reducer is not None
        collectives = reducer.collectives
        row = torch.zeros(collectives.world, dtype=torch.int64)
        row[collectives.rank] = int(is_last_joiner)
        row = row.to(collectives.device)
        collectives.all_reduce(row, "who ended last").wait()
        source = max(rank for rank, last in enumerate(row.tolist()) if last)
        self._wrapper._authoritative_rank = source
        broadcast_values([m.parameter for m in reducer.parameters], reducer.buffers.buffers, collectives, source)
        reducer.buffers.source = 0
        reducer.divisor = float(collectives.world)
