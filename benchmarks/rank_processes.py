"""Processes that act as ranks: started, connected over loopback, timed side by side, ended; their results handed back.

Each has one intra-op thread and a default Gloo group. Things compared take turns as in ``harness.interleaved``, all of
them in the same processes; a barrier lines the ranks up before each turn, and a turn has taken as long as its slowest
rank.
"""

from __future__ import annotations

import gc
import os
import pickle
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

# what the server of the processes imports once, for all of them; optimisers import the second at their first step
PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "lockstep.session.session", "lockstep.shares"]

Turn = tuple[float, float]  # seconds of a step: until the host is done, until the device is done


def launch(function: Callable[..., Any], *args: object, world: int = 2) -> list[Any]:
    """Return what ``function(rank, *args)``, a function of a module, returned in each of ``world`` processes."""
    # forks of a server that has imported PyTorch start in no time; it ends with this process
    os.environ["OMP_NUM_THREADS"] = "1"  # also: a server with threads could not be forked safely
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        start = multiprocessing.start_processes
        start(_rank, (function, args, world, folder), nprocs=world, daemon=True, start_method="forkserver")
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(world)]


def _rank(rank: int, function: Callable[..., Any], args: tuple[object, ...], world: int, folder: str) -> None:
    torch.set_num_threads(1)
    loopback()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    gc.freeze()
    try:
        (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(function(rank, *args)))
        dist.barrier()  # a rank that leaves early would cut off the others
    except BaseException:
        traceback.print_exc()  # a failure here makes the other ranks fail, and only the first one seen is raised
        raise
    finally:
        dist.destroy_process_group()


def loopback() -> None:
    """Gloo groups that this process makes from now on stay on the machine."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def take_turns(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    inner: int,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, list[Turn]]:
    """The turns of each of ``steps`` on this rank, ``inner`` steps a turn; ``wait`` waits for the device.

    Every turn opens with a step that is not timed, and brings the caches back. The first round is not counted.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in steps}
    for number in range(-1, rounds):
        for name in list(steps) if number % 2 == 0 else list(steps)[::-1]:
            gc.collect()
            steps[name]()
            wait()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                steps[name]()
            host = time.perf_counter() - start
            wait()
            whole = time.perf_counter() - start
            if number >= 0:
                turns[name].append((host / inner, whole / inner))
    return turns


def slowest(turns: Sequence[Mapping[str, Sequence[Turn]]]) -> dict[str, Turn]:
    """From what ``take_turns`` returned on each rank: the median over the rounds of the slowest rank's turn."""
    medians: dict[str, Turn] = {}
    for name in turns[0]:
        rounds = list(zip(*(rank[name] for rank in turns), strict=True))
        host, whole = (statistics.median(max(turn[part] for turn in ranks) for ranks in rounds) for part in (0, 1))
        medians[name] = host, whole
    return medians
