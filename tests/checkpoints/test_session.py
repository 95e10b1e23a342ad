"""What a session adds to save() and resume(): its group, its step, its generators."""

from __future__ import annotations

from traceback import format_exception

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

import lockstep
from lockstep.failures.progress import phase_of
from processes import run_processes


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


class Watched:
    """Samples that note in which phase the run is when they are asked for; the last one cannot be read."""

    def __init__(self, run):
        self.run, self.phases = run, []

    def __len__(self):
        return 3

    def __getitem__(self, number):
        self.phases.append(self.run.progress.current_phase)
        if number == 2:
            raise OSError("a bad sector")
        return torch.ones(2) * number


def test_what_is_waited_for_in_a_sampler_is_data_also_after_an_evaluation():
    with lockstep.session() as run:
        model = lockstep.replicate(nn.Linear(2, 1))
        run.progress.current_phase = "forward"  # as the last forward of an evaluation leaves it, on several ranks
        data = Watched(run)
        sampler = lockstep.ResumableSampler(SequentialSampler(data))
        with pytest.raises(OSError) as raised:
            for x in run.batches(sampler.batches(DataLoader(data, 1, sampler=sampler))):
                model(x).sum().backward()
        assert data.phases == ["data"] * 3
        assert phase_of(raised.value.__traceback__, "training") == "data"


def saves_on_rank_0_alone(rank, path, backend, steps):
    """Return what the run raises, with its notes, as Python prints it."""
    try:
        with lockstep.session(backend=backend, timeout=20.0, device="cpu") as run:
            model = lockstep.replicate(nn.Linear(30, 30))
            for _ in range(steps):
                model(torch.ones(2, 30)).sum().backward()
                if run.is_main:
                    run.save(path, model=model)
    except Exception as error:
        return "".join(format_exception(error))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("steps", [1, 3], ids=["the others end", "the others train on"])
def test_a_save_on_rank_0_alone_says_what_to_do(tmp_path, backend, steps):
    told = run_processes(2, saves_on_rank_0_alone, tmp_path, backend, steps, launched=True)
    assert "If only some ranks have called save(): call save() on every rank, not under" in told[0]
    assert (told[1] is None) == (steps == 1)
