"""Claim: on a GPU, too, a data-parallel step takes no longer than with PyTorch's DDP, with half its extra memory.

Measured on one GPU: one rank over NCCL, where nothing is sent and what is left are hooks, copies and launches; and two
ranks, processes that share the GPU, over Gloo, and with ``--share-gpu`` over NCCL. Ways, models, turns and the training
step are those of ``bench_ddp.py``, with a larger encoder in bfloat16 added. "step" ends when the GPU has finished,
"host" when the last kernel has been launched. Extra memory is the peak of what PyTorch's allocator has handed out in
three steps after three others, over the same peak of the plain module; what is there before the module is wrapped does
not count.

With ``--quick`` and no GPU it runs on the CPU, to show that it runs.
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from ddp_models import PLAIN, WAYS, Task, encoder, report, steps_of_all_ways, tasks, training_step
from harness import arguments
from rank_processes import Turn, launch, slowest, take_turns

BF16, LARGE = "encoder, bf16", "0.8 G, bf16"


def gpu_tasks(quick: bool) -> dict[str, Task]:
    if quick:
        return {name: task for name, task in tasks(quick).items() if name != "wide"} | {
            BF16: Task(lambda: encoder(1, 16), (2, 4, 16), dtype=torch.bfloat16)
        }
    return tasks(quick) | {
        BF16: Task(lambda: encoder(12, 1024), (16, 512, 1024), dtype=torch.bfloat16),
        LARGE: Task(lambda: encoder(16, 2048), (2, 512, 2048), dtype=torch.bfloat16),
    }


def measure(
    rank: int, name: str, device: str, backend: str, quick: bool, rounds: int, inner: int
) -> tuple[dict[str, list[Turn]], dict[str, int]]:
    """On one rank: the turns of all ways, and the bytes that wrapping and stepping add at their peak (on a GPU)."""
    task, home = gpu_tasks(quick)[name], torch.device(device)
    peaks: dict[str, int] = {}
    if home.type == "cuda":
        torch.cuda.set_device(home)
        peak_of_way(rank, task, PLAIN, home, backend)  # the libraries' workspaces are there
        peaks = {way: peak_of_way(rank, task, way, home, backend) for way in WAYS}
    wait = torch.cuda.synchronize if home.type == "cuda" else lambda: None
    return take_turns(steps_of_all_ways(task, rank, home, backend), rounds, inner, wait), peaks


def peak_of_way(rank: int, task: Task, way: str, device: torch.device, backend: str) -> int:
    gc.collect()
    module, x = task.module(device), task.data(rank, device)
    before = torch.cuda.memory_allocated()
    step = training_step(WAYS[way](module, dist.new_group(backend=backend), task.partly_unused), x)
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    if not torch.cuda.is_available() and "--quick" not in sys.argv[1:]:
        print("no CUDA device here: nothing to measure (--quick runs on the CPU, to try the script)")
        return
    names = list(gpu_tasks(quick=False))
    options = (
        ("--models", {"nargs": "+", "choices": names}),
        ("--steps", {"type": int, "default": 10, "help": "steps a turn (default 10)"}),
        ("--nccl", {"nargs": "+", "default": ["nccl"], "help": "names of PyTorch's backends for NCCL (default nccl)"}),
        ("--share-gpu", {"action": "store_true", "help": "two ranks over NCCL, too, which takes NCCL 2.30"}),
        ("--ranks", {"nargs": "+", "type": int, "choices": [1, 2], "default": [1, 2], "help": "one, two (or both)"}),
    )
    args = arguments(__doc__, 20, *options)
    device, nccl = ("cuda:0", args.nccl) if torch.cuda.is_available() else ("cpu", ["gloo"])
    steps = 1 if args.quick else args.steps
    over_nccl = [(f"one rank, {name}", name, 1) for name in nccl]
    over_nccl += [(f"two ranks, {name}", name, 2) for name in nccl if args.share_gpu]
    for where, backend, world in (*over_nccl, ("two ranks, gloo", "gloo", 2)):
        if world not in args.ranks:
            continue
        for name, task in gpu_tasks(args.quick).items():
            if args.models and name not in args.models:
                continue
            found = launch(measure, name, device, backend, args.quick, args.rounds, steps, world=world)
            peaks = [peak for _, peak in found]
            most = {way: max(peak[way] for peak in peaks) for way in peaks[0]}
            extra = {way: peak - most[PLAIN] for way, peak in most.items()}
            report(f"{name}, {where}", task, slowest([turns for turns, _ in found]), extra)


if __name__ == "__main__":
    main()
