"""What parameters have after a backward that failed: the same on every rank, so that a step on it is the same, too.

A program may catch the error on every rank and go on without `zero_grad()`. What one rank alone still had - of micro-
batches before, of an earlier backward, of layers that backward got to - would make replicas drift apart.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import AgreementError, OptionError, PeerError, ShareError
from programs.ranks import on_ranks, replicated, scalars
from small_modules import error_of, fails_in_backward, one_weight, x_of
from threaded import run_ranks


class Net(nn.Module):
    """Layers of every kind of bucket; backward may fail between them, and one of them may be left out."""

    def __init__(self, width):
        super().__init__()
        self.rows = nn.Embedding(3, width, sparse=True)
        self.first, self.middle, self.last = (nn.Linear(width, width) for _ in range(3))
        self.extra = nn.Linear(width, width, bias=False)

    def forward(self, rank, fails="", uses_extra=True):
        x = fails_in_backward(self.rows(torch.tensor([rank.rank])), fails == "late")
        x = self.middle(fails_in_backward(self.first(x).relu(), fails == "between"))
        return fails_in_backward(self.last(x) + (self.extra(x) if uses_extra else 0), fails == "early").sum()


def given(model):
    return [name for name, parameter in model.named_parameters() if parameter.grad is not None]


def steps_alike(rank, model):
    """Return True if an optimizer's step, without `zero_grad()`, does the same on every rank; and then a whole batch
    does."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    found = [value.detach().clone() for value in model.parameters()]
    model(rank).backward()
    found += [p.grad.to_dense() for p in model.parameters()]
    optimizer.step()
    found += model.parameters()
    return rank.all_equal(torch.cat([value.flatten() for value in found]))


def backward(rank, model, **how):
    model(rank, **how).backward()


def piled_up(rank, model):
    with model.no_sync():
        backward(rank, model)


def piled_up_on_one_rank(rank, model):
    backward(rank, model, uses_extra=False)
    if rank.rank == 1:
        piled_up(rank, model)


def weighed(rank, model):
    with lockstep.accumulate(model, last=False, weight=1 + rank.rank):
        backward(rank, model)


BEFORE = {
    "nothing": lambda rank, model: None,
    "a backward that synchronises": backward,
    "one that leaves out a layer": lambda rank, model: backward(rank, model, uses_extra=False),
    "a micro-batch that does not synchronise": piled_up,
    "one that only one rank has, and another layer": piled_up_on_one_rank,
    "a reduced gradient, and a micro-batch": lambda rank, model: (backward(rank, model), piled_up(rank, model)),
    "a micro-batch with a weight": weighed,
}
"""What comes before the batch that fails."""
SOME = [name for name, before in BEFORE.items() if before not in (backward, piled_up_on_one_rank, weighed)]


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize(
    ("width", "cap", "settled", "hosts"),
    [
        (2, None, 0, ""),
        (100, 1e-4, 2, "aa"),
        *(pytest.param(*each, 2, "aa", marks=pytest.mark.around) for each in [(8, 1e-4), (100, None)]),
    ],
)
@on_ranks(2, "hosts")
def test_no_rank_has_a_gradient_after_a_backward_that_failed_on_one(rank, before, width, cap, settled):
    found = []
    model = replicated(rank, lambda: Net(width), bucket_cap_mb=cap)
    for _ in range(settled):
        backward(rank, model)
        model.zero_grad()
    for fails in ["early", "between", "late"]:
        for failing in range(rank.world):
            for uses_extra in [True, False]:
                before(rank, model)
                weight = 1.0 if before is weighed else None
                with lockstep.accumulate(model, weight=weight):
                    loss = model(rank, fails if rank.rank == failing else "", uses_extra)
                    raised = error_of(loss.backward)
                assert raised is (ArithmeticError if rank.rank == failing else PeerError)
                found.append((given(model), steps_alike(rank, model)))
                model.zero_grad()
    assert found == [([], True)] * 12


