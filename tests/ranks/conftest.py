"""What ranks that are threads have in common, and processes have not."""

import contextlib
import threading

import pytest
import torch


@pytest.fixture
def draws_in_turn(monkeypatch):
    """PowerSGD draws its first guess, seeded alike on all ranks, from the random numbers of the process."""
    fork_rng, turn = torch.random.fork_rng, threading.RLock()

    @contextlib.contextmanager
    def fork_in_turn(*args, **kwargs):
        with turn, fork_rng(*args, **kwargs):
            yield

    monkeypatch.setattr(torch.random, "fork_rng", fork_in_turn)
