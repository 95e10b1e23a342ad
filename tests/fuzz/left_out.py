"""Steps of several micro-batches, of which ranks leave out some, or fail in some: all train as one process would.

Epochs of any length, in loops over `batches` with unequal lengths or plain ones; in each step micro-batches, with
weights or without; and ranks that cannot use a micro-batch, and say so around all of the step or inside of
`accumulate`, catch the error themselves, go on without a word, or fail. A line is an epoch.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any, NamedTuple

import torch
from torch import nn

import lockstep
from fuzz.programs import Program
from lockstep.errors import PeerError
from programs.networks import mlp
from programs.ranks import replicated
from small_modules import fails_in_backward
from threaded import Rank, run_ranks
from training_loops import WHERE, BadBatchError

AROUND = ("skip_on around", "except around")
INSIDE = ("skip_on inside", "except inside")
CAUGHT, SILENT, FAILS = "caught", "goes on in silence", "fails"


class Step(NamedTuple):
    """The rows of each rank's micro-batches, and what goes wrong in them."""

    rows: list[list[int]]
    bad: dict[int, tuple[int, str]]
    """By rank: which micro-batch, and where."""
    how: str = AROUND[0]

    @property
    def is_left_out(self) -> bool:
        return bool(self.bad) and self.how in AROUND + INSIDE

    @property
    def ends_epoch(self) -> bool:
        return bool(self.bad) and self.how in (SILENT, FAILS)


class Setting(NamedTuple):
    """What holds for a whole program."""

    weighted: bool
    in_batches: bool
    lengths: list[int]
    """How many batches each rank has in each epoch, if it goes by `batches`; a batch is a step."""
    leaves: int | None = None
    """The step at which all ranks leave each loop."""


def draw(seed: int, length: int, device: str = "") -> Program:
    chance = random.Random(seed)
    world, weighted, in_batches = chance.choice([2, 2, 3]), chance.random() < 0.5, chance.random() < 0.6
    longest = chance.randint(2, 5)
    lengths = [chance.randint(1, longest) if in_batches else longest for _ in range(world)]
    lengths[chance.randrange(world)] = longest
    setting = Setting(weighted, in_batches, lengths, chance.choice([None, None, 1]))
    return Program(setting, tuple(epoch(chance, setting, longest) for _ in range(length)))


def epoch(chance: random.Random, setting: Setting, longest: int) -> list[Step]:
    """Draw the steps of an epoch."""
    world, weighted = len(setting.lengths), setting.weighted
    steps: list[Step] = []
    for number in range(longest):
        count = chance.randint(1, 3)
        counts = [chance.randint(1, 3) if weighted else count for _ in range(world)]
        rows = [[chance.randint(1, 3) for _ in range(count)] for count in counts]
        able = [rank for rank in range(world) if number < setting.lengths[rank]]
        bad: dict[int, tuple[int, str]] = {}
        how = AROUND[0]
        if chance.random() < 0.4 and not (steps and steps[-1].bad and steps[-1].how == SILENT):
            how = chance.choice([*AROUND, *AROUND, *INSIDE, CAUGHT, SILENT, FAILS])
            count = 1 if how not in AROUND + INSIDE else chance.randint(1, len(able))
            for rank in chance.sample(able, count):
                bad[rank] = chance.randrange(counts[rank]), chance.choice(WHERE)
                if how == CAUGHT:  # under no_sync(), and with weights: else there is nothing to leave out
                    bad = {rank: (0, "in backward")} if counts[rank] > 1 and weighted else {}
                elif how == FAILS:  # in the one that the others wait for: nobody is told of another
                    bad = {rank: (counts[rank] - 1, "in backward")}
                elif how == AROUND[1] and not setting.in_batches and bad[rank] == (0, WHERE[0]):
                    # It would count as the answer to an earlier failure: there is no sign of a new step.
                    bad[rank] = 0, WHERE[1]
                elif how == SILENT:  # the whole step, which only `batches` can tell
                    told = setting.in_batches and number + 1 < min(setting.lengths) and setting.leaves is None
                    bad = {rank: (0, "before forward")} if told else {}
        steps.append(Step(rows, bad, how))
    return steps


def rows_of(epoch: int, step: int, rank: int, micro: int, rows: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(hash((epoch, step, rank, micro)) % 2**31)
    return torch.randn(rows, 3, dtype=torch.float64, generator=numbers)


def network() -> nn.Module:
    return mlp().double()


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def expected(program: Program) -> list[torch.Tensor]:
    """The weights after each step of one process with all rows."""
    setting: Setting = program.setting
    model, found = Rank(0, 1, None).make(network), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch, steps in enumerate(program.lines):
        for number, step in enumerate(steps):
            if step.ends_epoch:
                break
            optimizer.zero_grad()
            weight = 0
            ranks = [rank for rank, length in enumerate(setting.lengths) if number < length]
            for rank in () if step.is_left_out else ranks:
                for micro, rows in enumerate(step.rows[rank]):
                    if step.bad.get(rank, (None,))[0] != micro:
                        model(rows_of(epoch, number, rank, micro, rows)).square().sum().backward()
                        weight += rows
            for p in model.parameters() if not step.is_left_out else ():
                p.grad /= weight if setting.weighted else len(ranks)
            optimizer.step()
            found.append(weights_of(model))
            if setting.leaves is not None and number == setting.leaves:
                break
    return found


def micro_batch(model: Any, x: torch.Tensor, where: str) -> None:
    if where == "before forward":
        raise BadBatchError
    y = model(x)
    if where == "in forward":
        raise BadBatchError
    fails_in_backward(y, where == "in backward", BadBatchError).square().sum().backward()


def all_micro_batches(model: Any, setting: Setting, step: Step, place: tuple[int, int], rank: int) -> None:
    epoch, number = place
    for micro, rows in enumerate(step.rows[rank]):
        x = rows_of(epoch, number, rank, micro, rows)
        bad, where = step.bad.get(rank, (None, ""))
        last, weight = micro == len(step.rows[rank]) - 1, float(rows) if setting.weighted else None
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


def one_step(model: Any, setting: Setting, step: Step, place: tuple[int, int], rank: int) -> None:
    if step.how == SILENT and rank in step.bad:
        return
    if step.how == AROUND[0]:
        with lockstep.loop.skip_on(BadBatchError, modules=[model]):
            all_micro_batches(model, setting, step, place, rank)
    elif step.how == AROUND[1]:
        try:
            all_micro_batches(model, setting, step, place, rank)
        except (BadBatchError, PeerError):
            lockstep.loop.skip_batch(model)
    else:
        all_micro_batches(model, setting, step, place, rank)


def train(rank: Rank, program: Program) -> list[torch.Tensor]:
    setting: Setting = program.setting
    model = replicated(rank, network)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for epoch, steps in enumerate(program.lines):
        own = range(setting.lengths[rank.rank])
        try:
            for number, _ in enumerate(lockstep.batches(own, model) if setting.in_batches else own):
                optimizer.zero_grad()
                one_step(model, setting, steps[number], (epoch, number), rank.rank)
                assert lockstep.loop.skipped(model) is steps[number].is_left_out or rank.rank in steps[number].bad
                optimizer.step()
                if not (steps[number].how == SILENT and steps[number].bad):
                    found.append(weights_of(model))
                if setting.leaves is not None and number == setting.leaves:
                    break
        except (BadBatchError, PeerError):
            pass
    lockstep.check_in_sync(model)
    return found


def play(program: Program) -> None:
    """Run a program on all ranks, and in one process; raises what is wrong."""
    wanted = expected(program)
    for found in run_ranks(len(program.setting.lengths), train, program):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
