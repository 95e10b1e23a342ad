"""A backward through several modules of several buckets each on one group: ranks tell each other at its end which."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import OptionError, PeerError
from processes import on_processes
from programs.ranks import clear, on_ranks, replicated, scalars, scalars_of
from small_modules import StopInBackward, chain, fails_in_backward, x_of
from threaded import count_collectives

LAYERS = 3


def chains(rank, count=2):
    """Modules in which each weight has a bucket, after their first round."""
    modules = [replicated(rank, lambda: chain(LAYERS), bucket_cap_mb=1e-6) for _ in range(count)]
    sum(module(x_of(rank)).sum() for module in modules).backward()
    clear(*modules)
    return modules


def in_turn(rank, modules):
    """The loss of modules through their forwards."""
    out = x_of(rank).requires_grad_()
    for module in modules:
        out = module(out)
    return out.sum()


def go_on(rank, modules):
    """Ranks are in step: a pass through all modules makes means."""
    assert scalars_of(*modules, loss=in_turn(rank, modules)) == [1.5] * len(modules) * LAYERS


@on_ranks(2)
def test_nothing_is_sent_before_the_end_but_then_one_question_and_the_buckets(rank):
    """The end: the gradient of the input has come."""
    modules = chains(rank)
    x, at_end = x_of(rank).requires_grad_(), []
    x.register_hook(lambda _: at_end.append(len(seen)))
    with count_collectives(rank) as seen:
        modules[1](modules[0](x)).sum().backward()
        assert (at_end, len(seen)) == ([0], 1 + 2 * LAYERS)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks(None, "world")
def test_backward_may_reach_modules_in_another_order_on_each_rank(rank):
    modules, mean = chains(rank, 3), sum(range(1, rank.world + 1)) / rank.world
    for _ in range(3):
        order = modules[:: -1 if rank.rank else 1]
        assert scalars_of(*modules, loss=in_turn(rank, order)) == [mean] * 3 * LAYERS


@pytest.mark.parametrize("cap", [1e-6, 1.0])
@on_ranks(2)
def test_a_weight_in_two_modules(rank, cap):
    """The last one reduces it: the other one must not take its gradient while that one's round goes on."""
    first, second = chain(LAYERS), chain(LAYERS)
    second[0].weight = first[0].weight
    options = {"process_group": rank.group, "bucket_cap_mb": cap}
    modules = [lockstep.DistributedDataParallel(each, **options) for each in (first, second)]
    for _ in range(3):
        assert scalars_of(*modules, loss=in_turn(rank, modules)) == [3.0, 1.5, 1.5] * 2


@pytest.mark.parametrize(
    ("uses", "wanted"),
    [
        (([0], [2]), [0.5, None, 1.0]),
        (([0, 1], [1]), [0.5, 1.5, None]),
        (([2, 0], [0, 1]), [1.5, 1.0, 0.5]),
        (([0, 1, 2], [1]), [0.5, 1.5, 0.5]),
    ],
)
@on_ranks(2)
def test_modules_that_other_ranks_alone_reach(rank, uses, wanted):
    modules = chains(rank, 3)
    for _ in range(3):
        seen = scalars_of(*modules, loss=in_turn(rank, [modules[n] for n in uses[rank.rank]]))
        assert seen[::LAYERS] == wanted


@on_ranks(2)
def test_a_rank_that_has_run_out(rank):
    """Rank 1 has one batch less."""
    modules, seen = chains(rank), []
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.0)
    for _ in lockstep.batches(range(3 - rank.rank), *modules):
        seen.append(scalars_of(*modules, loss=in_turn(rank, modules)))
        optimizer.step()
    assert seen == [[mean] * 2 * LAYERS for mean in (1.5, 1.5, 1.0)]


@on_ranks(2)
def test_micro_batches_of_one_of_the_modules(rank):
    modules, own = chains(rank), rank.rank + 1.0
    with modules[0].no_sync():
        in_turn(rank, modules[:1]).backward()
    in_turn(rank, modules).backward()
    assert scalars(*modules) == [3.0] * LAYERS + [1.5] * LAYERS
    with modules[1].no_sync():
        assert scalars_of(*modules, loss=in_turn(rank, modules)) == [1.5] * LAYERS + [own] * LAYERS


# -------------------------------------------------------------- what the graph does not show


