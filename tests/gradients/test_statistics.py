"""What statistics(model) says: rounds, bytes, waiting by rank, unused parameters, and why buckets were made anew."""

from __future__ import annotations

import itertools
import json
import time

import torch
from torch import nn

import lockstep
from programs.networks import Deep
from programs.ranks import on_ranks, replicated
from small_modules import filled


def used(model, layers):
    model(torch.ones(2, 3), range(layers)).sum().backward()


@on_ranks(2)
def test_rounds_bytes_and_unused_parameters(rank):
    model = replicated(rank, lambda: Deep(2))
    seen = [lockstep.loop.statistics(model)]
    for layers in (2, 1 + rank.rank, 2):
        used(model, layers)
        seen.append(lockstep.loop.statistics(model))
    with model.no_sync():
        used(model, 2)
    seen.append(lockstep.loop.statistics(model))
    assert [each.rounds for each in seen] == [0, 1, 2, 3, 3]
    unused = [] if rank.rank else ["layers.1.weight", "layers.1.bias"]
    assert [each.unused for each in seen] == [[], [], unused, [], []]
    gradients = 4 * 2 * (9 + 3)
    moved = [later.bytes_reduced - before.bytes_reduced for before, later in itertools.pairwise(seen)]
    assert all(gradients < each < gradients + 2048 for each in moved[1:3])  # with the report
    # in the first round the communication hooks and the values of parameters are compared
    assert gradients < moved[0] < gradients + 2048 + 2 * 4096
    assert moved[3] == 0
    assert seen[1].plan_changes == {"the order of gradients is known": 1}
    assert seen[-1].exposed_seconds == seen[-1].seconds["wait"] > 0
    assert seen[-1].hidden_seconds > 0


@on_ranks(2)
def test_why_buckets_were_made_anew(rank):
    model = replicated(rank, lambda: Deep(2))
    used(model, 2)
    model.layers[1] = filled(nn.Linear(3, 3))
    used(model, 2)
    assert lockstep.loop.statistics(model).plan_changes["the module has changed"] == 1


@on_ranks(2)
def test_the_rank_for_which_the_others_wait_is_known_on_all(rank):
    model = lockstep.replicate(nn.Linear(4, 4), process_group=rank.group)
    for _ in range(3):
        loss = model(torch.ones(2, 4)).sum()
        if rank.rank == 1:
            time.sleep(0.2)  # what is measured: rank 1 is late
        loss.backward()
    seen = lockstep.loop.statistics(model, all_ranks=True)
    assert all(rank.all_equal(torch.tensor(each)) for each in (seen.waited, seen.own_seconds))
    assert seen.late_rank == 1
    assert seen.waited[rank.rank] == seen.exposed_seconds
    assert seen.own_seconds[1] >= 0.2
    assert seen.slower_than_others[1] > 1 > seen.slower_than_others[0]
    assert seen.own_seconds_before == [None, None]
    told = json.loads(seen.as_json())
    assert told == seen.as_dict()
    assert told["late_rank"] == 1
    assert "\n" not in seen.as_json()
