"""`run.batches`: the loop of a session, over all its ranks or over those of some modules."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

import lockstep
from processes import be_launched, run_processes


def in_a_session(rank, port):
    """How many batches each rank goes through, and how many it has counted: of all ranks, and of two of three."""
    dist.destroy_process_group()
    be_launched(rank, port)
    with lockstep.session(timeout=60.0) as run:
        model = lockstep.replicate(nn.Linear(1, 1))
        of_all = sum(not turn for turn in padding_of(run.batches([0] * (1 + run.rank), model)))
        pair = dist.new_group([0, 1])
        if run.rank == 2:
            return of_all, 0, run.step
        beside = lockstep.replicate(nn.Linear(1, 1), process_group=pair)
        return of_all, len(padding_of(run.batches([0] * (1 + run.rank), beside))), run.step


def padding_of(batches):
    return [batches.is_padding for _ in batches]


def test_modules_say_which_ranks_go_together():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_processes(3, in_a_session, store.port) == [(1, 2, 5), (2, 2, 5), (3, 0, 3)]
