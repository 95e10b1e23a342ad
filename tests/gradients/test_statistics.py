"""What statistics(model) says: rounds, bytes, waiting by rank, unused parameters, and why buckets were made anew."""

from __future__ import annotations

import itertools
import json
import time

import torch
from torch import nn

import lockstep
from threaded import run_ranks


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both):
        return self.b(self.a(x)) if both else self.a(x)


def train(rank):
    model = lockstep.replicate(Branches(), process_group=rank.group)
    seen = [lockstep.loop.statistics(model)]
    for both in (True, rank.rank == 1, True):
        model(torch.ones(2, 4), both).sum().backward()
        seen.append(lockstep.loop.statistics(model))
    with model.no_sync():
        model(torch.ones(2, 4), True).sum().backward()
    seen.append(lockstep.loop.statistics(model))
    return seen


def test_rounds_bytes_and_unused_parameters():
    first, second = run_ranks(2, train)
    assert [each.rounds for each in first] == [0, 1, 2, 3, 3]
    assert [each.unused for each in first] == [[], [], ["b.weight", "b.bias"], [], []]
    assert [each.unused for each in second] == [[]] * 5
    gradients = 4 * 2 * (16 + 4)
    moved = [later.bytes_reduced - before.bytes_reduced for before, later in itertools.pairwise(first)]
    assert all(gradients < each < gradients + 2048 for each in moved[1:3])  # with the report
    # in the first round the communication hooks and the values of parameters are compared
    assert gradients < moved[0] < gradients + 2048 + 2 * 4096
    assert moved[3] == 0
    assert first[1].plan_changes == {"the order of gradients is known": 1}
    assert first[-1].exposed_seconds == first[-1].seconds["wait"] > 0
    assert first[-1].hidden_seconds > 0


def change(rank):
    model = lockstep.replicate(Branches(), process_group=rank.group)
    model(torch.ones(2, 4), True).sum().backward()
    model.b = nn.Linear(4, 4)
    nn.init.ones_(model.b.weight)
    nn.init.ones_(model.b.bias)
    model(torch.ones(2, 4), True).sum().backward()
    return lockstep.loop.statistics(model).plan_changes


def test_why_buckets_were_made_anew():
    assert all(each["the module has changed"] == 1 for each in run_ranks(2, change))


def be_late(rank):
    model = lockstep.replicate(nn.Linear(4, 4), process_group=rank.group)
    for _ in range(3):
        loss = model(torch.ones(2, 4)).sum()
        if rank.rank == 1:
            time.sleep(0.2)  # what is measured: rank 1 is late
        loss.backward()
    return lockstep.loop.statistics(model, all_ranks=True)


def test_the_rank_for_which_the_others_wait_is_known_on_all():
    first, second = run_ranks(2, be_late)
    assert first.waited == second.waited
    assert first.late_rank == second.late_rank == 1
    assert first.waited[0] == first.exposed_seconds
    assert first.own_seconds == second.own_seconds
    assert first.own_seconds[1] >= 0.2
    assert first.slower_than_others[1] > 1 > first.slower_than_others[0]
    assert first.own_seconds_before == [None, None]
    told = json.loads(first.as_json())
    assert told == first.as_dict()
    assert told["late_rank"] == 1
    assert "\n" not in first.as_json()
