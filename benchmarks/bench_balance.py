"""Claims: where one rank is twice as slow, `GlobalBatches(balance="speed")` makes at least 1.3 times the steps a second
of an equal deal, and a step takes at most 1.1 times as long as with the best deal there is; where all are equally fast,
it costs at most 1 %. Batches that are dealt by cost make 1.4 times the tokens a second of DDP with a
`DistributedSampler` on two ranks, and the losses are those of one process.

Measured, first: shares on two and three ranks, processes of one intra-op thread each. A share multiplies matrices or
sleeps; the last rank is slow since its shares sleep twice as long, or since it shares its core with a process that
counts. Each way is dealt equally, by speed, or, fixed from the first step on, as is best for the times of the ranks
that the others have measured. Of shares that sleep, what the slowest rank has slept is told as well, whatever the
system adds to it. The ways take turns, in the same processes. Equal ranks are told by processor time, too, and so is
what measuring and deciding take in a step, beside a step of eight shares of a 64 x 64 layer.

Second: an encoder on sequences with the lengths of a log-normal distribution, and of the paragraphs of Python's own
documentation (`pydoc_data.topics`), padded to the longest of a rank's batch. An epoch has the same samples in each way,
so its time is the reciprocal of tokens a second. Where other programs use the cores, the time says less. So the
processor time of the rank that has most of it in a step is told, too, summed over the steps. `group_by_length` sorts
the samples of fifty batches by length and deals neighbours to the ranks, as the sampler of that name in transformers
does: that is another order of the samples, and another result. The others have the global batches of
`DistributedSampler`.
"""

from __future__ import annotations

import itertools
import os
import pydoc_data.topics
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, ratio, table
from rank_processes import launch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep
from lockstep._base.deal import deal_by_speed, slowest
from lockstep.loop import BalancedSampler
from lockstep.shares import GlobalBatches
from lockstep.shares.balance import Balance, Pace, ShareClock

# ------------------------------------------------------------------------------------- shares by speed

CPU = torch.device("cpu")
EQUAL, BY_SPEED, BEST = "equal deal", "by speed", "best deal"
SHARE_SECONDS = 0.02


def work_of(slowness: str, rank: int, world: int) -> Callable[[], object]:
    """What a share of this rank does before its backward."""
    if slowness == "sleeps":
        return lambda: time.sleep(SHARE_SECONDS * (1 + (rank == world - 1)))
    a = torch.ones(192, 192)
    return lambda: [a @ a for _ in range(20)]


def shares_of_rank(rank: int, slowness: str, shares: int, steps: int, rounds: int) -> dict[str, Any]:
    """On one rank: the seconds of a step by way, of processor time, too; the last deal, and the seconds of a share."""
    world, busy = dist.get_world_size(), None
    if slowness != "sleeps" and sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        if slowness == "busy core" and rank == world - 1:
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core
    work = work_of(slowness, rank, world)
    rows = TensorDataset(torch.randn(64 * shares, 64, generator=torch.Generator().manual_seed(0)))
    ways: dict[str, tuple[Any, Any, Iterator[Any]]] = {}
    for way in (EQUAL, BY_SPEED, BEST):
        group = dist.new_group(backend="shm")
        torch.manual_seed(0)
        model = lockstep.replicate(nn.Linear(64, 64), shares=shares, process_group=group)
        balance = "speed" if way == BY_SPEED else None
        data = GlobalBatches(rows, 4 * shares, shares, process_group=group, balance=balance)
        ways[way] = model, data, _forever(data)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    processor: dict[str, list[float]] = {way: [] for way in ways}
    seconds: list[float] = []
    counts: dict[str, list[int]] = {way: [] for way in ways}
    try:
        for number in range(-1, rounds):
            for way, (model, _, batches) in ways.items():
                dist.barrier()
                begin, spent = time.perf_counter(), time.process_time()
                for batch in itertools.islice(batches, steps):
                    model.zero_grad()
                    if number >= 0:
                        counts[way].append(len(batch))
                    for (x,) in batch:
                        work()
                        model(x).square().sum().backward()
                dist.barrier()
                if number >= 0:
                    taken[way].append((time.perf_counter() - begin) / steps)
                    processor[way].append((time.process_time() - spent) / steps)
                elif way == EQUAL:
                    seconds = [each or 0.0 for each in lockstep.loop.statistics(model).share_seconds]
                    best = ways[BEST][1]
                    best._balance._since = [(0, seconds)]  # before its first step
        found = lockstep.loop.statistics(ways[BY_SPEED][0])
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    best_deal = deal_by_speed(shares, seconds)
    told = {"deal": found.shares, "best": best_deal, "seconds": seconds}
    return {"taken": taken, "processor": processor, "counts": counts, **told}


