"""Means over what is counted: `accumulate(weight=...)` against one process with the whole batch, in float64."""

from __future__ import annotations

import contextlib
import copy
import fractions
import math

import pytest
import torch
from torch import nn

import lockstep
import small_modules
from lockstep.errors import OptionError
from programs.networks import mlp
from programs.ranks import on_ranks, replicated, same_gradients, scalars
from small_modules import x_of
from threaded import count_collectives, run_ranks


def network():
    return mlp(3, 5, 2).double()


def batch(rows, seed=0):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed)).double()


def loss_sum(model, x):
    return model(x).square().sum()


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def whole(model, x, weight):
    """The gradients of one process."""
    reference = copy.deepcopy(model)
    reference.zero_grad()
    (loss_sum(reference, x) / weight).backward()
    return gradients(reference)


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-15)


def one_weight(rank, dtype=torch.float64):
    return replicated(rank, lambda: small_modules.one_weight().to(dtype))


def weighted(rank, model, parts):
    """A batch of micro-batches (gradient, weight)."""
    model.zero_grad()
    for number, (gradient, weight) in enumerate(parts):
        with lockstep.accumulate(model, last=number == len(parts) - 1, weight=weight):
            model(torch.full((1, 1), float(gradient), dtype=model.weight.dtype)).sum().backward()
    return model.weight.grad.item()


# ---------------------------------------------------------------------------------- exact

SIZES = {  # rows of each micro-batch of each rank
    "equal": [[4, 4], [4, 4]],
    "unequal ranks": [[2, 2], [7, 5]],
    "unequal micro-batches": [[1, 9, 3], [2, 2, 2]],
    "other numbers of micro-batches": [[1], [2, 3, 4, 1]],
    "three ranks": [[5, 1], [2], [3, 3, 3]],
    "one row in all": [[1], [0]],
    "a rank without rows": [[3, 2], [0, 0]],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("cap", [25, 1e-5])
def test_as_one_process_with_the_whole_batch(sizes, cap):
    def call(rank):
        model = replicated(rank, network, bucket_cap_mb=cap)
        flat = [count for counts in sizes for count in counts]
        for seed in range(3):
            pieces = list(batch(sum(flat), seed).split(flat))
            before = sum(map(len, sizes[: rank.rank]))
            mine = pieces[before : before + len(sizes[rank.rank])]
            model.zero_grad()
            for number, x in enumerate(mine):
                with lockstep.accumulate(model, last=number == len(mine) - 1, weight=len(x)):
                    loss_sum(model, x).backward()
            close(gradients(model), whole(model, torch.cat(pieces), sum(flat)))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)
        lockstep.check_in_sync(model)

    run_ranks(len(sizes), call)


@on_ranks(2)
def test_with_clipping_momentum_and_the_wrapper(rank):
    ddp = lockstep.DistributedDataParallel(rank.make(network), process_group=rank.group)
    alone = rank.make(network)
    sgd, reference = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ddp, alone))
    for seed in range(4):
        pieces = batch(10, seed).split([1, 2, 4, 3])
        for model, parts, optimizer in ((ddp, pieces[rank.rank * 2 :][:2], sgd), (alone, pieces, reference)):
            optimizer.zero_grad()
            for number, x in enumerate(parts):
                if model is ddp:
                    with lockstep.accumulate(ddp, last=number == 1, weight=len(x)):
                        loss_sum(ddp, x).backward()
                else:
                    (loss_sum(alone, x) / 10).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    close([p.detach() for p in ddp.parameters()], [p.detach() for p in alone.parameters()])


@pytest.mark.parametrize(
    "weights",
    [
        [[1, 2**53], [3, 5]],  # no float32 could tell 2**53 + 9
        [[0.1, 0.2], [1 / 3, math.pi]],
        [[1e-300], [3e-300]],
        [[1e300, 1e300], [1e307]],
        [[2**40 + 1], [2**20 + 1], [1]],
        [[5e-324], [0.0]],
    ],
)
def test_huge_and_fractional_weights_are_summed_in_float64(weights):
    def call(rank):
        return weighted(rank, one_weight(rank), [(3.0, weight) for weight in weights[rank.rank]])

    flat = [weight for own in weights for weight in own]
    exact = 3 * len(flat) / sum(map(fractions.Fraction, flat))
    results = run_ranks(len(weights), call)
    assert len(set(results)) == 1
    try:
        assert results[0] == pytest.approx(float(exact), rel=1e-14)
    except OverflowError:
        assert results[0] == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@on_ranks(2)
def test_weights_are_exact_that_the_dtype_of_gradients_does_not_hold(rank, dtype):
    first = round(2 / torch.finfo(dtype).eps) + 1
    parts = [(0, 1)] if rank.rank else [(first + 1, first)]
    assert weighted(rank, one_weight(rank, dtype), parts) == 1.0


@on_ranks(2)
def test_tensors_and_numbers_are_weights(rank):
    model = one_weight(rank)
    weights = 2, 2.0, True + True, torch.tensor(2), torch.tensor([2.0]), torch.tensor([[2]], dtype=torch.int8)
    assert [weighted(rank, model, [(6.0, weight)]) for weight in weights] == [3.0] * 6


# ---------------------------------------------------------------------------------- zero


@on_ranks(2)
def test_a_rank_that_counts_nothing_adds_its_gradient_and_no_weight(rank):
    model = one_weight(rank)
    assert [
        weighted(rank, model, [(6.0 * rank.rank, 3 * rank.rank)]),
        weighted(rank, model, [(0.0, 0), (0.0 if rank.rank else 8.0, 0 if rank.rank else 4)]),
    ] == [2.0, 2.0]


