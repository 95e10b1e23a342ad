"""Use that makes no sense is an error that says what, where, and what to do; the module stays what it was."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import (
    AgreementError,
    CommunicationError,
    LayoutError,
    NotReplicableError,
    OptionError,
    PeerError,
)
from programs.ranks import on_ranks, replicated
from small_modules import x_of


def alone():
    """A group of this process."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


def replicate(module):
    return lockstep.replicate(module, process_group=alone())


def wrap(module, **options):
    return lockstep.DistributedDataParallel(module, process_group=alone(), **options)


# ---------------------------------------------------------------------------------- what is replicated


@pytest.mark.parametrize("call", [replicate, wrap])
@pytest.mark.parametrize("value", [None, 3, [nn.Linear(1, 1)], nn.Linear])
def test_only_modules_are_replicated(call, value):
    with pytest.raises(OptionError, match=r"expected a torch\.nn\.Module to replicate, got "):
        call(value)


def test_parameters_are_leaves():
    module = nn.Linear(1, 1)
    module._parameters["weight"] = module.weight * 2
    with pytest.raises(NotReplicableError, match="parameter weight is not a leaf of autograd; register a Parameter"):
        replicate(module)
    assert type(module) is nn.Linear


def test_parameters_that_are_not_initialised_when_they_are_needed():
    lazy = replicate(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(NotReplicableError, match=r"0\.weight is not initialised\. Modules with uninit"):
        lazy(torch.ones(1, 3))
    lazy[0](torch.ones(1, 3))
    lazy(torch.ones(1, 3)).sum().backward()
    assert lazy[0].bias.grad.tolist() == [1.0, 1.0]


def test_modules_without_parameters():
    assert replicate(nn.Sequential(nn.ReLU()))(torch.ones(1)).item() == 1.0


# ---------------------------------------------------------------------------------- no group


def test_without_a_group_the_wrapper_refuses_and_a_replicated_module_refuses_when_it_is_used():
    with pytest.raises(CommunicationError, match="Default process group has not been initialized"):
        lockstep.DistributedDataParallel(nn.Linear(1, 1))
    model = lockstep.replicate(nn.Linear(1, 1))
    message = "used before there is a process group; put the training into `with lockstep.session"
    with pytest.raises(CommunicationError, match=message):
        model(torch.ones(1, 1))
    with pytest.raises(CommunicationError, match=message), lockstep.accumulate(model, weight=1):
        pass
    with pytest.raises(CommunicationError, match=message):
        lockstep.distributed.training_state_dict(model)
    assert lockstep.replicate.state(model).ready is False
    assert lockstep.replicate.state(model).process_group is None
    with model.no_sync():
        pass
    model.register_comm_hook(None, lambda state, bucket: bucket.buffer())


def test_means_and_checks_need_a_group():
    for call in (lockstep.loop.mean_over_ranks, lockstep.check_in_sync):
        with pytest.raises(CommunicationError, match="there is no process group yet"):
            call(nn.Linear(1, 1) if call is lockstep.check_in_sync else torch.ones(1))


# ---------------------------------------------------------------------------------- not replicated


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.ReLU()])
def test_functions_for_replicated_modules_say_what_they_got(module):
    calls = {
        "accumulate": lambda: lockstep.accumulate(module).__enter__(),
        "statistics": lambda: lockstep.loop.statistics(module),
        "training_state_dict": lambda: lockstep.distributed.training_state_dict(module),
        "load_training_state_dict": lambda: lockstep.distributed.load_training_state_dict(module, {}),
    }
    for name, call in calls.items():
        with pytest.raises(NotReplicableError) as caught:
            call()
        assert str(caught.value).startswith(f"{name}() got a {type(module).__name__} that is not replicated; pass the")


def test_a_copy_is_not_replicated():
    with pytest.raises(NotReplicableError, match=r"statistics\(\) got a Linear that is not replicated"):
        lockstep.loop.statistics(copy.deepcopy(replicate(nn.Linear(1, 1))))
    assert lockstep.replicate.state(nn.Linear(1, 1)) is None


@pytest.mark.parametrize("weight", ["four", [1, 2], torch.ones(2), object()])
def test_weights_are_numbers(weight):
    model = replicate(nn.Linear(2, 2))
    with pytest.raises((TypeError, ValueError, RuntimeError)), lockstep.accumulate(model, weight=weight):
        pass
    model(torch.ones(1, 2)).sum().backward()
    assert model.bias.grad.tolist() == [1.0, 1.0]


# ---------------------------------------------------------------------------------- changed afterwards


def reshaped(model):
    model.weight.data = torch.ones(3, 2)
    model.bias.data = torch.ones(3)


def retyped(model):
    model.to(torch.float64)


def reshaped_without_bias(model):
    model.weight.data = torch.ones(3, 2)


