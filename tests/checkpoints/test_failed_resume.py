"""A resume that fails on one rank is an error on all of them, and leaves every object on every rank as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from checkpoints.runs import Kind, Run
from lockstep.errors import CheckpointError
from processes import on_processes
from programs.ranks import on_ranks, replicated

KINDS = {
    "adamw": Kind(),
    "PowerSGD": Kind("sgd", power_sgd=True),
    "local buffers, a wrapper": Kind(buffer_policy="local", wrapper=True),
}


class Failing:
    """State that one rank cannot take when it is given the first time."""

    def __init__(self, rank, error=None):
        self.rank, self.error = rank, error

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        error, self.error = self.error, None
        if error is not None and self.rank.rank == 1:
            raise error


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.around), 2])
@pytest.mark.parametrize(("kind", "backend"), list(zip(KINDS, ["gloo", "shm", "shm"], strict=True)))
@on_processes(2, "backend")
def test_a_run_goes_on_as_if_nobody_had_tried(rank, kind, first, tmp_path):
    """A run that tries to resume after some steps, fails and goes on has the bits of one that never tried."""
    saving = Run(rank, KINDS[kind])
    saving.train(until=5)
    for name in "amz":  # before all others, between them and after them
        lockstep.save(tmp_path / name, group=rank.group, step=5, **saving.state(), **{name: Failing(rank)})
    plain = Run(rank, KINDS[kind])
    plain.train(until=first + 2)
    wanted = plain.digests()
    for name, error in [("a", ValueError("of another model")), ("m", OSError("")), ("z", KeyboardInterrupt())]:
        run = Run(rank, KINDS[kind])
        if first:
            run.train(until=first)
        losses = run.losses
        with pytest.raises(KeyboardInterrupt if name == "z" and rank.rank else CheckpointError) as caught:
            lockstep.resume(tmp_path / name, group=rank.group, **run.state(), **{name: Failing(rank, error)})
        assert not getattr(caught.value, "__notes__", [])
        assert len(losses) == first
        run.train(until=first + 2)
        run.check(wanted)


def network():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def train(rank, optimizer, *models, steps=4):
    for number in range(steps):
        for model in models:
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=rank.generator(number))).sum().backward()
            optimizer.step()


def two_modules(rank):
    both = nn.ModuleList(replicated(rank, network, bucket_cap_mb=1e-5) for _ in range(2))
    return both, torch.optim.Adam(both.parameters(), 0.1)


def hook(state, bucket):
    state["count"] = state.get("count", 0) + 1
    return bucket.buffer()


@pytest.mark.parametrize("hosts", ["", "aa"])
@on_ranks(2, "hosts")
def test_rounds_and_hooks_that_do_not_fit_on_one_rank(rank, tmp_path):
    """The rounds and plans of both modules are given back; no rank waits for an agreement of the others."""
    both, optimizer = two_modules(rank)
    train(rank, optimizer, *both)
    lockstep.save(tmp_path, group=rank.group, both=both, optimizer=optimizer)
    both, optimizer = two_modules(rank)
    train(rank, optimizer, *both, steps=1)
    if rank.rank == 1:
        both[0].register_comm_hook({}, hook)
    before = [lockstep.distributed.training_state_dict(model) for model in both]
    words = r"resume\(\) failed on rank 1 .*: NotReplicableError: the training state"
    with pytest.raises(CheckpointError, match=words):
        lockstep.resume(tmp_path, group=rank.group, both=both, optimizer=optimizer)
    assert [lockstep.distributed.training_state_dict(model) for model in both] == before
    if rank.rank == 0:
        both[0].register_comm_hook({}, hook)
    train(rank, optimizer, *both)
    assert all(rank.all_equal(tensor) for tensor in both.state_dict().values())


@on_ranks(2)
def test_values_of_every_kind(rank, tmp_path):
    """Values are the same objects as before, generators and random numbers where they were."""
    tensor, numbers, table, generator = torch.ones(3), [[1]], {"a": [2]}, rank.generator()
    given = {"tensor": tensor, "numbers": numbers, "table": table, "generator": generator}
    lockstep.save(tmp_path, group=rank.group, **given, z=Failing(rank))
    inner = numbers[0], table["a"]
    tensor.zero_()
    numbers.append(3)
    table["b"] = 4
    wanted = torch.rand(2, generator=generator.clone_state())
    with pytest.raises(CheckpointError, match="of another model"):
        lockstep.resume(tmp_path, group=rank.group, **given, z=Failing(rank, ValueError("of another model")))
    assert (tensor.tolist(), numbers, table) == ([0.0] * 3, [[1], 3], {"a": [2], "b": 4})
    assert numbers[0] is inner[0]
    assert table["a"] is inner[1]
    assert torch.equal(torch.rand(2, generator=generator), wanted)
    lockstep.resume(tmp_path, group=rank.group, **given, z=Failing(rank))
    assert (tensor.tolist(), numbers, table) == ([1.0] * 3, [[1]], {"a": [2]})


class Versioned(nn.Module):
    """A module whose state had another meaning in its first version."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if (metadata.get("version") or 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *args)


