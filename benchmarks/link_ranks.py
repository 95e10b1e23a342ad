"""Processes that act as ranks, each on a host of its own whose link is slow: network namespaces (needs root).

A benchmark starts itself on each host with ``--rank``, and leaves what a rank has found in a file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hosts.network import Hosts, missing

MEGABITS = 200
"""What a host sends in a second, at most."""


def no_links() -> str:
    """Why this machine has no such links; empty if it has."""
    return missing(("ip", "tc", "unshare"))


def over_links(script: str, world: int, *said: object) -> list[Any]:
    """Return what :func:`run_as_rank` of ``script`` has found on each of ``world`` hosts; ``said``: its arguments."""
    with tempfile.TemporaryDirectory() as folder, Hosts(world) as hosts:
        started = []
        for rank in range(world):
            hosts.slow_down(rank, MEGABITS)
            command = [sys.executable, script, "--rank", str(rank), str(world), folder, json.dumps(said)]
            log = Path(folder) / f"log{rank}"
            environment = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": os.pathsep.join(sys.path)}
            started.append((hosts.start(rank, command, environment, log), log))
        for process, log in started:
            if process.wait(timeout=600):
                raise RuntimeError(log.read_text())
        return [json.loads((Path(folder) / f"result{rank}").read_text()) for rank in range(world)]


def is_rank() -> bool:
    """True in a process that :func:`over_links` has started."""
    return sys.argv[1:2] == ["--rank"]


def run_as_rank(function: Callable[..., Any]) -> None:
    """Connect the ranks over Gloo, and leave what ``function(rank, *said)`` returns."""
    rank, world, folder, said = sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(world))
    (Path(folder) / f"result{rank}").write_text(json.dumps(function(int(rank), *json.loads(said))))
    dist.barrier()
    dist.destroy_process_group()


def bytes_sent() -> int:
    """Return what has left this host."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
