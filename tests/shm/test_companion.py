"""What lockstep sends between CPUs goes over a group of its own, the companion of the program's group."""

from __future__ import annotations

import copy
import logging
import os
import random
import threading
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.group_state import end_groups, state_of
from lockstep.distributed.comm.groups import companion_timeout
from lockstep.errors import CommunicationError, PeerFailure
from lockstep.phases import Phases
from processes import on_processes, run_processes
from programs.ranks import on_ranks


def companion(group=None):
    return state_of(group or dist.group.WORLD).companion


def step(module, rank) -> float:
    module.zero_grad()
    module(torch.full((1, 1), rank + 1.0)).sum().backward()
    return module.weight.grad.item()


def linear(**options) -> nn.Module:
    return lockstep.replicate(nn.Linear(1, 1, bias=False), **options)


# ------------------------------------------------------------------------------------ which groups


@on_processes(3)
def test_gloo_and_shm_groups_get_one(rank):
    model, again = linear(), linear()
    shm, pair = dist.new_group(backend="shm"), dist.new_group([0, 1])
    models = [model, again, linear(process_group=shm)]
    if rank.rank < 2:
        models.append(linear(process_group=pair))
    grads = [step(each, rank.rank) for each in models]
    kinds = [type(companion(each)).__name__ for each in (None, shm, pair)[: len(models) - 1]]
    ours = len(models) - 1
    assert (grads, kinds) == ([2, 2, 2, 1.5][: ours + 1], ["ProcessGroupShm"] * ours)


@on_processes(2)
def test_that_of_a_shm_group_has_its_options_and_its_timeout(rank):
    options = lockstep.distributed.ShmOptions(host=f"host {rank.rank}")
    group = dist.new_group(backend="shm", pg_options=options, timeout=timedelta(seconds=17))
    grad = step(linear(process_group=group), rank.rank)
    made = companion(group)
    assert (grad, made.options == options, made._timeout, made._shares_memory) == (1.5, True, 17, False)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_processes(2, "backend")
def test_nothing_goes_over_the_programs_group(rank):
    """The program's collectives are under way while lockstep's begin and end."""
    group = dist.group.WORLD
    model, others = linear(), torch.full((100,), rank.rank + 1.0)
    optimizer = lockstep.shard_optimizer(torch.optim.Adam(model.parameters()))
    begun = group._get_sequence_number_for_group()
    work = dist.all_reduce(others, async_op=True)
    grad = step(model, rank.rank)
    optimizer.step()
    lockstep.check_in_sync(model)
    mean = lockstep.mean(torch.tensor(float(rank.rank)))
    work.wait()
    assert grad == 1.5
    assert mean.item() == 0.5
    assert others.sum().item() == 300.0
    assert group._get_sequence_number_for_group() - begun == 1


