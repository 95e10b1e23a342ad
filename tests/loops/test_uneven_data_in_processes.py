"""Uneven data and batches that are left out, where ranks are processes."""

from __future__ import annotations

import pytest
import torch

from processes import run_processes
from training_loops import WHERE, Plan, alone, train

PLANS = {
    "streams": Plan((3, 1), known=False, wrapped=True),
    "left out": Plan((3, 2), window=2, weighted=True, bad=((0, 1, 0, WHERE[0]), (0, 0, 2, WHERE[2]))),
    "left out by hand": Plan((2, 2), modules=2, context=False, bad=((0, 1, 0, WHERE[2]), (1, 0, 1, WHERE[1]))),
}


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("name", PLANS)
def test_processes_train_as_one_would(name, backend):
    wanted = alone(PLANS[name])
    for found in run_processes(2, train, PLANS[name], None, backend=backend):
        assert found["steps"] == wanted["steps"]
        torch.testing.assert_close(found["values"], wanted["values"], rtol=1e-9, atol=1e-12)