def cost_of_measuring(number: int) -> tuple[float, float]:
    """The processor time of a clock and a decision in a step, and of a whole step of one rank without work."""
    clock, balance = ShareClock(), Balance()
    begin = time.process_time()
    for step in range(number):
        clock.begin([CPU])
        clock.end(7)
        balance.ask_for(step)
        balance.decide(step, balance.deal(step, 8, 1), [Pace(clock.seconds(), balance.ahead(step))])
    measuring = (time.process_time() - begin) / number
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    model = lockstep.replicate(nn.Linear(64, 64), shares=8, process_group=group)
    batches = _forever(GlobalBatches(TensorDataset(torch.randn(64, 64)), 32, 8, process_group=group))
    begin = time.process_time()
    for batch in itertools.islice(batches, number):
        for (x,) in batch:
            model(x).square().sum().backward()
    return measuring, (time.process_time() - begin) / number


def _forever(data: Any) -> Iterator[Any]:
    while True:
        yield from data


def show_shares(slowness: str, world: int, shares: int, steps: int, rounds: int) -> None:
    """Print what was measured of one case."""
    ranks = launch(shares_of_rank, slowness, shares, steps, rounds, world=world)
    times = {way: statistics.median(ranks[0]["taken"][way]) for way in (EQUAL, BY_SPEED, BEST)}
    name = f"{slowness}, {world} ranks, {shares} shares"
    dealt, best = (" + ".join(map(str, ranks[0][each])) for each in ("deal", "best"))
    shown = " and ".join(f"{1e3 * seconds:.1f}" for seconds in ranks[0]["seconds"])
    print(f"\n{name}: dealt {dealt} (best in the first round: {best}); a share takes {shown} ms")
    print("  ms of a step: " + ", ".join(f"{way} {1e3 * seconds:.1f}" for way, seconds in times.items()))
    if slowness == "equal":
        ratio(f"{name}, by speed to equal deal", times[BY_SPEED], times[EQUAL], 1.01)
        steps_of = {way: zip(*(rank["processor"][way] for rank in ranks), strict=True) for way in times}
        both = [statistics.median(map(sum, steps_of[way])) for way in (BY_SPEED, EQUAL)]
        ratio(f"{name}, processor time, by speed to equal deal", both[0], both[1], 1.01)
        return
    ratio(f"{name}, by speed to best deal", times[BY_SPEED], times[BEST], 1.1)
    print(f"ratio  {name}, steps a second, by speed to equal deal: {times[EQUAL] / times[BY_SPEED]:.3f}")
    if slowness == "sleeps":
        each = nominal(world)
        deals = {way: zip(*(rank["counts"][way] for rank in ranks), strict=True) for way in times}
        slept = {way: sum(slowest(deal, each) for deal in deals[way]) for way in times}
        best = len(ranks[0]["counts"][BEST]) * slowest(deal_by_speed(shares, each), each)
        ratio(f"{name}, sleep of the slowest rank, by speed to best deal", slept[BY_SPEED], best, 1.1)
        more = slept[EQUAL] / slept[BY_SPEED]
        print(f"ratio  {name}, steps a second by that sleep, by speed to equal deal: {more:.3f}")


def nominal(world: int) -> list[float]:
    """What a share sleeps on each rank."""
    return [SHARE_SECONDS * (1 + (rank == world - 1)) for rank in range(world)]


# ------------------------------------------------------------------------------------- batches by cost

VOCABULARY = 500
Epoch = Callable[[], list[tuple[float, float]]]
"""Trains an epoch, and returns of each step the sum of this rank's losses, and its processor time."""
DDP, PLAIN, GROUPED, BALANCED, PADDED = (
    "DDP, DistributedSampler",
    "lockstep, DistributedSampler",
    "lockstep, group_by_length",
    "lockstep, BalancedSampler",
    "lockstep, BalancedSampler, padded",
)
SHARES, SHARES_BY_COST = "shares", "shares, cost=lengths, padded"


