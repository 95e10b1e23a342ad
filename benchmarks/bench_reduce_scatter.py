"""Claim: a reduce-scatter in place of the all-reduce of gradients would save a sharded optimizer next to nothing.

A sharded optimizer needs of the mean of all gradients only the slice on which its rank steps, and sends the weights in
an all-gather. With a reduce-scatter of the gradients it would send the bytes of one all-reduce in all, if the backend's
reduce-scatter sends half of those of its all-reduce. Beside the backend's all-gather are broadcasts, one of each rank's
slice, and lockstep's all-gather, which between two ranks over Gloo is an all-to-all.

Link: ranks are processes, each on a host of its own: a network namespace, which sends 200 Mbit/s (``tc``; needs root).
The tensor has 8 MB. "sent" is what leaves the first rank's host, by the counter of its link.

Loopback: ranks are processes, which share this machine's cores. The tensor has 19 MB, as the gradients of the encoder
of ``bench_shard_optimizer.py``. "processor ms" is what one rank's threads take, the largest of all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, mib, ms, ratio, table
from link_ranks import MEGABITS, bytes_sent, is_rank, no_links, over_links, run_as_rank
from rank_processes import launch

import lockstep  # registers shm
from lockstep.distributed.comm.collectives import Collectives
from lockstep.phases import Phases

assert lockstep
ALL_REDUCE, REDUCE_SCATTER = "all-reduce", "reduce-scatter"
ALL_GATHER, BROADCASTS = "all-gather", "broadcasts, one of each rank"
DIRECT = "all-gather of lockstep"
COMPARED = ((REDUCE_SCATTER, ALL_REDUCE), (BROADCASTS, ALL_GATHER), (DIRECT, ALL_GATHER))


def collectives(group: Any, numel: int) -> dict[str, Callable[[], object]]:
    """The collectives of a step, each of which blocks."""
    world, rank = group.size(), group.rank()
    numel = numel // world * world
    whole = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    gathered = torch.ones(numel)  # ones, so that its pages have been touched
    part = gathered.view(world, -1)[rank]
    ours = Collectives(group, Phases())

    def broadcasts() -> None:
        begun = [
            dist.broadcast(each, group=group, group_src=source, async_op=True)
            for source, each in enumerate(gathered.view(world, -1).unbind())
        ]
        for each in begun:
            each.wait()

    return {
        ALL_REDUCE: lambda: group.allreduce([whole.mul_(1 / world)]).wait(),
        REDUCE_SCATTER: lambda: group._reduce_scatter_base(part, whole).wait(),
        ALL_GATHER: lambda: group._allgather_base(gathered, part).wait(),
        BROADCASTS: broadcasts,
        DIRECT: lambda: ours.all_gather_flat(gathered, part, "parts").wait(),
    }


def measured(group: Any, numel: int, rounds: int, sent: Callable[[], int] = lambda: 0) -> dict[str, list[float]]:
    """For each collective the medians of seconds, of seconds of the processor, and of bytes sent."""
    found: dict[str, list[list[float]]] = {}
    for number in range(rounds + 1):
        for name, run in collectives(group, numel).items():
            dist.barrier()
            before = time.perf_counter(), time.process_time(), sent()
            run()
            work = time.process_time() - before[1]
            dist.barrier()
            if number:
                found.setdefault(name, []).append([time.perf_counter() - before[0], work, sent() - before[2]])
    return {name: [statistics.median(each) for each in zip(*rows, strict=True)] for name, rows in found.items()}


def on_loopback(rank: int, backend: str, numel: int, rounds: int) -> dict[str, list[float]]:
    return measured(dist.new_group(backend=backend), numel, rounds)


def measure_loopback(worlds: Sequence[int], numel: int, rounds: int) -> None:
    """The tables of ranks on this machine."""
    for world in worlds:
        for backend in ("gloo", "shm"):
            of_ranks = launch(on_loopback, backend, numel, rounds, world=world)
            found = {name: [max(each[name][i] for each in of_ranks) for i in range(2)] for name in of_ranks[0]}
            title = f"{world} ranks on loopback, {backend}"
            table(title, ["collective", "processor ms", "clock ms"], [[n, ms(w), ms(t)] for n, (t, w) in found.items()])
            for one, other in COMPARED:
                ratio(f"{title}: processor, {one} / {other}", found[one][1], found[other][1])
                ratio(f"{title}: clock, {one} / {other}", found[one][0], found[other][0])


def on_link(rank: int, numel: int, rounds: int) -> dict[str, list[float]]:
    return measured(dist.new_group(), numel, rounds, bytes_sent)


def measure_link(worlds: Sequence[int], numel: int, rounds: int) -> None:
    """The tables of ranks on several hosts."""
    if reason := no_links():
        print(f"\nno link: {reason}")
        return
    for world in worlds:
        found = over_links(__file__, world, numel, rounds)[0]
        title = f"{world} ranks over {MEGABITS} Mbit/s"
        table(title, ["collective", "clock ms", "MiB sent"], [[n, ms(t), mib(b)] for n, (t, _, b) in found.items()])
        for one, other in COMPARED:
            ratio(f"{title}: bytes, {one} / {other}", found[one][2], found[other][2])
            ratio(f"{title}: clock, {one} / {other}", found[one][0], found[other][0])


def main() -> None:
    """Measure all."""
    args = arguments(__doc__, 9)
    worlds = [2] if args.quick else [2, 3, 4]
    measure_link(worlds, 20_000 if args.quick else 2_000_000, min(args.rounds, 5))
    measure_loopback(worlds, 60_000 if args.quick else 4_737_024, args.rounds)


if __name__ == "__main__":
    if is_rank():
        run_as_rank(on_link)
    else:
        main()
