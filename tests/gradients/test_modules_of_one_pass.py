"""A backward through several modules of several buckets each on one group: ranks tell each other at its end which."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import OptionError, PeerError
from processes import run_processes
from small_modules import one_weight, x_of
from threaded import count_collectives, run_ranks

LAYERS = 3


def chain():
    return nn.Sequential(*(one_weight() for _ in range(LAYERS)))


def replicated(rank, count=2, make=chain, **options):
    """Modules in which each weight has a bucket, after their first round."""
    modules = [
        lockstep.replicate(make(), process_group=rank.group, bucket_cap_mb=1e-6, **options) for _ in range(count)
    ]
    sum(module(x_of(rank, 1.0)).sum() for module in modules).backward()
    for module in modules:
        module.zero_grad()
    return modules


def grads(*modules):
    return [None if p.grad is None else p.grad.item() for module in modules for p in module.parameters()]


def forward_in_turn(rank, modules):
    """The loss of modules through their forwards."""
    out = x_of(rank).requires_grad_()
    for module in modules:
        out = module(out)
    return out.sum()


def sent_during_backward(rank):
    """How many collectives begin before the gradient of the input has come, and how many in all."""
    modules = replicated(rank)
    x = x_of(rank).requires_grad_()
    at_end = []
    x.register_hook(lambda _: at_end.append(len(seen)))
    with count_collectives(rank) as seen:
        modules[1](modules[0](x)).sum().backward()
        return at_end[0], len(seen)


def test_nothing_is_sent_before_the_end_but_then_one_question_and_the_buckets():
    assert run_ranks(2, sent_during_backward) == [(0, 1 + 2 * LAYERS)] * 2


def in_other_orders(rank):
    modules = replicated(rank, 3)
    seen = []
    for _ in range(3):
        order = modules[:: -1 if rank.rank else 1]
        forward_in_turn(rank, order).backward()
        seen.append(grads(*modules))
        for module in modules:
            module.zero_grad()
    return seen


@pytest.mark.parametrize("world", [2, 3])
def test_backward_may_reach_modules_in_another_order_on_each_rank(world):
    mean = sum(range(1, world + 1)) / world
    assert run_ranks(world, in_other_orders) == [[[mean] * 3 * LAYERS] * 3] * world


def of_a_shared_weight(rank, cap):
    """The weights' gradients in three steps of two wrappers, which have the weight of their first layer in common."""
    first, second = chain(), chain()
    second[0].weight = first[0].weight
    options = {"process_group": rank.group, "bucket_cap_mb": cap}
    modules = [lockstep.DistributedDataParallel(each, **options) for each in (first, second)]
    seen = []
    for _ in range(3):
        forward_in_turn(rank, modules).backward()
        seen.append(grads(*modules))
        for module in modules:
            module.zero_grad()
    return seen


@pytest.mark.parametrize("cap", [1e-6, 1.0])
def test_a_weight_in_two_modules(cap):
    """The last one reduces it: the other one must not take its gradient while that one's round goes on."""
    wanted = [3.0, 1.5, 1.5] * 2
    assert run_ranks(2, of_a_shared_weight, cap) == [[wanted] * 3] * 2


def on_other_ranks(rank, uses):
    modules = replicated(rank, 3)
    seen = []
    for _ in range(3):
        forward_in_turn(rank, [modules[n] for n in uses[rank.rank]]).backward()
        seen.append([each[0] for each in map(grads, modules)])
        for module in modules:
            module.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("uses", "wanted"),
    [
        (([0], [2]), [0.5, None, 1.0]),
        (([0, 1], [1]), [0.5, 1.5, None]),
        (([2, 0], [0, 1]), [1.5, 1.0, 0.5]),
        (([0, 1, 2], [1]), [0.5, 1.5, 0.5]),
    ],
)
def test_modules_that_other_ranks_alone_reach(uses, wanted):
    assert run_ranks(2, on_other_ranks, uses) == [[wanted] * 3] * 2


