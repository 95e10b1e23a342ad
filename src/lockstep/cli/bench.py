"""``lockstep bench``: times a training step of the user's model with PyTorch's wrapper and with lockstep's."""

import argparse
import contextlib
import copy
import difflib
import gc
import importlib
import os
import statistics
import sys
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
from lockstep._base.devices import all_accelerators
from lockstep.cli import printing
from lockstep.cli.doctor import usable_backends
from lockstep.cli.local_ranks import as_rank, run_ranks, say
from lockstep.errors import OptionError

Step = Callable[[Module], Tensor]
Wrap = Callable[[Module], Module]

WARMUP = 2
"""Number of turns that are not counted."""


def run(options: argparse.Namespace) -> int:
    """Measure the ways of training, and print the results."""
    if options.model:
        check_model(options.model)
    settings = {
        "model": options.model,
        "backends": usable_backends(),
        "replicas": options.ranks if options.one_process else 0,
        "rounds": options.rounds,
        "timeout": options.timeout,
    }
    by_rank = run_ranks("lockstep.cli.bench", settings, 1 if options.one_process else options.ranks, options.timeout)
    devices = by_rank[0]["devices"]
    ways = {name: _slowest([found["ways"][name] for found in by_rank]) for name in by_rank[0]["ways"]}
    for way in [] if options.one_process else ways.values():
        way["exposed_seconds"] = way["seconds"] - ways["alone"]["seconds"]
    if options.json:
        place = {"devices": devices} if options.one_process else {"ranks": options.ranks}
        printing.print_json({**place, "rounds": options.rounds, "ways": ways})
    elif options.one_process:
        _show_replicas(ways, devices)
    else:
        _show_ranks(ways, options.ranks)
    return 0


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def _show_ranks(ways: dict[str, dict[str, float]], ranks: int) -> None:
    alone, reference = ways["alone"], ways.get("DDP, nccl") or ways["DDP, gloo"]
    rows = [("alone", printing.seconds(alone["seconds"]), "", "", printing.size(alone["memory"]), "")]
    rows += [
        (
            name,
            printing.seconds(way["seconds"]),
            printing.seconds(way["exposed_seconds"]),
            printing.seconds(way["host_seconds"] - alone["host_seconds"]),
            printing.size(way["memory"]),
            f"{way['seconds'] / reference['seconds']:.2f}",
        )
        for name, way in ways.items()
        if way is not alone
    ]
    headers = (
        "way",
        "time of a step",
        "communication not hidden",
        "CPU time beyond alone",
        "peak memory",
        "step / DDP",
    )
    printing.print_table(f"{ranks} ranks on this host; medians, of the slowest rank", headers, rows)
    print("\nStep / DDP below 1 is faster than DDP.")
    print("DDP is PyTorch's DistributedDataParallel. Times vary with whatever else this host does, so that a little")
    print("communication may come out below zero: repeat them on a quiet host.")


def _show_replicas(ways: dict[str, dict[str, float]], devices: list[str]) -> None:
    reference = "torch.nn.DataParallel" if "torch.nn.DataParallel" in ways else "alone"
    rows = [
        (
            name,
            printing.seconds(way["seconds"]),
            printing.seconds(way["host_seconds"]),
            printing.size(way["memory"]),
            "" if name == reference else f"{way['seconds'] / ways[reference]['seconds']:.2f}",
        )
        for name, way in ways.items()
    ]
    headers = ("way", "time of a step", "CPU time", "peak memory", f"step / {reference}")
    printing.print_table(f"{len(devices)} replicas in one process, on {', '.join(devices)}; medians", headers, rows)
    print("\nAlone is the whole batch on the first device, with all of PyTorch's threads where that is the CPU.")
    if reference == "alone":
        print("There is no row of torch.nn.DataParallel: without accelerators it calls the module once, as alone does.")


# -------------------------------------------------------------------------------------------- in each process


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return, for each way of training, the median seconds and processor seconds of a step, and its bytes of memory.

    ``devices`` has the device of each replica in one process; it is empty if each process has one replica.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=options["timeout"]))
    build = find_builder(options["model"])
    _Way(*build(), wrap=lambda module: module)  # one-time costs that all ways share must not count for the first
    device, replicas = next(build()[0].parameters()).device, options["replicas"]
    devices = _devices(device, replicas) if replicas else []
    ways = {name: _Way(*build(), wrap=wrap) for name, wrap in _wraps(device, devices, options["backends"]).items()}
    for number in range(-WARMUP, options["rounds"]):
        say(f"round {max(number, 0) + 1} of {options['rounds']}")
        for way in list(ways.values())[:: 1 if number % 2 else -1]:
            dist.barrier()
            way.turn(counts=number >= 0)
    results = {name: way.result() for name, way in ways.items()}
    del way
    ways.clear()
    gc.collect()
    dist.destroy_process_group()
    return {"ways": results, "devices": list(map(str, devices))}


