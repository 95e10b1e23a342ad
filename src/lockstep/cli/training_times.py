"""What a training step takes in each way of training, in turns: run in each of several processes."""

import contextlib
import copy
import gc
import importlib
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

import lockstep
from lockstep.cli.local_ranks import as_rank
from lockstep.errors import OptionError

Step = Callable[[Module], Tensor]


def build_encoder() -> tuple[Module, Step]:
    """The built-in model: an encoder of four layers, and its loss on one batch."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    inputs = torch.randn(8, 32, 256)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return model, lambda model: model(inputs).square().mean()


def measure(options: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By way of training: seconds and processor seconds of a step, the median, and bytes of memory that it takes."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=options["timeout"]))
    build = _find(options["model"])
    _Way("alone", *build())  # what is needed once, and by all, is not counted for the first of them
    ways: dict[str, _Way] = {}
    for name in options["ways"]:
        ways[name] = _Way(name, *build())
    for number in range(-options["warmup"], options["rounds"]):
        for way in list(ways.values())[:: 1 if number % 2 else -1]:
            dist.barrier()
            way.turn(counts=number >= 0)
    found = {name: way.result() for name, way in ways.items()}
    del way
    ways.clear()
    gc.collect()
    dist.destroy_process_group()
    return found


class _Way:
    """One way to train, with a model and a process group of its own."""

    def __init__(self, name: str, module: Module, step: Step) -> None:
        kind, _, backend = name.partition(", ")
        _reset_peak()
        before = _memory("VmRSS")
        self._step, self._times, self._host = step, list[float](), list[float]()
        self._model = self._wrap(kind, copy.deepcopy(module), dist.new_group(backend=backend) if backend else None)
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

    @staticmethod
    def _wrap(kind: str, module: Module, group: Any) -> Module:
        if kind == "DDP":
            return torch.nn.parallel.DistributedDataParallel(module, process_group=group)
        return lockstep.replicate(module, process_group=group) if kind == "lockstep" else module


def _find(name: str) -> Callable[[], tuple[Module, Step]]:
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
