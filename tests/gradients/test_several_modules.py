"""Several replicated modules on one group, in one backward or in turn: ranks tell each other which took part."""

from __future__ import annotations

import contextlib
import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.distributed.replication.replication import find_replication
from lockstep.errors import OptionError, PeerError
from processes import on_processes
from programs.networks import mlp
from programs.ranks import clear, on_ranks, replicated, rows, same_as_one_process, same_gradients, scalars, scalars_of
from small_modules import StopInBackward, chain, fails_in_backward, one_weight, x_of
from threaded import count_collectives, new_gloo_group, run_ranks

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
        (([0, 1], [2, 1], [1]), [1 / 3, 2.0, 2 / 3]),
    ],
)
def test_modules_that_other_ranks_alone_reach(uses, wanted):
    """`uses[rank]` lists those that a rank uses, in that order."""

    def call(rank):
        modules = chains(rank, 3)
        for _ in range(3):
            seen = scalars_of(*modules, loss=in_turn(rank, [modules[n] for n in uses[rank.rank]]))
            assert seen[::LAYERS] == [None if grad is None else pytest.approx(grad) for grad in wanted]

    run_ranks(len(uses), call)


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
    one_on_each_rank = modules[rank.rank](x_of(rank)).sum()
    assert scalars_of(*modules, loss=one_on_each_rank) == [0.5] * LAYERS + [1.0] * LAYERS
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


# ------------------------------------------------------------------------ modules that step in turn


def one_weights(rank, count=2):
    return [replicated(rank) for _ in range(count)]


# ---------------------------------------------------------------------------------- adversarial training


def discriminate(generator, discriminator, real, noise):
    return discriminator(real).mean() - discriminator(generator(noise).detach()).mean().square()


def generate(generator, discriminator, real, noise):
    return discriminator(generator(noise)).square().mean()


@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_two_networks_that_train_each_other(rank, wrapped):
    """Two modules, two losses, two optimizers; the second loss leaves gradients in both modules."""
    plain = [rank.make(lambda width=width: mlp(3, 4, width).double(), seed=width) for width in (3, 1)]
    references = copy.deepcopy(plain)
    if wrapped:
        called = [lockstep.DistributedDataParallel(each, process_group=rank.group) for each in plain]
    else:
        called = [lockstep.replicate(each, process_group=rank.group, bucket_cap_mb=1e-4) for each in plain]
    optimizers = [[torch.optim.Adam(each.parameters(), lr=0.01) for each in pair] for pair in (plain, references)]
    for step in range(4):
        for loss, turn in ((discriminate, 1), (generate, 0)):
            clear(*plain, *references)
            loss(*called, rows(step, rank.rank), rows(step + 50, rank.rank)).backward()
            parts = [loss(*references, rows(step, r), rows(step + 50, r)) for r in range(rank.world)]
            (sum(parts) / rank.world).backward()
            for module, reference in zip(plain, references, strict=True):
                same_gradients(rank, module, reference, 1e-10)
            for pair in optimizers:
                pair[turn].step()
    for each in plain:
        lockstep.check_in_sync(each, rank.group)


# ------------------------------------------------------------------------------------ child and parent


@pytest.mark.parametrize("cap", [None, 1e-4])
@pytest.mark.parametrize("parent_too", [True, False], ids=["child and parent", "each child"])
@on_ranks(2)
def test_children_replicated_by_themselves(rank, parent_too, cap):
    """A child with options of its own, then all around it."""
    module = rank.make(lambda: nn.Sequential(mlp(3, 4, 3), nn.Linear(3, 2), nn.Linear(2, 1)).double())
    lockstep.replicate(module[0], process_group=rank.group, bucket_cap_mb=cap)
    for each in [module] if parent_too else module[1:]:
        lockstep.replicate(each, process_group=rank.group)
    same_as_one_process(rank, module, lambda each, step, r: each(rows(step, r)).square().mean())


@on_ranks(2)
def test_each_module_synchronises_when_it_is_told_to(rank):
    """Children say by themselves whether they synchronise."""
    module = nn.Sequential(*one_weights(rank))
    with module[0].no_sync():
        assert scalars_of(module, loss=module(x_of(rank)).sum()) == [rank.rank + 1.0, 1.5]
    assert scalars_of(module, loss=module(x_of(rank)).sum()) == [1.5, 1.5]


# ---------------------------------------------------------------------- other modules on other ranks


@on_ranks(2)
def test_modules_used_in_turn(rank):
    """One module each step, another one on each rank, with a backward that not all of them see."""
    modules = one_weights(rank)
    for step in range(4):
        seen = scalars_of(*modules, loss=modules[(rank.rank + step) % 2](x_of(rank)).sum())
        assert seen == [[0.5, 1.0], [1.0, 0.5]][step % 2]


