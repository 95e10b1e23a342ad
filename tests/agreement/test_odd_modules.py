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
from processes import run_processes
from small_modules import one_weight, x_of
from threaded import run_ranks


class Counts(nn.Module):
    """A weight, and a buffer to which forward adds its input."""

    def __init__(self, counted):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("counted", counted)

    def forward(self, x):
        self.counted.add_(x.sum().detach())
        return self.weight * x


def rows(rank):
    return torch.full((1, 1), rank.rank + 1.0)


# ------------------------------------------------------------------------------------------------ buffers


def untie(net):
    net[1].counted = net[0].counted.clone()


def assign_a_checkpoint(net):
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [untie, assign_a_checkpoint])
def test_buffers_that_are_untied_are_both_made_equal(change):
    def call(rank):
        shared = torch.zeros(1)
        net = lockstep.replicate(nn.Sequential(Counts(shared), Counts(shared)), process_group=rank.group)
        net(rows(rank)).sum().backward()
        change(net)
        net(rows(rank)).sum().backward()
        return [layer.counted.item() for layer in net]

    first, second = run_ranks(2, call)
    assert first == second
    assert first[0] == first[1]


def test_buffers_that_are_tied_stay_tied():
    def call(rank):
        net = lockstep.replicate(nn.Sequential(*(Counts(torch.zeros(1)) for _ in range(2))), process_group=rank.group)
        net(rows(rank)).sum().backward()
        net[1].counted = net[0].counted
        for _ in range(2):
            net[0].counted.mul(net[0].weight).sum().backward()
            assert net[1].counted is net[0].counted
            net(rows(rank)).sum().backward()
        return net[0].counted.item(), net[1].counted is net[0].counted

    assert run_ranks(2, call) == [(5.0, True)] * 2


def test_buffers_of_a_layer_that_was_replaced_and_is_still_held():
    def call(rank):
        net = lockstep.replicate(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), process_group=rank.group)
        old = net[1]
        net[1] = nn.BatchNorm1d(1)
        x = torch.arange(4.0).view(4, 1) * (rank.rank + 1)
        net(x).sum().backward()
        return net[1].running_mean.item(), old.running_mean.item()

    first, second = run_ranks(2, call)
    assert first == second
    assert first[0] != 0 == first[1]


@pytest.mark.parametrize("policy", ["rank0", "mean", "local"])
def test_expanded_buffers(policy):
    def call(rank):
        net = Counts(torch.zeros(1))
        net.register_buffer("wide", torch.full((1,), rank.rank + 1.0).expand(3))
        lockstep.replicate(net, process_group=rank.group, buffer_policy=policy)
        at_first = net.wide.tolist()
        net.wide = torch.full((1,), rank.rank + 3.0).expand(3)
        net(rows(rank)).sum().backward()
        return at_first, net.wide.tolist()

    wanted = {"rank0": [3.0, 3.0], "mean": [3.5, 3.5], "local": [3.0, 4.0]}[policy]
    at_first = [1.0, 1.0]
    assert run_ranks(2, call) == [([a] * 3, [b] * 3) for a, b in zip(at_first, wanted, strict=True)]


# --------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("make", [lockstep.replicate, lockstep.DistributedDataParallel])
def test_an_expanded_parameter_is_refused_on_every_rank(make):
    def call(rank):
        net = nn.Linear(1, 3, bias=False)
        net.weight = nn.Parameter(torch.zeros(1, 1).expand(3, 1))
        with pytest.raises(NotReplicableError, match="parameter weight has elements that share memory"):
            make(net, process_group=rank.group)

    run_ranks(2, call)


@pytest.mark.parametrize("make", [lambda **given: nn.Embedding(4, 2, **given), lambda **g: nn.EmbeddingBag(4, 2, **g)])
def test_embeddings_that_rewrite_their_weights_are_refused(make):
    def call(rank):
        net = nn.ModuleDict({"words": make(max_norm=1.0)})
        with pytest.raises(NotReplicableError, match=r"parameter words\.weight belongs to .* max_norm=1"):
            lockstep.replicate(net, process_group=rank.group)
        net = nn.ModuleDict({"words": make(max_norm=1.0), "head": nn.Linear(1, 1)})
        lockstep.replicate(net, process_group=rank.group, params_and_buffers_to_ignore=["words.weight"])
        frozen = make(max_norm=1.0)
        frozen.weight.requires_grad_(False)
        lockstep.replicate(frozen, process_group=rank.group)

    run_ranks(2, call)


