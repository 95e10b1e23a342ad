"""Shares on ranks with an accelerator each, simulated: random numbers, buffers and gradients are the accelerator's."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep
from lockstep.errors import AgreementError, AuditError, PeerError
from processes import run_processes
from programs.ranks import on_ranks
from share_runs import MODELS, data_of, forever, make_optimizer
from threaded import run_ranks

pytestmark = pytest.mark.usefixtures("sim")


def train(rank, model, steps=3, audits=True):
    """The fingerprint after so many steps, and whether the accelerator's random numbers go on as without shares."""
    replicated = lockstep.replicate(rank.make(MODELS[model]), shares=8, process_group=rank.group)
    assert {p.device for p in replicated.parameters()} == {rank.device}
    lockstep.shares.audit(replicated, every=2 if audits else None)
    optimizer = make_optimizer("SGD", replicated)
    torch.sim.manual_seed(rank.rank)
    before = torch.sim.get_rng_state(rank.device)
    with torch.device("cpu"):
        data = data_of(model)
    batches = lockstep.shares.GlobalBatches(data, 32, 8, seed=1, last="smaller", process_group=rank.group)
    for batch in itertools.islice(forever(batches), steps):
        optimizer.zero_grad()
        for x, y in batch:
            loss = cross_entropy(replicated(x.to(rank.device)), y.to(rank.device), reduction="sum")
            loss.backward()
        nn.utils.clip_grad_norm_(replicated.parameters(), 1.0)
        optimizer.step()
    kept = torch.equal(torch.sim.get_rng_state(rank.device), before)
    return lockstep.shares.fingerprint(replicated, optimizer), kept


@pytest.mark.parametrize("model", ["digits", pytest.param("characters", marks=pytest.mark.around)])
def test_the_same_bits_on_any_number_of_accelerators(model):
    alone = run_ranks(1, train, model, device="sim")
    assert alone[0][1]
    for world in (2, 3, 8):
        assert run_ranks(world, train, model, device="sim") == alone * world


def in_processes(rank, model):
    """As :func:`train`: what lies on the CPU goes over the companion, in shared memory, which threads cannot have."""
    return train(
        types.SimpleNamespace(rank=rank.rank, device=rank.device, make=rank.make, group=dist.group.WORLD), model
    )


@pytest.mark.around
@pytest.mark.parametrize("model", MODELS)
def test_the_same_bits_in_processes_that_share_memory(model):
    alone = run_processes(1, in_processes, model, device="sim")
    assert run_processes(2, in_processes, model, device="sim") == alone * 2


@on_ranks(2, raises=AuditError, says="gradient of weight", device="sim")
def test_a_bit_that_is_turned_over_on_an_accelerator_is_found(rank):
    model = lockstep.replicate(nn.Linear(1, 1, bias=False), shares=4, process_group=rank.group)
    lockstep.shares.audit(model, every=1)
    if rank.rank == 1:
        model.weight.register_hook(lambda gradient: gradient + 1)
    with torch.device("cpu"):
        rows = torch.utils.data.TensorDataset(torch.ones(4, 1))
    for (x,) in next(iter(lockstep.shares.GlobalBatches(rows, 4, 4, process_group=rank.group))):
        model(x.to(rank.device)).sum().backward()


def moved(rank, where, alone=False):
    """Gradients, or an error, of four steps; before the third the model moves to device `where(rank)`, on the last rank
    only if `alone`."""
    model = lockstep.replicate(nn.Linear(1, 1, bias=False), shares=4, process_group=rank.group)
    nn.init.zeros_(model.weight)
    with torch.device("cpu"):
        rows = torch.utils.data.TensorDataset(torch.arange(16.0).view(16, 1))
    batches = lockstep.shares.GlobalBatches(rows, 8, 4, shuffle=False, process_group=rank.group)
    found = []
    for number, batch in enumerate(itertools.islice(forever(batches), 4)):
        if number == 2 and (not alone or rank.rank + 1 == rank.world):
            model.to(where(rank))
        model.zero_grad()
        try:
            for (x,) in batch:
                model(x.to(model.weight.device)).sum().backward()
            found.append((str(model.weight.grad.device), model.weight.grad.item()))
        except (AgreementError, PeerError) as error:
            found.append(str(error))
    return found


def another_one(rank):
    return torch.device("sim", 3 - rank.rank)


def test_a_model_that_moves_to_another_accelerator_between_steps():
    assert run_ranks(2, moved, another_one, device="sim") == [
        [("sim:0", 3.5), ("sim:0", 11.5), ("sim:3", 3.5), ("sim:3", 11.5)],
        [("sim:1", 3.5), ("sim:1", 11.5), ("sim:2", 3.5), ("sim:2", 11.5)],
    ]


def test_a_model_that_moves_to_another_accelerator_on_one_rank_only_is_an_error_on_all():
    for found in run_ranks(2, moved, another_one, True, device="sim"):
        assert "rank 1 has changed its module between batch 0 of epoch 1 and the step before" in found[2]
        assert "the devices of parameters" in found[2]


def test_a_model_that_moves_to_the_host_would_give_other_bits():
    for found in run_ranks(2, moved, lambda rank: "cpu", device="sim"):
        assert "when the module was replicated device was sim, now it is cpu" in found[2]


def waits(rank, sim, sizes):
    """The lines that show a wait for the device, in the third step of a network without buffers."""
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise([1, *sizes, 1])]
    model = lockstep.replicate(nn.Sequential(*layers), shares=4, process_group=rank.group)
    with torch.device("cpu"):
        rows = torch.utils.data.TensorDataset(torch.ones(16, 1))
    begun = 0
    batches = lockstep.shares.GlobalBatches(rows, 4, 4, process_group=rank.group)
    for number, batch in enumerate(itertools.islice(forever(batches), 3)):
        rank.gather(torch.zeros(1))
        if number == 2:
            begun = len(sim.stream_log())
        rank.gather(torch.zeros(1))
        for (x,) in batch:
            model(x.to(rank.device)).sum().backward()
    log = sim.stream_log()[begun:]
    return [line for line in log if line.action.startswith("sync")]


@pytest.mark.parametrize("sizes", [[2], [600, 600]], ids=["small", "large"])
@on_ranks(2, device="sim")
def test_the_host_waits_for_the_other_hosts_and_not_for_the_device(rank, sim, sizes):
    found = waits(rank, sim, sizes)
    assert [line for line in found if line.device == str(rank.device)] == []


@on_ranks(1, device="sim")
def test_changes_of_all_buffers_are_read_at_once(rank, sim):
    """How often each share of the third step reads from the accelerator, with twelve buffers."""
    model = nn.Sequential(nn.Linear(1, 3), *[nn.BatchNorm1d(3) for _ in range(4)], nn.Linear(3, 1))
    model = lockstep.replicate(model, shares=4, process_group=rank.group)
    with torch.device("cpu"):
        rows = torch.utils.data.TensorDataset(torch.arange(48.0).view(48, 1))
    found = []
    batches = lockstep.shares.GlobalBatches(rows, 16, 4, process_group=rank.group)
    for batch in itertools.islice(forever(batches), 3):
        found = []
        for (x,) in batch:
            model(x.to(rank.device)).sum().backward()
            found.append(len(sim.stream_log()))
    log = sim.stream_log()
    assert [sum(line.action.startswith("sync") for line in log[a:b]) for a, b in itertools.pairwise(found)] == [1, 1, 1]
