"""A step that fails each time: its batch is named, or left out; all other samples come once in each epoch."""

from __future__ import annotations

import warnings
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import lockstep
from lockstep.checkpoints import memory
from lockstep.errors import AgreementError, CrashLoopError, OptionError, PeerFailure
from processes import be_launched, run_processes

ROWS = torch.utils.data.TensorDataset(torch.arange(24))


@pytest.fixture(autouse=True)
def host_memory(tmp_path, monkeypatch):
    """A host of our own."""
    monkeypatch.setattr(memory, "ROOT", tmp_path / "shm")
    (tmp_path / "shm").mkdir()


def batches():
    return lockstep.shares.GlobalBatches(ROWS, batch_size=4, shares=2)


def samples_of(number, epoch=0):
    data = batches()
    found = data.samples_ahead(6 * epoch + number)
    assert found[:2] == (epoch, number)
    return found[2]


def train(folder, fails, every=1, seen=None, **resume):
    """Two epochs of six steps; ``fails`` gets the batch and raises."""
    data, had = batches(), []
    with lockstep.session() as run:
        run.resume(folder, data=data, seen=had if seen is None else seen, **resume)
        had = had if seen is None else seen
        for _ in range(data.epoch, 2):
            for batch in run.batches(data):
                fails(run, batch)
                for (rows,) in batch:
                    had += rows.tolist()
                run.snapshot(folder, every=every, data=data, seen=had)
    return had


def at_batch(number, epoch=0):
    def fails(run, batch):
        if (batch.epoch, batch.number) == (epoch, number):
            raise KeyError("bad batch")

    return fails


def fail(folder, fails, times=1, **more):
    for _ in range(times):
        with pytest.raises(KeyError):
            train(folder, fails, **more)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("number", "epoch"), [(3, 0), (5, 0), (0, 1), (5, 1)])
def test_the_samples_of_the_batch_are_named(number, epoch, every, tmp_path):
    fail(tmp_path / "run", at_batch(number, epoch), 3, every=every)
    wanted = samples_of(number, epoch)
    names = rf"batch {number} of epoch {epoch}, with the samples {', '.join(map(str, wanted))}: look"
    with pytest.raises(CrashLoopError, match=names) as raised:
        train(tmp_path / "run", at_batch(number, epoch), every=every)
    assert raised.value.samples == tuple(wanted)
    assert raised.value.step == 6 * epoch + number + 1


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("number", "epoch"), [(3, 0), (5, 0), (0, 1), (5, 1)])
def test_the_batch_is_left_out_and_every_other_sample_comes_once(number, epoch, every, tmp_path):
    fail(tmp_path / "run", at_batch(number, epoch), 3, every=every, skip_poison=True)
    with pytest.warns(
        UserWarning, match=rf"failed 3 times in a row, .*: batch {number} of epoch {epoch}, with the sam"
    ):
        seen = train(tmp_path / "run", at_batch(number, epoch), every=every, skip_poison=True)
    assert Counter(seen) == Counter({**dict.fromkeys(range(24), 2), **dict.fromkeys(samples_of(number, epoch), 1)})


@pytest.mark.filterwarnings("ignore:.*the run goes on without its batch")
def test_it_stays_left_out_after_a_failure_before_the_next_snapshot(tmp_path):
    def fails_before(run, batch):
        if batch.number == 4:
            raise KeyError("bad luck")

    fail(tmp_path / "run", at_batch(5), 3, every=4, skip_poison=True)
    fail(tmp_path / "run", fails_before, every=4, skip_poison=True)
    seen = train(tmp_path / "run", at_batch(5), every=4)  # also if it is not said again
    assert Counter(seen) == Counter({**dict.fromkeys(range(24), 2), **dict.fromkeys(samples_of(5), 1)})


@pytest.mark.filterwarnings("ignore:.*the run goes on without its batch")
def test_a_step_that_fails_with_any_batch_ends_the_run(tmp_path):
    def fails(run, batch):
        if run.step == 3:
            raise KeyError("always")

    fail(tmp_path / "run", fails, 6, skip_poison=True)
    with pytest.raises(CrashLoopError, match=r"the last 3 starts .* failed without batch 2 of epoch 0, too"):
        train(tmp_path / "run", fails, skip_poison=True)