@pytest.mark.parametrize(("count", "ranks"), [(2, [1]), (3, [0, 1])])
@on_ranks(2)
def test_modules_that_reentrant_checkpointing_hides_are_reduced(rank, count, ranks):
    """All but the last one are checkpointed as a whole, with passes of their own, on these ranks."""
    modules = chains(rank, count)
    for _ in range(3):
        out = x_of(rank).requires_grad_()
        for module in modules[:-1]:
            out = checkpoint(module, out, use_reentrant=True) if rank.rank in ranks else module(out)
        assert scalars_of(*modules, loss=modules[-1](out).sum()) == [1.5] * count * LAYERS


@on_ranks(2)
def test_a_module_that_gets_no_gradient_on_one_rank(rank):
    """The graph leads to it, and a function hands it none."""
    modules = chains(rank)
    for _ in range(2):
        out = StopInBackward.apply(modules[0](x_of(rank)), rank.rank == 1)
        assert scalars_of(*modules, loss=modules[1](out).sum()) == [0.5] * LAYERS + [1.5] * LAYERS


# ------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)])
@on_ranks(2)
def test_a_rank_that_fails_before_or_between_the_modules(rank, place):
    """Backward fails on rank 1 at a place; then all go on."""
    modules = chains(rank)
    out = x_of(rank).requires_grad_()
    for number, module in enumerate(modules):
        for layer, each in enumerate(module):
            out = each(fails_in_backward(out, rank.rank == 1 and place == (number, layer)))
    with pytest.raises((ArithmeticError, PeerError)) as caught:
        out.sum().backward()
    said = "\n".join((f"{caught.type.__name__}: {caught.value}", *getattr(caught.value, "__notes__", ())))
    if rank.rank == 1:
        assert said == "ArithmeticError: a bad batch"
    else:
        assert said.startswith("PeerError: rank 0: the backward pass failed on rank 1")
        assert "After it" not in said  # both modules say the same
    assert scalars(*modules) == [None] * 2 * LAYERS
    go_on(rank, modules)


@pytest.mark.parametrize("place", [0, 1])
@on_ranks(2)
def test_a_batch_that_is_left_out(rank, place):
    """Rank 1 leaves out its second batch, whose backward fails; a third module accumulates in all batches."""
    modules, seen = chains(rank, 3), []
    modules[2].set_requires_gradient_sync(False)
    for batch in lockstep.batches(range(3), *modules):
        clear(*modules)
        in_turn(rank, modules[2:]).backward()
        with lockstep.loop.skip_on(ArithmeticError, group=rank.group):
            out = x_of(rank).requires_grad_()
            for number, module in enumerate(modules[:2]):
                out = module(fails_in_backward(out, (rank.rank, batch, number) == (1, 1, place)))
            out.sum().backward()
        seen.append(scalars(*modules))
    usual = [1.5] * 2 * LAYERS + [rank.rank + 1.0] * LAYERS
    assert seen == [usual, [None] * 3 * LAYERS, usual]


@on_processes(2)
def test_a_rank_that_has_run_out_in_join(rank):
    """Rank 1 runs out of batches in Join, which has both wrappers."""
    modules = [lockstep.DistributedDataParallel(chain(LAYERS), bucket_cap_mb=1e-6) for _ in "ab"]
    with Join([*modules]):
        for mean in (1.5, 1.5, 1.5, 0.5)[: 4 - rank.rank]:
            assert scalars_of(*modules, loss=in_turn(rank, modules)) == [mean] * 2 * LAYERS


@on_ranks(2)
def test_a_rank_that_fails_between_its_buckets_and_its_report(rank):
    """What rank 1 is asked for its report fails, once, for the first of two modules."""
    modules, fails = chains(rank), iter([rank.rank == 1])
    lockstep.loop.stop_when(lambda: 1 / 0 if next(fails, False) else False, group=rank.group)
    with pytest.raises(ArithmeticError if rank.rank else PeerError):
        in_turn(rank, modules).backward()
    assert scalars(*modules) == [None] * LAYERS + [1.5] * LAYERS
    go_on(rank, modules)


@on_ranks(2)
def test_means_inside_of_a_pass_through_several_modules(rank):
    """Backward takes a mean before it comes to a module on rank 0, and after it has on rank 1."""
    modules = chains(rank)
    for _ in range(2):
        loss = lockstep.loop.mean_over_ranks(modules[0](x_of(rank)), rank.group).sum()
        if rank.rank:
            loss = loss + modules[1](x_of(rank)).sum()
        assert scalars_of(*modules, loss=loss) == [1.5] * LAYERS + [1.0] * LAYERS


