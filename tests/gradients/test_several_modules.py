"""Several replicated modules on one group: adversarial pairs, a child and its parent, other modules on other ranks."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.distributed.reduction.module.managed_parameters import Trigger
from lockstep.distributed.replication.replication import find_replication
from small_modules import fails_in_backward, one_weight, x_of
from threaded import count_collectives, new_gloo_group, run_ranks


def network(width=3):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, width))


def rows(step, rank):
    return torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def grads(*modules):
    return [None if p.grad is None else p.grad.item() for module in modules for p in module.parameters()]


def compare(rank, modules, references):
    for module, reference in zip(modules, references, strict=True):
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-13)
                assert rank.all_equal(p.grad)


# ---------------------------------------------------------------------------------- adversarial training


def discriminate(generator, discriminator, real, noise):
    return discriminator(real).mean() - discriminator(generator(noise).detach()).mean().square()


def generate(generator, discriminator, real, noise):
    return discriminator(generator(noise)).square().mean()


def adversarial(rank, wrapped):
    """Two modules, two losses, two optimizers; the second loss leaves gradients in both modules."""
    plain = [rank.make(network).double(), rank.make(lambda: network(1), seed=1).double()]
    references = copy.deepcopy(plain)
    if wrapped:
        called = [lockstep.DistributedDataParallel(each, process_group=rank.group) for each in plain]
    else:
        called = [lockstep.replicate(each, process_group=rank.group, bucket_cap_mb=1e-4) for each in plain]
    optimizers = [[torch.optim.Adam(each.parameters(), lr=0.01) for each in pair] for pair in (plain, references)]
    for step in range(4):
        for loss, turn in ((discriminate, 1), (generate, 0)):
            for each in (*plain, *references):
                each.zero_grad()
            loss(*called, rows(step, rank.rank), rows(step + 50, rank.rank)).backward()
            parts = [loss(*references, rows(step, r), rows(step + 50, r)) for r in range(rank.world)]
            (sum(parts) / rank.world).backward()
            compare(rank, plain, references)
            for pair in optimizers:
                pair[turn].step()
    for each in plain:
        lockstep.check_in_sync(each, rank.group)


@pytest.mark.parametrize("wrapped", [False, True])
def test_two_networks_that_train_each_other(wrapped):
    run_ranks(2, adversarial, wrapped)


# ------------------------------------------------------------------------------------ child and parent


def nested(rank, parent_too, cap):
    """A child with options of its own, then all around it."""
    module = rank.make(lambda: nn.Sequential(network(), nn.Linear(3, 2), network()[0])).double()
    module = nn.Sequential(module[0], module[1], nn.Linear(2, 1).double())
    reference = copy.deepcopy(module)
    lockstep.replicate(module[0], process_group=rank.group, bucket_cap_mb=cap)
    if parent_too:
        lockstep.replicate(module, process_group=rank.group)
    else:
        for child in module[1:]:
            lockstep.replicate(child, process_group=rank.group)
    reference.load_state_dict(module.state_dict())
    for step in range(3):
        for each in (module, reference):
            each.zero_grad()
        module(rows(step, rank.rank)).square().mean().backward()
        reference(torch.cat([rows(step, r) for r in range(rank.world)])).square().mean().backward()
        compare(rank, [module], [reference])


@pytest.mark.parametrize("cap", [None, 1e-4])
@pytest.mark.parametrize("parent_too", [True, False], ids=["child and parent", "each child"])
def test_children_replicated_by_themselves(parent_too, cap):
    run_ranks(2, nested, parent_too, cap)


def several_methods(rank):
    """Children say by themselves whether they synchronise."""
    module = nn.Sequential(one_weight(), one_weight())
    for child in module:
        lockstep.replicate(child, process_group=rank.group)
    seen = []
    with module[0].no_sync():
        module(x_of(rank)).sum().backward()
        seen.append(grads(module))
    module.zero_grad()
    module(x_of(rank)).sum().backward()
    return [*seen, grads(module)]


def test_each_module_synchronises_when_it_is_told_to():
    assert run_ranks(2, several_methods) == [[[rank, 1.5], [1.5, 1.5]] for rank in (1.0, 2.0)]


# ---------------------------------------------------------------------- other modules on other ranks


def branches(rank, uses, steps=3):
    """Three modules; `uses[rank]` lists those that a rank uses, in that order."""
    modules = [lockstep.replicate(one_weight(), process_group=rank.group) for _ in range(3)]
    seen = []
    for _ in range(steps):
        for module in modules:
            module.zero_grad()
        sum(modules[index](x_of(rank)).sum() for index in uses[rank.rank]).backward()
        seen.append(grads(*modules))
    return seen


@pytest.mark.parametrize(
    ("uses", "wanted"),
    [
        (([0, 1, 2], [2, 1, 0]), [1.5, 1.5, 1.5]),
        (([0], [2]), [0.5, None, 1.0]),
        (([0, 1], [1]), [0.5, 1.5, None]),
        (([2, 0], [0, 1]), [1.5, 1.0, 0.5]),
        (([0, 1], [2, 1], [1]), [1 / 3, 2.0, 2 / 3]),
    ],
)
def test_modules_used_in_another_order_or_not_at_all(uses, wanted):
    for seen in run_ranks(len(uses), branches, uses):
        for step in seen:
            assert step == [None if grad is None else pytest.approx(grad) for grad in wanted]


def other_order(rank):
    """Two modules of several buckets, which backward comes to in another order on each rank."""
    layers = [nn.Sequential(*(one_weight() for _ in range(4))) for _ in range(2)]
    modules = [lockstep.replicate(each, process_group=rank.group, bucket_cap_mb=1e-6) for each in layers]
    seen = []
    for _ in range(4):
        for module in modules:
            module.zero_grad()
        order = list(enumerate(modules))[:: -1 if rank.rank else 1]
        sum(module(x_of(rank, 10.0**number)).sum() for number, module in order).backward()
        seen.append([grads(module) for module in modules])
    return seen


def test_no_bucket_leaves_before_it_is_known_which_modules_take_part():
    assert run_ranks(2, other_order) == [[[[1.5] * 4, [15.0] * 4]] * 4] * 2


def alternate(rank):
    """One module each step, another one on each rank, with a backward that not all of them see."""
    modules = [lockstep.replicate(one_weight(), process_group=rank.group) for _ in range(2)]
    seen = []
    for step in range(4):
        for module in modules:
            module.zero_grad()
        modules[(rank.rank + step) % 2](x_of(rank)).sum().backward()
        seen.append(grads(*modules))
    return seen


def test_modules_used_in_turn():
    first, second = [0.5, 1.0], [1.0, 0.5]
    assert run_ranks(2, alternate) == [[first, second, first, second]] * 2


def failing(rank, together):
    """Backward fails on rank 1 while two modules take part; then all go on."""
    modules = [lockstep.replicate(one_weight(), process_group=rank.group) for _ in range(2)]
    errors = []

    def spoil(grad):
        if rank.rank == 1:
            raise ArithmeticError("a bad batch")

    middle = modules[0](x_of(rank)) * 1  # so that the failure comes before what is hooked to the output
    middle.register_hook(spoil)
    try:
        modules[1](middle).sum().backward()
    except (ArithmeticError, lockstep.errors.PeerError) as error:
        errors.append(type(error).__name__)
    for module in modules:
        module.zero_grad()
    loss = modules[1](modules[0](x_of(rank))) if together else modules[rank.rank](x_of(rank))
    loss.sum().backward()
    return errors, grads(*modules)


@pytest.mark.parametrize(("together", "wanted"), [(False, [0.5, 1.0]), (True, [1.5, 1.5])])
def test_a_failure_with_several_modules(together, wanted):
    """Also one of whose forwards the failed backward has not got to."""
    assert run_ranks(2, failing, together) == [
        (["PeerError"], wanted),
        (["ArithmeticError"], wanted),
    ]


def fails_before_what_it_hides(rank):
    """Backward fails on rank 1 before it gets to a module that is checkpointed as a whole, which no graph shows."""
    modules = [lockstep.replicate(one_weight(), process_group=rank.group) for _ in range(2)]
    modules[0](x_of(rank))  # a forward without a backward, on all ranks

    def spoil(grad):
        if rank.rank == 1:
            raise ArithmeticError("a bad batch")

    x = x_of(rank).requires_grad_()
    middle = modules[1](checkpoint(modules[0], x, use_reentrant=True)) * 1
    middle.register_hook(spoil)
    with pytest.raises(ArithmeticError if rank.rank == 1 else lockstep.errors.PeerError):
        middle.sum().backward()
    for module in modules:
        module.zero_grad()
    modules[1](modules[0](x_of(rank))).sum().backward()
    return grads(*modules)


def test_after_a_failure_forwards_are_counted_anew_for_every_module_on_every_rank():
    assert run_ranks(2, fails_before_what_it_hides) == [[1.5, 1.5]] * 2


# --------------------------------------------------------------------------- modules that come and go


def come_and_go(rank):
    """A second module on the group, used, and gone again; on rank 1 garbage is collected late."""
    first = lockstep.replicate(one_weight(), process_group=rank.group)
    seen = []
    for _ in range(2):
        second = lockstep.replicate(one_weight(), process_group=rank.group)
        second(first(x_of(rank))).sum().backward()
        seen.append(grads(first, second))
        first.zero_grad()
        del second
        if rank.rank == 0:
            gc.collect()
        first(x_of(rank)).sum().backward()
        seen.append(grads(first))
        first.zero_grad()
    return seen


def test_modules_that_come_and_go():
    assert run_ranks(2, come_and_go) == [[[1.5, 1.5], [1.5]] * 2] * 2


def count(rank, modules):
    """Collectives of a step, when plans are made."""
    replicated = [lockstep.replicate(one_weight(), process_group=rank.group) for _ in range(modules)]
    for _ in range(3):
        with count_collectives(rank) as seen:
            sum(module(x_of(rank)).sum() for module in replicated).backward()
    return [each.name for each in seen]


def test_several_modules_cost_one_tiny_collective():
    assert run_ranks(2, count, 1) == [["all_reduce"]] * 2
    for seen in run_ranks(2, count, 3):
        assert len(seen) == 3 + 1


def two_groups(rank):
    """A module on each of two groups; the second has the ranks the other way round."""
    store = dist.PrefixStore("other", STORES[0])
    other = dist.ProcessGroupGloo(store, rank.world - 1 - rank.rank, rank.world)
    modules = [lockstep.replicate(one_weight(), process_group=group) for group in (rank.group, other)]
    seen = []
    for order in ([0, 1], [1, 0]):
        for module in modules:
            module.zero_grad()
        x = x_of(rank)
        for index in order:
            x = modules[index](x)
        x.sum().backward()
        seen.append(grads(*modules))
    return seen


STORES: list[object] = []


def test_modules_on_different_groups():
    STORES[:] = [dist.HashStore()]
    try:
        assert run_ranks(2, two_groups) == [[[1.5, 1.5]] * 2] * 2
    finally:
        STORES.clear()


def sent_before_the_end(rank):
    """How many collectives have begun when a backward through two modules of several buckets comes to its end."""
    groups = [rank.group, new_gloo_group(dist.PrefixStore("another", STORES[0]), rank.rank, rank.world, 30)]
    layers = [nn.Sequential(*(one_weight() for _ in range(3))) for _ in groups]
    modules = [
        lockstep.replicate(each, process_group=group, bucket_cap_mb=1e-6)
        for each, group in zip(layers, groups, strict=True)
    ]
    with count_collectives(rank) as seen:
        for _ in range(3):
            x, at_end = x_of(rank).requires_grad_(), []
            x.register_hook(lambda _, at_end=at_end: at_end.append(len(seen)))
            begun = len(seen)
            modules[1](modules[0](x)).sum().backward()
    return at_end[0] - begun


def test_buckets_leave_early_where_each_module_has_a_group():
    STORES[:] = [dist.HashStore()]
    try:
        assert run_ranks(2, sent_before_the_end) == [4] * 2
    finally:
        STORES.clear()


def left_out_in_backward(rank):
    """A backward through two modules fails on rank 1, which leaves out the batch; the next one goes past forward."""
    models = [lockstep.replicate(one_weight(), process_group=rank.group) for _ in range(2)]
    seen = []
    for turn in range(3):
        with lockstep.loop.skip_on(ArithmeticError, modules=models):
            y = x_of(rank)
            for model in models:
                model.zero_grad()
                y = model(y) if turn < 2 else nn.functional.linear(y, model.weight)
            fails_in_backward(y, rank.rank == turn == 1).sum().backward()
        grads = [model.weight.grad for model in models]
        seen.append((lockstep.loop.skipped(*models), [None if each is None else each.item() for each in grads]))
    return seen


def test_a_batch_that_is_left_out_ends_the_rounds_of_all_modules():
    usual, left_out = (False, [1.5, 1.5]), (True, [None, None])
    assert run_ranks(2, left_out_in_backward) == [[usual, left_out, usual]] * 2


class EndedMeanwhile(list):
    """Passes of another thread, which ends them as soon as it is asked whether there are any."""

    def __len__(self):
        number = super().__len__()
        self.clear()
        return number


def test_a_pass_of_another_thread_may_end_while_this_one_is_asked_about():
    """Every pass asks the modules of all threads: ranks that are threads, and a plain module beside them."""

    def work(rank):
        model = lockstep.replicate(one_weight(), process_group=rank.group)
        reducer = find_replication(model).reducer
        reducer._steps = EndedMeanwhile([SimpleNamespace(this=None)])
        with ThreadPoolExecutor(1) as other:
            other.submit(lambda: nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()).result()
        reducer._steps = []
        model(x_of(rank)).sum().backward()
        return model.weight.grad.item()

    assert run_ranks(1, work) == [1.0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_pass_in_which_nothing_leaves_early_calls_no_trigger(monkeypatch, count):
    triggered, call = [], Trigger.__call__

    def note(trigger, parameter):
        triggered.append(parameter)
        call(trigger, parameter)

    monkeypatch.setattr(Trigger, "__call__", note)

    def work(rank):
        modules = [lockstep.replicate(network(), process_group=rank.group) for _ in range(count)]

        def triggers(step):
            before = len(triggered)
            for module in modules:
                step(module)
            return sum(any(each is p for p in module.parameters() for module in modules) for each in triggered[before:])

        def local(module):
            with module.no_sync():
                module(torch.ones(2, 3)).sum().backward()

        def reduced(module):
            module(torch.ones(2, 3)).sum().backward()

        return [triggers(step) for step in (local, reduced, reduced, local, reduced)]

    found = run_ranks(2, work)
    # The order of gradients is learnt in the first round; with one module, its last one tells that a bucket is full.
    assert [steps[0] for steps in found] == [steps[3] for steps in found] == [0, 0]
    assert all(steps[1] > 0 for steps in found)
    assert count == 1 or [steps[4] for steps in found] == [0, 0]
