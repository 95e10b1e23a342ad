"""Accumulation: which backward synchronises, several forwards or backwards, what is left of gradients between them."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.replication.replication import find_replication
from programs.ranks import on_ranks, replicated, rows, same_gradients, scalars
from small_modules import chain, one_weight, x_of
from threaded import count_collectives, run_ranks


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def grad(module):
    return scalars(module)[0]


def two_layers(rank, **options):
    return replicated(rank, lambda: nn.ModuleList(chain()), **options)


def attach(rank, kind, module):
    if kind == "wrapper":
        return lockstep.DistributedDataParallel(module, process_group=rank.group)
    return lockstep.replicate(module, process_group=rank.group)


kinds = pytest.mark.parametrize("kind", ["module", "wrapper"])

# ---------------------------------------------------------------------------- which backward synchronises


@kinds
@on_ranks(2)
def test_only_the_last_backward_synchronises(rank, kind):
    module = attach(rank, kind, one_weight())
    seen = []

    def backward():
        module(x_of(rank)).sum().backward()
        seen.append(grad(module))

    with module.no_sync():
        backward()
        with module.no_sync():
            pass
        backward()  # still inside
    module.set_requires_gradient_sync(False)
    backward()
    with module.no_sync():
        pass
    backward()  # as it was before no_sync
    module.set_requires_gradient_sync(True)
    for last in (False, False, True):
        with lockstep.accumulate(module, last=last):
            backward()
    with contextlib.suppress(ZeroDivisionError), module.no_sync():
        raise ZeroDivisionError
    backward()
    own = [n * (rank.rank + 1.0) for n in range(1, 7)]
    assert seen == [*own, 7 * 1.5, 8 * 1.5]


@on_ranks(2)
def test_where_backward_runs_counts_and_not_where_forward_ran(rank):
    module = replicated(rank)
    with module.no_sync():
        loss = module(x_of(rank)).sum()
    with count_collectives(rank) as seen:
        loss.backward()
    synchronised, counted = grad(module), len(seen)
    loss = module(x_of(rank)).sum()
    with module.no_sync(), count_collectives(rank) as seen:
        loss.backward()
    assert (synchronised, counted > 0, grad(module), len(seen)) == (1.5, True, 2.5 + rank.rank, 0)


def in_part(module):
    next(module.parameters()).grad = None
    for parameter in list(module.parameters())[1:]:
        if parameter.grad is not None:
            parameter.grad.zero_()


ZEROS = {
    "to none": lambda module: module.zero_grad(),
    "to zero": lambda module: module.zero_grad(set_to_none=False),
    "by hand": lambda module: [
        setattr(p, "grad", torch.zeros_like(p)) for p in module.parameters()
    ],  # views of nothing
    "in part": in_part,
    "not at all": lambda module: None,  # they go on adding up, over synchronised steps
}


@pytest.mark.parametrize("cap", [None, 1e-4])
@pytest.mark.parametrize("zero", ZEROS)
@on_ranks(2)
def test_micro_batches_are_as_one_batch(rank, zero, cap):
    micro_batches = 3 if zero == "to none" else 2
    module = replicated(rank, network, bucket_cap_mb=cap)
    reference = copy.deepcopy(module)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (module, reference)]
    for step in range(4):
        for each in (module, reference):
            ZEROS[zero](each)
        for part in range(micro_batches):
            draw = 10 * step + part
            with lockstep.accumulate(module, last=part == micro_batches - 1):
                module(rows(draw, rank.rank)).square().mean().backward()
            reference(torch.cat([rows(draw, r) for r in range(rank.world)])).square().mean().backward()
        same_gradients(rank, module, reference, atol=1e-14)
        for optimizer in optimizers:
            optimizer.step()


# --------------------------------------------------------------------- several forwards, several backwards


@on_ranks(2)
def test_several_forwards_before_one_backward(rank):
    module = replicated(rank, network)
    reference = copy.deepcopy(module)
    for step in range(3):
        parts = [module(rows(10 * step + i, rank.rank)).square().mean() for i in range(3)]
        with torch.no_grad():
            module(rows(99, rank.rank))  # an evaluation in between
        sum(parts).backward()
        whole = [torch.cat([rows(10 * step + i, r) for r in range(rank.world)]) for i in range(3)]
        sum(reference(x).square().mean() for x in whole).backward()
    same_gradients(rank, module, reference, atol=1e-14)


@on_ranks(2)
def test_several_backwards_before_a_step(rank):
    """Through one graph, each synchronised or not; and each of two forwards by itself, in the other order."""
    module = replicated(rank)
    loss = module(x_of(rank)).sum()
    seen = []
    for synchronise in (True, False, True):
        module.set_requires_gradient_sync(synchronise)
        loss.backward(retain_graph=True)
        seen.append(grad(module))
    first, second = module(x_of(rank)).sum(), module(x_of(rank, 10.0)).sum()
    second.backward()
    seen.append(grad(module))
    first.backward()
    seen = [*seen, grad(module)]
    assert seen == [1.5, 1.5 + rank.rank + 1, 4.5, 4.5 + 15.0, 4.5 + 15.0 + 1.5]


@pytest.mark.parametrize("cap", [None, 1e-6])
@on_ranks(2)
def test_all_that_has_piled_up_is_synchronised(rank, cap):
    """A layer that the plan has no place for piles up, and the backward that synchronises does not use it."""
    module = two_layers(rank, bucket_cap_mb=cap)
    module[0](x_of(rank)).sum().backward()
    module.zero_grad()
    with module.no_sync():
        module[1](x_of(rank)).sum().backward()
    module[0](x_of(rank)).sum().backward()
    first = scalars(module)
    module[0](x_of(rank)).sum().backward()
    assert (first, scalars(module)) == ([1.5, 1.5], [3.0, 1.5])


@pytest.mark.parametrize("placed", [True, False], ids=["in the plan", "not in it"])
@pytest.mark.parametrize("cap", [None, 1e-6])
@on_ranks(2)
def test_a_parameter_of_which_all_was_given_up_is_as_if_it_had_not_been_used(rank, placed, cap):
    """The second layer's gradient, and how often its hook has run, after a backward that did not use it."""
    model = two_layers(rank, bucket_cap_mb=cap)
    called = []
    model[1].weight.register_post_accumulate_grad_hook(called.append)

    def both():
        return (model[0](x_of(rank)) + model[1](x_of(rank))).sum()

    for _ in range(2):  # in which the plan is made
        (both() if placed else model[0](x_of(rank)).sum()).backward()
        model.zero_grad()
    called.clear()
    with model.no_sync():
        both().backward()
    model.zero_grad()
    model[0](x_of(rank)).sum().backward()
    assert (model[0].weight.grad.item(), model[1].weight.grad, called) == (1.5, None, [])


