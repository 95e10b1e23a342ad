"""Claim: a session costs a step at most 1 %: no collective, no message, next to nothing for the host.

Two ranks over ``shm`` and over Gloo train a small network, in turns in the same processes: with a group that nobody
watches, and with the same group while a session's parts are at work: the channel of failures with its thread, waits
that hear of it, the page of progress, batches that are counted. Interleaved; printed are the medians over the rounds of
the slowest rank's turn, and their ratio. The network is small, since the session's part does not grow with it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from harness import arguments, ms, ratio, table
from rank_processes import Turn, launch, slowest
from torch import nn

import lockstep


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


@contextlib.contextmanager
def watched(group: dist.ProcessGroup) -> Iterator[lockstep.watch]:
    with lockstep.watch(group) as watch:
        yield watch


def turns(rank: int, backend: str, width: int, rounds: int, inner: int) -> dict[str, list[Turn]]:
    group = dist.new_group(backend=backend)
    steps = training(group, width)
    taken: dict[str, list[Turn]] = {"nobody watches": [], "watched": []}
    for number in range(-1, rounds):
        for name in list(taken) if number % 2 == 0 else list(taken)[::-1]:
            with lockstep.watch(group) if name == "watched" else contextlib.nullcontext():
                seconds = timed(steps, inner)
            if number >= 0:
                taken[name].append((seconds, seconds))
    return taken


def timed(steps: Iterable[None], inner: int) -> float:
    for _ in itertools.islice(steps, 5):
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
        medians = slowest(launch(turns, backend, width, args.rounds, inner))
        table(
            f"a step of two ranks over {backend}", ["", "ms"], [[name, ms(host)] for name, (host, _) in medians.items()]
        )
        ratio(f"watched / nobody watches, {backend}", medians["watched"][0], medians["nobody watches"][0], aim=1.01)


if __name__ == "__main__":
    main()
