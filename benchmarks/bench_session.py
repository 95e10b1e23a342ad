"""Claim: a session costs a step at most 1 %: no collective, no message, next to nothing for the host.

Two ranks over ``shm`` and over Gloo train a small network, in turns in the same processes: with a group that nobody
watches, and with the same group while a session's parts are at work: the channel of failures with its thread, waits
that hear of it, the page of progress. Before each turn there has been a watch, which takes the processes some time to
begin and to end; so that its traces are the same, the turn is a while after that. Interleaved; printed are the medians
over the rounds of the slowest rank's turn, and their ratio; and the same of the fastest tenth, which other programs
have disturbed least. The network is small, since the session's part does not grow with it.

On a machine that has other things to do, ratios near 1 tell nothing. So what a watch adds to a step is also counted and
timed by itself: how often a step says in which phase it is, and waits for others; and what each takes.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
from harness import arguments, ms, ratio, table
from rank_processes import Turn, launch
from torch import nn

import lockstep
from lockstep.distributed.comm.collectives import Collectives
from lockstep.failures.channel import FailureChannel
from lockstep.phases import Phases


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def training(group: dist.ProcessGroup, width: int) -> Iterator[None]:
    """Steps, one after the other."""
    model = lockstep.replicate(network(width), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    while True:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield


def turns(rank: int, backend: str, width: int, rounds: int, inner: int) -> dict[str, list[Turn]]:
    group = dist.new_group(backend=backend)
    steps = training(group, width)
    taken: dict[str, list[Turn]] = {"nobody watches": [], "watched": []}
    for number in range(-1, rounds):
        for name in list(taken) if number % 2 == 0 else list(taken)[::-1]:
            with contextlib.ExitStack() as watch:
                watch.enter_context(lockstep.watch(group))
                if name != "watched":
                    watch.close()
                seconds = timed(steps, inner)
            if number >= 0:
                taken[name].append((seconds, seconds))
    return taken


def added(rank: int, backend: str, width: int, repeats: int) -> tuple[float, float, float]:
    """Phases and waits in a step, and the seconds that both add to it."""
    group = dist.new_group(backend=backend)
    steps = training(group, width)
    with lockstep.watch(group) as watch:
        timed(steps, 3)
        with mock.patch.object(FailureChannel, "enter", autospec=True) as enter:
            timed(steps, 5)  # of which as many lead in
        with mock.patch.object(
            Collectives, "wait_watched", autospec=True, side_effect=Collectives.wait_watched
        ) as wait:
            timed(steps, 5)
        phases, waits = enter.call_count / 10, wait.call_count / 10
        collectives, channel = Collectives(group, Phases()), watch.channel

        def a_wait() -> None:
            with collectives.watcher.waiting("what"):
                channel.check()

        seconds = phases * fastest_call(lambda: collectives.enter("backward"), repeats)
        seconds += waits * fastest_call(a_wait, repeats)
        dist.barrier()
    return phases, waits, seconds


def fastest_call(call: Callable[[], object], repeats: int) -> float:
    return min(timeit.repeat(call, number=1000, repeat=repeats)) / 1000


def timed(steps: Iterable[None], inner: int) -> float:
    for _ in itertools.islice(steps, inner):
        pass
    dist.barrier()
    start = time.perf_counter()
    for _ in itertools.islice(steps, inner):
        pass
    return (time.perf_counter() - start) / inner


def main() -> None:
    args = arguments(__doc__, 40)
    width, inner = (32, 2) if args.quick else (256, 100)
    for backend in ("shm", "gloo"):
        ranks = launch(turns, backend, width, args.rounds, inner)
        medians = {name: median(of_slowest(ranks, name)) for name in ranks[0]}
        fastest = {name: median(sorted(of_slowest(ranks, name))[: -(-args.rounds // 10)]) for name in ranks[0]}
        rows = [[name, ms(medians[name]), ms(fastest[name])] for name in medians]
        table(f"a step of two ranks over {backend}", ["", "median ms", "fastest tenth ms"], rows)
        for what, seconds in (("median", medians), ("fastest tenth", fastest)):
            ratio(
                f"watched / nobody watches, {backend}, {what}",
                seconds["watched"],
                seconds["nobody watches"],
                aim=1.01,
            )
        phases, waits, seconds = launch(added, backend, width, 5 if args.quick else 300)[0]
        print(f"a watch adds to a step: {phases:g} phases, {waits:g} waits: {seconds * 1e6:.1f} us\n")
        ratio(f"(step + that) / step, {backend}, fastest tenth", 1 + seconds / fastest["nobody watches"], 1, aim=1.01)


def of_slowest(ranks: Sequence[dict[str, list[Turn]]], name: str) -> list[float]:
    """The seconds of a step in each turn, by the rank that took longest."""
    return [max(host for host, _ in turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)]


if __name__ == "__main__":
    main()