def of_one_rank_in_padding(rank):
    """Rank 1 has one batch less."""
    modules = replicated(rank)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.0)
    seen = []
    for _ in lockstep.batches(range(3 - rank.rank), *modules):
        optimizer.zero_grad()
        forward_in_turn(rank, modules).backward()
        seen.append(grads(*modules))
        optimizer.step()
    return seen


def test_a_rank_that_has_run_out():
    wanted = [[1.5] * 2 * LAYERS] * 2 + [[1.0] * 2 * LAYERS]
    assert run_ranks(2, of_one_rank_in_padding) == [wanted] * 2


def accumulated(rank):
    """Micro-batches of one module under no_sync, then a pass through both."""
    modules = replicated(rank)
    with modules[0].no_sync():
        forward_in_turn(rank, modules[:1]).backward()
    forward_in_turn(rank, modules).backward()
    first = grads(*modules)
    for module in modules:
        module.zero_grad()
    with modules[1].no_sync():
        forward_in_turn(rank, modules).backward()
    return first, grads(*modules)


def test_micro_batches_of_one_of_the_modules():
    for number, (first, second) in enumerate(run_ranks(2, accumulated), 1):
        assert first == [3.0] * LAYERS + [1.5] * LAYERS
        assert second == [1.5] * LAYERS + [float(number)] * LAYERS


# -------------------------------------------------------------- what the graph does not show


def hidden(rank):
    """A module that is checkpointed as a whole, with a pass of its own, on rank 1 alone."""
    modules = replicated(rank)
    seen = []
    for _ in range(3):
        x = x_of(rank).requires_grad_()
        inner = checkpoint(modules[0], x, use_reentrant=True) if rank.rank else modules[0](x)
        modules[1](inner).sum().backward()
        seen.append(grads(*modules))
        for module in modules:
            module.zero_grad()
    return seen


def hidden_everywhere(rank):
    modules = replicated(rank, 3)
    seen = []
    for _ in range(3):
        out = x_of(rank).requires_grad_()
        for module in modules[:2]:
            out = checkpoint(module, out, use_reentrant=True)
        modules[2](out).sum().backward()
        seen.append(grads(*modules))
        for module in modules:
            module.zero_grad()
    return seen


@pytest.mark.parametrize(("call", "count"), [(hidden, 2), (hidden_everywhere, 3)])
def test_modules_that_reentrant_checkpointing_hides_are_reduced(call, count):
    assert run_ranks(2, call) == [[[1.5] * count * LAYERS] * 3] * 2


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return None


def without_gradients(rank):
    """The graph leads to a module, and a function hands it no gradient."""
    modules = replicated(rank)
    seen = []
    for _ in range(2):
        out = modules[0](x_of(rank))
        out = _NoGradient.apply(out) if rank.rank else out
        modules[1](out).sum().backward()
        seen.append(grads(*modules))
        for module in modules:
            module.zero_grad()
    return seen


def test_a_module_that_gets_no_gradient_on_one_rank():
    assert run_ranks(2, without_gradients) == [[[0.5] * LAYERS + [1.5] * LAYERS] * 2] * 2


# ------------------------------------------------------------------------------------------ failures


