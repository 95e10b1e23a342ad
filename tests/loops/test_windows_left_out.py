"""Steps of several micro-batches, of which ranks leave out some, or fail in some: all train as one process would.

A program is drawn at random: epochs, in loops over `batches` with unequal lengths or plain ones; in each step one to
three micro-batches, with weights or without; and ranks that cannot use a micro-batch, and say so around all of the step
or inside of `accumulate`, catch the error themselves, go on without a word, or fail.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError, PeerError
from programs.networks import mlp
from programs.ranks import on_ranks, replicated
from small_modules import fails_in_backward
from threaded import Rank, run_ranks
from training_loops import WHERE, BadBatchError

AROUND = ("skip_on around", "except around")
INSIDE = ("skip_on inside", "except inside")
CAUGHT, SILENT, FAILS = "caught", "goes on in silence", "fails"


@dataclass
class Step:
    """The rows of each rank's micro-batches, and what goes wrong in them."""

    rows: list[list[int]]
    bad: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By rank: which micro-batch, and where."""
    how: str = AROUND[0]

    @property
    def is_left_out(self) -> bool:
        return bool(self.bad) and self.how in AROUND + INSIDE

    @property
    def ends_epoch(self) -> bool:
        return bool(self.bad) and self.how in (SILENT, FAILS)


@dataclass
class Program:
    weighted: bool
    in_batches: bool
    epochs: list[list[Step]]
    lengths: list[int]
    """How many batches each rank has in each epoch, if it goes by `batches`; a batch is a step."""
    leaves: int | None = None
    """The step at which all ranks leave each loop."""


def random_program(seed: int) -> tuple[int, Program]:
    draw = random.Random(seed)
    world, weighted, in_batches = draw.choice([2, 2, 3]), draw.random() < 0.5, draw.random() < 0.6
    longest = draw.randint(2, 5)
    lengths = [draw.randint(1, longest) if in_batches else longest for _ in range(world)]
    lengths[draw.randrange(world)] = longest
    epochs, leaves = [], draw.choice([None, None, 1])
    for _ in range(draw.randint(1, 3)):
        steps: list[Step] = []
        for number in range(longest):
            count = draw.randint(1, 3)
            counts = [draw.randint(1, 3) if weighted else count for _ in range(world)]
            step = Step([[draw.randint(1, 3) for _ in range(count)] for count in counts])
            able = [rank for rank in range(world) if number < lengths[rank]]
            if draw.random() < 0.4 and not (steps and steps[-1].bad and steps[-1].how == SILENT):
                step.how = draw.choice([*AROUND, *AROUND, *INSIDE, CAUGHT, SILENT, FAILS])
                count = 1 if step.how not in AROUND + INSIDE else draw.randint(1, len(able))
                for rank in draw.sample(able, count):
                    micro = draw.randrange(counts[rank])
                    step.bad[rank] = micro, draw.choice(WHERE)
                    if step.how == CAUGHT:  # under no_sync(), and with weights: else there is nothing to leave out
                        step.bad = {rank: (0, "in backward")} if counts[rank] > 1 and weighted else {}
                    elif step.how == FAILS:  # in the one that the others wait for: nobody is told of another
                        step.bad = {rank: (counts[rank] - 1, "in backward")}
                    elif step.how == AROUND[1] and not in_batches and step.bad[rank] == (0, WHERE[0]):
                        # It would count as the answer to an earlier failure: there is no sign of a new step.
                        step.bad[rank] = 0, WHERE[1]
                    elif step.how == SILENT:  # the whole step, which only `batches` can tell
                        told = in_batches and number + 1 < min(lengths) and leaves is None
                        step.bad = {rank: (0, "before forward")} if told else {}
            steps.append(step)
        epochs.append(steps)
    return world, Program(weighted, in_batches, epochs, lengths, leaves)


def rows_of(epoch: int, step: int, rank: int, micro: int, rows: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(hash((epoch, step, rank, micro)) % 2**31)
    return torch.randn(rows, 3, dtype=torch.float64, generator=numbers)


def network() -> nn.Module:
    return mlp().double()


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def expected(world: int, program: Program) -> list[torch.Tensor]:
    """The weights after each step of one process with all rows."""
    model, found = Rank(0, 1, None).make(network), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch, steps in enumerate(program.epochs):
        for number, step in enumerate(steps):
            if step.ends_epoch:
                break
            optimizer.zero_grad()
            weight = 0
            ranks = [rank for rank in range(world) if number < program.lengths[rank]]
            for rank in () if step.is_left_out else ranks:
                for micro, rows in enumerate(step.rows[rank]):
                    if step.bad.get(rank, (None,))[0] != micro:
                        model(rows_of(epoch, number, rank, micro, rows)).square().sum().backward()
                        weight += rows
            for p in model.parameters() if not step.is_left_out else ():
                p.grad /= weight if program.weighted else len(ranks)
            optimizer.step()
            found.append(weights_of(model))
            if program.leaves is not None and number == program.leaves:
                break
    return found


def micro_batch(model, x, where):
    if where == "before forward":
        raise BadBatchError
    y = model(x)
    if where == "in forward":
        raise BadBatchError
    fails_in_backward(y, where == "in backward", BadBatchError).square().sum().backward()


def all_micro_batches(model, program, step, place, rank):
    epoch, number = place
    for micro, rows in enumerate(step.rows[rank]):
        x = rows_of(epoch, number, rank, micro, rows)
        bad, where = step.bad.get(rank, (None, ""))
        last, weight = micro == len(step.rows[rank]) - 1, float(rows) if program.weighted else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(lockstep.accumulate(model, last=last, weight=weight))
            if step.how == INSIDE[0]:
                stack.enter_context(lockstep.loop.skip_on(BadBatchError, modules=[model]))
            try:
                micro_batch(model, x, where if micro == bad else "")
            except (BadBatchError, PeerError):
                if step.how == INSIDE[1]:
                    lockstep.loop.skip_batch(model)
                elif step.how != CAUGHT:
                    raise


def one_step(model, program, step, place, rank):
    if step.how == SILENT and rank in step.bad:
        return
    if step.how == AROUND[0]:
        with lockstep.loop.skip_on(BadBatchError, modules=[model]):
            all_micro_batches(model, program, step, place, rank)
    elif step.how == AROUND[1]:
        try:
            all_micro_batches(model, program, step, place, rank)
        except (BadBatchError, PeerError):
            lockstep.loop.skip_batch(model)
    else:
        all_micro_batches(model, program, step, place, rank)


def train(rank, program):
    model = replicated(rank, network)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for epoch, steps in enumerate(program.epochs):
        own = range(program.lengths[rank.rank])
        try:
            for number, _ in enumerate(lockstep.batches(own, model) if program.in_batches else own):
                optimizer.zero_grad()
                one_step(model, program, steps[number], (epoch, number), rank.rank)
                assert lockstep.loop.skipped(model) is steps[number].is_left_out or rank.rank in steps[number].bad
                optimizer.step()
                if not (steps[number].how == SILENT and steps[number].bad):
                    found.append(weights_of(model))
                if program.leaves is not None and number == program.leaves:
                    break
        except (BadBatchError, PeerError):
            pass
    lockstep.check_in_sync(model)
    return found


def check(seed):
    world, program = random_program(seed)
    wanted = expected(world, program)
    for found in run_ranks(world, train, program):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=lambda text: f"{program}: {text}")


@pytest.mark.parametrize(
    "seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.around) for seed in range(15, 40))]
)
def test_random_programs(seed):
    check(seed)


@pytest.mark.soak
def test_many_random_programs():
    for seed in range(1000, 3000):
        check(seed)


# ----------------------------------------------------------------------------- one by one


@pytest.mark.parametrize("in_batches", [False, True], ids=["plain", "batches"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", AROUND)
def test_a_whole_step_is_left_out_by_what_is_around_its_micro_batches(how, where, weighted, in_batches):
    for micro in (0, 1):
        steps = [Step([[1, 2], [3, 1]]) for _ in range(4)]
        steps[1] = Step([[1, 2], [3, 1]], {1: (micro, where)}, how)
        program = Program(weighted, in_batches, [steps], [4, 4])
        for found in run_ranks(2, train, program):
            torch.testing.assert_close(found, expected(2, program))


@pytest.mark.parametrize("kind", [BadBatchError, ValueError, Exception])
@on_ranks(2, raises=OptionError, says="skip_on() has ended between the micro-batches of a step")
def test_skip_on_between_the_micro_batches_of_a_step_is_an_error(rank, kind):
    """Also where it is of a kind that the block leaves out batches for."""
    model = replicated(rank, network)
    with lockstep.loop.skip_on(kind, modules=[model]), lockstep.accumulate(model, last=False):
        model(torch.ones(1, 3).double()).sum().backward()


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
