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
from programs.ranks import on_ranks, replicated
from share_runs import MODELS, batches_of, data_of, forever, make_optimizer
from small_modules import one_weight
from threaded import run_ranks

pytestmark = pytest.mark.usefixtures("sim")


def rows_of(count):
    with torch.device("cpu"):
        return torch.utils.data.TensorDataset(torch.arange(float(count)).view(count, 1))


def train(rank, model, steps=3, audits=True):
    """The fingerprint after so many steps, and whether the accelerator's random numbers go on as without shares."""
    net = replicated(rank, MODELS[model], shares=8)
    assert {p.device for p in net.parameters()} == {rank.device}
    lockstep.shares.audit(net, every=2 if audits else None)
    optimizer = make_optimizer("SGD", net)
    torch.sim.manual_seed(rank.rank)
    before = torch.sim.get_rng_state(rank.device)
    with torch.device("cpu"):
        data = data_of(model)
    batches = lockstep.shares.GlobalBatches(data, 32, 8, seed=1, last="smaller", process_group=rank.group)
    for batch in itertools.islice(forever(batches), steps):
        optimizer.zero_grad()
        for x, y in batch:
            cross_entropy(net(x.to(rank.device)), y.to(rank.device), reduction="sum").backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    kept = torch.equal(torch.sim.get_rng_state(rank.device), before)
    return lockstep.shares.fingerprint(net, optimizer), kept


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
    model = replicated(rank, shares=4)
    lockstep.shares.audit(model, every=1)
    if rank.rank == 1:
        model.weight.register_hook(lambda gradient: gradient + 1)
    for (x,) in next(iter(batches_of(rank, rows_of(4)))):
        model(x.to(rank.device)).sum().backward()


def moved(rank, where, alone=False):
    """Gradients, or an error, of four steps; before the third the model moves to device `where(rank)`, on the last rank
    only if `alone`."""
    model, found = replicated(rank, lambda: one_weight(0.0), shares=4), []
    for number, batch in enumerate(itertools.islice(forever(batches_of(rank, rows_of(16), 8)), 4)):
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


@pytest.mark.parametrize("sizes", [[2], [600, 600]], ids=["small", "large"])
@on_ranks(2, device="sim")
def test_the_host_waits_for_the_other_hosts_and_not_for_the_device(rank, sim, sizes):
    """In the third step of a network without buffers no line shows a wait for this rank's."""
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise([1, *sizes, 1])]
    model = lockstep.replicate(nn.Sequential(*layers), shares=4, process_group=rank.group)
    begun = 0
    for number, batch in enumerate(itertools.islice(batches_of(rank, rows_of(16)), 3)):
        rank.gather(torch.zeros(1))
        if number == 2:
            begun = len(sim.stream_log())
        rank.gather(torch.zeros(1))
        for (x,) in batch:
            model(x.to(rank.device)).sum().backward()
    waits = [line for line in sim.stream_log()[begun:] if line.action.startswith("sync")]
    assert [line for line in waits if line.device == str(rank.device)] == []


@on_ranks(1, device="sim")
def test_changes_of_all_buffers_are_read_at_once(rank, sim):
    """How often each share of the third step reads from the accelerator, with twelve buffers."""
    model = nn.Sequential(nn.Linear(1, 3), *[nn.BatchNorm1d(3) for _ in range(4)], nn.Linear(3, 1))
    model = lockstep.replicate(model, shares=4, process_group=rank.group)
    for batch in batches_of(rank, rows_of(48), 16):
        found = []
        for (x,) in batch:
            model(x.to(rank.device)).sum().backward()
            found.append(len(sim.stream_log()))
    log = sim.stream_log()
    assert [sum(line.action.startswith("sync") for line in log[a:b]) for a, b in itertools.pairwise(found)] == [1, 1, 1]
