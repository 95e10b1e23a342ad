"""Processes are killed while they save, with signals that no handler hears."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings

import torch

import lockstep
from processes import run_processes


def save_until_killed(rank, folder, victim, after, seed):
    """Steps, each with a save; the victim is killed at some moment after the first whole one."""
    warnings.simplefilter("ignore")  # what the one before has left is skipped
    weights, saved = torch.zeros(50_000), threading.Event()
    found = lockstep.resume(folder, weights=weights)
    begin = found.step if found else 0
    assert weights[0] == begin

    def kill():
        saved.wait()
        time.sleep(random.Random(seed).random() * after)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank.rank == victim:
        threading.Thread(target=kill, daemon=True).start()
    for step in range(begin + 1, begin + 10_000):
        weights.add_(1)
        try:
            lockstep.save(folder, step=step, weights=weights)
        except RuntimeError:
            if rank.rank != victim:
                return step
            raise
        saved.set()
    return None


def resume_after(rank, folder):
    warnings.simplefilter("ignore")
    weights = torch.zeros(50_000)
    found = lockstep.resume(folder, weights=weights)
    assert torch.equal(weights, torch.full_like(weights, float(found.step)))
    return found.step


def test_processes_killed_while_they_save(tmp_path):
    folder, steps = tmp_path / "run", [0]
    for seed, victim in enumerate((0, 1, 0)):
        outcomes = run_processes(
            2, save_until_killed, folder, victim, 0.05, seed, errors=True, backend="shm", group_timeout=20.0
        )
        assert outcomes[victim].returncode == -signal.SIGKILL
        step = outcomes[1 - victim].result  # of the save that the other rank was told has failed
        one, other = run_processes(2, resume_after, folder)
        assert one == other
        assert max(steps[-1] + 1, step - 1) <= one <= step
        steps.append(one)