def failing(rank, place, error=ArithmeticError):
    """Backward fails on rank 1 at a place; then all go on."""
    modules = replicated(rank)

    def spoil(_):
        if rank.rank == 1:
            raise error("a bad batch")

    out = x_of(rank).requires_grad_()
    for number, module in enumerate(modules):
        for layer, each in enumerate(module):
            if (number, layer) == place:
                out.register_hook(spoil)
            out = each(out)
    try:
        out.sum().backward()
        said = ""
    except (error, PeerError) as caught:
        said = "\n".join((f"{type(caught).__name__}: {caught}", *getattr(caught, "__notes__", ())))
    after_it = grads(*modules)
    for module in modules:
        module.zero_grad()
    forward_in_turn(rank, modules).backward()
    return said, after_it, grads(*modules)


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)])
def test_a_rank_that_fails_before_or_between_the_modules(place):
    first, second = run_ranks(2, failing, place)
    assert first[0].startswith("PeerError: rank 0: the backward pass failed on rank 1")
    assert "After it" not in first[0]  # both modules say the same
    assert second[0] == "ArithmeticError: a bad batch"
    for _, after_it, later in (first, second):
        assert after_it == [None] * 2 * LAYERS
        assert later == [1.5] * 2 * LAYERS


def skipping(rank, place):
    """Rank 1 leaves out its second batch, whose backward fails; a third module accumulates in all batches."""
    modules = replicated(rank, 3)
    modules[2].set_requires_gradient_sync(False)
    seen = []
    for batch in lockstep.batches(range(3), *modules):
        for module in modules:
            module.zero_grad()
        forward_in_turn(rank, modules[2:]).backward()

        def spoil(_, batch=batch):
            if rank.rank == 1 and batch == 1:
                raise ArithmeticError("a bad batch")

        with lockstep.loop.skip_on(ArithmeticError, group=rank.group):
            out = x_of(rank).requires_grad_()
            for number, module in enumerate(modules[:2]):
                if number == place:
                    out.register_hook(spoil)
                out = module(out)
            out.sum().backward()
        seen.append(grads(*modules))
    return seen


@pytest.mark.parametrize("place", [0, 1])
def test_a_batch_that_is_left_out(place):
    for number, seen in enumerate(run_ranks(2, skipping, place), 1):
        usual = [1.5] * 2 * LAYERS + [float(number)] * LAYERS
        assert seen == [usual, [None] * 3 * LAYERS, usual]


def joined(rank):
    """Rank 1 runs out of batches in Join, which has both wrappers."""
    modules = [lockstep.DistributedDataParallel(chain(), bucket_cap_mb=1e-6) for _ in "ab"]
    seen = []
    with Join([*modules]):
        for _ in range(4 - rank.rank):
            for module in modules:
                module.zero_grad()
            forward_in_turn(rank, modules).backward()
            seen.append(grads(*modules))
    return seen


def test_a_rank_that_has_run_out_in_join():
    first, second = run_processes(2, joined)
    assert first == [[1.5] * 2 * LAYERS] * 3 + [[0.5] * 2 * LAYERS]
    assert second == first[:3]


def failing_before_the_report(rank):
    """What rank 1 is asked for its report fails, once, for the first of two modules."""
    modules = replicated(rank)
    fails = [rank.rank == 1]

    def request():
        if fails[0]:
            fails[0] = False
            raise ArithmeticError("no report")
        return False

    lockstep.loop.stop_when(request, group=rank.group)
    with pytest.raises(ArithmeticError if rank.rank else PeerError):
        forward_in_turn(rank, modules).backward()
    after_it = grads(*modules)
    for module in modules:
        module.zero_grad()
    forward_in_turn(rank, modules).backward()
    return after_it, grads(*modules)


def test_a_rank_that_fails_between_its_buckets_and_its_report():
    wanted = [None] * LAYERS + [1.5] * LAYERS, [1.5] * 2 * LAYERS
    assert run_ranks(2, failing_before_the_report) == [wanted] * 2


def with_a_mean(rank):
    """Backward takes a mean before it comes to a module on rank 0, and after it has on rank 1."""
    modules = replicated(rank)
    seen = []
    for _ in range(2):
        loss = lockstep.loop.mean_over_ranks(modules[0](x_of(rank)), rank.group).sum()
        if rank.rank:
            loss = loss + modules[1](x_of(rank)).sum()
        loss.backward()
        seen.append(grads(*modules))
        for module in modules:
            module.zero_grad()
    return seen


