"""A message to or from one rank ends like a collective where a rank fails: whoever waits for it is told which one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import CommunicationError, PeerFailure
from lockstep.failures import channel
from processes import on_processes

BIG = 10_000_000

CALLS = {
    "recv": lambda: dist.recv(torch.zeros(3), 1),
    "irecv": lambda: dist.irecv(torch.zeros(3), 1).wait(),
    "recv from any rank": lambda: dist.recv(torch.zeros(3)),
    "recv from a rank that waits itself": lambda: dist.recv(torch.zeros(3), 2),
    "send": lambda: dist.send(torch.zeros(BIG), 1),
    "batch": lambda: [
        each.wait()
        for each in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(3), peer) for peer in (1, 2)])
    ],
}


@pytest.mark.parametrize("call", CALLS)
@on_processes(3, backend="shm")
def test_who_waits_for_a_message_is_told_which_rank_has_raised(rank, call):
    channel.FAREWELL_SECONDS = 0.1
    told = rf"^rank {rank.rank} stops, because rank 1 failed in training: ValueError: of rank 1(\n|$)"
    error, words = (ValueError, "^of rank 1$") if rank.rank == 1 else (PeerFailure, told)
    with pytest.raises(error, match=words), lockstep.watch():
        dist.barrier()
        if rank.rank == 1:
            raise ValueError("of rank 1")
        dist.barrier() if rank.rank == 2 else CALLS[call]()


@on_processes(2, backend="shm")
def test_who_waits_for_a_rank_that_has_left_is_told_without_a_session(rank):
    """Rank 1 leaves the group; no session tells rank 0."""
    dist.barrier()
    if rank.rank == 1:
        dist.destroy_process_group()
        return
    told = "^receive on rank 0 from rank 1: that rank has died, has left, or did not answer in time"
    with pytest.raises(CommunicationError, match=told):
        dist.recv(torch.zeros(3), 1)