def test_sparse_gradients_on_some_ranks_only_are_an_error_on_every_rank():
    def call(rank):
        net = nn.Embedding(4, 2, sparse=rank.rank == 0)
        with pytest.raises(AgreementError) as caught:
            lockstep.replicate(net, process_group=rank.group)
        return str(caught.value)

    first, second = run_ranks(2, call)
    assert first == second
    assert "parameter weight" in first
    assert "rank 0 has float32 of shape (4, 2), trained, sparse gradients; rank 1 has" in first


class Partly(nn.Module):
    """An embedding elsewhere, and a layer."""

    def __init__(self, embedding):
        super().__init__()
        self.words = embedding
        self.head = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize("make", [lockstep.replicate, lockstep.DistributedDataParallel])
@pytest.mark.parametrize("kind", ["meta", "lazy"])
def test_what_is_ignored_by_name_may_lie_elsewhere_or_have_no_values(make, kind):
    def call(rank):
        odd = nn.Embedding(3, 2, device="meta") if kind == "meta" else nn.LazyLinear(2, bias=False)
        net = make(Partly(odd), process_group=rank.group, params_and_buffers_to_ignore=["words.weight"])
        net(rows(rank)).sum().backward()
        return next(p.grad.item() for p in net.parameters() if p.grad is not None)

    assert run_ranks(2, call) == [1.5, 1.5]


# ------------------------------------------------------------------------------------- what is changed in place

LARGE = 1 << 20  # elements of a gradient that travels alone

CONVERSIONS = {
    "the second of two in a bucket": (lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), True),
    "one that no rank uses": (lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), False),
    "a large one": (lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, LARGE, bias=False)), False),
}


@pytest.mark.parametrize(("make", "used"), CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_layer_of_another_dtype_on_one_rank_is_an_error_on_every_rank(make, used):
    def call(rank):
        net = lockstep.replicate(make(), process_group=rank.group)
        net(rows(rank)).sum().backward()
        net.zero_grad()
        if rank.rank == 1:
            net[1].bfloat16()
        with pytest.raises(AgreementError) as caught:
            out = net[0](rows(rank))
            (net[1](out.to(net[1].weight.dtype)) if used else out).sum().backward()
        return str(caught.value)

    first, second = run_ranks(2, call)
    assert first == second
    assert re.match(r"ranks differ in parameter 1\.weight: rank 0 has float32 .*; rank 1 has bfloat16", first)


def transform(state, bucket):
    return bucket.buffer()


def other_transform(state, bucket):
    return bucket.buffer()


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("later", [False, True], ids=["before the first backward", "later"])
@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (None, "ranks differ in communication hook: rank 0 has transform; rank 1 has none"),
        (other_transform, "ranks differ in communication hook: rank 0 has transform; rank 1 has other_transform"),
    ],
    ids=["on one rank only", "another one"],
)
def test_communication_hooks_that_differ_are_an_error_on_every_rank(hook, words, later, hosts):
    def call(rank):
        net = lockstep.replicate(nn.Linear(1, 1, bias=False), process_group=rank.group)
        if later:
            net(rows(rank)).sum().backward()
        chosen = transform if rank.rank == 0 else hook
        if chosen is not None:
            net.register_comm_hook(None, chosen)
        with pytest.raises(AgreementError) as caught:
            net(rows(rank)).sum().backward()
        return str(caught.value)

    for message in run_ranks(2, call, hosts=hosts):
        assert words in message


def test_a_communication_hook_that_is_registered_late_begins_one_backward_later():
    def call(rank):
        net = lockstep.replicate(nn.Linear(1, 1, bias=False), process_group=rank.group)
        net(rows(rank)).sum().backward()
        net.register_comm_hook(None, lambda state, bucket: bucket.buffer() * 2)
        seen = []
        for _ in range(3):
            net.zero_grad()
            net(rows(rank)).sum().backward()
            seen.append(net.weight.grad.item())
        return seen

    assert run_ranks(2, call) == [[1.5, 3.0, 3.0]] * 2


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


def test_hooks_that_keep_something_for_each_bucket_go_on_after_unfreezing():
    def call(rank):
        net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for layer in net:
            nn.init.ones_(layer.weight)
        net[0].requires_grad_(False)
        lockstep.replicate(net, process_group=rank.group)
        net.register_comm_hook(None, Feedback())
        for step in range(5):
            net[0].requires_grad_(step >= 2)
            net.zero_grad()
            net(rows(rank)).sum().backward()
        return [p.grad.item() for p in net.parameters()]

    assert run_ranks(2, call) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("hooked", [False, True])
