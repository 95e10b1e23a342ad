"""State of sharded optimizers: whole and in slices, saved, and loaded on other numbers of ranks and into plain ones."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lockstep
from lockstep.errors import LayoutError, ShardingError
from lockstep.sharding import StateSlice, full_state_dict, shard_optimizer
from lockstep.sharding.partition import blocks_of
from processes import on_processes, run_processes
from programs.ranks import on_ranks
from sharded_runs import adamw, begun, equal, made, network, replicated, results, train, values, without_sharding_too
from threaded import run_ranks

MAKE = {
    "AdamW": adamw,
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2]),
}


def continued(rank, name, sharded, start):
    """Three steps, from there on or from the beginning."""
    model, optimizer = begun(rank, MAKE[name], sharded=sharded)
    if start is not None:
        weights, state = copy.deepcopy(start)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    train(rank, model, optimizer, range(3))
    return model.state_dict(), full_state_dict(optimizer, all_ranks=True)


@pytest.mark.parametrize("name", MAKE)
def test_a_full_state_dict_loads_into_plain_and_sharded_optimizers_on_any_number_of_ranks(name):
    start = run_ranks(2, continued, name, True, None)[0]
    expected = run_ranks(2, continued, name, False, start)
    assert equal(expected, run_ranks(2, continued, name, True, start))
    assert equal(run_ranks(3, continued, name, False, start), run_ranks(3, continued, name, True, start))


def test_it_is_on_rank_0_unless_it_is_asked_for_and_can_be_saved():
    def on_ranks(rank):
        _, optimizer = begun(rank, steps=1)
        return full_state_dict(optimizer), full_state_dict(optimizer, all_ranks=True)

    (first, whole), (other, same) = run_ranks(2, on_ranks)
    assert other == {}
    assert equal(first, whole)
    assert equal(whole, same)
    file = io.BytesIO()
    torch.save(first, file)
    file.seek(0)
    assert equal(torch.load(file, weights_only=True), first)


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@on_ranks(2, "hosts")
def test_an_optimizer_that_is_sharded_and_saved_in_inference_mode(rank):
    """As by a function that evaluates and saves."""
    model = lockstep.replicate(nn.Linear(3, 1), process_group=rank.group)
    with torch.inference_mode():
        optimizer = shard_optimizer(adamw(model.parameters()))
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        with torch.inference_mode():
            state = full_state_dict(optimizer, all_ranks=True)
        assert equal(state, full_state_dict(optimizer, all_ranks=True))
        optimizer.load_state_dict(state)


@without_sharding_too(2)
def test_hooks_of_state_dicts_run(rank, sharded):
    _, optimizer = begun(rank, sharded=sharded, steps=1)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda given: seen.append("before state_dict"))
    optimizer.register_state_dict_post_hook(lambda given, state: {**state, "more": len(state["state"])})
    optimizer.register_load_state_dict_pre_hook(lambda given, state: seen.append(state.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda given: seen.append("loaded"))
    state = full_state_dict(optimizer, all_ranks=True)
    optimizer.load_state_dict(state)
    return seen, state["more"], full_state_dict(optimizer, all_ranks=True)


def test_a_slice_can_be_copied_and_says_what_to_do_when_it_is_read():
    def slices(rank):
        model, optimizer = begun(rank, steps=1)
        moment = optimizer.state_dict()["state"][2 * rank.rank]["exp_avg"]
        assert isinstance(moment, StateSlice)
        assert moment.shape == model[2 * rank.rank].weight.shape
        assert moment is not optimizer.state[model[2 * rank.rank].weight]["exp_avg"]
        copied = copy.deepcopy(moment)
        assert torch.equal(copied.local, moment.local)
        assert copied.local.data_ptr() != moment.local.data_ptr()
        for use in (lambda: moment + 1, moment.sum, lambda: torch.save(moment, io.BytesIO())):
            with pytest.raises(ShardingError, match=r"each rank has a slice .*full_state_dict"):
                use()
        assert repr(moment).startswith("StateSlice(0:1850 of shape (50, 37)" if not rank.rank else "StateSlice(")

        return optimizer.state_dict()

    given = run_ranks(2, slices)

    def elsewhere(rank):
        optimizer = made(adamw, replicated(rank), True)
        with pytest.raises(LayoutError, match="was made by another number of ranks"):
            optimizer.load_state_dict(given[0])

    run_ranks(3, elsewhere)


@without_sharding_too(2)
def test_the_fingerprint_is_that_of_the_plain_optimizer(rank, sharded):
    model, optimizer = begun(rank, sharded=sharded)
    before = lockstep.shares.fingerprint(model, optimizer)
    train(rank, model, optimizer, range(2))
    return before, lockstep.shares.fingerprint(model, optimizer)


@on_ranks(2)
def test_a_change_through_the_state_is_refused_and_says_how_to_begin_anew(rank):
    model, optimizer = begun(rank, steps=2)
    weight = next(iter(optimizer.state))
    for change in (
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.pop(weight),
        lambda: optimizer.state.__setitem__(weight, {}),
        lambda: optimizer.state[weight].update(exp_avg=torch.zeros_like(weight)),
        lambda: (setattr(optimizer, "state", {}), optimizer.step()),
    ):
        with pytest.raises(ShardingError, match=r"cannot be changed through optimizer\.state"):
            change()
    optimizer.load_state_dict({**full_state_dict(optimizer, all_ranks=True), "state": {}})
    before = values(model)
    train(rank, model, optimizer, range(1))
    assert full_state_dict(optimizer, all_ranks=True)["state"][0]["step"].item() == 1
    assert equal(before, values(model)) is False


@on_ranks(2)
def test_a_parameter_that_was_taken_out_of_its_group_has_no_state(rank):
    model, optimizer = begun(rank, steps=1)
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    train(rank, model, optimizer, range(1, 2))
    optimizer.load_state_dict(optimizer.state_dict())
    assert sorted(full_state_dict(optimizer, all_ranks=True)["state"]) == [0, 1, 2, 3, 4]


@on_ranks(2)
def test_a_sharded_state_dict_loads_into_the_same_number_of_ranks(rank):
    model, optimizer = begun(rank, steps=2)
    kept, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(rank, model, optimizer, range(2, 4))
    after = results(model, optimizer)
    model.load_state_dict(weights)
    optimizer.load_state_dict(kept)
    train(rank, model, optimizer, range(2, 4))
    assert equal(after, results(model, optimizer))


# --------------------------------------------------------------------- torch.distributed.checkpoint


def dcp_save(rank, folder):
    """The whole state of each of the optimizers."""
    found = {}
    for name, make in MAKE.items():
        model, optimizer = begun(rank, make, steps=3)
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / name)
        found[name] = full_state_dict(optimizer, all_ranks=True)
    return found


def dcp_load(rank, folder, sharded):
    found = {}
    for name, make in MAKE.items():
        model, optimizer = begun(rank, make, sharded=sharded, steps=1)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder / name)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        found[name] = full_state_dict(optimizer, all_ranks=True)
    return found


@pytest.mark.parametrize(
    ("saved", "loaded", "sharded"), [(2, 3, True), (3, 1, False), pytest.param(1, 2, True, marks=pytest.mark.around)]
)
@pytest.mark.numpy
def test_distributed_checkpoints_are_saved_and_loaded_on_any_number_of_ranks(saved, loaded, sharded, tmp_path):
    expected = run_processes(saved, dcp_save, tmp_path)[0]
    assert all(equal(each, expected) for each in run_processes(loaded, dcp_load, tmp_path, sharded))


@pytest.mark.numpy
@on_processes(2)
def test_distributed_checkpoints_by_names(rank, tmp_path):
    """As PyTorch's guide does it: names instead of numbers, and state that is made when it is asked for."""
    model, optimizer = begun(rank, steps=2)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    expected = full_state_dict(optimizer, all_ranks=True)
    fresh = replicated(rank, network)
    other = made(adamw, fresh, True)
    state = {"optimizer": get_optimizer_state_dict(fresh, other)}
    dcp.load(state, checkpoint_id=tmp_path)
    options = StateDictOptions(strict=False)  # a rank has no state of what others step alone
    set_optimizer_state_dict(fresh, other, state["optimizer"], options=options)
    found = full_state_dict(other, all_ranks=True)
    assert equal(expected["state"], found["state"])


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (1, 4, 1, 3)])
def test_blocks_are_the_elements_of_a_range_in_order(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            blocks = blocks_of(shape, start, stop)
            places = [tuple(slice(o, o + n) for o, n in zip(*block, strict=True)) for block in blocks]
            found = [value for place in places for value in whole[place].reshape(-1).tolist()]
            assert found == list(range(start, stop))
            assert len(blocks) <= max(1, 2 * len(shape) - 1)


# ----------------------------------------------------------------------------- save() and resume()


def saving(rank, folder, sharded):
    model, optimizer = begun(rank, sharded=sharded, steps=2)
    lockstep.save(folder, model=model, optimizer=optimizer, group=rank.group)
    return full_state_dict(optimizer, all_ranks=True)


def resuming(rank, folder, sharded, trains_before):
    model, optimizer = begun(rank, sharded=sharded)
    if trains_before:
        train(rank, model, optimizer, range(1))
    assert lockstep.resume(folder, model=model, optimizer=optimizer, group=rank.group) is not None
    state = copy.deepcopy(full_state_dict(optimizer, all_ranks=True))  # of a plain one it is its own
    train(rank, model, optimizer, range(2, 4))
    return state, values(model)


@pytest.mark.filterwarnings("ignore:.*what each rank had of its own is not loaded")
@pytest.mark.parametrize(("saved", "resumed"), [(2, 3), (3, 2), (1, 2), (2, 1)])
def test_a_run_is_resumed_on_another_number_of_ranks_with_or_without_sharding(saved, resumed, tmp_path):
    expected = run_ranks(saved, saving, tmp_path, True)[0]
    sharded = run_ranks(resumed, resuming, tmp_path, True, True)
    assert equal(sharded[0][0], expected)
    assert equal(sharded, run_ranks(resumed, resuming, tmp_path, False, False))
    assert equal(torch.load(next(tmp_path.glob("save-*/optimizer.pt")), weights_only=True), expected)


@on_ranks(2)
def test_a_resume_that_fails_gives_back_the_slices(rank, tmp_path):
    saving(rank, tmp_path, True)
    _, optimizer = begun(rank, steps=3)
    before = full_state_dict(optimizer, all_ranks=True)
    other = nn.Linear(2, 3)
    with pytest.raises(lockstep.errors.CheckpointError):
        lockstep.resume(tmp_path, optimizer=optimizer, model=other, group=rank.group)
    assert equal(before, full_state_dict(optimizer, all_ranks=True))


@without_sharding_too(2)
def test_state_of_a_frozen_layer_is_kept_when_it_is_sharded_or_loaded(rank, sharded):
    model = replicated(rank)
    optimizer = adamw(model.parameters())
    train(rank, model, optimizer, range(2))
    model[2].requires_grad_(False)
    optimizer = shard_optimizer(optimizer) if sharded else optimizer
    train(rank, model, optimizer, range(2, 4))
    state = full_state_dict(optimizer, all_ranks=True)
    del optimizer
    optimizer = made(adamw, model, sharded)
    optimizer.load_state_dict(state)
    model[2].requires_grad_(True)
    train(rank, model, optimizer, range(4, 6))
    return values(model), sorted(full_state_dict(optimizer, all_ranks=True)["state"].items())


@pytest.mark.parametrize("whole", [True, False])
@without_sharding_too(2)
def test_state_of_a_group_that_was_added_is_loaded_before_its_first_step(rank, sharded, whole):
    model = replicated(rank)

    def built():
        optimizer = made(lambda _: adamw(model[0].parameters()), model, sharded)
        optimizer.add_param_group({"params": list(model[2:].parameters()), "lr": 0.02})
        return optimizer

    optimizer = built()
    train(rank, model, optimizer, range(2))
    state = full_state_dict(optimizer, all_ranks=True) if whole else copy.deepcopy(optimizer.state_dict())
    del optimizer
    optimizer = built()
    optimizer.load_state_dict(state)
    train(rank, model, optimizer, range(2, 4))
    return results(model, optimizer)


@without_sharding_too(2)
def test_state_of_another_dtype_and_place_is_cast_as_pytorch_does(rank, sharded):
    model, optimizer = begun(rank, sharded=sharded, steps=1)
    state = full_state_dict(optimizer, all_ranks=True)
    for each in state["state"].values():
        each["exp_avg"] = each["exp_avg"].double()
    optimizer.load_state_dict(state)
    train(rank, model, optimizer, range(1, 2))
    return full_state_dict(optimizer, all_ranks=True)


def test_an_unsharded_optimizer_gives_its_own_state_dict():
    parameters = [nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    assert full_state_dict(optimizer) == optimizer.state_dict()
    with pytest.raises(lockstep.errors.NotReplicableError, match="no parameter of this optimizer"):
        shard_optimizer(optimizer)
