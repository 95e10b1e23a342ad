"""Several wrappers in one `Join`, and what is left of `join` when it is over."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.distributed.algorithms.join import Join

import lockstep
from ddp_reference import both, ddp_class
from lockstep.errors import AgreementError, OptionError, PeerError
from processes import on_processes, run_processes
from small_modules import one_weight
from tensor_classes import Hiding
from threaded import count_collectives


def one_after_the_other(a, b, x):
    a(x).sum().backward()
    b(x).sum().backward()


def together(a, b, x):
    (a(x) + b(x)).sum().backward()


def the_other_way_round(a, b, x):
    first, second = a(x).sum(), b(x).sum()
    second.backward()
    first.backward()


def one_of_another(a, b, x):
    b(a(x)).sum().backward()


def in_two_backwards_of_one(a, b, x):
    """The second wrapper's gradients pile up."""
    b.require_backward_grad_sync = False
    (a(x) + b(x)).sum().backward()
    b.require_backward_grad_sync = True


def run(rank, use, implementation, initial):
    """Rank 0 has one batch, rank 1 has three; gradients of each wrapper are r + 1 on rank r."""
    make = ddp_class(implementation)
    a, b = make(one_weight()), make(one_weight())
    seen = []
    with Join([a, b], divide_by_initial_world_size=initial):
        for _ in range(1 + 2 * rank.rank):
            a.zero_grad()
            b.zero_grad()
            use(a, b, torch.full((1, 1), rank.rank + 1.0))
            seen.append([a.module.weight.grad.item(), b.module.weight.grad.item()])
    return seen


@both
@pytest.mark.parametrize("initial", [True, False], ids=["all ranks", "ranks with batches"])
def test_several_wrappers_in_one_context(implementation, initial):
    alone = 1.0 if initial else 2.0
    second = 1.0 if implementation == "torch" else alone  # the option is the first wrapper's only, there
    found = run_processes(2, run, one_after_the_other, implementation, initial)
    assert found == [[[1.5, 1.5]], [[1.5, 1.5], [alone, second], [alone, second]]]


@pytest.mark.parametrize("use", [together, the_other_way_round, one_of_another])
def test_forwards_and_backwards_of_several_wrappers_in_any_order(use):
    assert run_processes(2, run, use, "lockstep", True) == [[[1.5, 1.5]], [[1.5, 1.5], [1.0, 1.0], [1.0, 1.0]]]


@on_processes(2)
def test_wrappers_that_send_buckets_early(rank):
    """Outside of `join`, these send buckets before the end of backward."""

    def layers():
        return torch.nn.Sequential(*(one_weight() for _ in range(3)))

    a, b = (lockstep.DistributedDataParallel(layers(), bucket_cap_mb=1e-6) for _ in range(2))
    x = torch.full((1, 1), rank.rank + 1.0)
    for _ in range(2):
        b(a(x)).sum().backward()
    seen = []
    with Join([a, b]):
        for _ in range(1 + 2 * rank.rank):
            a.zero_grad()
            b.zero_grad()
            b(a(x)).sum().backward()
            seen.append([p.grad.item() for p in (*a.parameters(), *b.parameters())])
    assert seen == [[[1.5] * 6], [[1.5] * 6, [1.0] * 6, [1.0] * 6]][rank.rank]


def test_a_wrapper_that_does_not_synchronise_beside_one_that_does():
    found = run_processes(2, run, in_two_backwards_of_one, "lockstep", True)
    assert found == [[[1.5, 1.0]], [[1.5, 2.0], [1.0, 2.0], [1.0, 2.0]]]


@on_processes(2)
def test_a_round_between_two_iterations_of_a_wrapper_is_none_of_them(rank):
    """Run a second backward through the second wrapper's last forward, after the next one of the first wrapper."""
    a, b = (lockstep.DistributedDataParallel(one_weight()) for _ in range(2))
    seen, kept = [], []
    with Join([a, b]):
        for _ in range(1 + 2 * rank.rank):
            a.zero_grad()
            b.zero_grad()
            x = torch.full((1, 1), rank.rank + 1.0)
            first = a(x).sum()
            for loss in kept:
                loss.backward()
                seen.append(b.module.weight.grad.item())
                b.zero_grad()
            first.backward()
            kept = [b(x).sum()]
            kept[0].backward(retain_graph=True)
            seen.append([a.module.weight.grad.item(), b.module.weight.grad.item()])
    found = seen
    assert found == [[[1.5, 1.5]], [[1.5, 1.5], 1.0, [1.0, 1.0], 1.0, [1.0, 1.0]]][rank.rank]


