"""Modules with something out of the ordinary: each is right on every rank, or refused by name on every rank."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import lockstep
import sim as simulator
from lockstep.errors import AgreementError, NotReplicableError
from processes import on_processes
from programs.networks import Applying
from programs.ranks import error_on_all, on_ranks, replicated, scalars, scalars_of
from small_modules import chain, one_weight, x_of
from threaded import run_ranks


def counts(counted):
    """A weight, and a buffer to which forward adds its input."""

    def forward(m, x):
        m.counted.add_(x.sum().detach())
        return m.weight * x

    return Applying(forward, (), weight=nn.Parameter(torch.ones(1)), counted=counted)


# ------------------------------------------------------------------------------------------------ buffers


def untie(net):
    net[1].counted = net[0].counted.clone()


def assign_a_checkpoint(net):
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [untie, assign_a_checkpoint])
@on_ranks(2)
def test_buffers_that_are_untied_are_both_made_equal(rank, change):
    shared = torch.zeros(1)
    net = replicated(rank, lambda: nn.Sequential(counts(shared), counts(shared)))
    net(x_of(rank)).sum().backward()
    change(net)
    net(x_of(rank)).sum().backward()
    assert all(rank.all_equal(layer.counted) for layer in net)
    assert torch.equal(net[0].counted, net[1].counted)


@on_ranks(2)
def test_buffers_that_are_tied_stay_tied(rank):
    net = lockstep.replicate(nn.Sequential(*(counts(torch.zeros(1)) for _ in range(2))), process_group=rank.group)
    net(x_of(rank)).sum().backward()
    net[1].counted = net[0].counted
    for _ in range(2):
        net[0].counted.mul(net[0].weight).sum().backward()
        assert net[1].counted is net[0].counted
        net(x_of(rank)).sum().backward()
    assert (net[0].counted.item(), net[1].counted is net[0].counted) == (5.0, True)


@on_ranks(2)
def test_buffers_of_a_layer_that_was_replaced_and_is_still_held(rank):
    net = replicated(rank, lambda: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    old = net[1]
    net[1] = nn.BatchNorm1d(1)
    x = torch.arange(4.0).view(4, 1) * (rank.rank + 1)
    net(x).sum().backward()
    assert rank.all_equal(net[1].running_mean)
    assert net[1].running_mean.item() != 0 == old.running_mean.item()


@pytest.mark.parametrize(("policy", "wanted"), [("rank0", [3.0, 3.0]), ("mean", [3.5, 3.5]), ("local", [3.0, 4.0])])
@on_ranks(2)
def test_expanded_buffers(rank, policy, wanted):
    net = counts(torch.zeros(1))
    net.register_buffer("wide", torch.full((1,), rank.rank + 1.0).expand(3))
    lockstep.replicate(net, process_group=rank.group, buffer_policy=policy)
    assert net.wide.tolist() == [1.0] * 3
    net.wide = torch.full((1,), rank.rank + 3.0).expand(3)
    net(x_of(rank)).sum().backward()
    assert net.wide.tolist() == [wanted[rank.rank]] * 3


# --------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("make", [lockstep.replicate, lockstep.DistributedDataParallel])
@on_ranks(2)
def test_an_expanded_parameter_is_refused_on_every_rank(rank, make):
    net = nn.Linear(1, 3, bias=False)
    net.weight = nn.Parameter(torch.zeros(1, 1).expand(3, 1))
    with pytest.raises(NotReplicableError, match="parameter weight has elements that share memory"):
        make(net, process_group=rank.group)


@pytest.mark.parametrize("make", [lambda **given: nn.Embedding(4, 2, **given), lambda **g: nn.EmbeddingBag(4, 2, **g)])
@on_ranks(2)
def test_embeddings_that_rewrite_their_weights_are_refused(rank, make):
    net = nn.ModuleDict({"words": make(max_norm=1.0)})
    with pytest.raises(NotReplicableError, match=r"parameter words\.weight belongs to .* max_norm=1"):
        lockstep.replicate(net, process_group=rank.group)
    net = nn.ModuleDict({"words": make(max_norm=1.0), "head": nn.Linear(1, 1)})
    lockstep.replicate(net, process_group=rank.group, params_and_buffers_to_ignore=["words.weight"])
    frozen = make(max_norm=1.0)
    frozen.weight.requires_grad_(False)
    lockstep.replicate(frozen, process_group=rank.group)


def test_sparse_gradients_on_some_ranks_only_are_an_error_on_every_rank():
    message = error_on_all(2, lambda rank: replicated(rank, lambda: nn.Embedding(4, 2, sparse=rank.rank == 0)))
    assert "parameter weight" in message
    assert "rank 0 has float32 of shape (4, 2), trained, sparse gradients; rank 1 has" in message


@pytest.mark.parametrize("make", [lockstep.replicate, lockstep.DistributedDataParallel])
@pytest.mark.parametrize("kind", ["meta", "lazy"])
@on_ranks(2)
def test_what_is_ignored_by_name_may_lie_elsewhere_or_have_no_values(rank, make, kind):
    odd = nn.Embedding(3, 2, device="meta") if kind == "meta" else nn.LazyLinear(2, bias=False)
    net = Applying(lambda m, x: m.head(x), (), words=odd, head=one_weight())
    net = make(net, process_group=rank.group, params_and_buffers_to_ignore=["words.weight"])
    net(x_of(rank)).sum().backward()
    assert next(p.grad.item() for p in net.parameters() if p.grad is not None) == 1.5


# ------------------------------------------------------------------------------------- what is changed in place

LARGE = 1 << 20  # elements of a gradient that travels alone

CONVERSIONS = {
    "the second of two in a bucket": (1, True),
    "one that no rank uses": (1, False),
    "a large one": (LARGE, False),
}


@pytest.mark.parametrize(("size", "used"), CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_layer_of_another_dtype_on_one_rank_is_an_error_on_every_rank(size, used):
    def call(rank):
        net = replicated(rank, lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, size, bias=size == 1)))
        net(x_of(rank)).sum().backward()
        net.zero_grad()
        if rank.rank == 1:
            net[1].bfloat16()
        out = net[0](x_of(rank))
        (net[1](out.to(net[1].weight.dtype)) if used else out).sum().backward()

    words = r"ranks differ in parameter 1\.weight: rank 0 has float32 .*; rank 1 has bfloat16"
    assert re.match(words, error_on_all(2, call))


def transform(state, bucket):
    return bucket.buffer()


def other_transform(state, bucket):
    return bucket.buffer()


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("later", [False, True], ids=["before the first backward", "later"])
@pytest.mark.parametrize(("hook", "name"), [(None, "none"), (other_transform, "other_transform")])
def test_communication_hooks_that_differ_are_an_error_on_every_rank(hook, name, later, hosts):
    def call(rank):
        net = replicated(rank)
        if later:
            net(x_of(rank)).sum().backward()
        chosen = transform if rank.rank == 0 else hook
        if chosen is not None:
            net.register_comm_hook(None, chosen)
        net(x_of(rank)).sum().backward()

    words = f"ranks differ in communication hook: rank 0 has transform; rank 1 has {name}"
    assert words in error_on_all(2, call, hosts=hosts)


@on_ranks(2)
def test_a_communication_hook_that_is_registered_late_begins_one_backward_later(rank):
    net = replicated(rank)
    net(x_of(rank)).sum().backward()
    net.register_comm_hook(None, lambda state, bucket: bucket.buffer() * 2)
    assert [scalars_of(net, loss=net(x_of(rank)).sum()) for _ in range(3)] == [[1.5], [3.0], [3.0]]


# --------------------------------------------------------------------------- hooks that keep something for each bucket


class Feedback:
    """Adds what a bucket of that number lacked the last time, as error feedback does."""

    def __init__(self):
        self.kept = {}

    def __call__(self, state, bucket):
        own = bucket.buffer()
        kept = self.kept.get(bucket.index(), torch.zeros_like(own))
        self.kept[bucket.index()] = torch.zeros_like(own)
        return own + kept


@on_ranks(2)
def test_hooks_that_keep_something_for_each_bucket_go_on_after_unfreezing(rank):
    net = chain(2)
    net[0].requires_grad_(False)
    lockstep.replicate(net, process_group=rank.group)
    net.register_comm_hook(None, Feedback())
    for step in range(5):
        net[0].requires_grad_(step >= 2)
        grads = scalars_of(net, loss=net(x_of(rank)).sum())
    assert grads == [1.5, 1.5]


@pytest.mark.parametrize("hooked", [False, True])
@on_ranks(2)
def test_a_module_that_gets_ready_in_inference_mode_can_be_trained(rank, hooked):
    net = lockstep.replicate(nn.Linear(1, 1, bias=False, device="meta"), process_group=rank.group)
    if hooked:
        net.register_comm_hook(None, transform)
    net.to_empty(device="cpu")
    nn.init.ones_(net.weight)
    with torch.inference_mode():
        net(x_of(rank))
    net(x_of(rank)).sum().backward()
    assert net.weight.grad.item() == 1.5


@on_ranks(2)
def test_a_copy_of_a_module_that_was_parametrized_after_replicating_is_plain_and_can_be_replicated(rank):
    net = replicated(rank)
    parametrize.register_parametrization(net, "weight", nn.Identity())
    copied = copy.deepcopy(net)
    copied(x_of(rank)).sum().backward()
    assert scalars(copied) == [rank.rank + 1.0]
    copied.zero_grad()
    lockstep.replicate(copied, process_group=rank.group)
    copied(x_of(rank)).sum().backward()
    assert scalars(copied) == [1.5]


@on_ranks(2)
def test_a_tensor_that_was_swapped_for_one_without_a_place_in_the_plan(rank):
    """A frozen weight, which the plan has left out, is exchanged for a trained one; its hook is gone."""
    model = replicated(rank, lambda: nn.ModuleList([one_weight(), one_weight()]))
    model[1].weight.requires_grad_(False)
    for _ in range(2):
        model[0](x_of(rank)).sum().backward()
        model.zero_grad()
    torch.utils.swap_tensors(model[1].weight, nn.Parameter(torch.ones(1, 1)))
    (model[0](x_of(rank)) + model[1](x_of(rank))).sum().backward()
    assert scalars(model) == [1.5, 1.5]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_modules_of_torchscript_are_refused_by_name():
    """At the start, or when one comes later; none is needed on all ranks to know."""

    both = [torch.jit.script(nn.Linear(1, 1)) for _ in range(2)]  # not in threads: that is not safe

    def work(rank):
        scripted = both[rank.rank]
        with pytest.raises((NotReplicableError, AgreementError), match="0 is a TorchScript module"):
            lockstep.replicate(nn.Sequential(scripted), process_group=rank.group)(torch.ones(1, 1))
        for group in rank.group, None:  # None: there is no group yet
            with pytest.raises((NotReplicableError, AgreementError), match="the module is a TorchScript module"):
                lockstep.replicate(scripted, process_group=group)
        model = replicated(rank, lambda: nn.Sequential(nn.Linear(1, 1)))
        model.append(scripted)
        with pytest.raises(AgreementError, match="1 is a TorchScript module"):
            model(torch.ones(1, 1)).sum().backward()

    run_ranks(2, work)


@on_processes(2)
def test_what_one_rank_has_on_an_accelerator_is_named(rank):
    """Rank 1 moves its module there before it is replicated, or before the third step."""
    assert not isinstance(found := simulator.load(1), str), found
    words = r"rank 0 has float32 of shape \(1, 1\).*rank 1 has float32 of shape \(1, 1\), on sim"
    for step in (0, 2):
        module = one_weight()
        with pytest.raises(AgreementError, match=words):
            for at in range(step + 1):
                if at == step and rank.rank == 1:
                    module.to("sim")
                if at == 0:
                    lockstep.replicate(module)
                module(torch.ones(2, 1, device=module.weight.device)).sum().backward()
        assert at == step
    module = nn.BatchNorm1d(2, affine=False).to("sim" if rank.rank else "cpu")
    with pytest.raises(AgreementError, match=r"buffer running_mean.*on sim"):
        lockstep.replicate(module)
