"""Tensors of all ranks in one."""

from __future__ import annotations

import pytest
import torch

from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import CommunicationError
from lockstep.phases import Phases
from programs.ranks import on_ranks, rows
from threaded import run_ranks


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.complex64])
@pytest.mark.parametrize(("world", "hosts"), [(1, ""), (2, ""), (3, ""), (4, ""), (3, "aaa"), (4, "aabb")])
@pytest.mark.parametrize("in_place", [True, False])
@on_ranks(None, "world", "hosts")
def test_every_rank_gets_the_tensors_of_all_in_order(rank, dtype, in_place):
    numel, world = 300_000, rank.world
    parts = [rows(0, each, numel).mul(50).to(dtype) for each in range(world)]
    output, own = torch.zeros(world * numel, dtype=dtype), parts[rank.rank]
    part = output.view(world, -1)[rank.rank].copy_(own) if in_place else own
    Collectives(rank.group, Phases()).all_gather_flat(output, part, "numbers").wait()
    assert output.count_nonzero()
    assert torch.equal(output, torch.cat(parts))


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_does_not_take_part_is_an_error_on_the_others(world):
    def gathers(rank):
        if rank.rank == 1:
            return
        Collectives(rank.group, Phases()).all_gather_flat(torch.zeros(world * 10), torch.ones(10), "numbers").wait()

    results = run_ranks(world, gathers, errors=True, group_timeout=1.0)
    assert results.pop(1) is None
    for error in results:
        assert isinstance(error, CommunicationError)
        assert "numbers failed" in str(error)
