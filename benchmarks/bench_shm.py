"""Claim: all-reduce on one host through the `shm` group takes a quarter of Gloo's time from 1 MB up, 40 % below.

Measured: `dist.all_reduce` of float32 tensors of 4 KB to 100 MB among 2 and 4 ranks, processes of one intra-op thread
each: Gloo on loopback, `shm` with ordinary tensors ("shm"), `shm` with tensors from `group.allocate` ("shm, in place"),
and, as the limit, one copy of the tensor on every rank at once ("copy"). All live in the same processes and take
turns; a turn is as many all-reduces, one after the other, as fill some milliseconds, and has taken as long as its
slowest rank.

Aims, two ranks on two cores: at most 1/4 of Gloo's time from 1 MB up and 1/2.5 below, and at most 2.5 times the copy
for 16 MB and more. With more ranks than cores all ways wait for each other's turns; the aims do not hold there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import arguments, ms, ratio, table
from rank_processes import Turn, launch, slowest, take_turns

import lockstep  # noqa: F401  (registers the backend)

KB, MB = 1000, 1000 * 1000
SIZES = (4 * KB, 16 * KB, 64 * KB, 256 * KB, 1 * MB, 4 * MB, 16 * MB, 64 * MB, 100 * MB)
QUICK_SIZES = (4 * KB, 400 * KB)
GLOO, SHM, IN_PLACE, COPY = "gloo", "shm", "shm, in place", "copy"


def time_sizes(rank: int, sizes: tuple[int, ...], rounds: int) -> dict[int, dict[str, list[Turn]]]:
    """On one rank: the turns of all ways, for each size."""
    gloo, shm = dist.new_group(backend="gloo"), dist.new_group(backend="shm")
    return {size: take_turns(ways(size // 4, gloo, shm), rounds, inner(size)) for size in sizes}


def ways(numel: int, gloo: dist.ProcessGroup, shm: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """Return what is compared, each with a tensor of its own; zeros, which stay zeros."""
    tensors = {name: torch.zeros(numel) for name in (GLOO, SHM, COPY)}
    tensors[IN_PLACE] = shm.allocate(numel).zero_()
    source = torch.zeros(numel)
    return {
        GLOO: lambda: dist.all_reduce(tensors[GLOO], group=gloo),
        SHM: lambda: dist.all_reduce(tensors[SHM], group=shm),
        IN_PLACE: lambda: dist.all_reduce(tensors[IN_PLACE], group=shm),
        COPY: lambda: tensors[COPY].copy_(source),
    }


def inner(size: int) -> int:
    """All-reduces a turn: few large ones, many small ones."""
    return max(3, min(100, 4 * MB // size))


def report(world: int, size: int, turns: dict[str, Turn]) -> list[str]:
    """A row of the table."""
    seconds = {name: whole for name, (_, whole) in turns.items()}
    parts = f"{seconds[SHM] / seconds[GLOO]:.2f}", f"{seconds[IN_PLACE] / seconds[GLOO]:.2f}"
    return [label(size), *(ms(seconds[name]) for name in (GLOO, SHM, IN_PLACE, COPY)), *parts]


def label(size: int) -> str:
    """A size in words."""
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


def main() -> None:
    args = arguments(__doc__, 15, ("--ranks", {"nargs": "+", "type": int, "default": [2, 4]}))
    sizes = QUICK_SIZES if args.quick else SIZES
    for world in args.ranks[:1] if args.quick else args.ranks:
        results = launch(time_sizes, sizes, args.rounds, world=world)
        turns = {size: slowest([rank[size] for rank in results]) for size in sizes}
        headers = ("size", "gloo ms", "shm ms", "in place ms", "copy ms", "shm / gloo", "in place / gloo")
        table(f"all-reduce, {world} ranks", headers, [report(world, size, turns[size]) for size in sizes])
        print()
        if world == 2:
            ratios(turns)


def ratios(turns: dict[int, dict[str, Turn]]) -> None:
    """The aims for two ranks."""
    for size, by_way in turns.items():
        seconds = {name: whole for name, (_, whole) in by_way.items()}
        aim = 1 / 4 if size >= MB else 1 / 2.5
        for way in (SHM, IN_PLACE):
            ratio(f"{label(size)}: {way} / gloo", seconds[way], seconds[GLOO], aim)
            if size >= 16 * MB and not math.isclose(seconds[COPY], 0):
                ratio(f"{label(size)}: {way} / copy", seconds[way], seconds[COPY], 2.5)


if __name__ == "__main__":
    main()
