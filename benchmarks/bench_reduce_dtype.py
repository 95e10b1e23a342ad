"""Claim: gradients that travel in bfloat16 have an error that does not grow with the number of ranks, and a step takes
at most 0.6 of float32's over a link of 200 Mbit/s, and 1.02 of it where bytes do not count.

Error: ranks are threads over Gloo on loopback, 2 to 64. Each has a gradient of 65,536 elements: what all have in
common, and noise of half its size. "rms" is the norm of the difference from the mean in float64, by the norm of that
mean, in units of 2^-9, which is the most that rounding one number to bfloat16 changes it by. "largest" is that of one
element. PyTorch's ``bf16_compress_hook`` and ``reduce_dtype`` go through the same replicated module.

Link: ranks are processes, each on a host of its own: a network namespace, which sends 200 Mbit/s (``tc``; needs root).
The model is the encoder of ``bench_ddp.py``, 19 MB of gradients, on a batch of 32 tokens. All ways live in the same
processes, and take turns. "sent" is what leaves a rank's host in a step, of all kinds, by the counter of its link.

Loopback: the same without a link, two ranks on Gloo and on ``shm``, where bytes cost processor time alone: that of both
ranks, with all their threads, and what the clock says.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_models import Task, tasks, training_step
from harness import arguments, mib, ms, ratio, table
from link_ranks import MEGABITS, bytes_sent, is_rank, no_links, over_links, run_as_rank
from rank_processes import Turn, launch, slowest, take_turns
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lockstep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from threaded import Rank, run_ranks

CPU = torch.device("cpu")
UNIT = 2.0**-9
MODELS = ("encoder", "many small")
INNER = 3
"""Steps in a turn."""
Wrap = Callable[[nn.Module, Any], nn.Module]


def torch_ddp(hook: Any) -> Wrap:
    """PyTorch's wrapper, with a communication hook if it is not None.

    On the CPU it refuses ``bf16_compress_hook`` by name, but not a function that calls it.
    """

    def wrap(module: nn.Module, group: Any) -> nn.Module:
        wrapped = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
        if hook is not None:
            wrapped.register_comm_hook(group, hook)
        return wrapped

    return wrap


def lockstep_ddp(dtype: torch.dtype | None) -> Wrap:
    """Our module, whose gradients travel in a dtype."""
    return lambda module, group: lockstep.replicate(module, process_group=group, reduce_dtype=dtype)


WAYS: dict[str, Wrap] = {
    "float32": lockstep_ddp(None),
    "bfloat16": lockstep_ddp(torch.bfloat16),
    "float16": lockstep_ddp(torch.float16),
    "DDP, float32": torch_ddp(None),
    "DDP, bf16_compress_hook": torch_ddp(lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)),
}

# ------------------------------------------------------------------------------------------- error


def errors_of(rank: Rank, numel: int) -> dict[str, tuple[float, float]]:
    """The errors of each way, in units: of all elements together, and of the worst one."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    own = common + 0.5 * torch.randn(numel, generator=rank.generator(1))
    exact = sum(each.double() for each in rank.gather(own)) / rank.world
    found = {}
    for name in ("lockstep", "hook"):
        module = nn.ParameterList([nn.Parameter(torch.zeros(numel))])
        lockstep.replicate(
            module, process_group=rank.group, reduce_dtype=torch.bfloat16 if name == "lockstep" else None
        )
        if name == "hook":
            module.register_comm_hook(rank.group, default_hooks.bf16_compress_hook)
        (module[0] * own).sum().backward()
        difference = module[0].grad.double() - exact
        largest = (difference.abs() / exact.abs().clamp(min=0.1)).max()
        found[name] = ((difference.norm() / exact.norm()).item() / UNIT, largest.item() / UNIT)
    return found


def measure_errors(quick: bool) -> None:
    """The table of errors."""
    worlds = [2, 4] if quick else [2, 4, 8, 16, 32, 64]
    found = {world: run_ranks(world, errors_of, 4096 if quick else 65536, timeout=300)[0] for world in worlds}
    rows = [
        [world, *(f"{value:.2f}" for way in ("lockstep", "hook") for value in each[way])]
        for world, each in found.items()
    ]
    table("error by number of ranks, in units of 2^-9", ["ranks", "rms", "largest", "hook: rms", "hook: largest"], rows)
    first, last = found[worlds[0]], found[worlds[-1]]
    ratio(f"rms error of lockstep, {worlds[-1]} ranks / {worlds[0]}", last["lockstep"][0], first["lockstep"][0], 1.1)
    ratio(f"rms error of the hook, {worlds[-1]} ranks / {worlds[0]}", last["hook"][0], first["hook"][0])
    ratio(f"rms error, {worlds[-1]} ranks: lockstep / the hook", last["lockstep"][0], last["hook"][0])