@on_ranks(2)
def test_a_parameter_that_changes_amid_backward_is_an_error_on_every_rank(rank):
    """It had another shape when the pass began."""
    model = replicated(rank, lambda: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    out = model[0](torch.ones(1, 2))
    if rank.rank == 1:
        out.register_hook(lambda grad: reshaped(model[1]))
    with pytest.raises(LayoutError if rank.rank == 1 else PeerError, match="backward"):
        out.sum().backward()


@on_ranks(2)
def test_a_parameter_that_is_replaced_is_trained_on_this_rank_alone_as_with_any_new_one(rank):
    model = replicated(rank)
    model.extra = nn.Parameter(torch.ones(1))
    (model(x_of(rank)) * model.extra).sum().backward()
    assert rank.all_equal(model.weight.grad)


# ---------------------------------------------------------------------------------- mean_over_ranks


def test_means_of_what_cannot_be_averaged():
    group = alone()
    assert lockstep.loop.mean_over_ranks([], group) == ()
    sparse = torch.ones(2, requires_grad=True) * torch.eye(2).to_sparse()
    for each, name in ((1.0, "a float"), (None, "None"), (torch.ones(2).int(), "int32"), (sparse, "sparse_coo")):
        with pytest.raises(OptionError, match=rf"tensor 1 given to mean_over_ranks\(\) is .*{name}"):
            lockstep.loop.mean_over_ranks([torch.ones(1), each], group)
    with pytest.raises((TypeError, AttributeError)):
        lockstep.loop.mean_over_ranks(None, group)


# ---------------------------------------------------------------------------------- methods of the wrapper


def test_a_module_that_is_gone_cannot_be_used():
    model = replicate(nn.Linear(2, 2))
    state = lockstep.replicate.state(model)
    del model
    assert state.options.dim == 0


@on_ranks(2)
def test_a_frozen_layer_that_is_retyped_on_one_rank_and_trained_on_another(rank):
    """It had no place among the gradients yet."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    lockstep.replicate(model, process_group=rank.group)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    if rank.rank == 1:
        model[1].double()
    else:
        model[1].requires_grad_(True)
    model.zero_grad()
    with pytest.raises(AgreementError, match=r"ranks differ in parameter 1\.weight"):
        model[1](model[0](torch.ones(1, 2)).to(model[1].weight.dtype)).sum().backward()
    assert [p.grad for p in model[1].parameters()] == [None, None]


CHANGED = (
    (PeerError, "backward failed on rank 1"),
    (LayoutError, r"parameter 1\.weight was torch.float32, shape \(2, 2\), .* when backward began, and is torch.float"),
)


@pytest.mark.parametrize("change", [reshaped, retyped])
@pytest.mark.parametrize("cap", [None, 1e-6], ids=["one bucket", "a bucket each"])
@on_ranks(2)
def test_a_layer_that_changes_on_one_rank_while_backward_runs(rank, change, cap):
    """It changes when all gradients have come, and those of a bucket of their own have left."""
    model = replicated(rank, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), bucket_cap_mb=cap)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    x = torch.ones(1, 2, requires_grad=True)
    if rank.rank == 1:
        x.register_hook(lambda _: change(model[1]) and None)
    error, words = CHANGED[rank.rank]
    with pytest.raises(error, match=words):
        model(x).sum().backward()
    assert [p.grad for p in model.parameters()] == [None] * 4


@on_ranks(2)
def test_a_frozen_layer_that_is_retyped_while_another_rank_trains_it(rank):
    """It had no place among the gradients yet, and gets one in this pass."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    lockstep.replicate(model, process_group=rank.group)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    if rank.rank == 0:
        model[1].requires_grad_(True)
    output = model(torch.ones(1, 2))
    if rank.rank == 1:
        output.register_hook(lambda _: model[1].double() and None)
    error, words = CHANGED[rank.rank]
    with pytest.raises(error, match=words):
        output.sum().backward()
    assert [p.grad for p in model.parameters()] == [None] * 4


@pytest.mark.parametrize("change", [reshaped, reshaped_without_bias, retyped])
@pytest.mark.parametrize(
    ("size", "clears"),
    [(2, False), (2, True), (1100, False), (1100, True)],
    ids=["side by side", "side by side, cleared", "alone", "alone, cleared"],
)
@on_ranks(2)
def test_a_layer_that_changes_on_a_rank_that_does_not_use_it(rank, change, size, clears):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(size, size)])
    model[1].weight.data.fill_(1.0)
    lockstep.replicate(model, process_group=rank.group)
    for _ in range(2):
        sum(each(torch.ones(1, each.in_features)).sum() for each in model).backward()
        model.zero_grad(set_to_none=clears)
    if rank.rank == 1:
        change(model[1])
    with pytest.raises(AgreementError, match=r"ranks differ in parameter 1\.weight"):
        each = model[1 - rank.rank]
        each(torch.ones(1, each.in_features)).sum().backward()