# ------------------------------------------------------------------------- errors that all ranks raise


def past_forward(rank, model):
    """One rank goes past the module's forward."""
    return error_of((model.last.weight.sum() if rank.rank == 1 else model(rank)).backward)


def weight_on_one_rank(rank, model):
    """One rank weighs what it contributes, the other does not."""
    with lockstep.accumulate(model, weight=1.0 if rank.rank == 1 else None):
        return error_of(model(rank).backward)


def hook_on_one_rank(rank, model):
    """One rank has a communication hook, which the ranks find out before they send anything else."""
    hook = None, lambda state, bucket: bucket.buffer()
    if rank.rank == 1:
        model.register_comm_hook(*hook)
    raised = error_of(model(rank).backward)
    if rank.rank == 0:
        model.register_comm_hook(*hook)
    return raised


def layer_on_one_rank(rank, model):
    """One rank has another layer, which has had a gradient."""
    before = model.last
    if rank.rank == 1:
        model.last = nn.Linear(2, 2)
    raised = error_of(model(rank).backward)
    new, model.last = model.last, before
    assert all(parameter.grad is None for parameter in new.parameters())
    return raised


@pytest.mark.parametrize(
    ("fail", "kinds"),
    [
        (past_forward, {PeerError}),
        (weight_on_one_rank, {OptionError, PeerError}),
        (hook_on_one_rank, {AgreementError}),
        (layer_on_one_rank, {AgreementError}),
    ],
)
@pytest.mark.parametrize("before", SOME)
@on_ranks(2)
def test_no_rank_has_a_gradient_after_an_error_on_all(rank, fail, kinds, before):
    model = replicated(rank, lambda: Net(2))
    if fail is not hook_on_one_rank:  # else it would be agreed on in the round before
        backward(rank, model)
        model.zero_grad()
    BEFORE[before](rank, model)
    raised, left, alike = fail(rank, model), given(model), steps_alike(rank, model)
    assert raised in kinds
    assert (left, alike) == ([], True)


# ----------------------------------------------------------------------------- of which modules