def log_normal(samples: int) -> list[int]:
    """Lengths with a median of 50 tokens."""
    rng = random.Random(0)
    return [min(400, 1 + round(rng.lognormvariate(3.9, 0.8))) for _ in range(samples)]


def paragraphs(samples: int) -> list[int]:
    """The numbers of words of paragraphs in the documentation of the language."""
    texts = pydoc_data.topics.topics.values()
    words = [len(part.split()) for text in texts for part in text.split("\n\n") if part.strip()]
    return random.Random(0).sample([min(400, each) for each in words], samples)


LENGTHS = {"log-normal": log_normal, "Python's documentation": paragraphs}


class Encoder(nn.Module):
    """Says of each token what it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The sum of the losses of all tokens; 0 is padding."""
        hidden = self.layers(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), tokens, ignore_index=0, reduction="sum")


def texts_of(lengths: Sequence[int]) -> list[Tensor]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def collate(texts: list[Tensor]) -> Tensor:
    """Pad to the longest."""
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)


class GroupedByLength:
    """A batch sampler that sorts the samples of fifty batches by length, and deals neighbours to the ranks."""

    def __init__(self, lengths: Sequence[int], batch_size: int, rank: int, world: int) -> None:
        self.lengths, self.batch_size, self.rank, self.world = lengths, batch_size, rank, world

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.lengths), generator=torch.Generator().manual_seed(0)).tolist()
        together, many = self.batch_size * self.world, 50 * self.batch_size * self.world
        for first in range(0, len(order), many):
            part = sorted(order[first : first + many], key=lambda sample: -self.lengths[sample])
            for begin in range(0, len(part), together):
                yield part[begin : begin + together][self.rank :: self.world]


