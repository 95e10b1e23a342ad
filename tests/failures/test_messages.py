"""A message to or from one rank ends like a collective where a rank fails: whoever waits for it is told which one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import CommunicationError, PeerFailure
from lockstep.failures import channel
from processes import run_processes

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


def raises_in_the_middle(rank, call):
    channel.FAREWELL_SECONDS = 0.1
    try:
        with lockstep.watch():
            dist.barrier()
            if rank.rank == 1:
                raise ValueError("of rank 1")
            dist.barrier() if rank.rank == 2 else CALLS[call]()
    except (PeerFailure, ValueError) as error:
        return str(error).partition("\n")[0]


@pytest.mark.parametrize("call", CALLS)
def test_who_waits_for_a_message_is_told_which_rank_has_raised(call):
    told = run_processes(3, raises_in_the_middle, call, backend="shm")
    assert told[1] == "of rank 1"
    for rank in (0, 2):
        assert told[rank] == f"rank {rank} stops, because rank 1 failed in training: ValueError: of rank 1"


def leaves(rank):
    """Rank 1 leaves the group; no session tells rank 0."""
    dist.barrier()
    if rank.rank == 1:
        dist.destroy_process_group()
        return None
    with pytest.raises(CommunicationError) as raised:
        dist.recv(torch.zeros(3), 1)
    return str(raised.value)


def test_who_waits_for_a_rank_that_has_left_is_told_without_a_session():
    told = run_processes(2, leaves, backend="shm")[0]
    assert told.startswith("receive on rank 0 from rank 1: that rank has died, has left, or did not answer in time")
