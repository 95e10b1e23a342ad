"""Claim: that the numbers of optimizers are compared makes a settled step at most 1 % longer, and so do values.

Measured: a training on two ranks on an ``shm`` group, AdamW, with the whole watch for drift, with numbers alone, and
without, in turns in the same processes. A turn has 28 steps, after four of which slices of the values are looked at.
Turns differ by more than what is measured, so the time inside of the watch's calls is printed beside them: of turns
that are not compared, since a clock around each call takes time as well.

    python benchmarks/bench_drift.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, ms, ratio, table
from rank_processes import Turn, launch, slowest, take_turns
from torch import nn

import lockstep
from lockstep._base.optimizer_steps import observe_steps
from lockstep.distributed.reduction.module.drift import DriftWatch
from lockstep.distributed.reduction.module.value_digests import Table
from lockstep.distributed.replication.replication import find_replication

STEPS = 28


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


MODELS = {"mlp": (mlp, 8), "400 small": (many_small, 1), "conv-BN": (conv_bn, 1), "encoder": (encoder, 1)}
"""Each with how many turns it has for one of the others."""


KINDS = ("both", "numbers", "nothing")
"""What is compared in a turn."""
VALUES = {DriftWatch: ["_look"], Table: ["sample"]}
"""The calls that look at values; what is left of the watch's others compares numbers."""
ALL = {DriftWatch: ["step_begins", "step_ended", "tell", "heard"]}


class Timed:
    """Adds up the time in some methods."""

    def __init__(self, methods: dict[type, list[str]]) -> None:
        self.seconds = 0.0
        self._plain = {(kind, name): vars(kind)[name] for kind, names in methods.items() for name in names}

    def __enter__(self) -> None:
        for (kind, name), plain in self._plain.items():
            setattr(kind, name, self._around(plain))

    def __exit__(self, *_: object) -> None:
        for (kind, name), plain in self._plain.items():
            setattr(kind, name, plain)

    def _around(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            since = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - since

        return timed


def work(rank: int, name: str, rounds: int, steps: int) -> tuple[dict[str, list[Turn]], float, float]:
    """Return, on one rank, the turns of each kind, and the seconds of a step in calls of the watch: those for numbers,
    and those for values."""
    torch.manual_seed(0)
    model, x = MODELS[name][0]()
    lockstep.replicate(model, process_group=dist.new_group(backend="shm"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    replication: Any = find_replication(model)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    watch = replication.drift
    now = "both"

    def switch(to: str) -> None:
        nonlocal now
        if to != now:
            if "nothing" in (to, now):
                watch.compares = to != "nothing"
                (observe_steps if watch.compares else type(watch).stop)(watch)
            for each, call in ((watch, "_look"), (watch.table, "sample")):
                vars(each).pop(call, None)
                if to == "numbers":
                    setattr(each, call, lambda *_: None)
            now = to

    def run(kind: str) -> Callable[[], None]:
        def one() -> None:
            switch(kind)
            step()

        return one

    turns = take_turns({kind: run(kind) for kind in KINDS}, rounds, steps)
    switch("both")
    of_values, of_all = Timed(VALUES), Timed(ALL)
    count = rounds * steps
    with of_values, of_all:
        for _ in range(count):
            step()
    assert watch.alike_after > 0, "nothing has been looked at"
    return turns, (of_all.seconds - of_values.seconds) / count, of_values.seconds / count


def main() -> None:
    """Measure all."""
    args = arguments(__doc__, 30)
    rows = []
    for name, (_, times) in MODELS.items():
        found = launch(work, name, args.rounds * (1 if args.quick else times), 7 if args.quick else STEPS)
        turns, *inside = zip(*found, strict=True)
        both, numbers, nothing = (slowest(turns)[kind][1] for kind in KINDS)
        in_numbers, in_values = map(max, inside)
        rows.append([name, ms(both), ms(numbers), ms(nothing), f"{1e6 * in_numbers:.1f}", f"{1e6 * in_values:.1f}"])
        ratio(f"{name}: numbers compared / nothing", numbers, nothing, 1.01)
        ratio(f"{name}: values, too / numbers alone", both, numbers, 1.01)
        ratio(f"{name}: inside the calls for numbers, over a step", in_numbers, nothing, 0.01)
        ratio(f"{name}: inside the calls for values, over a step", in_values, nothing, 0.01)
    table(
        "a settled step of two ranks, in ms, and the time in calls of the watch, in us",
        ["model", "both", "numbers", "nothing", "in calls: numbers", "values"],
        rows,
    )


if __name__ == "__main__":
    main()
