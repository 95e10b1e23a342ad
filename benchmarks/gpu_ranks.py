"""What ranks of the GPU kit do, as processes: sum one tensor, train with shares, train until one of them is killed.

Several ranks may have one GPU, which NCCL allows from 2.30 on, if ``NCCL_MULTI_RANK_GPU_ENABLE`` is 1.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.errors import PeerFailure
from lockstep.shares import GlobalBatches, fingerprint

TESTS = Path(__file__).parents[1] / "tests"
SHARES, STEPS, ROWS = 8, 6, 32
PLACES = ("forward", "backward", "optimizer")
"""Where a rank is killed."""


@dataclass(frozen=True)
class Kill:
    """Which rank is killed, when, and where in its step."""

    rank: int
    step: int
    place: str


@dataclass(frozen=True)
class Ended:
    """What became of a rank: its exit code (None if it had to be stopped), what it returned, and its last words."""

    code: int | None
    result: Any
    words: str = ""


def run(function: Callable[..., Any], world: int, kind: str, backend: str, *args: object, limit: float) -> list[Ended]:
    """Return what became of each rank, after ``limit`` seconds at most.

    ``kind`` is that of the devices: cuda, sim or cpu.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "torch.distributed", "lockstep.session.session", "lockstep.shares"]
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=_rank, args=(function, rank, world, port, folder, kind, backend, args), daemon=True)
            for rank in range(world)
        ]
        for process in started:
            process.start()
        deadline, ended = time.monotonic() + limit, []
        for rank, process in enumerate(started):
            process.join(max(0.0, deadline - time.monotonic()))
            code = process.exitcode
            process.kill()
            process.join()
            result, log = Path(folder, f"result{rank}"), Path(folder, f"log{rank}")
            words = log.read_text(errors="replace").strip()[-600:] if code else ""
            ended.append(Ended(code, pickle.loads(result.read_bytes()) if result.exists() else None, words))
        return ended


def _rank(
    function: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    folder: str,
    kind: str,
    backend: str,
    args: tuple[object, ...],
) -> None:
    with open(Path(folder, f"log{rank}"), "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    result = function(_device(kind, rank), backend, *args)
    partial = Path(folder, f"part{rank}")
    partial.write_bytes(pickle.dumps(result))
    partial.rename(Path(folder, f"result{rank}"))


def _device(kind: str, rank: int) -> str:
    """The device of a rank: ranks take the GPUs in turn."""
    if kind == "cuda":
        return f"cuda:{rank % torch.cuda.device_count()}"
    if kind == "cpu":
        return "cpu"
    sys.path.insert(0, str(TESTS))
    import sim

    if isinstance(reason := sim.load(8), str):
        raise RuntimeError(reason)
    return f"sim:{rank}"


# ------------------------------------------------------------------------------------------------ in the ranks


def add(device: str, backend: str) -> float:
    """The sum of ones over the ranks."""
    with lockstep.session(device=device, backend=backend, timeout=40) as run:
        (mean,) = lockstep.loop.mean_over_ranks([torch.ones(1000, device=run.device)], run.group)
        return float(mean.sum()) / 1000 * run.world_size


def network() -> nn.Sequential:
    """Convolutions, batch normalisation, dropout and linear layers."""
    first = [nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*first, nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 64, 256), nn.ReLU(), nn.Linear(256, 10))


def shares(device: str, backend: str) -> str:
    """The fingerprint after some steps with shares."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the first product of matrices
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(device.startswith("cuda"), warn_only=True)
    with lockstep.session(device=device, backend=backend, timeout=60) as run:
        torch.manual_seed(1)
        model = lockstep.replicate(network().to(run.device), shares=SHARES)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        numbers = torch.Generator().manual_seed(2)
        images = torch.randn(ROWS * STEPS, 3, 16, 16, generator=numbers)
        labels = torch.randint(10, (ROWS * STEPS,), generator=numbers)
        rows = torch.utils.data.TensorDataset(images, labels)
        for batch in GlobalBatches(rows, batch_size=ROWS, shares=SHARES):
            optimizer.zero_grad()
            for x, y in batch:
                outputs = model(x.to(run.device))
                nn.functional.cross_entropy(outputs, y.to(run.device), reduction="sum").backward()
            optimizer.step()
        return fingerprint(model, optimizer)


def until_killed(device: str, backend: str, kill: Kill, folder: str) -> tuple[int, str, float, float]:
    """Which rank this one was told of, in what words, after how many seconds, and after how many its session was over.

    The killed rank returns nothing.
    """
    told = Path(folder, "killed")

    def die() -> None:
        told.write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def since() -> float:
        return time.monotonic() - float(told.read_text())

    def train(run: lockstep.Session) -> None:
        model = lockstep.replicate(network().to(run.device))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        here, step = run.rank == kill.rank, 0
        optimizer.register_step_pre_hook(
            lambda *_: die() if here and step == kill.step and kill.place == "optimizer" else None
        )
        x = torch.randn(8, 3, 16, 16, device=run.device)
        for step in range(1, 1000):
            optimizer.zero_grad()
            now = here and step == kill.step
            if now and kill.place == "forward":
                die()
            outputs = model(x)
            if now and kill.place == "backward":
                outputs.register_hook(lambda _: die())
            outputs.square().mean().backward()
            optimizer.step()

    named = 0.0
    try:
        with lockstep.session(device=device, backend=backend, timeout=60) as run:
            try:
                train(run)
            except PeerFailure:
                named = since()
                raise
    except PeerFailure as failure:
        return failure.rank, str(failure).partition("\n")[0], named, since()
    return -1, "no failure", 0.0, 0.0
