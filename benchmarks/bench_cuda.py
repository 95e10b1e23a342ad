"""Claim, on GPUs: at most a third of the host time that torch.nn.DataParallel takes, and never a slower step.

Measured in one run, taking turns: training steps of an encoder (24 layers, 768 wide, 128 tokens, batch 32) and of a
network of ResNet-50's size (224 x 224, batch 32) on one GPU given twice and four times, and on all GPUs where there are
several. Three ways: ``torch.nn.DataParallel``, ``lockstep.DataParallel`` called in the same way, and
``lockstep.DataParallel.step``.

Host time is ``time.perf_counter`` around each of the four methods (scatter, replicate, parallel_apply, gather) of one
forward, without synchronisation inside; the GPU is idle when the forward starts, so that the host does not wait for
room in its queue. parallel_apply contains the layers' own launches, the same work in both, so the ratios are given with
and without it; what its dispatch costs is measured with replicas that do nothing. The whole step (forward, loss,
backward, SGD, zero_grad) is synchronised before and after. Peak memory is the most that one way has
allocated on any GPU during a step, network, batch and whatever it keeps from step to step included.

Without a GPU this prints one line. ``--device cpu`` runs lockstep alone on the CPU, with small sizes: it shows that the
script works, and no more.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from harness import arguments, mib, ms, ratio, table
from torch import nn
from torch.nn import functional

import lockstep

PHASES = ("scatter", "replicate", "parallel_apply", "gather")
AROUND = ("scatter", "replicate", "gather")


# -------------------------------------------------------------------------------------- networks


def encoder(layers: int, width: int, heads: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        return functional.relu(self.body(x) + self.shortcut(x))


def residual(depths: Sequence[int], width: int) -> nn.Module:
    """With depths 3, 4, 6, 3 and width 64 the sizes of ResNet-50: 25.6 million parameters."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, inputs = [], width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            blocks.append(Bottleneck(inputs, width << stage, stride))
            inputs = 4 * (width << stage)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


@dataclass(frozen=True)
class Task:
    """A network, a batch and a loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[..., torch.Tensor]


def tasks(small: bool) -> dict[str, Task]:
    rows = 8 if small else 32
    if small:
        text, image = (rows, 8, 32), (rows, 3, 32, 32)
        networks = partial(encoder, 2, 32, 2), partial(residual, (1, 1), 8)
    else:
        text, image = (rows, 128, 768), (rows, 3, 224, 224)
        networks = partial(encoder, 24, 768, 12), partial(residual, (3, 4, 6, 3), 64)
    return {
        "encoder": Task(networks[0], lambda: (torch.randn(text), torch.randn(text)), functional.mse_loss),
        "ResNet-50": Task(
            networks[1], lambda: (torch.randn(image), torch.randint(1000, (rows,))), functional.cross_entropy
        ),
    }


# ------------------------------------------------------------------------------------ measurement


@dataclass
class Way:
    """One way to train, with what was measured of it."""

    parallel: nn.Module
    loss: Callable[..., torch.Tensor]
    stepping: bool
    batch: tuple[torch.Tensor, torch.Tensor]
    optimizer: torch.optim.Optimizer = field(init=False)
    host: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    peak: int = 0
    last_loss: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.parallel.parameters(), lr=1e-4)
        for phase in PHASES:
            setattr(self.parallel, phase, self._timed(phase, getattr(self.parallel, phase)))

    def _timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.host[phase].append(time.perf_counter() - start)

        return call

    def step(self) -> None:
        """One whole training step, synchronised; the methods' times are noted on the way."""
        x, y = self.batch
        gc.collect()
        before = allocated()
        for device in range(len(before)):
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        if self.stepping:
            loss = self.parallel.step(self.loss, x, y)  # type: ignore[operator]
        else:
            loss = self.loss(self.parallel(x), y)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize()
        self.steps.append(time.perf_counter() - start)
        self.peak = max(self.peak, self._peak(before))
        self.last_loss = float(loss.detach())

    def forget(self) -> None:
        """Begin to measure."""
        self.host.clear()
        self.steps.clear()
        self.peak = 0

    def _peak(self, before: Sequence[int]) -> int:
        kept = self.kept or [0] * len(before)
        return max((torch.cuda.max_memory_allocated(d) - b + kept[d] for d, b in enumerate(before)), default=0)

    def median(self, phase: str) -> float:
        """Median seconds of a phase; 0 where it does not run."""
        return statistics.median(self.host[phase]) if self.host[phase] else 0.0


