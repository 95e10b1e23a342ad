"""Steps of several micro-batches, of which ranks leave out some: one by one what `fuzz/left_out.py` has at random."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import lockstep
from fuzz.left_out import AROUND, Setting, Step, micro_batch, network, play
from fuzz.programs import Program
from lockstep.errors import OptionError, PeerError
from programs.ranks import clear, on_ranks, replicated, scalars
from small_modules import one_weight
from training_loops import WHERE, BadBatchError


@pytest.mark.parametrize("in_batches", [False, True], ids=["plain", "batches"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", AROUND)
def test_a_whole_step_is_left_out_by_what_is_around_its_micro_batches(how, where, weighted, in_batches):
    for micro in (0, 1):
        steps = [Step([[1, 2], [3, 1]], {}) for _ in range(4)]
        steps[1] = Step([[1, 2], [3, 1]], {1: (micro, where)}, how)
        play(Program(Setting(weighted, in_batches, [4, 4]), (steps,)))


@pytest.mark.parametrize("kind", [BadBatchError, ValueError, Exception])
@on_ranks(2, raises=OptionError, says="skip_on() has ended between the micro-batches of a step")
def test_skip_on_between_the_micro_batches_of_a_step_is_an_error(rank, kind):
    """Also where it is of a kind that the block leaves out batches for."""
    model = replicated(rank, network)
    with lockstep.loop.skip_on(kind, modules=[model]), lockstep.accumulate(model, last=False):
        model(torch.ones(1, 3).double()).sum().backward()


@pytest.mark.parametrize("where", WHERE)
@on_ranks(2)
def test_a_batch_that_is_left_out_drops_what_all_modules_have_on_all_ranks(rank, where):
    first, second = (lockstep.replicate(rank.make(network), process_group=rank.group) for _ in range(2))
    x = torch.ones(1, 3).double()
    micro_batch(first, x, "")
    with lockstep.loop.skip_on(BadBatchError, modules=[second]):
        micro_batch(second, x, where if rank.rank else "")
    assert lockstep.loop.skipped(second)
    assert {each.grad for model in (first, second) for each in model.parameters()} == {None}


@on_ranks(2, raises=OptionError, says="those of another module, whose steps overlap")
def test_windows_of_two_modules_that_overlap_need_a_group_each(rank):
    models = [lockstep.replicate(rank.make(one_weight), process_group=rank.group) for _ in range(2)]
    for last in (False, True):
        for model in models:
            with lockstep.accumulate(model, last=last), lockstep.loop.skip_on(ValueError, modules=[model]):
                model(torch.ones(1, 1)).sum().backward()


@on_ranks(2)
def test_skip_on_inside_of_blocks_with_weights_of_which_no_rank_reaches_one_module(rank):
    models = [lockstep.replicate(rank.make(one_weight), process_group=rank.group) for _ in range(2)]
    found = []
    for reached in (models, models[:1], models):
        clear(*models)
        with contextlib.ExitStack() as blocks:
            for model in models:
                blocks.enter_context(lockstep.accumulate(model, weight=1 + rank.rank))
            blocks.enter_context(lockstep.loop.skip_on(ValueError, modules=models))
            sum(model(torch.full((1, 1), 3.0)).sum() for model in reached).backward()
        found.append(scalars(*models))
    assert found == [[2.0, 2.0], [2.0, None], [2.0, 2.0]]


@on_ranks(2, raises=PeerError, says=("rank 1 leaves out its batch", "inside accumulate() or no_sync()"))
def test_a_step_over_several_batches_has_to_leave_out_one_inside_of_accumulate(rank):
    """Outside of `accumulate` a rank leaves out its batch, and goes on with the rest of the step."""
    model = replicated(rank, network)
    for number in lockstep.batches(range(4), model):
        try:
            with lockstep.accumulate(model, last=number % 2 == 1):
                micro_batch(model, torch.ones(1, 3).double(), "in forward" if (rank.rank, number) == (1, 0) else "")
        except BadBatchError:
            lockstep.loop.skip_batch(model)


@on_ranks(2)
def test_a_new_loop_after_an_error_in_one_that_is_kept(rank):
    model = replicated(rank, network)
    kept, found = [], []
    for epoch in range(3):
        kept.append(iter(lockstep.batches(iter(range(3)), model)))
        try:
            for number in kept[-1]:
                if (epoch, number, rank.rank) == (0, 1, 1):
                    continue
                model(torch.ones(1, 3).double()).sum().backward()
            found.append("over")
        except PeerError:
            found.append("PeerError")
    assert found == ["PeerError", "over", "over"]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("policy", ["rank0", "mean", "local"])
@on_ranks(2)
def test_buffers_of_a_step_that_is_left_out_are_those_from_before_it(rank, policy, bad):
    model = replicated(rank, lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), buffer_policy=policy)
    for step in range(2):
        before = [each.clone() for each in model.buffers()]
        for number in range(3):
            with (
                lockstep.accumulate(model, last=number == 2),
                lockstep.loop.skip_on(BadBatchError, modules=[model]),
            ):
                x = torch.full((4, 3), torch.nan if step and rank.rank and number == bad else 1.0 + rank.rank + number)
                loss = model(x * torch.arange(4)[:, None]).sum()
                if not loss.isfinite():
                    raise BadBatchError
                loss.backward()
        assert lockstep.loop.skipped(model) == bool(step)
        same = [torch.equal(one, other) for one, other in zip(before, model.buffers(), strict=True)]
        assert all(same) if step else not any(same)
