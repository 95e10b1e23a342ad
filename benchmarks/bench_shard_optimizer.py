"""Claims: a sharded AdamW needs 8 + 8/W bytes for each float32 weight, within 2 %; a step takes no longer than without
sharding on 2 ranks, at most 0.8 of it on 4 where the optimizer counts, and at most 0.7 of that with PyTorch's
``ZeroRedundancyOptimizer``; Muon's step takes at most 0.55 of the replicated one's on 2 ranks.

Ranks are processes, each with one intra-op thread. All ways take turns in the same processes; printed are medians over
the rounds of the slowest rank's turn: of whole training steps, of ``optimizer.step()`` alone with what it gathers, and
of the processor time that this takes in a rank, of all its threads, which tells more where others use the machine, too.
Memory is measured in processes of its own: the bytes of weights, gradients and state, counted, and the growth of the
resident peak (``VmHWM``) from the built model to the end of the third step. Bytes sent are computed: an all-reduce of n
bytes sends 2 n (W - 1) / W from each rank, an all-gather n (W - 1) / W. PyTorch's broadcasts in
``ZeroRedundancyOptimizer`` send the weights once, too. With more ranks than cores, times are of ranks that share cores.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from bench_memory import peak, resident
from ddp_models import Task, encoder, small_layers, wide_layers
from harness import arguments, mib, ms, ratio, table
from rank_processes import Turn, launch, slowest, take_turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.sharding import shard_optimizer

with warnings.catch_warnings():  # PyTorch's package uses what PyTorch deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

PLAIN, SHARDED = "lockstep", "lockstep, sharded"
PLAIN_SHM, SHARDED_SHM = "lockstep on shm", "lockstep on shm, sharded"
DDP, ZERO = "DDP", "DDP, ZeroRedundancyOptimizer"
WAYS = (PLAIN, SHARDED, PLAIN_SHM, SHARDED_SHM, DDP, ZERO)
CPU = torch.device("cpu")


def models(quick: bool) -> dict[str, Task]:
    """Name -> task; tiny ones with ``quick``."""
    if quick:
        return {
            "encoder": Task(lambda: encoder(1, 16), (2, 4, 16)),
            "25 M wide": Task(lambda: wide_layers(3, 64), (4, 64)),
            "400 small": Task(lambda: small_layers(20, 8), (4, 8)),
            "Muon, encoder": Task(lambda: encoder(1, 16), (2, 4, 16)),
        }
    return {
        "encoder": Task(lambda: encoder(6, 256), (8, 64, 256)),
        "25 M wide": Task(lambda: wide_layers(3, 2880), (32, 2880)),
        "400 small": Task(lambda: small_layers(200, 64), (32, 64)),
        "Muon, encoder": Task(lambda: encoder(2, 256), (2, 64, 256)),  # a step of six layers takes 20 s
    }


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=1e-5)


class Training:
    """One way to train a model."""

    def __init__(self, name: str, task: Task, way: str, rank: int, groups: dict[str, Any]) -> None:
        module = task.module(CPU)
        make = muon if name.startswith("Muon") else adamw
        self.model: Any
        if way in (DDP, ZERO):
            self.model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        else:
            self.model = lockstep.replicate(module, process_group=groups["shm" if "shm" in way else "gloo"])
        self.optimizer: Any
        if way == ZERO:
            self.optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-5, fused=True)
        else:
            self.optimizer = make(list(module.parameters()))
            if "sharded" in way:
                self.optimizer = shard_optimizer(self.optimizer)
        self.data = task.data(rank, CPU)
        self.seconds: list[float] = []
        self.work: list[float] = []

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()
        start, work = time.perf_counter(), time.process_time()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.work.append(time.process_time() - work)

    def bytes_held(self) -> dict[str, int]:
        """Bytes of weights, gradients and state on this rank."""
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        inner = getattr(self.optimizer, "optim", None) or self.optimizer
        values = [each for values in inner.state.values() for each in values.values()]
        state = [getattr(each, "local", each) for each in values if isinstance(each, torch.Tensor)]  # of a StateSlice
        return {
            "weights": sum(each.nbytes for each in parameters),
            "gradients": sum(each.grad.nbytes for each in parameters if each.grad is not None),
            "state": sum(each.nbytes for each in state),
            "elements": sum(each.numel() for each in parameters),
        }


def ways_of(name: str) -> list[str]:
    return [way for way in WAYS if way != ZERO or not name.startswith("Muon")]  # which takes no groups of matrices


def make_groups() -> dict[str, Any]:
    return {backend: dist.new_group(backend=backend) for backend in ("gloo", "shm")}


def timed(rank: int, name: str, quick: bool, rounds: int, inner: int) -> dict[str, tuple[list[Turn], float, float]]:
    groups, task = make_groups(), models(quick)[name]
    trainings = {way: Training(name, task, way, rank, groups) for way in ways_of(name)}
    steps: dict[str, Callable[[], object]] = {way: each.step for way, each in trainings.items()}
    turns = take_turns(steps, rounds, inner)
    counted = slice(inner + 1, None)  # without the first round
    medians = {way: [statistics.median(each[counted]) for each in (t.seconds, t.work)] for way, t in trainings.items()}
    return {way: (turns[way], *medians[way]) for way in trainings}


def held(rank: int, name: str, way: str, quick: bool) -> dict[str, int]:
    task = models(quick)[name]
    groups = make_groups()
    training = Training(name, task, way, rank, groups)
    built = resident()
    for _ in range(3):
        training.step()
    return {**training.bytes_held(), "grown": peak() - built}


def sent(way: str, found: dict[str, int], world: int) -> float:
    """Bytes that a rank sends in a step: gradients, and the weights where the state is sharded."""
    gathers = 1 if way in (SHARDED, SHARDED_SHM, ZERO) else 0
    return (2 * found["gradients"] + gathers * found["weights"]) * (world - 1) / world


def compare(name: str, world: int, rounds: int, inner: int, quick: bool) -> None:
    told = launch(timed, name, quick, rounds, inner, world=world)
    whole = slowest([{way: turns for way, (turns, *_) in each.items()} for each in told])
    work = {way: max(each[way][2] for each in told) for way in told[0]}
    alone = {way: max(each[way][1] for each in told) for way in told[0]}
    memory = {way: launch(held, name, way, quick, world=world) for way in told[0]}
    rows = []
    for way in told[0]:
        each = max(memory[way], key=lambda found: found["state"])
        per_weight = (each["weights"] + each["gradients"] + each["state"]) / each["elements"]
        cells = [mib(each["state"]), f"{per_weight:.3f}", mib(max(found["grown"] for found in memory[way]))]
        rows.append([way, ms(whole[way][1]), ms(alone[way]), ms(work[way]), *cells, mib(sent(way, each, world))])
    headers = (
        "way",
        "step, ms",
        "optimizer, ms",
        "its CPU, ms",
        "state, MiB",
        "bytes/weight",
        "peak growth, MiB",
        "sent, MiB",
    )
    table(f"{name}, {world} ranks", headers, rows)
    print()
    title = f"{name}, {world} ranks"
    for sharded, plain in ((SHARDED, PLAIN), (SHARDED_SHM, PLAIN_SHM)):
        aim = 0.55 if world == 2 and name.startswith("Muon") else None
        ratio(f"{title}: step, {sharded} / {plain}", whole[sharded][1], whole[plain][1], 1.0 if world == 2 else 0.8)
        ratio(f"{title}: optimizer, {sharded} / {plain}", alone[sharded], alone[plain], aim)
        ratio(f"{title}: optimizer's processor time, {sharded} / {plain}", work[sharded], work[plain])
    if ZERO in whole:
        ratio(f"{title}: step, {SHARDED} / {ZERO}", whole[SHARDED][1], whole[ZERO][1], 0.7)
        ratio(f"{title}: optimizer, {SHARDED} / {ZERO}", alone[SHARDED], alone[ZERO])
    ratio(f"{title}: step, {SHARDED_SHM} / {DDP}", whole[SHARDED_SHM][1], whole[DDP][1])
    each = max(memory[SHARDED], key=lambda found: found["state"])
    if not name.startswith("Muon"):
        per_weight = (each["weights"] + each["gradients"] + each["state"]) / each["elements"]
        ratio(f"{title}: bytes for each weight / (8 + 8/W)", per_weight, 8 + 8 / world, 1.02)


def main() -> None:
    options = (("--worlds", {"type": int, "nargs": "+"}), ("--models", {"nargs": "+"}))
    args = arguments(__doc__, 7, *options)
    for world in args.worlds or ((2,) if args.quick else (2, 4)):
        for name in args.models or models(args.quick):
            inner = 1 if args.quick or name.startswith("Muon") else 3
            compare(name, world, args.rounds, inner, args.quick)


if __name__ == "__main__":
    main()
