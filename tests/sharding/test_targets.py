"""The places to which the streams of all ranks are copied: the same as rank by rank, in few copies."""

from __future__ import annotations

import random

import pytest
import torch

from lockstep.sharding.partition import ALIGNED, cut_evenly
from lockstep.sharding.streams import HEAD_BYTES, Moves, Targets, chunk_bytes


def places_of(numels, world, memory):
    """Return the places of each rank's pieces in parameters that lie in one memory."""
    parameters = memory.split_with_sizes(numels)
    return [
        [parameters[piece.number][piece.start : piece.stop] for piece in rank] for rank in cut_evenly(numels, world)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_copies_are_those_of_each_rank(seed):
    draw = random.Random(seed)
    world = draw.choice([2, 3, 7, 40, 300])
    numels = [draw.choice([0, 1, 64, 127, 128, 1000, 4096]) for _ in range(draw.randint(1, 12))]
    found, expected = torch.zeros(2, sum(numels), dtype=torch.uint8)
    chunk = draw.choice([64, 192, 4096])
    longest = max(sum(map(len, rank)) for rank in places_of(numels, world, found))
    chunk = min(chunk, chunk_bytes(HEAD_BYTES + longest, world))
    left_out = draw.randrange(world)
    one_by_one = [Moves(places, chunk) for places in places_of(numels, world, expected)]
    targets = Targets(
        [
            None if rank == left_out else Moves(places, chunk)
            for rank, places in enumerate(places_of(numels, world, found))
        ]
    )
    for number in range(-(-(HEAD_BYTES + longest) // chunk)):
        chunks = torch.randint(0, 255, (world, chunk), dtype=torch.uint8)
        for _ in range(2):
            targets.copy_out(number, chunks, is_kept=True)
        for rank, moves in enumerate(one_by_one):
            if rank != left_out:
                moves.copy_out(number, chunks[rank])

    assert torch.equal(found, expected)


def test_a_parameter_on_many_ranks_is_one_copy(monkeypatch):
    world, numels = 256, [ALIGNED * 256]
    memory = torch.zeros(sum(numels), dtype=torch.uint8)
    targets = Targets([Moves(places, 192) for places in places_of(numels, world, memory)])
    copies = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda places, _: copies.append(len(places)))
    targets.copy_out(0, torch.zeros(world, 192, dtype=torch.uint8), is_kept=False)

    assert copies == [1]
