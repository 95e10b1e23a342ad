"""`run.batches`: the loop of a session, over all its ranks or over those of some modules."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

import lockstep
from processes import on_processes


def padding_of(batches):
    return [batches.is_padding for _ in batches]


@on_processes(3, launched=True)
def test_modules_say_which_ranks_go_together(rank):
    """How many batches each rank goes through, and how many it has counted: of all ranks, and of two of three."""
    with lockstep.session(timeout=60.0) as run:
        model = lockstep.replicate(nn.Linear(1, 1))
        assert padding_of(run.batches([0] * (1 + rank.rank), model)).count(False) == 1 + rank.rank
        pair = dist.new_group([0, 1])
        if rank.rank < 2:
            beside = lockstep.replicate(nn.Linear(1, 1), process_group=pair)
            assert len(padding_of(run.batches([0] * (1 + rank.rank), beside))) == 2
        assert run.step == (5, 5, 3)[rank.rank]
