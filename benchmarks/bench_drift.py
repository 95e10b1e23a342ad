"""Claim: that replicas are watched for drift makes a settled step at most 1 % longer.

Measured: a training on two ranks on an ``shm`` group, AdamW, with the watch and without it, in turns in the same
processes. A turn has 28 steps, after four of which slices of the values are looked at.

    python benchmarks/bench_drift.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, ms, ratio, table
from rank_processes import Turn, launch, slowest, take_turns
from torch import nn

import lockstep
from lockstep._base.optimizer_steps import observe_steps
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


def turns_of(rank: int, name: str, rounds: int, steps: int) -> dict[str, list[Turn]]:
    """On one rank: the turns with the watch and without it."""
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
    on = True

    def run(watched: bool) -> Callable[[], None]:
        def one() -> None:
            nonlocal on
            if on != watched:
                on = watch.compares = watched
                (observe_steps if watched else type(watch).stop)(watch)
            step()

        return one

    found = take_turns({"watched": run(True), "not watched": run(False)}, rounds, steps)
    assert watch.alike_after > 0, "nothing has been looked at"
    return found


def main() -> None:
    """Measure all."""
    args = arguments(__doc__, 30)
    rows = []
    for name, (_, times) in MODELS.items():
        found = slowest(launch(turns_of, name, args.rounds * (1 if args.quick else times), 7 if args.quick else STEPS))
        rows.append([name, ms(found["watched"][1]), ms(found["not watched"][1])])
        ratio(f"{name}: watched / not watched", found["watched"][1], found["not watched"][1], 1.01)
    table("a settled step of two ranks", ["model", "watched", "not watched"], rows)


if __name__ == "__main__":
    main()
