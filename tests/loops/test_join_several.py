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
from programs.ranks import clear, scalars
from small_modules import chain, one_weight, x_of
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


def without_sync_of_the_second(a, b, x):
    b.require_backward_grad_sync = False
    (a(x) + b(x)).sum().backward()
    b.require_backward_grad_sync = True


def of_one_generated_batch(a, b, x):
    """The second wrapper, which is not the first in the context, runs more often in an iteration."""
    made = a(x)
    (b(x) - b(made.detach())).sum().backward()
    b.zero_grad()
    b(made).sum().backward()


def wrappers(implementation="lockstep", make=one_weight, **options):
    return [ddp_class(implementation)(make(), **options) for _ in range(2)]


def gradients(rank, a, b, use, **options):
    """Of both wrappers in each batch. Rank 0 has one, rank 1 three; without the mean they are r + 1 on rank r."""
    seen = []
    with Join([a, b], **options):
        for _ in range(1 + 2 * rank.rank):
            clear(a, b)
            use(a, b, x_of(rank))
            seen.append(scalars(a, b))
    return seen


@both
@pytest.mark.parametrize("initial", [True, False], ids=["all ranks", "ranks with batches"])
@on_processes(2)
def test_several_wrappers_in_one_context(rank, implementation, initial):
    alone = 1.0 if initial else 2.0
    second = 1.0 if implementation == "torch" else alone  # the option is the first wrapper's only, there
    wanted = [[1.5, 1.5], [alone, second], [alone, second]]
    found = gradients(rank, *wrappers(implementation), one_after_the_other, divide_by_initial_world_size=initial)
    assert found == wanted[: 1 + 2 * rank.rank]


@pytest.mark.parametrize("use", [together, the_other_way_round, one_of_another, of_one_generated_batch])
@on_processes(2)
def test_forwards_and_backwards_of_several_wrappers_in_any_order(rank, use):
    assert gradients(rank, *wrappers(), use) == [[1.5, 1.5], [1.0, 1.0], [1.0, 1.0]][: 1 + 2 * rank.rank]


@on_processes(2)
def test_wrappers_that_send_buckets_early(rank):
    """Outside of `join`, these send buckets before the end of backward."""
    a, b = wrappers(make=lambda: chain(3), bucket_cap_mb=1e-6)
    for _ in range(2):
        one_of_another(a, b, x_of(rank))
    assert gradients(rank, a, b, one_of_another) == [[1.5] * 6, [1.0] * 6, [1.0] * 6][: 1 + 2 * rank.rank]


@on_processes(2)
def test_a_wrapper_that_does_not_synchronise_beside_one_that_does(rank):
    found = gradients(rank, *wrappers(), without_sync_of_the_second)
    assert found == [[[1.5, 1.0]], [[1.5, 2.0], [1.0, 2.0], [1.0, 2.0]]][rank.rank]


@on_processes(2)
def test_a_round_between_two_iterations_of_a_wrapper_is_none_of_them(rank):
    """Run a second backward through the second wrapper's last forward, after the next one of the first wrapper."""
    (a, b), x = wrappers(), x_of(rank)
    seen, kept = [], []
    with Join([a, b]):
        for _ in range(1 + 2 * rank.rank):
            clear(a, b)
            first = a(x).sum()
            for loss in kept:
                loss.backward()
                seen += scalars(b)
                b.zero_grad()
            first.backward()
            kept = [b(x).sum()]
            kept[0].backward(retain_graph=True)
            seen.append(scalars(a, b))
    assert seen == [[[1.5, 1.5]], [[1.5, 1.5], 1.0, [1.0, 1.0], 1.0, [1.0, 1.0]]][rank.rank]


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


def steps_before(rank, error, words, use, several=True):
    """The steps in one context before an error that is said on this rank."""
    (a, b), steps = wrappers(), 0
    with pytest.raises(error, match=words), Join([a, b] if several else [a]):
        for _ in range(1 + 2 * (rank.rank > 0)):
            use(a, b, torch.ones(1, 1))
            steps += 1
    return steps


@on_processes(3)
def test_more_forwards_than_ranks_that_have_run_out_can_follow_are_named(rank):
    told = rf"^rank {rank.rank}, in join\(\): forward of Linear begins again" if rank.rank else None
    for use, several in (
        (two_forwards, False),
        (two_forwards, True),
        (a_forward_without_backward, False),
        (adversarial, True),
    ):
        found = steps_before(rank, OptionError if rank.rank else PeerError, told, use, several)
        assert found == 1, (use, several)


@on_processes(2)
def test_forward_of_the_first_wrapper_comes_first(rank):
    told = rf"^rank {rank.rank}, in join\(\): forward of Linear has come before that of Linear"
    assert steps_before(rank, OptionError, told, lambda a, b, x: (b(x) + a(x)).sum().backward()) == 0


@on_processes(2)
def test_a_context_whose_first_is_no_module(rank):
    """Every rank has as many batches; the first in the context is no module, and nothing is known of its order."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit.script

    ddp = lockstep.DistributedDataParallel(one_weight())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with Join([optimizer, ddp]):
        for _ in range(2):
            optimizer.zero_grad()
            ddp(x_of(rank)).sum().backward()
            optimizer.step()
    assert round(ddp.module.weight.item(), 6) == 0.7
