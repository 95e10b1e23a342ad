"""Claim: with the same Gloo group, a data-parallel step takes 0.7 to 0.95 of PyTorch's DDP with bucket views.

lockstep sends gradients over the group's companion, in shared memory; DDP sends them over Gloo. On a `shm` group
communication adds at most a third of what it adds with DDP on Gloo (an encoder: a fifth).

Measured: two ranks, processes of one intra-op thread each over Gloo on loopback; PyTorch's DDP as it is, the same with
``gradient_as_bucket_view=True``, lockstep as a wrapper and as ``replicate``, and the plain module, which does not
communicate but runs on both ranks at once; and both wrappers on the ``shm`` backend ("lockstep, shm", "DDP, shm"). All
live in the same two processes, each with a model and a process group of its own, and take turns. A step is
``zero_grad``, forward, backward and SGD. For the model of which a third of the parameters are unused, PyTorch's DDP is
told so (``find_unused_parameters=True``); lockstep needs no flag.

"over plain" is the step's time beyond that of the plain module's step. Extra memory is the peak of resident memory
(``VmHWM``, Linux) in three steps after three others, over the same peak of the plain module; each way in processes of
its own, the larger of the two ranks, the median of three launches. What is there before the module is wrapped does not
count; ways on ``shm``, where memory is common to both ranks, are not weighed. The C library is told to give large
blocks back at once, so that the numbers are those of tensors.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_models import PLAIN, WAYS, report, steps_of_all_ways, tasks, training_step
from harness import arguments
from rank_processes import Turn, launch, slowest, take_turns
from torch import nn

CPU = torch.device("cpu")


def time_ways(rank: int, names: list[str], quick: bool, rounds: int, inner: int) -> dict[str, dict[str, list[Turn]]]:
    """On one rank: the turns of all ways, for each model."""
    return {
        name: take_turns(
            steps_of_all_ways(tasks(quick)[name], rank, CPU, shm=True), rounds, inner
        )  # one model at a time in memory
        for name in names
    }


def peak_of_way(rank: int, name: str, way: str, quick: bool) -> int:
    """On one rank: the bytes that wrapping and stepping add at their peak."""
    task = tasks(quick)[name]
    give_back_at_once()
    training_step(WAYS[way](nn.Linear(2, 2), dist.new_group(), False), torch.ones(2, 2))()  # code and threads are there
    module, x, group = task.module(CPU), task.data(rank, CPU), dist.new_group()
    gc.collect()
    before = memory("VmRSS")
    step = training_step(WAYS[way](module, group, task.partly_unused), x)
    for _ in range(3):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in range(3):
        step()
    return memory("VmHWM") - before


def give_back_at_once() -> None:
    """Blocks of 64 KiB and more leave the process as soon as they are freed (GNU libc; elsewhere nothing happens)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, trim_threshold = -3, -1
        mallopt(mmap_threshold, 65536)
        mallopt(trim_threshold, 65536)


def memory(key: str) -> int:
    """A size from the process' status, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def extra_memory(name: str, quick: bool, launches: int) -> dict[str, float]:
    """The bytes at the peak beyond the plain module's, for each way."""
    peaks: dict[str, list[int]] = {way: [] for way in WAYS}
    for _ in range(launches):
        for way in WAYS:
            peaks[way].append(max(launch(peak_of_way, name, way, quick)))
    medians = {way: statistics.median(values) for way, values in peaks.items()}
    return {way: value - medians[PLAIN] for way, value in medians.items()}


def main() -> None:
    names = list(tasks(quick=True))
    options = (
        ("--models", {"nargs": "+", "choices": names, "default": names}),
        ("--steps", {"type": int, "default": 3, "help": "steps a turn (default 3)"}),
        ("--no-memory", {"action": "store_true", "help": "measure times only"}),
    )
    args = arguments(__doc__, 15, *options)
    # a quick run starts few processes
    groups = [args.models] if args.quick else [[name] for name in args.models]
    weighed = [] if args.no_memory or sys.platform != "linux" else args.models[:1] if args.quick else args.models
    for group in groups:
        turns = launch(time_ways, group, args.quick, args.rounds, args.steps)
        for name in group:
            extra = extra_memory(name, args.quick, 1 if args.quick else 3) if name in weighed else {}
            report(f"{name}, two ranks", tasks(args.quick)[name], slowest([rank[name] for rank in turns]), extra)


if __name__ == "__main__":
    main()