def loader_of(way: str, lengths: Sequence[int], batch_size: int, rank: int, world: int) -> DataLoader[Any]:
    """Return the loader of a rank; ``batch_size`` counts the samples of all ranks."""
    texts, own = texts_of(lengths), batch_size // world
    if way in (DDP, PLAIN):
        return DataLoader(texts, own, sampler=DistributedSampler(texts, world, rank), collate_fn=collate)  # type: ignore[arg-type]
    if way == GROUPED:
        sampler: Any = GroupedByLength(lengths, own, rank, world)
    else:
        sampler = BalancedSampler(lengths, batch_size, padded=way == PADDED)
    return DataLoader(texts, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


def epoch_of(way: str, lengths: Sequence[int], batch_size: int, width: int, rank: int, world: int) -> Epoch:
    """Return the epochs of one way."""
    torch.manual_seed(0)
    model: Any = Encoder(width)
    if way in (SHARES, SHARES_BY_COST):
        return shares_epoch(model, lengths, batch_size, by_cost=way == SHARES_BY_COST)
    model = DistributedDataParallel(model) if way == DDP else lockstep.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = loader_of(way, lengths, batch_size, rank, world)

    def epoch() -> list[tuple[float, float]]:
        steps = []
        for tokens in loader:
            begin = time.process_time()
            optimizer.zero_grad()
            number = int((tokens != 0).sum())
            if way == DDP:
                loss = model(tokens)
                (loss / number).backward()
            else:
                with lockstep.accumulate(model, weight=number):
                    loss = model(tokens)
                    loss.backward()
            optimizer.step()
            steps.append((loss.item(), time.process_time() - begin))
        return steps

    return epoch


def shares_epoch(module: nn.Module, lengths: Sequence[int], batch_size: int, *, by_cost: bool) -> Epoch:
    """The same with eight shares."""
    group = dist.new_group(backend="shm")
    cost = {"cost": lengths, "padded": True} if by_cost else {}
    model = lockstep.replicate(module, shares=8, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = GlobalBatches(texts_of(lengths), batch_size, 8, process_group=group, collate_fn=collate, **cost)  # type: ignore[arg-type]

    def epoch() -> list[tuple[float, float]]:
        steps = []
        for batch in data:
            begin = time.process_time()
            optimizer.zero_grad()
            for tokens in batch:
                with lockstep.accumulate(model, weight=int((tokens != 0).sum())):
                    model(tokens).backward()
            optimizer.step()
            steps.append((0.0, time.process_time() - begin))
        return steps

    return epoch


WAYS = (DDP, PLAIN, GROUPED, BALANCED, PADDED, SHARES, SHARES_BY_COST)


def epochs_of_rank(rank: int, lengths: Sequence[int], batch_size: int, width: int, rounds: int) -> dict[str, Any]:
    """On one rank: the seconds of epochs and the processor time of each step, by way; the losses of the first epoch."""
    world = dist.get_world_size()
    ways = {way: epoch_of(way, lengths, batch_size, width, rank, world) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    processor: dict[str, list[list[float]]] = {way: [] for way in ways}
    losses: list[float] = []
    for number in range(-1, rounds):
        for way in list(ways) if number % 2 == 0 else list(ways)[::-1]:
            dist.barrier()
            begin = time.perf_counter()
            found = ways[way]()
            dist.barrier()
            if number >= 0:
                seconds[way].append(time.perf_counter() - begin)
                processor[way].append([spent for _, spent in found])
            elif way == PADDED:
                losses = [loss for loss, _ in found]
    return {"seconds": seconds, "processor": processor, "losses": losses}


def of_slowest(ranks: Sequence[dict[str, Any]], way: str) -> float:
    """The processor time of the rank that has most in a step, summed over the steps of an epoch; the median epoch."""
    rounds = zip(*(rank["processor"][way] for rank in ranks), strict=True)
    return statistics.median(sum(map(max, zip(*each, strict=True))) for each in rounds)


def losses_of_one(rank: int, lengths: Sequence[int], batch_size: int, width: int) -> list[float]:
    """The losses of one process with whole batches."""
    return [loss for loss, _ in epoch_of(PADDED, lengths, batch_size, width, 0, 1)()]


def show_epochs(name: str, world: int, samples: int, batch_size: int, width: int, rounds: int) -> None:
    """Print what was measured of one distribution."""
    lengths = LENGTHS[name](samples)
    ranks = launch(epochs_of_rank, lengths, batch_size, width, rounds, world=world)
    tokens, times = sum(lengths), {way: statistics.median(ranks[0]["seconds"][way]) for way in WAYS}
    spent = {way: of_slowest(ranks, way) for way in WAYS}
    rows = [
        (way, f"{tokens / times[way]:,.0f}", f"{times[DDP] / times[way]:.2f}", f"{spent[DDP] / spent[way]:.2f}")
        for way in WAYS
    ]
    headers = ("way", "tokens a second", "over DDP", "by processor time")
    table(f"{name}, {world} ranks, batches of {batch_size}", headers, rows)
    pairs = [(PADDED, other) for other in (DDP, PLAIN, GROUPED)] + [(SHARES_BY_COST, SHARES)]
    for way, other in pairs:
        print(
            f"ratio  {name}, {world} ranks, tokens a second, {way} over {other}: {times[other] / times[way]:.3f}, "
            f"by processor time {spent[other] / spent[way]:.3f}"
        )
    (alone,) = launch(losses_of_one, lengths, batch_size, width, world=1)
    together = [sum(each) for each in zip(*(rank["losses"] for rank in ranks), strict=True)]
    worst = max(abs(a - b) / b for a, b in zip(together, alone, strict=True))
    print(f"ratio  {name}, {world} ranks, largest difference of a loss from one process: {worst:.1e}", flush=True)


def main() -> None:
    """Print all comparisons."""
    args = arguments(__doc__, 3, ("--only", {"choices": ["shares", "batches", "sleeps"]}))
    steps = 6 if args.quick else 15
    if args.only != "batches":
        cases = [("sleeps", 2, 8), ("sleeps", 2, 16), ("sleeps", 3, 8), ("sleeps", 3, 16), ("busy core", 2, 8)]
        cases += [("busy core", 2, 16), ("equal", 2, 8), ("equal", 2, 16)]
        measuring, step = cost_of_measuring(20 if args.quick else 1000)
        print(f"\nmeasuring and deciding take {1e6 * measuring:.1f} us of a step of {1e6 * step:.0f} us")
        ratio("a step that measures to one that does not", step / (step - measuring), 1.0, 1.01)
        for case in cases[:1] if args.quick else cases[: 4 if args.only == "sleeps" else None]:
            show_shares(*case, steps, args.rounds)
    if args.only not in ("shares", "sleeps"):
        samples, batch_size, width = (32, 8, 16) if args.quick else (256, 32, 128)
        for name in list(LENGTHS)[: 1 if args.quick else None]:
            for world in [2] if args.quick else [2, 4]:
                show_epochs(name, world, samples, batch_size, width, args.rounds)


if __name__ == "__main__":
    main()
