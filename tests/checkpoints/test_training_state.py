"""What training goes on from: the round, the plan and the states of communication hooks, saved and loaded."""

from __future__ import annotations

import io
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import lockstep
from lockstep.distributed import load_training_state_dict, training_state_dict
from lockstep.errors import HookError, LayoutError, NotReplicableError
from programs.ranks import on_ranks, replicated
from sharded_runs import equal
from threaded import count_collectives, run_ranks


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def train(rank, model, steps, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=rank.generator(step))).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # PowerSGD's state has NumPy's random numbers


def gone_on(rank, register, steps=4, more=3, **options):
    """Parameters after `more` steps: in one run, and in one that was saved and loaded in between."""
    model = replicated(rank, network, **options)
    register(model)
    train(rank, model, steps)
    saved = through_a_file((model.state_dict(), training_state_dict(model)))
    wanted = train(rank, model, more, first=steps)

    second = lockstep.replicate(rank.make(network, seed=9), process_group=rank.group, **options)
    register(second)
    second.load_state_dict(saved[0])
    with count_collectives(rank) as sent:
        load_training_state_dict(second, saved[1])
    assert sent == []
    return wanted, train(rank, second, more, first=steps), saved[1]


# ---------------------------------------------------------------------------------- round and plan


@pytest.mark.parametrize("cap", [25, 1e-4])
def test_training_goes_on_bit_for_bit_with_the_plan_it_had(cap):
    def call(rank):
        wanted, got, state = gone_on(rank, lambda model: None, bucket_cap_mb=cap)
        assert equal(wanted, got)
        assert state.keys() == {"round", "plan", "hook"}
        assert (state["round"], state["hook"]) == (4, None)
        return json.loads(state["plan"])

    one, other = run_ranks(2, call)
    assert one == other
    assert sorted(name for _, names in one for name in names) == ["0.bias", "0.weight", "2.bias", "2.weight"]


@on_ranks(2)
def test_a_restored_plan_is_not_made_anew(rank):
    model = replicated(rank, network, bucket_cap_mb=1e-4)
    plan = json.dumps([["shared", [name]] for name in ("0.weight", "2.weight", "0.bias", "2.bias")])
    load_training_state_dict(model, {"round": 7, "plan": plan, "hook": None})
    with count_collectives(rank) as sent:
        train(rank, model, 1)
    state = training_state_dict(model)
    reduced = [each.numel for each in sent if each.name == "all_reduce"]
    assert reduced[:5] == [1024, 1024, 48, 32, 8]  # hook and plan are compared before they are used
    assert (state["plan"], state["round"]) == (plan, 8)


@on_ranks(2)
def test_a_plan_that_other_ranks_do_not_have_is_refused_on_every_rank(rank):
    model = replicated(rank, network, bucket_cap_mb=1e-4)
    names = ["0.weight", "2.weight", "0.bias", "2.bias"]
    plan = json.dumps([["shared", [name]] for name in (names if rank.rank else names[::-1])])
    load_training_state_dict(model, {"round": 7, "plan": plan, "hook": None})
    for _ in range(2):  # again and again
        with pytest.raises(lockstep.errors.AgreementError, match="ranks differ in plan"):
            train(rank, model, 1)


@on_ranks(2)
def test_the_state_of_a_wrapper_and_of_a_module_that_gets_ready_later(rank):
    with torch.device("meta"):
        model = network()
    lockstep.replicate(model, process_group=rank.group)
    plain = lockstep.DistributedDataParallel(rank.make(network), process_group=rank.group)
    train(rank, plain, 2)
    state = training_state_dict(plain)
    load_training_state_dict(model, state)
    model.to_empty(device="cpu")
    model.load_state_dict(plain.module.state_dict())
    model(torch.ones(1, 6))  # gets ready
    assert training_state_dict(model) == state


# ---------------------------------------------------------------------------------- hooks


@pytest.mark.usefixtures("draws_in_turn")
@pytest.mark.numpy
@on_ranks(2)
def test_power_sgd_goes_on_bit_for_bit(rank):
    def register(model):
        state = powerSGD_hook.PowerSGDState(rank.group, 1, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    wanted, got, state = gone_on(rank, register, bucket_cap_mb=1e-5)
    assert equal(wanted, got)
    kept = state["hook"]["state"]
    assert kept["iter"] == 4
    assert kept["error_dict"]
    assert "process_group" not in kept


class Noise:
    """A state with a way of its own to be saved."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def state_dict(self):
        return {"numbers": self.generator.get_state()}

    def load_state_dict(self, saved):
        self.generator.set_state(saved["numbers"])


class Slots:
    __slots__ = ("count", "group", "unset")


def noisy(state, bucket):
    return bucket.buffer() + torch.randn(bucket.buffer().shape, generator=state.generator)


def counting(state, bucket):
    state["steps"] = state.get("steps", 0) + 1
    return bucket.buffer() * state["steps"]


def counting_slots(state, bucket):
    state.count += 1
    return bucket.buffer() * state.count


def slots_of(group):
    slots = Slots()
    slots.count, slots.group = 0, group
    return slots


STATES = {
    "with state_dict": (lambda group: Noise(), noisy, None),
    "a dictionary": (lambda group: {}, counting, {"steps": 2}),
    "with slots": (slots_of, counting_slots, {"count": 2}),
    "none": (lambda group: None, lambda state, bucket: bucket.buffer(), None),
    "a group": (lambda group: group, default_hooks.allreduce_hook, None),
}


@pytest.mark.parametrize(("make", "hook", "kept"), STATES.values(), ids=STATES)
@on_ranks(2)
def test_states_of_every_kind_are_kept(rank, make, hook, kept):
    wanted, got, state = gone_on(rank, lambda model: model.register_comm_hook(make(rank.group), hook), steps=2)
    assert equal(wanted, got)
    assert hook is noisy or state["hook"] == {"state": kept}


# ---------------------------------------------------------------------------------- errors


def alone(make=network, **options):
    return lockstep.replicate(make(), process_group=dist.ProcessGroupGloo(dist.HashStore(), 0, 1), **options)


def test_other_modules_and_other_hooks_are_refused():
    state, hooked, stateless = training_state_dict(alone()), alone(), alone()
    with pytest.raises(LayoutError, match=r"is of another module: it has a parameter '2\.bias', this one has not"):
        load_training_state_dict(alone(lambda: nn.Linear(2, 2)), state)
    hooked.register_comm_hook({}, counting)
    with pytest.raises(NotReplicableError, match="with no communication hook, and one is registered"):
        load_training_state_dict(hooked, state)
    with pytest.raises(NotReplicableError, match="with a communication hook, and none is registered"):
        load_training_state_dict(alone(), training_state_dict(hooked))
    stateless.register_comm_hook(None, counting)
    with pytest.raises(HookError, match="but the hook was registered without one"):
        load_training_state_dict(stateless, {**state, "hook": {"state": {"steps": 1}}})
