"""Claim: eight shares take at most 1.10 times as long as plain accumulation over as many micro-batches, and memory for
at most log2(8) + 1 gradients.

Measured: one, two and three ranks, processes of one intra-op thread each, over Gloo on loopback and over `shm`;
``replicate(model, shares=8)`` with ``GlobalBatches``, and ``replicate(model)`` with ``accumulate(last=...)`` over the
same rows, which a ``DataLoader`` cuts into the same micro-batches. Both live in the same processes, each with a model
and a process group of its own, and take turns. A step is loading, ``zero_grad``, forward and backward of each share or
micro-batch, and SGD. With more ranks than cores, ranks wait for each other's processor time: those ratios say less. So
the processor time of all ranks together is told, too, which other programs on the machine disturb little.

Memory is the peak of resident memory (``VmHWM``, Linux) in three steps after three others, beyond what there was
before the model was replicated, in gradients of the whole model; each way in processes of its own, the larger of the
ranks. Inputs and activations are next to nothing there. The C library is told to give large blocks back at once. Pages
of shared memory count on each rank that has touched them.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_ddp import give_back_at_once, memory
from ddp_models import ConvNet, encoder, wide_layers
from harness import arguments
from rank_processes import Turn, launch, slowest, take_turns
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

SHARES = 8
Turns = dict[str, list[Turn]]
Processor = dict[str, list[float]]
"""Seconds of processor time of each step, by way."""
PLAIN, WITH_SHARES = "plain accumulation", "shares"


def digits() -> nn.Module:
    """The network of the digits example, with dropout."""

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    first = [*convolution(1, 48), *convolution(48, 48), nn.MaxPool2d(2)]
    second = [*convolution(48, 96), *convolution(96, 96), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Dropout(0.2), nn.Linear(96 * 4, 10))


TASKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "digits": (digits, (128, 1, 8, 8)),
    "encoder": (lambda: encoder(6, 256), (32, 64, 256)),
    "conv-BN": (lambda: ConvNet(20, 64), (32, 3, 8, 8)),
    "wide": (lambda: wide_layers(3, 2048), (16, 2048)),
}
QUICK: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {"wide": (lambda: wide_layers(3, 64), (16, 64))}


def shares_step(module: nn.Module, rows: TensorDataset, group: Any) -> Callable[[], None]:
    """A step with shares; batches have all rows."""
    model = lockstep.replicate(module, shares=SHARES, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = lockstep.shares.GlobalBatches(rows, len(rows), SHARES, shuffle=False, process_group=group)
    batches = _forever(data)

    def step() -> None:
        optimizer.zero_grad()
        for (x,) in next(batches):
            model(x).square().sum().backward()
        optimizer.step()

    return step


def plain_step(module: nn.Module, rows: TensorDataset, group: Any) -> Callable[[], None]:
    """A step of this rank's part of the same micro-batches."""
    model = lockstep.replicate(module, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    parts = list(torch.arange(len(rows)).view(SHARES, -1).tensor_split(group.size())[group.rank()].tolist())
    loader: DataLoader[Any] = DataLoader(rows, batch_sampler=parts)

    def step() -> None:
        optimizer.zero_grad()
        for number, (x,) in enumerate(loader):
            with lockstep.accumulate(model, last=number == len(parts) - 1, weight=len(x)):
                model(x).square().sum().backward()
        optimizer.step()

    return step


WAYS = {PLAIN: plain_step, WITH_SHARES: shares_step}


def _forever(data: Any) -> Iterator[Any]:
    while True:
        yield from data


def _task(name: str, quick: bool) -> tuple[nn.Module, TensorDataset]:
    make, shape = (QUICK if quick else TASKS)[name]
    torch.manual_seed(0)
    return make(), TensorDataset(torch.randn(shape))


def time_ways(rank: int, name: str, backend: str, quick: bool, rounds: int, inner: int) -> tuple[Turns, Processor]:
    """On one rank: the turns of both ways, and the processor time of each of their steps."""
    steps = {way: make(*_task(name, quick), dist.new_group(backend=backend)) for way, make in WAYS.items()}
    seconds: Processor = {way: [] for way in steps}

    def timed(way: str) -> Callable[[], None]:
        def step() -> None:
            before = time.process_time()
            steps[way]()
            seconds[way].append(time.process_time() - before)

        return step

    return take_turns({way: timed(way) for way in steps}, rounds, inner), seconds


def processor_time(ranks: Sequence[Processor], way: str) -> float:
    """The median over the steps, but for those of the first round, of what all ranks have taken together."""
    steps = [sum(each) for each in zip(*(rank[way] for rank in ranks), strict=True)]
    return statistics.median(steps[len(steps) // 4 :])


def peak_of_way(rank: int, name: str, way: str, backend: str, quick: bool) -> float:
    """On one rank: the memory that stepping adds at its peak, in gradients of the whole model."""
    give_back_at_once()
    other, group = dist.new_group(backend=backend), dist.new_group(backend=backend)
    WAYS[way](nn.Linear(2, 2), TensorDataset(torch.ones(SHARES, 2)), other)()  # code and threads are there
    module, rows = _task(name, quick)
    gc.collect()
    before = memory("VmRSS")
    step = WAYS[way](module, rows, group)
    for _ in range(3):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in range(3):
        step()
    return (memory("VmHWM") - before) / sum(p.numel() * p.itemsize for p in module.parameters())


def main() -> None:
    """Print both tables."""
    args = arguments(
        __doc__,
        5,
        ("--worlds", {"type": int, "nargs": "*", "default": [1, 2, 3]}),
        ("--tasks", {"nargs": "*"}),
        ("--no-memory", {"action": "store_true"}),
    )
    names = args.tasks or list(QUICK if args.quick else TASKS)
    worlds, backends = ([2], ["shm"]) if args.quick else (args.worlds, ["gloo", "shm"])
    for name in names:
        print(f"\n{name}: milliseconds of a step, on so many ranks")
        for world in worlds:
            for backend in backends:
                inner = 1 if args.quick else 4
                measured = launch(time_ways, name, backend, args.quick, args.rounds, inner, world=world)
                turns, processor = [turns for turns, _ in measured], [seconds for _, seconds in measured]
                times = {way: whole for way, (_, whole) in slowest(turns).items()}
                print(f"  {world} over {backend:5}" + "".join(f"  {w} {1e3 * t:8.2f}" for w, t in times.items()))
                ratio = times[WITH_SHARES] / times[PLAIN]
                print(f"ratio {name}, {world} over {backend}, shares to plain accumulation: {ratio:.2f}")
                plain, shared = (1e3 * processor_time(processor, way) for way in (PLAIN, WITH_SHARES))
                print(
                    f"  processor time: {PLAIN} {plain:.1f}, {WITH_SHARES} {shared:.1f}: ratio {shared / plain:.2f}",
                    flush=True,
                )
    if sys.platform != "linux" or args.no_memory:
        return
    name = names[-1]
    print(f"\n{name}: peak of memory on a rank, in gradients of the model (its parameters are there before)")
    for world in worlds:
        for backend in backends:
            peaks = {way: max(launch(peak_of_way, name, way, backend, args.quick, world=world)) for way in WAYS}
            print(f"  {world} over {backend:5}" + "".join(f"  {way} {peak:5.2f}" for way, peak in peaks.items()))


if __name__ == "__main__":
    main()
