"""A step that fails each time: its batch is named, and a program can go on without its samples."""

from __future__ import annotations

import warnings
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


class Without(torch.utils.data.Dataset):
    """The data set of docs/reliability.md, with others in the place of bad samples."""

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, number):
        while number in self.bad:
            number = (number + 1) % len(ROWS)
        return ROWS[number]


def goes_on_without(folder, fails):
    """The program of docs/reliability.md, over two epochs; returns the samples that were seen, and those left out."""
    bad, seen = [], []
    data = lockstep.shares.GlobalBatches(Without(bad), batch_size=4, shares=2)
    with lockstep.session() as run:
        state = {"data": data, "bad": bad, "seen": seen}
        try:
            run.resume(folder, **state)
        except CrashLoopError as error:
            if set(error.samples) <= set(bad):
                raise
            run.resume(folder, give_up_after=None, **state)
            bad += error.samples
            run.save(folder, **state)
        for _ in range(data.epoch, 2):
            for batch in run.batches(data):
                for (rows,) in batch:
                    fails(run, rows)
                    seen += rows.tolist()
                run.snapshot(folder, every=1, **state)
    return seen, bad


def fails_until(folder, fails, kind):
    """Start until there is no other error than KeyError; return what comes then, and how often it has failed."""
    for times in range(12):
        try:
            return goes_on_without(folder, fails), times
        except KeyError:
            continue
        except kind as error:
            return error, times
    return None


def test_a_run_goes_on_without_the_samples_that_fail(tmp_path):
    def fails(run, rows):
        if 13 in rows:
            raise KeyError("bad sample")

    (seen, bad), times = fails_until(tmp_path / "run", fails, CrashLoopError)
    assert times == 3
    assert bad == samples_of(next(number for number in range(6) if 13 in samples_of(number)))
    assert len(seen) == 48
    assert set(seen) == set(range(24)) - set(bad)


def test_a_step_that_fails_with_any_samples_ends_the_run(tmp_path):
    def fails(run, rows):
        if run.step == 3:
            raise KeyError("always")

    error, times = fails_until(tmp_path / "run", fails, CrashLoopError)
    assert times == 4  # three times with the samples, and once without
    assert error.samples == tuple(samples_of(2))


def test_what_to_write_for_skip_poison(tmp_path):
    with lockstep.session() as run, pytest.raises(OptionError, match=r"no option skip_poison\. To go on without"):
        run.resume(tmp_path / "run", skip_poison=True, data=batches())


def test_a_new_run_has_the_history_of_no_other(tmp_path):
    fail(tmp_path / "run", at_batch(3), 3)
    (tmp_path / "run").rename(tmp_path / "before")
    with pytest.warns(UserWarning, match="earlier run|of which .* knows nothing"):
        fail(tmp_path / "run", at_batch(3))
    fail(tmp_path / "run", at_batch(3), 2)
    with pytest.raises(CrashLoopError, match="the last 3 starts"):
        train(tmp_path / "run", at_batch(3))


# --------------------------------------------------------------------------------------- many ranks


def in_sessions(rank, port, folder):
    """Sessions of the same processes, in which rank 1 fails at a batch of its own loader, or at a global batch; and one
    in which ranks ask for different things."""
    dist.destroy_process_group()
    memory.ROOT = folder
    be_launched(rank, port)
    told = []
    warnings.simplefilter("ignore")
    for path, data in (("shares", batches()), ("sampler", None)):
        for _ in range(4):
            sampler = lockstep.ResumableSampler(DistributedSampler(ROWS, 2, rank.rank, shuffle=False))
            state = {"data": data or sampler}
            try:
                with lockstep.session() as run:
                    for each in state.values():
                        each.load_state_dict((batches() if data else sampler).state_dict())
                    try:
                        run.resume(folder / path, **state)
                    except CrashLoopError as error:
                        told.append((error.step, error.samples))
                        raise
                    loader = data or sampler.batches(DataLoader(ROWS, batch_size=2, sampler=sampler))
                    for batch in run.batches(loader):
                        if rank.rank == 1 and (batch.number == 2 if data else 13 in batch[0]):
                            raise KeyError("bad batch")
                        run.agree(False)
                        for _ in batch if data else ():
                            pass
                        run.snapshot(folder / path, every=1, **state)
            except (KeyError, CrashLoopError, PeerFailure):
                continue
    with lockstep.session() as run, pytest.raises(AgreementError, match="ranks differ in give_up_after: 3 on rank 0"):
        run.resume(folder, data=batches(), give_up_after=3 + rank.rank)
    return told


def test_ranks_agree_on_the_batch(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    of_shares, of_sampler = (3, tuple(samples_of(2))), (4, (13, 15))  # of the rank that has failed, on every rank
    assert run_processes(2, in_sessions, store.port, tmp_path) == [[of_shares, of_sampler]] * 2


class LateBatches(lockstep.shares.GlobalBatches):
    """Waits for the other ranks before the first batch."""

    def __iter__(self):
        dist.barrier()
        yield from super().__iter__()


def fails_first(rank, port, folder):
    """From the second start on, rank 1 fails in its first batch, before rank 0, on another host, has begun any."""
    dist.destroy_process_group()
    memory.ROOT = folder / f"host {rank.rank}"
    memory.ROOT.mkdir()
    be_launched(rank, port)
    for start in range(4):
        late = start and rank.rank == 0
        data = LateBatches(ROWS, batch_size=4, shares=2) if late else batches()
        try:
            with lockstep.session() as run:
                run.resume(folder / "run", data=data)
                for batch in run.batches(data):
                    if batch.number == 2 and rank.rank == 1:
                        raise KeyError("bad batch")
                    run.agree(False)
                    list(batch)
                    run.snapshot(folder / "run", every=1, data=data)
        except CrashLoopError as error:
            return error.samples
        except (KeyError, PeerFailure):
            continue
    return None


def test_the_batch_of_a_rank_that_fails_before_others_have_begun_one(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    assert run_processes(2, fails_first, store.port, tmp_path) == [tuple(samples_of(2))] * 2