class SumOverRanks(torch.autograd.Function):
    """A sum in forward and in backward, as in layers that normalise over all ranks."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    backward = forward


class Branches(nn.Module):
    """Weights with buckets of their own, and sums over the ranks behind some of them."""

    def __init__(self, weights=5, sums=(1,)):
        super().__init__()
        self.sums = sums
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(weights))
        for number, layer in enumerate(self.layers):
            nn.init.constant_(layer.weight, 1 + number / 8)

    def forward(self, x, without=()):
        for number, layer in enumerate(self.layers):
            x = x if number in without else layer(x)
            x = SumOverRanks.apply(x) if number in self.sums else x
        return x


def means(rank, networks, steps, **options):
    """The means of gradients after some steps, each a list of the weights that each network leaves out on this rank: by
    collectives of the program, and by lockstep."""
    found = []
    for is_wrapped in (False, True):
        modules = [copy.deepcopy(network) for network in networks]
        if is_wrapped:
            modules = [lockstep.replicate(module, **options) for module in modules]
        for step in steps:
            x = torch.full((1, 1), rank.rank + 1.0, dtype=torch.float64, requires_grad=True)  # each sum has a backward
            for module, without in zip(modules, step, strict=True):
                module.zero_grad()
                x = module(x, without)
            x.sum().backward()
            weights = [weight for module in modules for weight in module.parameters()]
            grads = torch.stack([torch.zeros_like(each) if each.grad is None else each.grad for each in weights])
            if not is_wrapped:
                dist.all_reduce(grads)
            found.append(grads if is_wrapped else grads / rank.world)
    return found[: len(steps)], found[len(steps) :]


@pytest.mark.parametrize("on", ["one module", "several modules"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_processes(2, "backend")
def test_collectives_of_the_program_in_backward_do_not_meet_buckets(rank, on):
    """Rank 1 stops to use the last weight, whose bucket left first: there, all buckets wait for the end of backward."""
    networks = [Branches().double() for _ in range(1 if on == "one module" else 2)]
    unused = (4,) if on == "one module" and rank.rank == 1 else ()
    wanted, got = means(rank, networks, [[()] * len(networks)] * 2 + [[unused] * len(networks)], bucket_cap_mb=1e-6)
    assert [*map(torch.equal, wanted, got)] == [True] * 3


def sums_at_random(rank, seeds):
    """Random networks, which leave out other weights on each rank and in each step."""
    wrong = []
    for seed in seeds:
        drawn, own = random.Random(seed), random.Random(f"{seed} {rank.rank}")
        networks = [
            Branches(drawn.randint(2, 6), [0, *drawn.sample(range(1, 6), drawn.randint(0, 3))]).double()
            for _ in range(drawn.randint(1, 3))
        ]
        steps = [[own.sample(range(6), own.choice([0, 0, 1, 3])) for _ in networks] for _ in range(6)]
        wanted, got = means(rank, networks, steps, bucket_cap_mb=drawn.choice([1e-6, 2e-5, 25]))
        if not all(map(torch.allclose, wanted, got)):
            wrong.append(seed)
    return wrong


@pytest.mark.parametrize(("backend", "world"), [("gloo", 2), ("shm", 3)])
def test_collectives_of_random_programs_in_backward(backend, world):
    assert run_processes(world, sums_at_random, range(5), backend=backend) == [[]] * world


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_collectives_of_many_random_programs_in_backward(backend, world):
    assert run_processes(world, sums_at_random, range(5, 105), backend=backend) == [[]] * world


@on_ranks(2)
def test_a_group_without_a_store_has_none(rank):
    model = linear(process_group=rank.group)
    assert (step(model, rank.rank), companion(rank.group)) == (1.5, None)


@on_processes(2)
def test_the_next_group_gets_another(rank):
    model = linear()
    grads = [step(model, rank.rank)]
    del model
    place = {"rank": rank.rank, "world_size": rank.world, "timeout": timedelta(seconds=20)}
    store = dist.PrefixStore("second", dist.distributed_c10d._world.pg_map[dist.group.WORLD][1])
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, **place)
    assert [*grads, step(linear(), rank.rank)] == [1.5, 1.5]


# ------------------------------------------------------------------------------ no shared memory


def without_memory(rank):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("lockstep").addHandler(handler)
    logging.getLogger("lockstep").setLevel(logging.INFO)
    if rank.rank == 1:
        del os.memfd_create  # as in a Python that was built for an old system
    begun = dist.group.WORLD._get_sequence_number_for_group()
    model = linear()
    grads = [step(model, rank.rank) for _ in range(3)]
    assert dist.group.WORLD._get_sequence_number_for_group() == begun
    return grads, type(companion()).__name__, [each.getMessage() for each in records]


def test_without_shared_memory_on_one_rank_it_is_a_gloo_group_on_all():
    first, *others = run_processes(3, without_memory)
    assert [each[:2] for each in (first, *others)] == [([2.0] * 3, "ProcessGroupGloo")] * 3
    (line,), *rest = (each[2] for each in (first, *others))
    assert rest == [[], []]
    assert "goes over a Gloo group of its own instead of shared memory" in line
    assert "cannot work on rank 1: memory cannot be shared here: AttributeError" in line


def told(rank, number, words):
    """The error on this rank if the one of that number has failed with these words."""
    return pytest.raises(ValueError if rank.rank == number else PeerFailure, match=words)


@on_processes(2, launched=True)
def test_a_failure_ends_waits_for_a_gloo_companion(rank):
    if rank.rank == 1:
        del os.memfd_create
    with told(rank, 1, "of rank 1"), lockstep.session(backend="gloo") as run:
        model = linear()
        for _ in run.batches(range(3)):
            step(model, rank.rank)
            if rank.rank == 1 and run.step == 2:
                raise ValueError("of rank 1")


# ---------------------------------------------------------------------- ranks that do not all come


@on_processes(2, launched=True)
def test_a_rank_that_comes_alone_is_told_who_is_missing(rank):
    dist.init_process_group("gloo")
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if rank.rank == 1:
        return
    with pytest.raises(CommunicationError, match=r"rank\(s\) 1 did not come to the shm process group within 1 s"):
        Collectives(dist.group.WORLD, Phases()).all_reduce(torch.ones(1), "test").wait()
    with pytest.raises(CommunicationError, match="rank 0 can no longer take part in what the other ranks"):
        linear()


@on_processes(2, launched=True)
def test_a_rank_that_fails_before_the_first_use_ends_the_wait(rank):
    before = threading.enumerate()
    with told(rank, 1, "before the first use"), lockstep.session(backend="gloo"):
        if rank.rank == 1:
            raise ValueError("before the first use")
        lockstep.mean(torch.ones(()))
    for each in threading.enumerate():  # the thread that makes the companion, and that of its store
        if rank.rank == 0 and each not in before:
            each.join(30)
            assert not each.is_alive(), each


def fails_beside_a_smaller_group(rank, ready):
    with lockstep.session(backend="gloo"):
        pair = dist.new_group([0, 1])
        model = linear(process_group=pair) if rank.rank < 2 else None
        if rank.rank == 2:
            os.read(os.open(ready, os.O_RDONLY), 1)
            raise ValueError("of rank 2")
        if rank.rank == 1:  # does not come to rank 0's round
            os.write(os.open(ready, os.O_RDWR), b"x")
            dist.barrier()
        step(model, 0)


def test_a_failure_ends_waits_on_all_groups(tmp_path):
    """Rank 0 waits for rank 1 in a group to which rank 2, which fails, does not belong."""
    os.mkfifo(tmp_path / "ready")
    outcomes = run_processes(3, fails_beside_a_smaller_group, str(tmp_path / "ready"), errors=True, launched=True)
    assert isinstance(outcomes[0].error, PeerFailure)
    assert str(outcomes[2].error) == "of rank 2"


@on_processes(2, backend="shm")
def test_a_failure_ends_waits_on_a_shm_group_and_on_its_companion(rank):
    step(linear(), rank.rank)
    if rank.rank == 0:
        end_groups(types.SimpleNamespace(global_ranks=[0, 1]), "for a reason")
    for call in (lambda: dist.all_reduce(torch.ones(1)), lambda: lockstep.mean(torch.ones(()))):
        with pytest.raises(CommunicationError, match="for a reason" if rank.rank else "has been destroyed"):
            call()


@on_processes(2, launched=True)
def test_it_ends_with_the_session_although_the_model_exists(rank):
    with lockstep.session(backend="gloo"):
        model = linear()
        assert step(model, rank.rank) == 1.5
    assert [each.name for each in threading.enumerate() if each.name.startswith("lockstep")] == []


@on_processes(2, backend="shm")
def test_it_ends_with_a_shm_group_although_the_model_exists(rank):
    model = linear()
    step(model, rank.rank)
    if rank.rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(CommunicationError, match="rank 1 has left the process group while others still use it"):
        step(model, rank.rank)


@on_processes(2)
def test_a_forked_process_does_not_communicate(rank):
    model = linear()
    step(model, rank.rank)
    child = os.fork()
    if child == 0:
        try:
            step(model, rank.rank)
        except CommunicationError as error:
            os._exit(0 if "was forked from process" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert step(model, rank.rank) == 1.5


# ----------------------------------------------------------------------------------- the time-out


class BackendOfDevice:
    """What a group says of its backend for a device."""

    def __init__(self, name, seconds):
        self._name = name
        self.options = types.SimpleNamespace(_timeout=timedelta(seconds=seconds))

    def name(self):
        return self._name


class GroupOfBackends:
    """A group with a backend for each type of device."""

    def __init__(self, **backends):
        self._backends = {kind: BackendOfDevice(*each) for kind, each in backends.items()}

    def _get_backend(self, device):
        if device.type not in self._backends:
            raise RuntimeError(f"no backend for {device}")
        return self._backends[device.type]


@pytest.mark.parametrize(
    ("backends", "seconds"),
    [
        ({"cpu": ("gloo", 1800), "sim": ("nccl", 600)}, 540),
        ({"sim": ("nccl", 600)}, 540),
        ({"cpu": ("gloo", 100), "sim": ("nccl", 600)}, 100),
        ({"cpu": ("gloo", 1800), "sim": ("gloo", 1800)}, 1800),
        ({}, 1800),
    ],
)
def test_its_timeout_comes_before_that_of_an_accelerators_backend(sim, backends, seconds):
    assert companion_timeout(GroupOfBackends(**backends)) == timedelta(seconds=seconds)
