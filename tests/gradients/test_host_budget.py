"""What a settled backward costs the host in Python: it may only fall. Lower the numbers when it does."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.comm import collectives
from processes import run_processes

PACKAGE = str(Path(lockstep.__file__).parent)
WAITS = "shm/peers.py"
"""What is called here depends on how long a rank waits for the other one."""


def settled_backward(rank, companion):
    """Return how many functions of the library a settled backward calls, in how many files, and how often the next
    function is in another file; of several backwards the least, since one that has to wait calls more."""
    if not companion:
        collectives.store_for_companion = lambda *_: None
    net = lockstep.replicate(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    files: list[str] = []

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and not file.endswith(WAITS):
            files.append(file)

    found = []
    for step in range(40):
        net.zero_grad()
        loss = net(torch.ones(2, 4)).sum()
        files.clear()
        sys.setprofile(note)
        loss.backward()
        sys.setprofile(None)
        if step >= 2:  # in the first the ranks learn the order of gradients, in the second buckets get memory
            found.append((len(files), len(set(files)), sum(a != b for a, b in itertools.pairwise(files))))
    return min(found)


# Without a companion the collectives are Gloo's; those of a companion are the library's own, in shared memory. On a
# busy machine, where every step waits, there is one call more, in one file more: it is counted in. Five calls are what
# tells of drift (module/drift.py).
@pytest.mark.parametrize(("companion", "budget"), [(False, (100, 29, 82)), (True, (142, 38, 108))])
def test_calls_and_files_and_moves_between_files_of_a_settled_backward(companion, budget):
    if not hasattr(torch._C, "_remove_obj_from_tls"):  # an older PyTorch, in which the object is replaced
        budget = budget[0] + 3, *budget[1:]
    least = tuple(map(min, zip(*run_processes(2, settled_backward, companion), strict=True)))
    assert least == tuple(map(min, zip(least, budget, strict=True)))
