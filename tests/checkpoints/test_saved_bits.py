"""A run that is stopped and resumed has the bits of one that never was."""

from __future__ import annotations

import random
import shutil
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from checkpoints.runs import LAST, STEPS_PER_EPOCH, Kind, Run
from lockstep.errors import CheckpointError
from processes import on_processes, run_processes
from threaded import run_ranks

KINDS = {
    "adamw": Kind(),
    "momentum, accumulation": Kind("sgd", accumulate=True),
    "PowerSGD": Kind("sgd", power_sgd=True),
    "local buffers, a wrapper": Kind(buffer_policy="local", wrapper=True),
}


def lose_all_numbers():
    """Random numbers as they may be when a process has started anew."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def stopped_at(rank, folder, number):
    """A folder in which the run ended after one of its saves."""
    to = folder.with_name(f"{folder.name}-{number}")
    if rank.rank == 0:
        (save,) = folder.glob(f"save-{number:06d}-*")
        shutil.copytree(save, to / save.name)
    dist.barrier(rank.group)
    return to


def saved_and_not(rank, kind, folder):
    """Return what an uninterrupted run ends with: one that saves after every step, and one that never does."""
    plain = Run(rank, kind)
    plain.train()
    wanted = plain.digests()
    saving = Run(rank, kind)
    saving.train(save_to=folder)
    saving.check(wanted)
    assert LAST == plain.step == saving.step
    return wanted, plain


def stop_and_go_on(rank, kind, folder):
    wanted, plain = saved_and_not(rank, kind, folder)
    # within an epoch, after its last batch, after the first batch of the next
    for number in (1, 3, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1, LAST - 1):
        lose_all_numbers()
        run = Run(rank, kind)
        run.resume(stopped_at(rank, folder, number))
        assert run.step == number
        run.train()
        assert run.seen == plain.seen[number:], number
        run.check(wanted)
    return wanted


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("adamw", "gloo"),
        ("momentum, accumulation", "shm"),
        pytest.param("PowerSGD", "gloo", marks=pytest.mark.around),
        pytest.param("local buffers, a wrapper", "shm", marks=pytest.mark.around),
        pytest.param("adamw", "shm", marks=pytest.mark.soak),
        pytest.param("momentum, accumulation", "gloo", marks=pytest.mark.soak),
        pytest.param("PowerSGD", "shm", marks=pytest.mark.soak),
        pytest.param("local buffers, a wrapper", "gloo", marks=pytest.mark.soak),
    ],
)
def test_a_resumed_run_has_the_same_bits(kind, backend, tmp_path):
    one, other = run_processes(2, stop_and_go_on, KINDS[kind], tmp_path / "run", backend=backend)
    same = [name for name in one if one[name] == other[name]]
    own = {name for name in one if name.startswith("model 1.running")} if "local" in kind else set()
    assert {*one} - {*same} == {"random numbers", "rest", *own}  # losses are each rank's


def part_of_a_run(rank, folder, resumes, until):
    lose_all_numbers()
    run = Run(rank, Kind())
    if resumes:
        run.resume(folder)
    run.train(save_to=folder, until=until)
    return run.digests()


def whole(rank, folder):
    return saved_and_not(rank, Kind(), folder)[0]


@pytest.mark.around
def test_two_stops_each_with_new_processes(tmp_path):
    for resumes, until, backend in [(False, 5, "gloo"), (True, 9, "shm"), (True, LAST, "gloo")]:
        got = run_processes(2, part_of_a_run, tmp_path / "run", resumes, until, backend=backend)
    assert got == run_processes(2, whole, tmp_path / "other")


def with_shares(rank, folder, until, loss="mean"):
    """A run whose bits do not depend on the number of ranks: to a step, from the newest checkpoint if there is one."""
    rows = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 96).view(16, 6), torch.arange(16) % 3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    for parameter in model.parameters():  # not at random: ranks are threads here, with one generator outside of shares
        nn.init.constant_(parameter, 0.1)
    nn.init.eye_(model[0].weight)
    model = lockstep.replicate(model, shares=3, loss=loss, process_group=rank.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = lockstep.shares.GlobalBatches(rows, 6, 3, process_group=rank.group)
    state = {"model": model, "optimizer": optimizer, "data": data}
    found = lockstep.resume(folder, group=rank.group, **state)
    for step in range(1 + (found.step if found else 0), until + 1):
        for x, y in next(iter(data)):
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == until:
            lockstep.save(folder, step=step, group=rank.group, **state)
    return lockstep.shares.fingerprint(model, optimizer)


def in_a_process(rank, folder, until):
    warnings.filterwarnings("ignore", ".*saved by")
    return with_shares(rank, folder, until)


@pytest.mark.filterwarnings("ignore:.*saved by")
def test_with_shares_it_has_them_on_another_number_of_ranks(tmp_path):
    (wanted,) = run_ranks(1, with_shares, tmp_path / "whole", 5)
    run_processes(3, in_a_process, tmp_path / "run", 2)
    run_ranks(1, with_shares, tmp_path / "run", 3)
    with pytest.raises(CheckpointError, match="the run was begun with shares=3 and loss='mean', this module has"):
        run_ranks(2, with_shares, tmp_path / "run", 5, "sum")
    assert run_processes(2, in_a_process, tmp_path / "run", 5) == [wanted] * 2


def uneven(rank, folder, stop, resumes):
    """A run in which each rank has an order of its own, and the second one fewer samples."""
    torch.manual_seed(rank.rank)
    rows = torch.utils.data.TensorDataset(torch.randn(10 - 6 * rank.rank, 4))
    model = lockstep.replicate(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)), process_group=rank.group
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sampler = lockstep.ResumableSampler(torch.utils.data.RandomSampler(rows))
    loader = torch.utils.data.DataLoader(rows, 2, sampler=sampler)
    state = {"model": model, "optimizer": optimizer, "data": sampler}
    step = lockstep.resume(folder, **state).step if resumes else 0
    while sampler.epoch < 2:
        for (x,) in lockstep.batches(sampler.batches(loader), model):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            step += 1
            if step == stop:
                lockstep.save(folder, step=step, **state)
                return None
    return lockstep.shares.fingerprint(model, optimizer), sampler.state_dict(), torch.rand(1).item()


@on_processes(2, backend="shm")
def test_it_may_be_stopped_when_a_rank_has_run_out_of_batches(rank, tmp_path):
    folder = tmp_path / "run"
    wanted = uneven(rank, folder, 0, resumes=False)
    for stop in (1, 2, 4, 5, 8):  # of five steps an epoch, of which the second rank has two
        uneven(rank, folder, stop, resumes=False)
        assert uneven(rank, folder, 0, resumes=True) == wanted, stop
