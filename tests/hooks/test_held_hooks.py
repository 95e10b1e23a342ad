"""Users' hooks on parameters: each runs once in a synchronised backward, on reduced gradients, on every rank alike."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import AgreementError, NotReplicableError, PeerError
from programs.ranks import on_ranks
from small_modules import fails_in_backward, x_of
from threaded import run_ranks

with warnings.catch_warnings():  # PyTorch's own, while it is imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import _apply_optimizer_in_backward


def weights(count):
    layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(count)])
    for layer in layers:
        nn.init.ones_(layer.weight)
    return layers


def values(module):
    return [p.item() for p in module.parameters()]


def step_in_hooks(module, lr=0.1):
    """An optimizer for each parameter, and a list of the numbers of the parameters that it has stepped."""
    stepped = []
    for number, parameter in enumerate(module.parameters()):
        optimizer = torch.optim.SGD([parameter], lr=lr)

        def step(p, optimizer=optimizer, number=number):
            stepped.append(number)
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return stepped


# ------------------------------------------------------------------------------------ which ranks, how often


def branches(rank, cap):
    """Each rank goes another way; nobody uses the last weight, in some rounds nobody the last but one."""
    module = lockstep.replicate(weights(5), process_group=rank.group, bucket_cap_mb=cap)
    stepped = step_in_hooks(module)
    rounds = []
    for number in range(4):
        way = [(0, 1), (2, 1), (0, 3)][rank.rank] if number % 2 else [(0,), (1, 0), (2,)][rank.rank]
        sum(module[i](x_of(rank)) for i in way).sum().backward()
        rounds.append(list(stepped))
        stepped.clear()
        lockstep.check_in_sync(module)
        assert all(p.grad is None for p in module.parameters())
    return rounds, values(module)


@pytest.mark.parametrize("cap", [None, 1e-6])
def test_each_runs_once_for_every_parameter_that_any_rank_has_used(cap):
    results = run_ranks(3, branches, cap)
    assert results[1:] == results[:1] * 2  # in the same order, too
    rounds, after = results[0]
    assert [sorted(each) for each in rounds] == [[0, 1, 2], [0, 1, 2, 3]] * 2
    assert after == pytest.approx(
        [1 - 0.2 * (3 / 3 + 4 / 3), 1 - 0.2 * (2 / 3 + 3 / 3), 1 - 0.2 * (3 / 3 + 2 / 3), 0.8, 1]
    )


@on_ranks(2)
def test_they_run_in_the_same_order_on_every_rank(rank):
    """Hooks that communicate need the same order on every rank, whatever order gradients come in."""
    module = lockstep.replicate(weights(3), process_group=rank.group)
    sums = []

    def hook(parameter):
        total = parameter.grad.clone()
        dist.all_reduce(total, group=rank.group)
        sums.append(total.item())

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        module.zero_grad()
        x = x_of(rank)
        for i in (0, 1, 2) if rank.rank else (2, 1, 0):
            x = module[i](x)
        (x * module[0].weight).sum().backward()
    assert sorted(sums[-3:]) == [3.0, 3.0, 6.0]


class CheckpointedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = weights(1)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layers[0], x, use_reentrant=True)
        return x


@on_ranks(2)
def test_once_for_a_layer_that_is_checkpointed_twice(rank):
    first = 1 - 0.1 * 2 * 1.5
    module = lockstep.replicate(CheckpointedTwice(), process_group=rank.group)
    stepped = step_in_hooks(module)
    for _ in range(2):
        module(x_of(rank).requires_grad_()).sum().backward()
    assert (stepped, values(module)) == ([0, 0], [pytest.approx(first - 0.1 * 2 * 1.5 * first)])


@pytest.mark.parametrize("cap", [None, 1e-6])
@on_ranks(2)
def test_not_on_gradients_that_are_this_ranks_alone(rank, cap):
    after = [pytest.approx(1 - 0.1 * (3 + 4) / 2), pytest.approx(1 - 0.1 * 2 / 2)]
    module = lockstep.replicate(weights(2), process_group=rank.group, bucket_cap_mb=cap)
    stepped = step_in_hooks(module)
    with module.no_sync():
        module[0](x_of(rank)).sum().backward()
        module[rank.rank](x_of(rank)).sum().backward()
    before = list(stepped), values(module)
    module[0](x_of(rank)).sum().backward()
    assert (before, sorted(stepped), values(module)) == (([], [1.0, 1.0]), [0, 1], after)


@on_ranks(2)
def test_not_on_a_parameter_that_has_left_the_module(rank):
    """The successor shares the memory of the parameter that has left, whose gradient has not been reduced yet."""
    module = lockstep.replicate(nn.Linear(2, 2), process_group=rank.group)
    nn.init.ones_(module.weight)
    stepped = step_in_hooks(module)
    if rank.rank:
        with module.no_sync():
            module(torch.ones(1, 2)).sum().backward()
    nn.utils.parametrizations.weight_norm(module)
    module(torch.ones(1, 2)).sum().backward()
    assert (sorted(stepped), module.parametrizations.weight.original1.tolist()) == ([1], [[1, 1], [1, 1]])


@on_ranks(2)
def test_not_in_a_round_that_has_failed(rank):
    module = lockstep.replicate(weights(2), process_group=rank.group)
    stepped = step_in_hooks(module)
    with pytest.raises(ValueError if rank.rank else PeerError):
        x = module[0](x_of(rank))
        module[1](fails_in_backward(x, error=ValueError) if rank.rank else x).sum().backward()
    module.zero_grad()
    assert (stepped, values(module)) == ([], [1.0, 1.0])


# ------------------------------------------------------------------------------------ handles


def remove(rank, wrap_again):
    """Hooks that are registered before, between and after; each handle removes its own, in any order."""
    module, seen, handles = weights(1), [], []

    def register(name):
        hook = lambda parameter: seen.append(name)  # noqa: E731
        handles.append(module[0].weight.register_post_accumulate_grad_hook(hook))

    def backward():
        module[0](x_of(rank)).sum().backward()
        called = list(seen)
        seen.clear()
        return called

    register("before")
    register("before, too")
    wrapper = lockstep.DistributedDataParallel(module, process_group=rank.group)
    register("after")
    if wrap_again:
        wrapper = lockstep.DistributedDataParallel(module, process_group=rank.group)
        register("last")
    results = [backward()]
    for number in (1, 2, 0):
        handles[number].remove()
        results.append(backward())
    handles[1].remove()  # once more
    del wrapper
    return results


def test_handles_from_before_replicating_remove_their_hooks():
    first = ["before", "before, too", "after"]
    assert run_ranks(2, remove, False) == [[first, ["before", "after"], ["before"], []]] * 2


def test_handles_remove_their_hooks_when_a_module_is_wrapped_again():
    first = ["before", "before, too", "after", "last"]
    wanted = [first, ["before", "after", "last"], ["before", "last"], ["last"]]
    assert run_ranks(2, remove, True) == [wanted] * 2


@pytest.mark.parametrize("cap", [None, 1e-6])
@on_ranks(2)
def test_between_passes_a_parameter_has_its_own_hooks_and_no_others(rank, cap):
    """The hooks of parameters after passes that synchronise, accumulate and fail."""
    module = lockstep.replicate(weights(3), process_group=rank.group, bucket_cap_mb=cap)
    module[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    before = [p._post_accumulate_grad_hooks for p in module.parameters()]
    same = []
    for number in range(4):
        module.zero_grad()
        x = module[2](module[1](module[0](x_of(rank))))
        if number == 2:
            with module.no_sync():
                x.sum().backward()
        elif number == 3:
            with pytest.raises(ValueError if rank.rank else PeerError):
                (fails_in_backward(x, error=ValueError) if rank.rank else x).sum().backward()
        else:
            x.sum().backward()
        now = [p._post_accumulate_grad_hooks for p in module.parameters()]
        same.append(all(a is b for a, b in zip(before, now, strict=True)))
    assert (before[0], len(before[1]), same) == (None, 1, [True] * 4)


@on_ranks(2)
def test_hooks_that_change_while_a_pass_runs(rank):
    """Hooks that are registered and removed while backward runs, on a parameter that has others and on one without."""
    module, seen = lockstep.replicate(weights(3), process_group=rank.group), []
    _, handle = (
        module[0].weight.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
        for name in ("kept", "removed")
    )

    def change(_):
        for layer in module[:2]:
            layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
        handle.remove()

    x = module[1](module[0](x_of(rank)))
    x.register_hook(change)
    module[2](x).sum().backward()
    assert sorted(seen, key=str) == [1.5, 1.5, "kept"]


# -------------------------------------------------------------------- PyTorch's optimizers in backward


class Way(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, i):
        return self.layers[i](x)


def apply_optimizers(module):
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})


REFUSED = "parameter {} has an optimizer from _apply_optimizer_in_backward.*register_post_accumulate_grad_hook"


@on_ranks(2)
def test_optimizers_in_backward_are_refused_before_a_module_is_replicated(rank):
    """On a rank that has none, too."""
    module = weights(2)
    if rank.rank:
        apply_optimizers(module[1])
    with pytest.raises(NotReplicableError if rank.rank else AgreementError, match=REFUSED.format("1.weight")):
        lockstep.replicate(module, process_group=rank.group)


@pytest.mark.parametrize("way", ["whole", "part"])
@pytest.mark.parametrize("when", ["at once", "later", "on new layers"])
@on_ranks(2)
def test_optimizers_in_backward_are_refused_before_they_step(rank, when, way):
    module = weights(3)
    whole = lockstep.DistributedDataParallel(Way(module), process_group=rank.group)

    def backward(i):
        (module[i] if way == "part" else (lambda x: whole(x, i)))(x_of(rank)).sum().backward()

    for _ in range(0 if when == "at once" else 3):
        backward(0)
        module.zero_grad()
    for i, layer in enumerate(weights(3)) if when == "on new layers" else ():
        module[i] = layer
    apply_optimizers(module)
    for sync in (True, False):
        whole.set_requires_gradient_sync(sync)
        with pytest.raises(NotReplicableError, match=REFUSED.format(r"(layers.)?0.weight")):
            backward(rank.rank)
    assert values(module) == [1.0] * 3


@on_ranks(2)
def test_optimizers_in_backward_of_a_new_layer_that_another_rank_has_used(rank):
    module = weights(2)
    whole = lockstep.DistributedDataParallel(Way(module), process_group=rank.group)
    module[1] = weights(1)[0]
    apply_optimizers(module[1])
    with pytest.raises(NotReplicableError) as caught:
        whole(x_of(rank), rank.rank).sum().backward()
    assert (values(module), type(caught.value)) == ([1.0, 1.0], NotReplicableError)


@on_ranks(1)
def test_optimizers_in_backward_that_would_step_on_the_gradients_of_a_share_are_refused(rank):
    model = lockstep.replicate(nn.Linear(1, 1), process_group=rank.group, shares=2)
    rows = torch.utils.data.TensorDataset(torch.ones(4, 1))
    data = lockstep.shares.GlobalBatches(rows, 2, 2, process_group=rank.group)
    apply_optimizers(model)
    with pytest.raises(NotReplicableError, match=REFUSED.format("weight")):
        list(next(iter(data)))
