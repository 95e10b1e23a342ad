"""Shares on ranks that are processes: what draws from the process's generators, and the same bits as in threads."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from processes import run_processes
from share_runs import CELLS, data_of, digits, make_optimizer, train


class Noise(nn.Module):
    """Adds random numbers of each kind to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = digits(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs for noisy images."""
        return self.inner(x + torch.randn_like(x) + random.random() + float(np.random.rand()))


def noisy(rank):
    """The fingerprint, and whether random numbers of the program go on as if there were no shares."""
    torch.manual_seed(1)
    model = lockstep.replicate(Noise(), shares=4)
    optimizer = make_optimizer("SGD", model)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for batch in lockstep.shares.GlobalBatches(data_of("digits"), 20, 4):
        optimizer.zero_grad()
        for x, y in batch:
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    kept = torch.equal(before[0], after[0]) and before[1:] == after[1:]
    return lockstep.shares.fingerprint(model, optimizer), kept


def test_random_numbers_of_each_kind_belong_to_the_share():
    alone = run_processes(1, noisy)
    assert alone[0][1]
    assert set(run_processes(2, noisy) + run_processes(3, noisy, backend="shm")) == set(alone)


def few_cells(rank):
    """The fingerprints of two cells."""
    return [train(rank, CELLS[1], 2), train(rank, CELLS[6], 2)]


@pytest.mark.parametrize(("world", "backend"), [(2, "shm"), (3, "gloo")])
def test_processes_come_to_the_bits_of_one(world, backend):
    assert run_processes(world, few_cells, backend=backend) == run_processes(1, few_cells) * world