@on_ranks(2)
def test_where_nothing_counts_at_all_gradients_are_zero(rank):
    model = one_weight(rank)
    first = weighted(rank, model, [(0.0, 0)]), weighted(rank, model, [(5.0, 0)])
    assert (first, weighted(rank, model, [(5.0, 1)])) == ((0.0, 0.0), 5.0)


# ---------------------------------------------------------------------------------- with other things


@on_ranks(2)
def test_it_nests_in_no_sync(rank):
    model = one_weight(rank)
    x = x_of(rank, dtype=torch.float64)
    with count_collectives(rank) as sent, model.no_sync(), lockstep.accumulate(model, last=True, weight=2):
        model(x).sum().backward()
    assert sent == []
    with lockstep.accumulate(model, last=True, weight=1):
        model(x).sum().backward()
    assert model.weight.grad.item() == 1.0


@on_ranks(2)
def test_unused_late_sparse_and_large_gradients_are_weighted_too(rank):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.sparse = nn.Embedding(4, 1, sparse=True).double()
            self.large = nn.Parameter(torch.ones(1 << 20).double())
            self.branches = nn.ParameterList(torch.ones(1).double() for _ in range(3))

    third = pytest.approx(1 / 3)
    model = replicated(rank, Parts)
    for number in range(3):
        model.zero_grad()
        branch = model.branches[rank.rank if number < 2 else 2]  # the last one has no place in the plan
        with lockstep.accumulate(model, weight=rank.rank + 1):
            (model.sparse(torch.tensor([rank.rank])).sum() + model.large.sum() + 6 * branch.sum()).backward()
    assert model.sparse.weight.grad.to_dense().flatten().tolist() == [third, third, 0, 0]
    assert model.large.grad[-1].item() == pytest.approx(2 / 3)
    assert scalars(model.branches) == [None, None, 4.0]


@on_ranks(2)
def test_weights_take_no_collective(rank):
    model = one_weight(rank)
    weighted(rank, model, [(1.0, 2)])
    with count_collectives(rank) as sent:
        weighted(rank, model, [(1.0, 2), (1.0, 3)])
    assert [each.name for each in sent] == ["all_reduce"]


# ---------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("weight", [-1, -1e-300, math.inf, math.nan, torch.tensor(-2.0)])
@on_ranks(2)
def test_weights_are_finite_and_not_negative(rank, weight):
    model = one_weight(rank)
    with (
        pytest.raises(OptionError, match="expected a finite number, 0 or more"),
        lockstep.accumulate(model, weight=weight),
    ):
        raise AssertionError("inside")
    assert (weighted(rank, model, [(4.0, 2)]), model.no_sync is not None) == (2.0, True)


@pytest.mark.parametrize("missing", [0, 1, 2])
@on_ranks(3)
def test_a_rank_without_a_weight_is_an_error_on_every_rank_by_its_number(rank, missing):
    model = one_weight(rank)
    weighted(rank, model, [(1.0, 1)])
    words = f"^rank {missing} gave no weight in round 2, others did; give one on every rank, 0 where there is nothing"
    with pytest.raises(OptionError, match=words):
        weighted(rank, model, [(1.0, None if rank.rank == missing else 5)])
    assert [weighted(rank, model, [(6.0, weight)]) for weight in (2, None)] == [3.0, 6.0]


@pytest.mark.parametrize("weights", [[3, None], [None, 3], [None, 3, 2], [3, None, 2]])
@on_ranks(2)
def test_a_micro_batch_without_a_weight_is_an_error_and_training_goes_on(rank, weights):
    model = one_weight(rank)
    with pytest.raises(OptionError, match="give accumulate\\(\\) a weight in every micro-batch, or in none"):
        weighted(rank, model, [(1.0, weight) for weight in weights])
    assert model.weight.grad is None
    assert weighted(rank, model, [(6.0, 1), (6.0, 2)]) == 4.0
    assert weighted(rank, model, [(6.0, None), (6.0, None)]) == 12.0


@on_ranks(2)
def test_a_micro_batch_without_a_weight_on_one_rank_is_told_to_the_others(rank):
    model = one_weight(rank)
    kind = OptionError if rank.rank == 1 else lockstep.errors.PeerError
    with pytest.raises(kind):
        weighted(rank, model, [(1.0, 1), (1.0, None if rank.rank == 1 else 1)])
    assert weighted(rank, model, [(6.0, 1), (6.0, 2)]) == 4.0


BLOCKS = {"of both": (0, 1), "of both, the one inside first": (1, 0), "of the one around": (0,)}


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@on_ranks(2)
def test_a_module_that_is_replicated_inside_of_another_one_needs_a_weight(rank, blocks):
    plain = rank.make(lambda: mlp().double())
    model = copy.deepcopy(plain)
    both = model, model[2]
    for each in reversed(both):
        lockstep.replicate(each, process_group=rank.group)
    rows = [torch.full((number + 2, 3), 1.0 + number).double() for number in range(2)]

    def step():
        with contextlib.ExitStack() as stack:
            for number in blocks:
                stack.enter_context(lockstep.accumulate(both[number], weight=len(rows[rank.rank])))
            model(rows[rank.rank]).square().sum().backward()

    if len(blocks) == 1:
        with pytest.raises(OptionError, match="replicated by itself inside"):
            step()
        return
    step()
    (plain(torch.cat(rows)).square().sum() / 5).backward()
    same_gradients(rank, model, plain)