@pytest.mark.parametrize("how", ["join()", "Join", "join() that raised"])
@on_processes(2)
def test_after_join_forward_does_not_communicate(rank, how):
    """Forwards of one rank alone when the context is over."""
    ddp = lockstep.DistributedDataParallel(one_weight())
    x = torch.ones(1, 1)
    if how == "join()":
        with ddp.join():
            ddp(x).sum().backward()
    elif how == "Join":
        with Join([ddp]):
            ddp(x).sum().backward()
    else:
        with pytest.raises(ArithmeticError), ddp.join():
            ddp(x).sum().backward()
            raise ArithmeticError("on every rank")
        gc.collect()  # the traceback
    with count_collectives(rank) as seen:
        if rank.rank == 0:
            ddp.eval()
            ddp(x)
            with torch.no_grad():
                ddp(x)
            ddp.train()
        forwards = len(seen)
    ddp.zero_grad()
    ddp(x * (rank.rank + 1)).sum().backward()
    again = ddp.module.weight.grad.item()
    with ddp.join():
        for _ in range(1 + rank.rank):
            ddp.zero_grad()
            ddp(x * (rank.rank + 1)).sum().backward()
    assert (forwards, again, ddp.module.weight.grad.item()) == [(0, 1.5, 1.5), (0, 1.5, 1.0)][rank.rank]


def hiding_buffer_fails(rank):
    """An error at each look at a buffer when all batches are done, until none comes: what is raised."""
    inner = one_weight()
    inner.register_buffer("kept", Hiding(torch.full((4,), rank.rank, dtype=torch.int8), torch.ones(1)))
    model = lockstep.DistributedDataParallel(inner)
    raised = []
    while True:
        try:
            with model.join():
                for _ in range(1 + rank.rank):
                    model(torch.ones(1, 1)).sum().backward()
                inner.kept.left = len(raised) if rank.rank == 1 else None
        except (AgreementError, ArithmeticError) as error:
            raised.append((type(error), "not again" in str(error)))
            inner.kept.left = None
        else:
            return raised


def test_what_fails_at_the_end_is_told():
    """Rank 1, which has ended last, cannot send its values."""
    told, failing = run_processes(2, hiding_buffer_fails)
    assert len(told) > 0
    assert told == [(AgreementError, True)] * len(told)
    assert failing == [(ArithmeticError, True)] * len(told)


def two_forwards(a, b, x):
    (a(x) + a(-x)).sum().backward()


def a_forward_without_backward(a, b, x):
    a(x)
    a(x).sum().backward()


def adversarial(a, b, x):
    """The generator runs for the discriminator's step, and again for its own."""
    made = a(x)
    (b(x) - b(made.detach())).sum().backward()
    b(a(x)).sum().backward()


def of_one_generated_batch(a, b, x):
    made = a(x)
    (b(x) - b(made.detach())).sum().backward()
    b.zero_grad()
    b(made).sum().backward()


def with_too_many_forwards(rank, use, several):
    a, b = lockstep.DistributedDataParallel(one_weight()), lockstep.DistributedDataParallel(one_weight())
    seen = []
    try:
        with Join([a, b] if several else [a]):
            for _ in range(1 + 2 * (rank.rank > 0)):
                use(a, b, torch.ones(1, 1))
                seen.append(a.module.weight.grad.item())
    except (OptionError, PeerError) as error:
        return len(seen), type(error), str(error)
    return len(seen), None, ""


@pytest.mark.parametrize(
    ("use", "several"),
    [(two_forwards, False), (two_forwards, True), (a_forward_without_backward, False), (adversarial, True)],
)
def test_more_forwards_than_ranks_that_have_run_out_can_follow_are_named(use, several):
    gone, *others = run_processes(3, with_too_many_forwards, use, several)
    assert gone[:2] == (1, PeerError)
    for number, (steps, kind, said) in enumerate(others, 1):
        assert (steps, kind) == (1, OptionError)
        assert said.startswith(f"rank {number}, in join(): forward of Linear begins again"), said


def test_a_wrapper_that_is_not_the_first_may_run_more_often_in_an_iteration():
    found = run_processes(2, run, of_one_generated_batch, "lockstep", True)
    assert found == [[[1.5, 1.5]], [[1.5, 1.5], [1.0, 1.0], [1.0, 1.0]]]


def the_second_one_first(a, b, x):
    (b(x) + a(x)).sum().backward()


def test_forward_of_the_first_wrapper_comes_first():
    for number, found in enumerate(run_processes(2, with_too_many_forwards, the_second_one_first, True)):
        steps, kind, said = found
        assert (steps, kind) == (0, OptionError)
        assert said.startswith(f"rank {number}, in join(): forward of Linear has come before that of Linear"), said


@on_processes(2)
def test_a_context_whose_first_is_no_module(rank):
    """Every rank has as many batches; the first in the context is no module, and nothing is known of its order."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit.script

    ddp = lockstep.DistributedDataParallel(one_weight())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with Join([optimizer, ddp]):
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.full((1, 1), rank.rank + 1.0)).sum().backward()
            optimizer.step()
    assert round(ddp.module.weight.item(), 6) == 0.7
