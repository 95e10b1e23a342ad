"""What a session adds to save() and resume(): its group, its step, its generators."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, SequentialSampler

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


ROWS = list(range(10))


def steps_of(run):
    """The sampler, and then the batches of two epochs."""
    sampler = lockstep.ResumableSampler(SequentialSampler(ROWS))
    loader = DataLoader(ROWS, 4, sampler=sampler, drop_last=False)
    yield sampler
    while sampler.epoch < 2:
        for batch in run.batches(sampler.batches(loader)):
            yield batch.tolist()


def test_a_sessions_batches_do_not_run_ahead_of_the_position(tmp_path):
    with lockstep.session() as run:
        sampler, *wanted = steps_of(run)
        assert len(wanted) == 6
        for number in range(1, 6):
            steps = steps_of(run)
            sampler = next(steps)
            assert [next(steps) for _ in range(number)] == wanted[:number]
            run.save(tmp_path, data=sampler)
            steps.close()
            steps = steps_of(run)
            run.resume(tmp_path, data=next(steps))
            assert list(steps) == wanted[number:]
