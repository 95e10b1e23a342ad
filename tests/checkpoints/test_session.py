"""What a session adds to save() and resume(): its group, its step, its generators."""

from __future__ import annotations

import torch

import lockstep


def numbers(run):
    return [torch.rand(1, generator=each).item() for each in (run.generator, run.shared_generator)]


def test_a_session_saves_its_step_and_generators(tmp_path):
    with lockstep.session() as run:
        assert run.resume(tmp_path) is None
        for _ in run.batches(range(3)):
            numbers(run)
        assert run.save(tmp_path, keep=2, history=[1]).name == "save-000001-step-00000003"
        wanted = numbers(run)
    with lockstep.session(seed=5) as run:
        found = run.resume(tmp_path)
        assert (run.step, found.step, found.values) == (3, 3, {"history": [1]})
        assert numbers(run) == wanted
        next(iter(run.batches([0])))
        assert run.step == 4
        run.save(tmp_path, step=10)
    assert lockstep.resume(tmp_path).step == 10
