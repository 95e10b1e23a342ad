"""Loops over batches inside of one another, or side by side, of ranks with unequal numbers of batches: a batch counts
where its rank has one in all of them."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError
from programs.networks import Signed
from programs.ranks import on_ranks, replicated, scalars
from small_modules import x_of
from threaded import run_ranks


class Program:
    """What each rank does in each turn, and what is to come of it."""

    def __init__(self, rank):
        self.rank, self.turn = rank, 0
        self.model = replicated(rank, Signed)
        self.before = 0, 0

    def step(self, active, *loops):
        """One round in which the ranks ``active`` have a batch; checks what has come of it."""
        rank, self.turn = self.rank, self.turn + 1
        where = self.turn, list(active)
        self.model.zero_grad()
        self.model(self.turn, rank.rank, self._value(rank.rank)).backward()
        grad = self.model.weight.grad
        if active:
            mean = sum(map(self._value, active)) / len(active)
            assert grad.item() == pytest.approx(mean), where
            assert lockstep.mean([self._value(rank.rank)], group=rank.group) == [pytest.approx(mean)], where
            self.before = (self.turn, active[0])
        else:
            assert grad is None, where
        lockstep.loop.skipped(self.model)  # on accelerators, waits for the buffers
        assert self.model.signature() == self.before, where
        if loops:
            assert loops[-1].is_padding == (rank.rank not in active), where

    def _value(self, rank):
        return float(2**rank * self.turn)


def having(lengths, number, among=None):
    """The ranks, of those ``among``, that have a batch of that number."""
    return [rank for rank, length in enumerate(lengths) if length > number and (among is None or rank in among)]


def nested(rank, outer, inner, known):
    program = Program(rank)
    for _ in range(2):
        batches = lockstep.batches([0] * outer[rank.rank], program.model)
        for number, _ in enumerate(batches):
            active = having(outer, number)
            program.step(active, batches)
            given = [0] * inner[rank.rank]
            within = lockstep.batches(given if known else iter(given), program.model)
            for place, _ in enumerate(within):
                program.step(having(inner, place, active), batches, within)
            assert place + 1 == max(inner)
            program.step(active, batches)
        program.step(range(rank.world))
    return program.turn


knowing = pytest.mark.parametrize("known", [True, False], ids=["lengths", "streams"])
LENGTHS = [((2, 3), (2, 3)), ((2, 3), (2, 2)), ((1, 3, 2), (3, 1, 2)), ((3, 2, 1), (1, 2, 3)), ((1, 1), (1, 2))]


@knowing
@pytest.mark.parametrize(("outer", "inner"), LENGTHS)
def test_a_batch_counts_where_its_rank_has_one_in_all_loops(outer, inner, known):
    turns = 2 * (1 + max(outer) * (2 + max(inner)))
    assert run_ranks(len(outer), nested, outer, inner, known) == [turns] * len(outer)


@knowing
@pytest.mark.usefixtures("sim")
def test_on_accelerators(known):
    assert run_ranks(3, nested, (1, 3, 2), (3, 1, 2), known, device="sim", group_timeout=10) == [2 * (1 + 3 * 5)] * 3


@on_ranks(3)
def test_loops_side_by_side(rank):
    first, second = (1, 4, 3), (3, 2, 1)
    program = Program(rank)
    loops = [lockstep.batches([0] * lengths[rank.rank], program.model) for lengths in (first, second)]
    for number, _ in enumerate(zip(*loops, strict=False)):
        program.step(having(second, number, having(first, number)), *loops)
    program.step(range(rank.world))
    assert number + 1 == 3


@on_ranks(2)
def test_three_loops(rank):
    lengths = [(1, 2), (2, 1), (2, 3)]
    program = Program(rank)

    def go(depth, active, *loops):
        program.step(active, *loops)
        if depth < len(lengths):
            batches = lockstep.batches([0] * lengths[depth][rank.rank], program.model)
            for number, _ in enumerate(batches):
                go(depth + 1, having(lengths[depth], number, active), *loops, batches)
            program.step(active, *loops)

    go(0, range(rank.world))
    assert program.turn == (((3 + 2) * 2 + 2) * 2) + 2


@pytest.mark.parametrize("how", ["break", "raise"])
@on_ranks(2)
def test_an_inner_loop_that_is_left_early(rank, how):
    program = Program(rank)
    outer, inner = (2, 3), (1, 3)
    for number, _ in enumerate(batches := lockstep.batches([0] * outer[rank.rank], program.model)):
        active = having(outer, number)
        within = lockstep.batches([0] * inner[rank.rank], program.model)
        with contextlib.suppress(ArithmeticError):
            for place, _ in enumerate(within):
                program.step(having(inner, place, active), batches, within)
                if place == 1 and how == "break":
                    break
                if place == 1:
                    raise ArithmeticError
        program.step(active, batches)
    program.step(range(rank.world))
    assert program.turn == 3 * 3 + 1


@knowing
@on_ranks(2)
def test_a_loop_inside_of_one_whose_length_is_not_known_is_refused_on_every_rank(rank, known):
    model = replicated(rank)
    with pytest.raises(OptionError, match="inside of another one whose loader has no length on some rank"):
        for _ in lockstep.batches(iter([0] * 2) if rank.rank else [0], model):
            model(torch.ones(1, 1)).sum().backward()
            for _ in lockstep.batches([0] if known else iter([0]), model):
                pass
    for x in lockstep.batches(iter([torch.ones(1, 1)] * (1 + rank.rank)), model):  # and this is one
        model.zero_grad()
        model(x).sum().backward()
    assert model.weight.grad.item() == 1.0


@on_ranks(2)
def test_evaluation_inside_of_a_loop(rank):
    """A loop without gradients is none that ranks have in common."""
    model, seen = replicated(rank), 0
    for x in lockstep.batches(iter([torch.ones(1, 1)] * (1 + rank.rank)), model):
        model.zero_grad()
        model(x).sum().backward()
        with torch.no_grad():
            seen += sum(1 for _ in lockstep.batches([0] * (3 - rank.rank), model))
    assert seen == [6, 4][rank.rank]


@pytest.mark.parametrize("skipped", [None, (1, 2)])
@on_ranks(2)
def test_micro_batches_in_an_inner_loop(rank, skipped):
    """The inner loop piles up, and the round comes after it; one rank leaves out a batch in an inner one."""
    model = replicated(rank)
    outer, inner = (2, 3), (3, 1)
    found = []
    for number, _ in enumerate(lockstep.batches([0] * outer[rank.rank], model)):
        model.zero_grad()
        with model.no_sync():
            for place, _ in enumerate(lockstep.batches([0] * inner[rank.rank], model)):
                model(x_of(rank)).sum().backward()
                if skipped == (number, place) and rank.rank == 0:
                    lockstep.loop.skip_batch(model)
        model(x_of(rank)).sum().backward()
        found.append((*scalars(model), lockstep.loop.skipped(model)))
    usual, last = ((3 + 1) * 1.0 + (1 + 1) * 2.0) / 2, (1 + 1) * 2.0
    assert found == [(usual, False), (None, True) if skipped else (usual, False), (last, False)]


@on_ranks(2)
def test_each_loop_knows_which_of_its_batches_was_left_out(rank):
    model, found = replicated(rank), []
    for number, _ in enumerate(lockstep.batches([0] * (1 + rank.rank), model)):
        with lockstep.loop.skip_on(ArithmeticError, modules=[model]):
            if number == 0 and rank.rank == 1:
                raise ArithmeticError
            model(torch.ones(1, 1)).sum().backward()
        for place, _ in enumerate(lockstep.batches([0] * 2, model)):
            with lockstep.loop.skip_on(ArithmeticError, modules=[model]):
                if number == place == 1 and rank.rank == 1:
                    raise ArithmeticError
                model(torch.ones(1, 1)).sum().backward()
            found.append(lockstep.loop.skipped(model))
        found.append(lockstep.loop.skipped(model))
    assert found == [False, False, True, False, True, False]


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("device", ["", "sim"])
@on_ranks(2, "device")
def test_a_batch_of_an_inner_loop_that_was_left_out_is_none_of_the_outer_loop(rank):
    """The last one, of which only the outer loop asks. On accelerators its report is read when the inner loop is
    over."""
    model, found = replicated(rank), []
    for number, _ in enumerate(lockstep.batches([0] * 6, model)):
        for place, _ in enumerate(lockstep.batches([0] * 2, model)):
            if number == 4 and place == rank.rank == 1:
                lockstep.loop.skip_batch(model)
            else:
                model(torch.ones(1, 1)).sum().backward()
        if number >= 4:
            found.append(lockstep.loop.skipped(model))
        model.zero_grad()
        model(x_of(rank)).sum().backward()
        if number >= 4:
            found.append((lockstep.loop.skipped(model), model.weight.grad.item()))
    assert found == [False, (False, 1.5)] * 2


@pytest.mark.parametrize("again", [False, True])
@on_ranks(2)
def test_a_module_that_is_new_in_a_batch_that_counts_nothing(rank, again):
    model = replicated(rank)
    found = []
    for number, _ in enumerate(lockstep.batches([0] * (1 + 2 * rank.rank), model)):
        if again and number:
            model = lockstep.DistributedDataParallel(getattr(model, "module", model), process_group=rank.group)
        new = model if again else replicated(rank)
        new.zero_grad()
        new(x_of(rank)).sum().backward()
        found.append(next(new.parameters()).grad.item())
    new.zero_grad()
    new(x_of(rank)).sum().backward()
    assert [*found, next(new.parameters()).grad.item()] == [1.5, 2.0, 2.0, 1.5]


@pytest.mark.usefixtures("sim")
@on_ranks(2, device="sim", group_timeout=5)
def test_a_loop_does_not_end_with_the_report_of_the_one_before(rank):
    """The last report of a loop is not read when a loop begins in which this rank has no batch at all."""
    model = lockstep.replicate(nn.Linear(3, 1, bias=False), process_group=rank.group)
    model.weight.data.fill_(1.0)
    for _ in lockstep.batches([0] * 3, model):
        model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()
    turns = 0
    for x in lockstep.batches(iter([torch.ones(1, 3)] * 2 * rank.rank), model, padding=torch.ones(1, 3)):
        turns += 1
        model(x).sum().backward()
    assert (turns, model.weight.grad.tolist()) == (2, [[2.0] * 3])


@pytest.mark.soak
@knowing
def test_many_loops(known):
    chance = random.Random(3)
    for _ in range(200):
        outer, inner = ([chance.randint(1, 4) for _ in range(chance.choice([2, 3]))] for _ in range(2))
        world = min(len(outer), len(inner))
        run_ranks(world, nested, outer[:world], inner[:world], known)