@on_ranks(2)
def test_the_versions_of_modules_are_kept(rank, tmp_path):
    model = lockstep.DistributedDataParallel(
        nn.ModuleList([Versioned(), nn.BatchNorm1d(1)]), process_group=rank.group, buffer_policy="local"
    )
    weight = model.module[0].weight
    lockstep.save(tmp_path, group=rank.group, model=model, z=Failing(rank))
    with torch.no_grad():
        weight.fill_(3.0)
    with pytest.raises(CheckpointError):
        lockstep.resume(tmp_path, group=rank.group, model=model, z=Failing(rank, ValueError("")))
    before = weight.item()
    lockstep.resume(tmp_path, group=rank.group, model=model, z=Failing(rank))
    assert (before, weight.item()) == (3.0, 1.0)


@on_ranks(2)
def test_a_module_that_gets_ready_later(rank, tmp_path):
    """A module that is not ready takes up no round of a resume that has failed."""
    model = replicated(rank, network)
    train(rank, torch.optim.SGD(model.parameters(), 0.1), model, steps=3)
    lockstep.save(tmp_path, group=rank.group, model=model, z=Failing(rank))
    with torch.device("meta"):
        later = network()
    lockstep.replicate(later, process_group=rank.group)
    later.to_empty(device="cpu")
    with pytest.raises(CheckpointError):
        lockstep.resume(tmp_path, group=rank.group, model=later, z=Failing(rank, ValueError("")))
    assert lockstep.distributed.training_state_dict(later)["round"] == 0


class Stubborn(Failing):
    """It does not take the state that it had either."""

    def load_state_dict(self, state):
        raise ValueError("of another model")


class Unreadable(Failing):
    """Its state cannot be read before anything is filled."""

    def state_dict(self):
        raise KeyError("momentum")


NOT_GIVEN_BACK = "what was filled before that could not be given back: ValueError: of another model"


@pytest.mark.parametrize(
    ("kind", "words", "notes"),
    [
        (Stubborn, "ValueError: of another model", [NOT_GIVEN_BACK]),
        (Unreadable, r"resume\(\) failed: KeyError: 'momentum'", []),
    ],
)
def test_state_that_cannot_be_given_back_or_read(kind, words, notes, tmp_path):
    x = torch.ones(1)
    lockstep.save(tmp_path, x=x, z=Failing(None))
    x.zero_()
    with pytest.raises(CheckpointError, match=words) as caught:
        lockstep.resume(tmp_path, x=x, z=kind(None))
    assert getattr(caught.value, "__notes__", []) == notes
    assert x.item() == 0


@on_ranks(2)
def test_a_name_that_was_not_saved(rank, tmp_path):
    """An error in one rank's reading, too, leaves nothing behind."""
    lockstep.save(tmp_path, group=rank.group, x=torch.ones(1))
    x = torch.zeros(1)
    with pytest.raises(CheckpointError, match="has no 'y'"):
        lockstep.resume(tmp_path, group=rank.group, x=x, y={})
    rank.gather(torch.zeros(1))
    assert x.item() == 0.0