@pytest.mark.parametrize(("groups", "left"), [(1, [None, None, None]), (3, [None, None, 1.5])])
def test_after_a_failure_modules_of_one_group_have_no_gradient_those_of_others_have_theirs(groups, left, store):
    """Of three modules two are in the pass that fails; all have gradients that were reduced before.

    Ranks of one group do not know of each other which of its modules the pass would have gone through.
    """
    kept = []  # until all ranks have ended: a rank that has may not wait for one that needs its groups

    def train(rank):
        stores = [dist.PrefixStore(str(number), store) for number in range(groups)]
        made = [dist.ProcessGroupGloo(each, rank.rank, rank.world) for each in stores]
        kept.extend(made)
        models = [lockstep.replicate(one_weight(), process_group=each) for each in made * (3 // groups)]
        sum(model(x_of(rank)) for model in models).sum().backward()
        out = models[1](fails_in_backward(models[0](x_of(rank)), rank.rank == 1))
        assert error_of(out.sum().backward) is (PeerError, ArithmeticError)[rank.rank]
        assert scalars(*models) == left

    run_ranks(2, train)


# ------------------------------------------------------------------------------- what has not failed


@on_ranks(2)
def test_a_failure_without_synchronising_is_this_ranks_own(rank):
    """What had accumulated on it is left, and counts in the next round."""
    # of rank 1 two of the first layer, and three of the last one; of rank 0 three of each
    reduced = [(3 * 1 + 2 * 2) / 2, (3 * 1 + 3 * 2) / 2]
    model = lockstep.replicate(nn.Sequential(one_weight(), one_weight()), process_group=rank.group)
    with model.no_sync():
        model(x_of(rank)).sum().backward()
        inner = fails_in_backward(model[0](x_of(rank)), rank.rank == 1)
        failed = error_of(model[1](inner).sum().backward)
    kept = scalars(model)
    model(x_of(rank)).sum().backward()
    found = (failed, kept, scalars(model))
    assert found == [(None, [2.0, 2.0], reduced), (ArithmeticError, [2.0, 4.0], reduced)][rank.rank]


@on_ranks(2)
def test_a_rank_that_has_run_out_has_no_gradient_either(rank):
    """Rank 1 has run out of batches when rank 0 fails; it holds what its last batch has given."""
    model = replicated(rank)
    loader = [x_of(rank, 10.0**n) for n in range(2 - rank.rank)]
    found = []
    for number, x in enumerate(lockstep.batches(loader, model)):
        out = fails_in_backward(model(x), rank.rank == 0 and number == 1)
        found.append((error_of(out.sum().backward), scalars(model)))
    assert found == [[(None, [1.5]), (ArithmeticError, [None])], [(None, [1.5]), (PeerError, [None])]][rank.rank]


@pytest.mark.parametrize("hosts", ["", "aa"])
@on_ranks(2, "hosts")
def test_after_a_step_in_shares_that_failed_all_ranks_have_what_they_had_before(rank):
    """With shares, parameters have what they had before the step, and an optimizer's step is an error by name."""
    model = replicated(rank, shares=4)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    raised = (PeerError, ArithmeticError)[rank.rank]
    # A step is added to the gradient of the one before; the second one has failed.
    wanted = [(None, [1.0], None), (raised, [1.0], ShareError), (None, [2.0], None)]
    for batch in lockstep.shares.GlobalBatches([torch.ones(1)] * 24, 8, 4, process_group=rank.group):

        def all_shares(batch=batch):
            for number, x in enumerate(batch):
                fails = (rank.rank, batch.number, number) == (1, 1, 1)
                fails_in_backward(model(x), fails).sum().backward()

        assert (error_of(all_shares), scalars(model), error_of(optimizer.step)) == wanted.pop(0)
    assert (wanted, model.weight.item()) == ([], -2.0)


@pytest.mark.parametrize("shape", [(1,), (1024, 1100)], ids=["with others", "alone"])
@on_ranks(2)
def test_what_a_failed_round_has_kept_does_not_come_back(rank, shape):
    """The second parameter, which has a gradient, is used neither in a round that fails nor in the one after it."""
    model = lockstep.replicate(nn.ParameterList([torch.ones(1), torch.ones(shape)]), process_group=rank.group)
    for _ in range(2):
        model.zero_grad()
        (model[0].sum() + model[1].sum()).backward()
    raised = error_of(fails_in_backward(1 * model[0], rank.rank == 1).sum().backward)
    model[0].sum().backward()
    found = (raised, model[0].grad.item(), model[1].grad)
    assert found == [(PeerError, 1.0, None), (ArithmeticError, 1.0, None)][rank.rank]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("skip", [(), (1,), (0, 1)], ids=["backward fails", "rank 1 skips", "all skip"])
@pytest.mark.parametrize("hosts", ["", "aa"])
@on_ranks(2, "hosts")
def test_buffers_after_a_failure_are_equal_again_after_the_next_batch(rank, skip, count):
    """After a batch that has failed, or was left out, each rank has its own buffers; all have one's after the next."""
    models = [replicated(rank, lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))) for _ in range(count)]
    x = torch.randn(4, 3, generator=rank.generator())
    sum(model(x).sum() for model in models).backward()
    loss = sum(model(x).sum() for model in models)
    if rank.rank in skip:
        lockstep.loop.skip_batch(group=rank.group)
    else:
        if rank.rank and not skip:
            loss.register_hook(lambda gradient: 1 / 0)
        with contextlib.suppress(ZeroDivisionError, PeerError):
            loss.backward()
    lockstep.check_in_sync(*models)
    own = [rank.all_equal(model[1].running_mean) for model in models]
    sum(model(x).sum() for model in models).backward()
    lockstep.check_in_sync(*models)
    assert own == [False] * count
    assert all(rank.all_equal(model[1].running_mean) for model in models)
