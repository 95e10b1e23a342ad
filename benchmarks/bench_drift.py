"""What watching for drift costs: the work that it adds to a step on a rank, beside the step itself, in turns.

One process, one thread. The step is forward, backward and the optimizer's step, without communication; what is added is
the watch's part of the optimizer's step, the two digests that it tells, and their bits in the report. All are medians,
of steps after which nothing is looked at, and of those after which a slice is; "added" is the average of both.

    python benchmarks/bench_drift.py
"""

from __future__ import annotations

import statistics
import time
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from harness import arguments, ratio
from torch import nn

from lockstep._base.optimizer_steps import stop_observing
from lockstep.distributed.comm.record import Field, Fold, Record
from lockstep.distributed.reduction.module.drift import DriftWatch

BITS = Record(
    Field("numbers", 64, Fold.SAME, attrgetter("numbers")), Field("values", 64, Fold.SAME, attrgetter("values"))
)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())]), torch.randn(16, 64)


def many_small() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[m for _ in range(200) for m in (nn.Linear(64, 64), nn.ReLU())]), torch.randn(16, 64)


def conv_bn() -> tuple[nn.Module, torch.Tensor]:
    layers = [m for _ in range(20) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *layers), torch.randn(4, 3, 16, 16)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(2, 64, 256)


def measure(make: Any, steps: int) -> tuple[float, float, float, float]:
    """Return the median seconds of a step, and of what the watch adds: without a look, with one, and on average."""
    torch.manual_seed(0)
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ranks: Any = SimpleNamespace(world=2, global_ranks=[0, 1])
    named = list(model.named_parameters())
    watch = DriftWatch(lambda: named, lambda: named, ranks, compares=True)
    stop_observing(watch)  # it is called below, to be timed
    plain: list[float] = []
    added: dict[bool, list[float]] = {False: [], True: []}
    for number in range(1, steps + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        plain.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        watch.step_begins(optimizer, False)
        watch.step_ended(optimizer, False)
        told = watch.tell(number + 1, known=True)
        BITS.encode(told, 0)
        watch.heard(False)
        watch.round = number + 1
        if number > 2:  # the first look is at everything
            added[told.values > 0].append(time.perf_counter() - begin)
    look, none = statistics.median(added[True]), statistics.median(added[False] or added[True])
    return statistics.median(plain), none, look, (look + (watch.table.apart - 1) * none) / watch.table.apart


def main() -> None:
    """Measure all."""
    steps = 30 * arguments(__doc__, 10).rounds
    for make, share in ((mlp, 5.0), (many_small, 1.0), (conv_bn, 0.5), (encoder, 0.3)):
        step, none, look, mean = measure(make, max(22, round(steps * share)))
        print(f"\n{make.__name__}: a step {step * 1e3:.2f} ms, no look {none * 1e6:.1f} us, a look {look * 1e6:.1f} us")
        ratio(f"{make.__name__}, added on average / step", mean, step, 0.01)


if __name__ == "__main__":
    main()