def synchronize() -> None:
    """Wait for every GPU."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def allocated() -> list[int]:
    """Bytes of tensors on each GPU, when all of them are idle."""
    synchronize()
    return [torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count())]


def ways(task: Task, devices: Sequence[Any], home: torch.device, with_torch: bool) -> dict[str, Way]:
    """The ways to train that run here, each with a network and an optimizer of its own, from the same weights."""
    weights = task.make().state_dict()
    data = task.batch()
    found: dict[str, Way] = {}
    kinds: dict[str, Callable[..., nn.Module]] = {"torch": nn.DataParallel} if with_torch else {}
    kinds |= {"lockstep": lockstep.DataParallel, "lockstep, step": lockstep.DataParallel}
    for name, kind in kinds.items():
        gc.collect()
        before = allocated()
        network, batch = task.make(), (data[0].to(home), data[1].to(home))
        network.load_state_dict(weights)
        network.to(home)
        way = Way(kind(network, list(devices)), task.loss, name == "lockstep, step", batch)
        try:
            way.step()
        except Exception as error:
            if name != "torch":
                raise
            print(f"torch.nn.DataParallel on {list(devices)} fails: {type(error).__name__}: {error}".splitlines()[0])
            continue
        gc.collect()
        way.kept = [after - was for after, was in zip(allocated(), before, strict=True)]
        found[name] = way
    return found


class Nothing(nn.Module):
    """A module that does nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input."""
        return x


def dispatch(devices: Sequence[Any], home: torch.device, rounds: int, with_torch: bool) -> dict[str, float]:
    """Median seconds of parallel_apply with modules that do nothing."""
    modules, inputs = [Nothing() for _ in devices], [(torch.zeros(1, device=home),) for _ in devices]
    calls: dict[str, Callable[..., Any]] = {"torch": nn.parallel.parallel_apply} if with_torch else {}
    calls["lockstep"] = lockstep.local.parallel_apply
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-5, 10 * rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call(modules, inputs, devices=list(devices))
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def compare(name: str, task: Task, devices: Sequence[Any], home: torch.device, rounds: int, with_torch: bool) -> None:
    found = ways(task, devices, home, with_torch)
    for number in range(-3, rounds):
        if number == 0:
            for way in found.values():
                way.forget()
        order = list(found.values())
        for way in order if number % 2 == 0 else order[::-1]:
            way.step()
    empty = dispatch(devices, home, rounds, "torch" in found and home.type == "cuda")
    rows = []
    for label, way in found.items():
        host = [way.median(phase) for phase in PHASES]
        cells = [ms(seconds) if seconds else "-" for seconds in host]
        rows.append(
            [label, *cells, ms(sum(host)), ms(statistics.median(way.steps)), mib(way.peak), f"{way.last_loss:.5f}"]
        )
    headers = ("way", *(f"{phase} ms" for phase in PHASES), "host ms", "step ms", "peak MiB", "last loss")
    table(f"{name} on {list(devices)}", headers, rows)
    print("parallel_apply of modules that do nothing: " + ", ".join(f"{k} {ms(v)} ms" for k, v in empty.items()))
    statistics_of_step = found["lockstep, step"].parallel.statistics()
    averages = {k: s / statistics_of_step.calls[k] for k, s in statistics_of_step.seconds.items()}
    print("host time in a step, mean ms: " + ", ".join(f"{k} {ms(v)}" for k, v in averages.items()))
    reference = found.get("torch")
    where = f"{name} on {list(devices)}"
    if reference is None:
        gathered, stepped = found["lockstep"], found["lockstep, step"]
        ratio(f"{where}: step / forward and backward", *(statistics.median(w.steps) for w in (stepped, gathered)))
        return
    measured = found["lockstep"]
    both = [[way.median(phase) for phase in PHASES] for way in (measured, reference)]
    around = [sum(way.median(phase) for phase in AROUND) for way in (measured, reference)]
    ratio(f"{where}: host time of scatter + replicate + gather", *around, 1 / 3)
    ratio(f"{where}: the same + dispatch", around[0] + empty["lockstep"], around[1] + empty["torch"], 1 / 3)
    ratio(f"{where}: host time of all four, layers included", sum(both[0]), sum(both[1]))
    for phase, own, other in zip(PHASES, *both, strict=True):
        ratio(f"{where}: host time of {phase}", own, other)
    for label in ("lockstep", "lockstep, step"):
        ratio(f"{where}: {label}, whole step", *(statistics.median(w.steps) for w in (found[label], reference)), 1.0)
        ratio(f"{where}: {label}, peak memory", found[label].peak, reference.peak)


def main() -> None:
    if not torch.cuda.is_available() and not any("cpu" in argument for argument in sys.argv[1:]):
        print("no CUDA device here: nothing to measure (--device cpu runs lockstep alone, to try the script)")
        return
    args = arguments(__doc__, 20, ("--device", {"choices": ["cuda", "cpu"], "default": "cuda"}))
    home = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    with_torch, small = home.type == "cuda", args.quick or home.type == "cpu"
    lists: list[list[Any]] = [[0] * 2, [0] * 4] if with_torch else [["cpu"] * 2, ["cpu"] * 4]
    if torch.cuda.device_count() > 1 and with_torch:
        lists.append(list(range(torch.cuda.device_count())))
    for name, task in tasks(small).items():
        for devices in lists:
            compare(name, task, devices, home, args.rounds, with_torch)


if __name__ == "__main__":
    main()
