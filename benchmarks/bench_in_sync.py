"""Claim: watching over all values costs at most 1 % of a step: ``check_in_sync(model, every=100)``.

Measured: processor time (``time.process_time``) of training steps of one process of one intra-op thread, on a Gloo
group of one rank: a model that is not watched, one that is looked at in every round, and the first once more (the
noise). A look costs the difference; divided by 100 it is what ``every=100`` adds to a step. All take turns.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from bench_ddp_cost import lockstep_ddp, world
from ddp_models import ConvNet, encoder, small_layers, wide_layers
from harness import arguments, ms, ratio, table
from rank_processes import loopback
from torch import nn

import lockstep

EVERY = 100
AIM = 0.01


def tasks(quick: bool) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Name -> model, and its batch; tiny ones with ``quick``."""
    if quick:
        return {"many small": (lambda: small_layers(3, 8), (2, 8)), "conv-BN": (lambda: ConvNet(3, 4), (2, 3, 4, 4))}
    return {
        "many small": (lambda: small_layers(200, 64), (32, 64)),
        "wide": (lambda: wide_layers(3, 2880), (32, 2880)),
        "encoder": (lambda: encoder(6, 256), (8, 64, 256)),
        "conv-BN": (lambda: ConvNet(53, 16), (8, 3, 16, 16)),
    }


def measure(make: Callable[[], nn.Module], batch: tuple[int, ...], rounds: int, inner: int) -> dict[str, float]:
    """The median processor time of a step of each."""
    watched = lockstep_ddp(make(), dist.new_group())
    lockstep.check_in_sync(watched, every=1)
    plain = lockstep_ddp(make(), dist.new_group())
    cases = {"plain": plain, "looked at": watched, "plain again": plain}
    x = torch.randn(batch)
    optimizers = {name: torch.optim.SGD(model.parameters(), 1e-4) for name, model in cases.items()}
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-2, rounds):
        for name in list(cases) if number % 2 == 0 else list(cases)[::-1]:
            gc.collect(0)
            begin = time.process_time()
            for _ in range(inner):
                optimizers[name].zero_grad()
                cases[name](x).square().mean().backward()
                optimizers[name].step()
            if number >= 0:
                taken[name].append((time.process_time() - begin) / inner)
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    args = arguments(__doc__, 20, ("--steps", {"type": int, "default": 3, "help": "steps a turn (default 3)"}))
    loopback()
    rows, verdicts = [], []
    with world("gloo", 1):
        for name, (make, batch) in tasks(args.quick).items():
            found = measure(make, batch, args.rounds, args.steps)
            look = found["looked at"] - found["plain"]
            count = sum(each.numel() for each in make().parameters())
            rows.append([name, f"{count:,}", ms(found["plain"]), ms(look), f"{look / found['plain']:.3f}"])
            verdicts.append((name, look / EVERY, found))
    table("", ("model", "parameters", "step ms", "a look ms", "of a step"), rows)
    print()
    for name, added, found in verdicts:
        ratio(f"{name}: what every={EVERY} adds / a step", added, found["plain"], AIM)
        ratio(f"{name}: plain again / plain (noise)", found["plain again"], found["plain"])


if __name__ == "__main__":
    main()