def test_a_module_that_gets_ready_in_inference_mode_can_be_trained(hooked):
    def call(rank):
        net = lockstep.replicate(nn.Linear(1, 1, bias=False, device="meta"), process_group=rank.group)
        if hooked:
            net.register_comm_hook(None, transform)
        net.to_empty(device="cpu")
        nn.init.ones_(net.weight)
        with torch.inference_mode():
            net(rows(rank))
        net(rows(rank)).sum().backward()
        return net.weight.grad.item()

    assert run_ranks(2, call) == [1.5, 1.5]


def test_a_copy_of_a_module_that_was_parametrized_after_replicating_is_plain_and_can_be_replicated():
    def call(rank):
        net = lockstep.replicate(nn.Linear(1, 1, bias=False), process_group=rank.group)
        nn.init.ones_(net.weight)
        parametrize.register_parametrization(net, "weight", nn.Identity())
        copied = copy.deepcopy(net)
        copied(rows(rank)).sum().backward()
        local = copied.parametrizations.weight.original.grad.item()
        copied.zero_grad()
        lockstep.replicate(copied, process_group=rank.group)
        copied(rows(rank)).sum().backward()
        return local, copied.parametrizations.weight.original.grad.item()

    assert run_ranks(2, call) == [(1.0, 1.5), (2.0, 1.5)]


def swapped_out_of_the_plan(rank):
    """A frozen weight, which the plan has left out, is exchanged for a trained one; its hook is gone."""
    model = lockstep.replicate(nn.ModuleList([one_weight(), one_weight()]), process_group=rank.group)
    model[1].weight.requires_grad_(False)
    for _ in range(2):
        model[0](x_of(rank)).sum().backward()
        model.zero_grad()
    torch.utils.swap_tensors(model[1].weight, nn.Parameter(torch.ones(1, 1)))
    (model[0](x_of(rank)) + model[1](x_of(rank))).sum().backward()
    return [parameter.grad.item() for parameter in model.parameters()]


def test_a_tensor_that_was_swapped_for_one_without_a_place_in_the_plan():
    assert run_ranks(2, swapped_out_of_the_plan) == [[1.5, 1.5]] * 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_modules_of_torchscript_are_refused_by_name():
    """At the start, or when one comes later; none is needed on all ranks to know."""

    both = [torch.jit.script(nn.Linear(1, 1)) for _ in range(2)]  # not in threads: that is not safe

    def work(rank):
        scripted = both[rank.rank]
        with pytest.raises((NotReplicableError, AgreementError), match="0 is a TorchScript module"):
            lockstep.replicate(nn.Sequential(scripted), process_group=rank.group)(torch.ones(1, 1))
        model = lockstep.replicate(nn.Sequential(nn.Linear(1, 1)), process_group=rank.group)
        model.append(scripted)
        with pytest.raises(AgreementError, match="1 is a TorchScript module"):
            model(torch.ones(1, 1)).sum().backward()
        return True

    assert run_ranks(2, work) == [True, True]


def moved_on_one_rank(rank, step, make):
    """What is raised if rank 1 moves the module to an accelerator before that step; 0: before it is replicated."""
    assert not isinstance(found := simulator.load(1), str), found
    module = make()
    try:
        for at in range(3):
            if at == step and rank.rank == 1:
                module.to("sim")
            if at == 0:
                lockstep.replicate(module)
            module(torch.ones(2, 1, device=next(module.parameters()).device)).sum().backward()
    except AgreementError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("step", [0, 2])
def test_a_module_that_one_rank_has_on_an_accelerator_is_named(step):
    first, second = run_processes(2, moved_on_one_rank, step, one_weight)
    assert first == second
    assert re.search(r"rank 0 has float32 of shape \(1, 1\).*rank 1 has float32 of shape \(1, 1\), on sim", first)


def only_buffers_moved(rank):
    assert not isinstance(found := simulator.load(1), str), found
    module = nn.BatchNorm1d(2, affine=False).to("sim" if rank.rank else "cpu")
    with pytest.raises(AgreementError, match=r"buffer running_mean.*on sim"):
        lockstep.replicate(module)


def test_buffers_that_one_rank_has_on_an_accelerator_are_named():
    run_processes(2, only_buffers_moved)
