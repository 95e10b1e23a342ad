"""Replicated before there is anything to replicate: no group yet, no values yet, no shapes yet."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from ddp_reference import failure, scalars
from lockstep.errors import CommunicationError, NotReplicableError
from processes import on_processes


class Network(nn.Module):
    """Layers and a buffer; `step` is another way in than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.last(self.norm(self.first(x))) * self.scale


def rank_input(rank):
    return torch.randn(4, 2, generator=rank.generator())


def train(rank, model, steps=2):
    """Trains on this rank's rows, and sees to it that the replicas stay the same, bit by bit."""
    update = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        update.zero_grad()
        model(rank_input(rank)).square().sum().backward()
        assert all(rank.all_equal(parameter.grad) for parameter in model.parameters())
        update.step()
    assert all(rank.all_equal(value) for value in model.state_dict().values())
    lockstep.check_in_sync(model)


def first_values(model):
    """The parameters and buffers as the first forward finds them, behind the hooks of replicate."""
    seen = []
    model.first.register_forward_pre_hook(
        lambda module, args: seen.append([v.clone() for v in model.state_dict().values()])
    )
    return seen


# ---------------------------------------------------------------------------------- the meta device


@on_processes(2)
def test_from_the_meta_device(rank):
    """`to_empty` makes new parameters, and each rank initialises its own; all begin with those of rank 0."""
    with torch.device("meta"):
        model = lockstep.replicate(Network())
    assert not lockstep.replicate.state(model).ready
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with pytest.raises(NotReplicableError, match=r"first\.weight is on the meta device .* call module\.to_empty"):
        model(rank_input(rank))
    model.to_empty(device="cpu")
    torch.manual_seed(rank.rank)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.scale.fill_(1.0 + rank.rank)
    of_rank_0 = [rank.gather(value)[0] for value in model.state_dict().values()]
    seen = first_values(model)
    train(rank, model)
    assert lockstep.replicate.state(model).ready
    torch.testing.assert_close(seen[0], of_rank_0, rtol=0, atol=0)


@on_processes(2)
def test_a_checkpoint_assigned_to_the_meta_device(rank):
    with torch.device("meta"):
        model = lockstep.replicate(Network())
    model.load_state_dict(rank.make(Network, seed=rank.rank).state_dict(), assign=True)
    train(rank, model)
    with torch.device("meta"):
        without_values = Network()
    kinds, message = failure(lambda: lockstep.DistributedDataParallel(without_values))
    assert "RuntimeError" in kinds
    assert "meta device" in message


# -------------------------------------------------------------------------------- before the group


@on_processes(2)
def test_before_there_is_a_group(rank, tmp_path):
    dist.destroy_process_group()
    model = rank.make(Network, seed=rank.rank)
    lockstep.replicate(model, bucket_cap_mb=0.0001)
    state = lockstep.replicate.state(model)
    assert (state.ready, state.process_group, state._param_names) == (False, None, [])
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert type(copied) is type(unpickled) is Network
    model.register_comm_hook(None, twofold)
    model.set_requires_gradient_sync(False)
    for call in (
        lambda: model(rank_input(rank)),
        lambda: lockstep.check_in_sync(model),
        lambda: lockstep.distributed.training_state_dict(model),
        lambda: lockstep.DistributedDataParallel(Network()),
        lambda: lockstep.loop.mean_over_ranks(torch.ones(1)),
    ):
        with pytest.raises(CommunicationError, match=r"init_process_group"):
            call()
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), rank.world), rank=rank.rank, world_size=rank.world
    )
    model(rank_input(rank)).sum().backward()
    assert state.ready
    assert state._param_names[0] == "first.weight"
    assert not all_equal(rank, model.last.bias.grad * (rank.rank + 1))  # not synchronised yet
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(rank_input(rank)).sum().backward()
    assert model.last.bias.grad.item() == 8.0  # four rows, twofold
    assert state.process_group is dist.group.WORLD


def all_equal(rank, tensor):
    """In the default group, which is not that of the rank."""
    return dataclasses.replace(rank, group=dist.group.WORLD).all_equal(tensor)


def twofold(state, bucket):
    return bucket.buffer() * 2


# ------------------------------------------------------------------------------------ lazy modules


def lazy(first=None):
    return nn.Sequential(first or nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 1))


@on_processes(2)
def test_lazy_modules_take_their_shapes_from_a_forward_without_gradients(rank):
    torch.manual_seed(rank.rank)
    model = lockstep.replicate(lazy())
    with pytest.raises(NotReplicableError, match=r"0\.weight is not initialised\..*Run a dummy forward pass"):
        model(rank_input(rank))
    with torch.no_grad():
        model(rank_input(rank))  # each rank's own values
    assert not lockstep.replicate.state(model).ready
    train(rank, model)
    assert lockstep.replicate.state(model).ready

    one_rank = lockstep.replicate(lazy())
    if rank.rank == 1:
        with torch.no_grad():
            one_rank(rank_input(rank))
    kinds, message = failure(lambda: one_rank(rank_input(rank)))
    assert "RuntimeError" in kinds
    assert "0.weight is not initialised" in message  # on the rank where it is, too

    ignored = lazy()
    lockstep.replicate(ignored, ignored_modules=[ignored[0], ignored[1]])
    assert lockstep.replicate.state(ignored).ready
    kinds, message = failure(lambda: lockstep.DistributedDataParallel(lazy()))
    assert "RuntimeError" in kinds
    assert "Modules with uninitialized parameters" in message


# -------------------------------------------------------------------------------- state and device


class Record(nn.Module):
    """Remembers what forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x, *, pair):
        self.given = x, pair
        return (x * self.weight + pair["tensor"]).sum()


@on_processes(2)
def test_state_and_device_id(rank):
    wanted = {"none": (None, False), "cpu": (None, False), "index": ([0], False), "device": ([1], False)}
    seen = {}
    for name, options in {
        "none": {},
        "cpu": {"device_id": torch.device("cpu")},
        "index": {"device_id": 0},
        "device": {"device_id": torch.device("cuda", 1)},
    }.items():
        with torch.device("meta"):
            model = lockstep.replicate(Record(), **options)
        state = lockstep.replicate.state(model)
        ddp = state._ddp_weakref()
        seen[name] = ddp.device_ids, ddp.ready
    with torch.device("meta"):
        model = lockstep.replicate(Record(), device_id=torch.device("cpu"))
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    x, pair = torch.full((2,), rank.rank + 1.0), {"tensor": torch.ones(2), "name": "pair"}
    model(x, pair=pair).backward()
    assert model.given[0] is x  # nothing is moved to the CPU, as in the reference
    assert model.given[1] is pair
    ddp = lockstep.replicate.state(model)._ddp_weakref()
    seen["after"] = ddp.device_ids, ddp.ready, ddp.process_group is rank.group, scalars(model)
    refused = failure(lambda: lockstep.replicate(Record(), device_id=[torch.device("cpu")]))
    assert "RuntimeError" in refused[0]
    assert "Expected device_id to be int or torch.device" in refused[1]
    assert lockstep.replicate.state(Record()) is None
    assert seen == {**wanted, "after": (None, True, True, [3.0])}
