"""What a training step takes in each way of training, in turns: run in one process, or in each of several."""

import contextlib
import copy
import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

import lockstep
from lockstep.cli.local_ranks import as_rank
from lockstep.devices import all_accelerators
from lockstep.errors import OptionError

Step = Callable[[Module], Tensor]
Wrap = Callable[[Module], Module]


def build_encoder() -> tuple[Module, Step]:
    """The built-in model: an encoder of four layers, and its loss on one batch; on an accelerator if there is one."""
    torch.manual_seed(0)
    count = torch.accelerator.device_count()
    device = all_accelerators()[int(os.environ.get("LOCAL_RANK", "0")) % count] if count else torch.device("cpu")
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    inputs = torch.randn(8, 32, 256, device=device)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    return model, lambda model: model(inputs).square().mean()


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """By way of training: seconds and processor seconds of a step, the median, and bytes of memory that it takes.

    ``devices`` are those of the replicas in one process, and empty where each process has one.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=options["timeout"]))
    build = find_builder(options["model"])
    _Way(*build(), wrap=lambda module: module)  # what is needed once, and by all, is not counted for the first of them
    device, replicas = next(build()[0].parameters()).device, options["replicas"]
    devices = _devices(device, replicas) if replicas else []
    wraps = _in_one_process(devices) if replicas else _in_many(_suitable(options["backends"], device))
    ways = {name: _Way(*build(), wrap=wrap) for name, wrap in wraps.items()}
    for number in range(-options["warmup"], options["rounds"]):
        for way in list(ways.values())[:: 1 if number % 2 else -1]:
            dist.barrier()
            way.turn(counts=number >= 0)
    found = {name: way.result() for name, way in ways.items()}
    del way
    ways.clear()
    gc.collect()
    dist.destroy_process_group()
    return {"ways": found, "devices": list(map(str, devices))}


def _devices(first: torch.device, count: int) -> list[torch.device]:
    """Where replicas are: on accelerators if the model is, and there are enough of them."""
    if first.type == "cpu":
        return [first] * count
    there = all_accelerators()
    if count > len(there):
        raise OptionError(f"--ranks {count}: the model is on {first}, and there are {len(there)} of that kind")
    return there[:count]


def _suitable(backends: Sequence[str], device: torch.device) -> list[str]:
    """Those that reduce the gradients of a model on that device: shared memory on the CPU, NCCL on GPUs."""
    other = "nccl" if device.type == "cpu" else "shm"
    return [name for name in backends if name != other]


def _in_many(backends: Sequence[str]) -> dict[str, Wrap]:
    """The ways of training with one replica a process."""

    def ddp(module: Module, backend: str) -> Module:
        return torch.nn.parallel.DistributedDataParallel(module, process_group=dist.new_group(backend=backend))

    def ours(module: Module, backend: str) -> Module:
        return lockstep.replicate(module, process_group=dist.new_group(backend=backend))

    ways: dict[str, Wrap] = {"alone": lambda module: module}
    for name, wrap in (("DDP", ddp), ("lockstep", ours)):
        ways |= {f"{name}, {backend}": partial(wrap, backend=backend) for backend in backends}
    return ways


def _in_one_process(devices: list[torch.device]) -> dict[str, Wrap]:
    """The ways of training with all replicas in one process. On the CPU, PyTorch's wrapper only calls the module."""
    ways: dict[str, Wrap] = {"alone": lambda module: module}
    if devices[0].type != "cpu":
        ways["torch.nn.DataParallel"] = lambda module: torch.nn.DataParallel(module, devices)
    return ways | {"lockstep.DataParallel": lambda module: lockstep.DataParallel(module, devices)}


class _Way:
    """One way to train, with a model and a process group of its own."""

    def __init__(self, module: Module, step: Step, wrap: Wrap) -> None:
        _reset_peak()
        before = _memory("VmRSS")
        self._step, self._times, self._host = step, list[float](), list[float]()
        self._model = wrap(copy.deepcopy(module))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        for _ in range(3):
            self._run()
        self._peak = max(0, _memory("VmHWM") - before)

    def turn(self, counts: bool) -> None:
        """One step."""
        gc.collect()
        begin, host = time.perf_counter(), time.process_time()
        self._run()
        if counts:
            self._times.append(time.perf_counter() - begin)
            self._host.append(time.process_time() - host)

    def result(self) -> dict[str, float]:
        """What the turns have taken."""
        return {
            "seconds": statistics.median(self._times),
            "host_seconds": statistics.median(self._host),
            "memory": float(self._peak),
        }

    def _run(self) -> None:
        self._optimizer.zero_grad()
        self._step(self._model).backward()
        self._optimizer.step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


def find_builder(name: str) -> Callable[[], tuple[Module, Step]]:
    """The user's function of that name, or ours."""
    if not name:
        return build_encoder
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(
            f"--model {name}: {error}. Expected MODULE:FUNCTION, a function without arguments that returns a module "
            "and a function that gives the loss of one batch when it is called with that module"
        ) from error
    return found  # type: ignore[no-any-return]


def _memory(entry: str) -> int:
    """Bytes, of Linux's count for this process; 0 elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{entry}:"):
                return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    as_rank(measure)