@on_ranks(2)
def test_backward_for_some_of_the_parameters(rank):
    """backward(inputs=...) leaves out the other parameters, as on one device."""
    module = replicated(rank, chain)
    module(x_of(rank)).sum().backward(inputs=[module[1].weight])
    assert scalars(module) == [None, 1.5]


@pytest.mark.parametrize("past_forward", [False, True])
@on_ranks(2)
def test_backward_may_run_in_another_thread(rank, past_forward):
    module, seen = replicated(rank), []
    for step in range(4):  # with triggers on all parameters, then on a few
        module.zero_grad()
        loss = (step + 1) * (x_of(rank) * module.weight if past_forward else module(x_of(rank))).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        seen.append(grad(module))
    assert seen == [1.5, 3.0, 4.5, 6.0]


# ------------------------------------------------------------------------------------------ forgotten


def steps_on(rank, plan, step):
    """The warnings of optimizer steps after backward passes that synchronise or not; of each rank."""
    module = replicated(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for synchronise in plan:
        optimizer.zero_grad()
        module.set_requires_gradient_sync(synchronise)
        step(module, optimizer, lambda: module(x_of(rank)).sum())


def backward_then_step(module, optimizer, loss):
    loss().backward()
    optimizer.step()


def summed_by_the_program(module, optimizer, loss):
    loss().backward()
    torch.distributed.all_reduce(module.weight.grad, group=find_replication(module).group)
    optimizer.step()


def synchronised_from_amid_the_pass(module, optimizer, loss):
    """What counts is how a pass has begun."""
    synchronises = find_replication(module).requires_sync
    output = loss()
    output.register_hook(lambda _: module.set_requires_gradient_sync(True))
    output.backward()
    module.set_requires_gradient_sync(synchronises)
    optimizer.step()


def step_with_a_closure(module, optimizer, loss):
    optimizer.step(lambda: loss().backward())


def only_micro_batches(module, optimizer, loss):
    loss().backward()


class SharpnessAware(torch.optim.SGD):
    """Its step begins with a gradient of this rank, and its closure synchronises."""

    def step(self, closure):
        parameters = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad.clone() for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, grads)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, grads)
        super().step()


def sharpness_aware(module, optimizer, loss):
    with module.no_sync():
        loss().backward()
    SharpnessAware(module.parameters(), lr=0.1).step(lambda: loss().backward())


def warned(plan, step):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, steps_on, plan, step)
    return sorted(str(warning.message) for warning in caught)


@pytest.mark.parametrize("step", [backward_then_step, step_with_a_closure, synchronised_from_amid_the_pass])
def test_a_step_on_gradients_that_are_not_synchronised_is_told_at_once(step):
    messages = warned([True, False], step)
    assert len(messages) == 2
    for rank, message in enumerate(messages):
        assert message.startswith(f"rank {rank}: SGD.step() uses the gradient of parameter weight of this rank alone")
        assert "must not be under no_sync(), accumulate(last=False) or set_requires_gradient_sync(False)" in message
    assert len(warned([False, True, False], step)) == 4


@pytest.mark.parametrize(
    ("plan", "step"),
    [
        ([True, True], backward_then_step),
        ([False, False, True, False, True, True], summed_by_the_program),
        ([True, True], step_with_a_closure),
        ([False, False, True], only_micro_batches),
        ([True, True, True], sharpness_aware),
    ],
)
def test_steps_on_reduced_gradients_are_not(plan, step):
    assert warned(plan, step) == []


@on_ranks(2)
def test_a_step_that_is_told_is_not_made_where_warnings_are_errors(rank):
    module = replicated(rank)
    before = module.weight.detach().clone()
    with module.no_sync():
        module(x_of(rank)).sum().backward()
    with pytest.raises(UserWarning, match=r"SGD\.step\(\) uses the gradient"):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert torch.equal(module.weight, before)


@on_ranks(2)
def test_values_that_all_ranks_load_between_micro_batches_are_not_told(rank):
    module = replicated(rank, network)
    checkpoint = {name: value + 1.0 for name, value in module.state_dict().items()}
    with lockstep.accumulate(module, last=False):
        module(rows(0, rank.rank)).square().mean().backward()
    module.load_state_dict(checkpoint)
    with lockstep.accumulate(module):
        module(rows(1, rank.rank)).square().mean().backward()
    assert [rank.all_equal(p.grad) for p in module.parameters()] == [True] * 4  # warnings are errors