@on_ranks(2)
def test_a_window_that_is_refused_for_one_of_them(rank):
    """One module is refused on rank 1 at the end of the pass, and the other one is reduced all the same."""
    modules = chains(rank)
    if rank.rank:
        next(modules[0].parameters()).grad = torch.ones(1, 1)
    refusal = pytest.raises(OptionError if rank.rank else PeerError)
    with refusal, lockstep.accumulate(modules[0], weight=1), lockstep.accumulate(modules[1], weight=1):
        in_turn(rank, modules).backward()
    assert scalars(*modules) == [None] * LAYERS + [1.5] * LAYERS


# --------------------------------------------------------------------- a pass inside of another one


def backward_inside(rank, *modules):
    with torch.enable_grad():
        in_turn(rank, modules).backward()


@on_ranks(2)
def test_a_pass_in_a_hook_is_reduced_by_itself(rank):
    """It runs after the gradients of the second module."""
    modules = chains(rank, 3)
    middle = modules[0](x_of(rank).requires_grad_())
    middle.register_hook(lambda _: backward_inside(rank, modules[2]))
    modules[1](middle).sum().backward()
    assert scalars(*modules) == [1.5] * 3 * LAYERS


@on_ranks(2)
def test_a_pass_inside_that_fails_and_is_caught(rank):
    """It fails on rank 1 after a gradient has come, and the hook that runs it catches the error."""
    modules = chains(rank, 3)

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
    go_on(rank, modules)


@pytest.mark.parametrize("caught", [True, False])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("hosts", ["", "aa"])
@on_ranks(2, "hosts")
def test_a_pass_inside_that_fails_before_a_gradient_has_come(rank, count, caught):
    """It fails on rank 0, in a hook of the loss, and the other rank is told in that pass."""
    modules = chains(rank, count)

    def run(_):
        with torch.enable_grad():
            inner = fails_in_backward(modules[-1](x_of(rank)), rank.rank == 0).sum()
        told = pytest.raises(PeerError if rank.rank else ArithmeticError)
        with told if caught else contextlib.nullcontext():
            inner.backward()

    loss = modules[0](x_of(rank)).sum()
    loss.register_hook(run)
    if caught:
        loss.backward()
        assert scalars(modules[0]) == [1.5] * LAYERS
    else:
        with pytest.raises(PeerError if rank.rank else ArithmeticError):
            loss.backward()
    go_on(rank, modules)


@on_ranks(2)
def test_a_pass_inside_that_fails_and_counts_in_the_pass_around_it(rank):
    """The pass around it has reached the module: what the other rank's part brings is reduced with that pass."""
    (module,) = chains(rank, 1)

    def run(_):
        with torch.enable_grad():
            inner = fails_in_backward(module[1](x_of(rank)), rank.rank == 0).sum()
        with pytest.raises(ArithmeticError) if rank.rank == 0 else contextlib.nullcontext():
            inner.backward()

    middle = module[0](x_of(rank).requires_grad_())
    out = module[1](middle)
    middle.register_hook(run)
    out.sum().backward()
    assert scalars(module) == [1.5, 2.5, None]
    go_on(rank, [module])


@on_ranks(2)
def test_a_pass_in_a_hook_that_meets_gradients_of_the_pass_around_it_on_one_rank(rank):
    """On rank 1 a pass inside of another one reaches the second module first, on rank 0 the pass around it does."""
    modules = chains(rank, 3)
    middle = modules[0](x_of(rank).requires_grad_())
    out = modules[1](middle) * 1
    (out if rank.rank else middle).register_hook(lambda _: backward_inside(rank, *modules[1:]))
    told = "backward failed on rank 0" if rank.rank else "rank 0: a hook has run a backward pass inside of another one"
    with pytest.raises((OptionError, PeerError), match=told):
        out.sum().backward()
    go_on(rank, modules)


@on_ranks(2)
def test_a_pass_in_a_hook_before_backward_has_come_to_a_module(rank):
    modules = chains(rank, 3)
    loss = modules[1](modules[0](x_of(rank))) * 1
    loss.register_hook(lambda _: backward_inside(rank, modules[2]))
    loss.sum().backward()
    assert scalars(*modules) == [1.5] * 3 * LAYERS