def test_means_inside_of_a_pass_through_several_modules():
    assert run_ranks(2, with_a_mean) == [[[1.5] * LAYERS + [1.0] * LAYERS] * 2] * 2


def refused_window(rank):
    """One module is refused on rank 1 at the end of the pass, and the other one is reduced all the same."""
    modules = replicated(rank)
    if rank.rank:
        next(modules[0].parameters()).grad = torch.ones(1, 1)
    refusal = pytest.raises(OptionError if rank.rank else PeerError)
    with refusal, lockstep.accumulate(modules[0], weight=1), lockstep.accumulate(modules[1], weight=1):
        forward_in_turn(rank, modules).backward()
    return grads(modules[0]), grads(modules[1])


def test_a_window_that_is_refused_for_one_of_them():
    assert run_ranks(2, refused_window) == [([None] * LAYERS, [1.5] * LAYERS)] * 2


# --------------------------------------------------------------------- a pass inside of another one


def backward_inside(rank, module):
    with torch.enable_grad():
        module(x_of(rank)).sum().backward()


def nested(rank):
    modules = replicated(rank, 3)
    middle = modules[0](x_of(rank).requires_grad_())
    middle.register_hook(lambda _: backward_inside(rank, modules[2]))  # after the gradients of the other module
    modules[1](middle).sum().backward()
    return grads(*modules)


def test_a_pass_in_a_hook_is_reduced_by_itself():
    assert run_ranks(2, nested) == [[1.5] * 3 * LAYERS] * 2


def nested_failure(rank):
    """A pass inside fails on rank 1 after a gradient has come, and its hook catches the error."""
    modules = replicated(rank, 3)

    def run(_):
        if rank.rank:
            with torch.enable_grad(), pytest.raises(ZeroDivisionError):
                middle = modules[2][0](x_of(rank))
                middle.register_hook(lambda _: 1 / 0)
                modules[2][1](middle).sum().backward()
        else:
            backward_inside(rank, modules[2])

    middle = modules[0](x_of(rank).requires_grad_())
    middle.register_hook(run)
    with pytest.raises(PeerError):
        modules[1](middle).sum().backward()
    for module in modules:
        module.zero_grad()
    forward_in_turn(rank, modules).backward()
    return grads(*modules)


def test_a_pass_inside_that_fails_and_is_caught():
    assert run_ranks(2, nested_failure) == [[1.5] * 3 * LAYERS] * 2


def nested_in_other_orders(rank):
    """On rank 1 a pass inside of another one reaches the second module first, on rank 0 the pass around it does."""
    modules = replicated(rank, 3)
    middle = modules[0](x_of(rank).requires_grad_())
    out = modules[1](middle) * 1

    def run(_):
        with torch.enable_grad():
            modules[2](modules[1](x_of(rank))).sum().backward()

    (out if rank.rank else middle).register_hook(run)
    with pytest.raises((OptionError, PeerError)) as raised:
        out.sum().backward()
    for module in modules:
        module.zero_grad()
    forward_in_turn(rank, modules).backward()
    return str(raised.value), grads(*modules)


def test_a_pass_in_a_hook_that_meets_gradients_of_the_pass_around_it_on_one_rank():
    first, second = run_ranks(2, nested_in_other_orders)
    assert "rank 0: a hook has run a backward pass inside of another one" in first[0]
    assert "backward failed on rank 0" in second[0]
    assert first[1] == second[1] == [1.5] * 3 * LAYERS


def nested_before_all(rank):
    modules = replicated(rank, 3)
    loss = modules[1](modules[0](x_of(rank))) * 1
    loss.register_hook(lambda _: backward_inside(rank, modules[2]))
    loss.sum().backward()
    return grads(*modules)


def test_a_pass_in_a_hook_before_backward_has_come_to_a_module():
    assert run_ranks(2, nested_before_all) == [[1.5] * 3 * LAYERS] * 2