# --------------------------------------------------------------------------------------- step times


def steps_of(rank: int, group: Callable[[], Any], task: Task) -> dict[str, Callable[[], object]]:
    """A training step of each way, each with a model and a group of its own."""
    return {name: training_step(wrap(task.module(CPU), group()), task.data(rank, CPU)) for name, wrap in WAYS.items()}


def rank_over_link(rank: int, quick: bool, rounds: int) -> list[Any]:
    """On one host: the turns of all ways, and the bytes of one step of each."""
    task = tasks(quick)["encoder"]
    steps = steps_of(rank, dist.new_group, replace(task, batch=(2, 16, task.batch[-1])))
    turns = take_turns(steps, rounds, 1)
    sent = {}
    for name, step in steps.items():
        dist.barrier()
        before = bytes_sent()
        step()
        sent[name] = bytes_sent() - before
    return [turns, sent]


def measure_link(quick: bool, rounds: int) -> None:
    """The tables of steps over links."""
    if reason := no_links():
        print(f"\nno link: {reason}")
        return
    for world in [2] if quick else [2, 4]:
        results = over_links(__file__, world, quick, rounds)
        times, sent = slowest([turns for turns, _ in results]), results[0][1]
        rows = [[name, ms(whole), mib(sent[name])] for name, (_, whole) in times.items()]
        table(f"a step of {world} ranks over {MEGABITS} Mbit/s", ["way", "ms", "MiB sent"], rows)
        for name in ("bfloat16", "float16"):
            ratio(f"{world} ranks over the link, {name} / float32", times[name][1], times["float32"][1], 0.6)
        hook = times["DDP, bf16_compress_hook"][1]
        ratio(f"{world} ranks over the link, bfloat16 / PyTorch's bf16_compress_hook", times["bfloat16"][1], hook)


def on_loopback(rank: int, backend: str, quick: bool, rounds: int) -> dict[str, dict[str, list[Turn]]]:
    """On one rank, for each model: the seconds of all ways in each round, of the processor and of the clock."""

    def group() -> Any:
        return dist.new_group(backend=backend)

    return {model: in_turns(steps_of(rank, group, tasks(quick)[model]), rounds) for model in MODELS}


def in_turns(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[Turn]]:
    """The seconds of each way in each round; the first one is not counted."""
    turns: dict[str, list[Turn]] = {name: [] for name in steps}
    for number in range(-1, rounds):
        for name in list(steps) if number % 2 == 0 else list(steps)[::-1]:
            gc.collect()
            dist.barrier()
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(INNER):
                steps[name]()
            took = time.process_time() - processor, time.perf_counter() - clock
            if number >= 0:
                turns[name].append((took[0] / INNER, took[1] / INNER))
    return turns


def measure_loopback(quick: bool, rounds: int) -> None:
    """The tables of steps where bytes do not count."""
    for backend in ("gloo", "shm"):
        of_ranks = launch(on_loopback, backend, quick, rounds)
        for model in MODELS:
            times = slowest([each[model] for each in of_ranks])
            rows = [[name, ms(processor), ms(clock)] for name, (processor, clock) in times.items()]
            table(f"{model}, two ranks on loopback, {backend}", ["way", "processor ms", "clock ms"], rows)
            for name in ("bfloat16", "float16"):
                for place, what in enumerate(("processor", "clock")):
                    label = f"{model} on {backend}, {name} / float32, {what}"
                    ratio(label, times[name][place], times["float32"][place], 1.02)


def main() -> None:
    """Measure all."""
    args = arguments(__doc__, 9, ("--only", {"choices": ["error", "link", "loopback"], "default": ""}))
    if args.only in ("", "error"):
        measure_errors(args.quick)
    if args.only in ("", "link"):
        measure_link(args.quick, args.rounds)
    if args.only in ("", "loopback"):
        measure_loopback(args.quick, args.rounds)


if __name__ == "__main__":
    if is_rank():
        run_as_rank(rank_over_link)
    else:
        main()