def find_builder(name: str) -> Callable[[], tuple[Module, Step]]:
    """Return the user's function of that name, or the built-in one."""
    if not name:
        return _build_encoder
    module, _, function = name.partition(":")
    try:
        if not function:
            raise ValueError("there is no colon")
        imported = importlib.import_module(module)
        if not hasattr(imported, function):
            near = difflib.get_close_matches(function, dir(imported), n=1)
            raise AttributeError(f"{module} has no {function}" + "".join(f"; did you mean {each}?" for each in near))
        builder = getattr(imported, function)
    except Exception as error:  # whatever the import of the user's module raises
        raise _wrong_model(name, f"{type(error).__name__}: {error}") from error
    return builder  # type: ignore[no-any-return]


def check_model(name: str) -> None:
    """Call the user's function once; raise :class:`OptionError` unless it returns a module and a function."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as in the ranks
    build: Any = find_builder(name)
    try:
        built = build()
    except Exception as error:
        raise _wrong_model(name, f"called, it raised {type(error).__name__}: {error}") from error
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], Module) and callable(built[1])):
        kinds = ", ".join(type(each).__name__ for each in built) if isinstance(built, tuple) else type(built).__name__
        raise _wrong_model(name, f"called, it returned {kinds}")


def _wrong_model(name: str, reason: str) -> OptionError:
    first_line = reason.partition("\n")[0]
    return OptionError(
        f"--model {name}: {first_line}. Expected MODULE:FUNCTION, a function without arguments that returns a module "
        "and a function that gives the loss of one batch when it is called with that module"
    )


def _build_encoder() -> tuple[Module, Step]:
    """Build the built-in model: an encoder of four layers, and its loss on one batch; on an accelerator if possible."""
    torch.manual_seed(0)
    count = torch.accelerator.device_count()
    device = all_accelerators()[int(os.environ.get("LOCAL_RANK", "0")) % count] if count else torch.device("cpu")
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    inputs = torch.randn(8, 32, 256, device=device)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    return model, lambda model: model(inputs).square().mean()


def _devices(first: torch.device, count: int) -> list[torch.device]:
    if first.type == "cpu":
        return [first] * count
    accelerators = all_accelerators()
    if count > len(accelerators):
        raise OptionError(f"--ranks {count}: the model is on {first}, and there are {len(accelerators)} of that kind")
    return accelerators[:count]


def _wraps(device: torch.device, devices: list[torch.device], backends: Sequence[str]) -> dict[str, Wrap]:
    """Return the ways of training: with a replica on each of ``devices``, or, without any, with one in this process."""
    ways: dict[str, Wrap] = {"alone": lambda module: module}
    if devices:
        if device.type != "cpu":  # on the CPU, PyTorch's wrapper only calls the module
            ways["torch.nn.DataParallel"] = lambda module: torch.nn.DataParallel(module, devices)
        ways["lockstep.DataParallel"] = lambda module: lockstep.DataParallel(module, devices)
        return ways

    def ddp(module: Module, backend: str) -> Module:
        return torch.nn.parallel.DistributedDataParallel(module, process_group=dist.new_group(backend=backend))

    def replicated(module: Module, backend: str) -> Module:
        return lockstep.replicate(module, process_group=dist.new_group(backend=backend))

    suitable = [name for name in backends if name != ("nccl" if device.type == "cpu" else "shm")]
    for name, wrap in (("DDP", ddp), ("lockstep", replicated)):
        ways |= {f"{name}, {backend}": partial(wrap, backend=backend) for backend in suitable}
    return ways


class _Way:
    """One way of training, with a model and a process group of its own."""

    def __init__(self, module: Module, step: Step, wrap: Wrap) -> None:
        with contextlib.suppress(OSError):  # resets the peak of VmHWM
            Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        self._step = step
        self._turns: list[tuple[float, float]] = []
        self._model = wrap(copy.deepcopy(module))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        for _ in range(3):
            self._run()
        self._peak = max(0, _memory("VmHWM") - before)

    def turn(self, counts: bool) -> None:
        gc.collect()
        begin, host = time.perf_counter(), time.process_time()
        self._run()
        if counts:
            self._turns.append((time.perf_counter() - begin, time.process_time() - host))

    def result(self) -> dict[str, float]:
        seconds, host = map(statistics.median, zip(*self._turns, strict=True))
        return {"seconds": seconds, "host_seconds": host, "memory": float(self._peak)}

    def _run(self) -> None:
        self._optimizer.zero_grad()
        self._step(self._model).backward()
        self._optimizer.step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


def _memory(entry: str) -> int:
    """Return bytes of this process, as Linux counts them; 0 elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{entry}:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    as_rank(measure)
