"""What one all-reduce takes on each backend, beside one copy of the tensor: run in each of several processes."""

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.cli.local_ranks import as_rank

BYTES_A_TURN = 8 << 20
"""Small messages are sent several times a turn, one after the other."""


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each backend and size: the median seconds of one all-reduce and of one copy, on this rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=options["timeout"]))
    groups = {name: dist.new_group(backend=name) for name in options["backends"]}
    rows = [row for size in options["sizes"] for row in _measure_size(groups, size, options["rounds"])]
    dist.destroy_process_group()
    return rows


def _measure_size(groups: dict[str, Any], size: int, rounds: int) -> list[dict[str, Any]]:
    calls = {name: _all_reduce(name, group, size) for name, group in groups.items()}
    source, target = torch.zeros(size // 4), torch.zeros(size // 4)
    calls["copy"] = lambda: target.copy_(source)
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = max(1, min(50, BYTES_A_TURN // size))
    for number in range(-1, rounds):
        for name, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            if number >= 0:
                times[name].append((time.perf_counter() - begin) / repeats)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {"backend": name, "bytes": size, "seconds": medians[name], "copy_seconds": medians["copy"]} for name in groups
    ]


def _all_reduce(name: str, group: Any, size: int) -> Callable[[], object]:
    if name != "nccl":
        tensor = torch.zeros(size // 4)
        return lambda: dist.all_reduce(tensor, group=group)
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    on_device = torch.zeros(size // 4, device=device)

    def call() -> None:
        dist.all_reduce(on_device, group=group)
        torch.cuda.synchronize(device)

    return call


if __name__ == "__main__":
    as_rank(measure)
