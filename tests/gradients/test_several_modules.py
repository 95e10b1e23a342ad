"""Several replicated modules on one group: adversarial pairs, a child and its parent, other modules on other ranks."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.distributed.replication.replication import find_replication
from lockstep.errors import PeerError
from programs.networks import mlp
from programs.ranks import clear, on_ranks, replicated, rows, same_as_one_process, same_gradients, scalars, scalars_of
from small_modules import chain, fails_in_backward, one_weight, x_of
from threaded import count_collectives, new_gloo_group


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


@pytest.mark.parametrize(
    ("world", "uses", "wanted"),
    [
        (2, ([0, 1, 2], [2, 1, 0]), [1.5, 1.5, 1.5]),
        (2, ([0], [2]), [0.5, None, 1.0]),
        (2, ([0, 1], [1]), [0.5, 1.5, None]),
        (2, ([2, 0], [0, 1]), [1.5, 1.0, 0.5]),
        (3, ([0, 1], [2, 1], [1]), [1 / 3, 2.0, 2 / 3]),
    ],
)
@on_ranks(None, "world")
def test_modules_used_in_another_order_or_not_at_all(rank, uses, wanted):
    """`uses[rank]` lists those that a rank uses, in that order."""
    modules = one_weights(rank, 3)
    for _ in range(3):
        seen = scalars_of(*modules, loss=sum(modules[index](x_of(rank)).sum() for index in uses[rank.rank]))
        assert seen == [None if grad is None else pytest.approx(grad) for grad in wanted]


@on_ranks(2)
def test_no_bucket_leaves_before_it_is_known_which_modules_take_part(rank):
    """Two modules of several buckets, which backward comes to in another order on each rank."""
    modules = [replicated(rank, lambda: chain(4), bucket_cap_mb=1e-6) for _ in range(2)]
    for _ in range(4):
        order = list(enumerate(modules))[:: -1 if rank.rank else 1]
        loss = sum(module(x_of(rank, 10.0**number)).sum() for number, module in order)
        assert scalars_of(*modules, loss=loss) == [1.5] * 4 + [15.0] * 4


@on_ranks(2)
def test_modules_used_in_turn(rank):
    """One module each step, another one on each rank, with a backward that not all of them see."""
    modules = one_weights(rank)
    for step in range(4):
        seen = scalars_of(*modules, loss=modules[(rank.rank + step) % 2](x_of(rank)).sum())
        assert seen == [[0.5, 1.0], [1.0, 0.5]][step % 2]


@pytest.mark.parametrize(("together", "wanted"), [(False, [0.5, 1.0]), (True, [1.5, 1.5])])
@on_ranks(2)
def test_a_failure_with_several_modules(rank, together, wanted):
    """Backward fails on rank 1 between two modules. Then all go on, also with one that it has not got to."""
    modules = one_weights(rank)
    loss = modules[1](fails_in_backward(modules[0](x_of(rank)), rank.rank == 1)).sum()
    with pytest.raises(ArithmeticError if rank.rank else PeerError):
        loss.backward()
    y = modules[1](modules[0](x_of(rank))) if together else modules[rank.rank](x_of(rank))
    assert scalars_of(*modules, loss=y.sum()) == wanted


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


@pytest.mark.parametrize(("modules", "collectives"), [(1, 1), (3, 3 + 1)])
@on_ranks(2)
def test_several_modules_cost_one_tiny_collective(rank, modules, collectives):
    """In a step when plans are made."""
    modules = one_weights(rank, modules)
    for _ in range(3):
        with count_collectives(rank) as seen:
            sum(module(x_of(rank)).sum() for module in modules).backward()
    assert len(seen) == collectives
    assert len(modules) > 1 or seen[0].name == "all_reduce"


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