@on_ranks(2)
def test_after_a_failure_forwards_are_counted_anew_for_every_module_on_every_rank(rank):
    """Backward fails on rank 1 before it gets to a module that is checkpointed as a whole, which no graph shows."""
    modules = one_weights(rank)
    modules[0](x_of(rank))  # a forward without a backward, on all ranks
    y = modules[1](checkpoint(modules[0], x_of(rank).requires_grad_(), use_reentrant=True))
    with pytest.raises(ArithmeticError if rank.rank else PeerError):
        fails_in_backward(y, rank.rank == 1).sum().backward()
    assert scalars_of(*modules, loss=modules[1](modules[0](x_of(rank))).sum()) == [1.5, 1.5]


# --------------------------------------------------------------------------- modules that come and go


@on_ranks(2)
def test_modules_that_come_and_go(rank):
    """A second module on the group, used, and gone again; on rank 1 garbage is collected late."""
    first = replicated(rank)
    for _ in range(2):
        second = replicated(rank)
        assert scalars_of(first, second, loss=second(first(x_of(rank))).sum()) == [1.5, 1.5]
        del second
        if rank.rank == 0:
            gc.collect()
        assert scalars_of(first, loss=first(x_of(rank)).sum()) == [1.5]


@on_ranks(2)
def test_no_memory_of_the_first_buckets_is_left(rank, caplog):
    """With gradients that are zeroed, and dropped with a batch: the log would name those that the program keeps."""
    modules = one_weights(rank)
    for turn in range(4):
        for module in modules:
            module.zero_grad(set_to_none=False)
        with lockstep.loop.skip_on(ArithmeticError, modules=modules):
            loss = modules[1](modules[0](x_of(rank))).sum()
            if rank.rank == 1 and turn == 3:
                raise ArithmeticError
            loss.backward()
    assert scalars(*modules) == [None, None]
    assert not caplog.records


@on_ranks(2)
def test_modules_on_different_groups(rank, store):
    """The second one has the ranks the other way round."""
    other = new_gloo_group(store, rank.world - 1 - rank.rank, rank.world, 30)
    modules = [replicated(rank), lockstep.replicate(one_weight(), process_group=other)]
    for first, second in (modules, modules[::-1]):
        assert scalars_of(*modules, loss=second(first(x_of(rank))).sum()) == [1.5, 1.5]


@on_ranks(2)
def test_buckets_leave_early_where_each_module_has_a_group(rank, store):
    """How many have begun when a backward through two modules of several buckets comes to its end."""
    groups = [rank.group, new_gloo_group(store, rank.rank, rank.world, 30)]
    modules = [lockstep.replicate(chain(3), process_group=group, bucket_cap_mb=1e-6) for group in groups]
    with count_collectives(rank) as seen:
        for _ in range(3):
            x, at_end = x_of(rank).requires_grad_(), []
            x.register_hook(lambda _, at_end=at_end: at_end.append(len(seen)))
            begun = len(seen)
            modules[1](modules[0](x)).sum().backward()
    assert at_end[0] - begun == 4


@on_ranks(2)
def test_a_batch_that_is_left_out_ends_the_rounds_of_all_modules(rank):
    """A backward through two modules fails on rank 1, which leaves out the batch; the next one goes past forward."""
    modules = one_weights(rank)
    for turn in range(3):
        with lockstep.loop.skip_on(ArithmeticError, modules=modules):
            clear(*modules)
            y = x_of(rank)
            for module in modules:
                y = module(y) if turn < 2 else nn.functional.linear(y, module.weight)
            fails_in_backward(y, rank.rank == turn == 1).sum().backward()
        assert lockstep.loop.skipped(*modules) == (turn == 1)
        assert scalars(*modules) == ([None, None] if turn == 1 else [1.5, 1.5])


class EndedMeanwhile(list):
    """Passes of another thread, which ends them as soon as it is asked whether there are any."""

    def __len__(self):
        number = super().__len__()
        self.clear()
        return number


@on_ranks(1)
def test_a_pass_of_another_thread_may_end_while_this_one_is_asked_about(rank):
    """Every pass asks the modules of all threads: ranks that are threads, and a plain module beside them."""
    module = replicated(rank)
    reducer = find_replication(module).reducer
    reducer._steps = EndedMeanwhile([SimpleNamespace(this=None)])
    with ThreadPoolExecutor(1) as other:
        other.submit(lambda: nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()).result()
    reducer._steps = []
    assert scalars_of(module, loss=module(x_of(rank)).sum()) == [1.0]
