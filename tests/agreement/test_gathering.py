"""Tensors of all ranks in one: over Gloo directly between the ranks' tensors if they are large."""

from __future__ import annotations

import pytest
import torch

from lockstep.distributed.comm import collectives
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import CommunicationError
from lockstep.phases import Phases
from threaded import run_ranks

LARGE = collectives._DIRECT_BYTES  # for each other rank


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.complex64])
@pytest.mark.parametrize(("world", "hosts"), [(1, ""), (2, ""), (3, ""), (4, ""), (3, "aaa"), (4, "aabb")])
@pytest.mark.parametrize("in_place", [True, False])
def test_every_rank_gets_the_tensors_of_all_in_order(world, hosts, dtype, in_place):
    def gathered(rank, nbytes):
        numel = nbytes // dtype.itemsize
        own = torch.randn(numel, generator=torch.Generator().manual_seed(rank.rank)).mul(50).to(dtype)
        output = torch.zeros(world * numel, dtype=dtype)
        part = output.view(world, -1)[rank.rank].copy_(own) if in_place else own
        Collectives(rank.group, Phases()).all_gather_flat(output, part, "numbers").wait()
        return own, output

    for nbytes in (64, LARGE * max(1, world - 1)):
        results = run_ranks(world, gathered, nbytes, hosts=hosts)
        expected = torch.cat([own for own, _ in results])
        assert expected.count_nonzero()
        assert all(torch.equal(output, expected) for _, output in results)


@pytest.mark.parametrize(("nbytes", "expected"), [(LARGE - 8, 1), (2 * LARGE, 2)])
def test_only_large_tensors_are_sent_to_each_rank_by_a_collective_of_its_own(nbytes, expected):
    def begun(rank):
        before = rank.group._get_sequence_number_for_group()
        Collectives(rank.group, Phases()).all_gather_flat(
            torch.empty(3 * nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8), "numbers"
        ).wait()
        return rank.group._get_sequence_number_for_group() - before

    assert run_ranks(3, begun) == [expected] * 3


def test_a_rank_that_does_not_take_part_is_an_error_on_the_others():
    def gathers(rank):
        if rank.rank == 1:
            return
        sizes = 3 * 2 * LARGE, 2 * LARGE
        output, own = (torch.empty(size, dtype=torch.uint8) for size in sizes)
        Collectives(rank.group, Phases()).all_gather_flat(output, own, "numbers").wait()

    results = run_ranks(3, gathers, errors=True, group_timeout=1.0)
    assert results[1] is None
    for error in (results[0], results[2]):
        assert isinstance(error, CommunicationError)
        assert "numbers failed" in str(error)