@pytest.mark.filterwarnings("ignore:.*the run goes on without its batch")
def test_two_batches_are_left_out(tmp_path):
    def fails(run, batch):
        if batch.epoch == 0 and batch.number in (1, 4):
            raise KeyError("bad batch")

    fail(tmp_path / "run", fails, 6, skip_poison=True)
    seen = train(tmp_path / "run", fails, skip_poison=True)
    missing = {*samples_of(1), *samples_of(4)}
    assert Counter(seen) == Counter({sample: 1 if sample in missing else 2 for sample in range(24)})


def test_a_new_run_has_the_history_of_no_other(tmp_path):
    fail(tmp_path / "run", at_batch(3), 3)
    (tmp_path / "run").rename(tmp_path / "before")
    with pytest.warns(UserWarning, match="earlier run|of which .* knows nothing"):
        fail(tmp_path / "run", at_batch(3))
    fail(tmp_path / "run", at_batch(3), 2)
    with pytest.raises(CrashLoopError, match="the last 3 starts"):
        train(tmp_path / "run", at_batch(3))


@pytest.mark.parametrize(
    ("state", "options"),
    [({}, {}), ({"a": batches(), "b": batches()}, {}), ({"a": batches()}, {"give_up_after": None})],
)
def test_nothing_that_could_be_left_out(state, options, tmp_path):
    with lockstep.session() as run, pytest.raises(OptionError, match=r"skip_poison=True\) with"):
        run.resume(tmp_path / "run", skip_poison=True, **options, **state)


def test_batches_without_some():
    for left_out in ([(0, 0)], [(0, 5)], [(0, 3), (1, 0)], [(1, number) for number in range(6)]):
        data, seen = batches(), []
        for each in left_out:
            data.leave_out(*each)
        while data.epoch < 3:
            assert data.batches_left == 6 - data.batch - sum(e == data.epoch and b >= data.batch for e, b in left_out)
            for batch in data:
                seen.append((batch.epoch, batch.number))
                list(batch)
                resumed = batches()
                resumed.load_state_dict(data.state_dict())
                assert (resumed.epoch, resumed.batch) == (data.epoch, data.batch)
                assert resumed.samples_ahead(0) == data.samples_ahead(0)
        assert seen == [(epoch, number) for epoch in range(3) for number in range(6) if (epoch, number) not in left_out]


# --------------------------------------------------------------------------------------- many ranks


def in_sessions(rank, port, folder):
    """Sessions of the same processes, in which rank 1 fails at a batch of its own loader, or at a global batch."""
    dist.destroy_process_group()
    memory.ROOT = folder
    be_launched(rank, port)
    told = []
    warnings.simplefilter("ignore")
    for path, data in (("shares", batches()), ("sampler", None)):
        for number in range(4):
            sampler = lockstep.ResumableSampler(DistributedSampler(ROWS, 2, rank.rank, shuffle=False))
            state = {"data": data or sampler}
            try:
                with lockstep.session() as run:
                    for each in state.values():
                        each.load_state_dict((batches() if data else sampler).state_dict())
                    options = {"skip_poison": True} if data and number == 3 else {}
                    try:
                        run.resume(folder / path, **options, **state)
                    except CrashLoopError as error:
                        told.append((error.step, error.samples))
                        raise
                    loader = data or sampler.batches(DataLoader(ROWS, batch_size=2, sampler=sampler))
                    for batch in run.batches(loader):
                        if rank.rank == 1 and (batch.number == 2 if data else 13 in batch[0]):
                            raise KeyError("bad batch")
                        run.agree(False)
                        for rows in batch if data else ():
                            told += rows[0].tolist() if number == 3 else []
                        run.snapshot(folder / path, every=1, **state)
            except (KeyError, CrashLoopError, PeerFailure):
                continue
    return told


def test_ranks_agree_on_the_batch(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    results = run_processes(2, in_sessions, store.port, tmp_path)
    assert [told.pop() for told in results] == [(4, (13, 15))] * 2  # of the rank that has failed, on every rank
    assert sorted(results[0] + results[1]) == sorted(sample for number in (3, 4, 5) for sample in samples_of(number))


def differ(rank, port, folder):
    dist.destroy_process_group()
    be_launched(rank, port)
    with lockstep.session() as run, pytest.raises(AgreementError, match=r"ranks differ in skip_poison: True on rank 0"):
        run.resume(folder, data=batches(), skip_poison=rank.rank == 0)


def test_ranks_that_do_not_agree(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    run_processes(2, differ, store.port, tmp_path)
