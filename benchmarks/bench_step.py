"""Claim, without an aim: what a training step over two CPU replicas takes, against one process with two threads.

Measured in one run: zero_grad, forward, loss, backward and an SGD step of a small convolutional network (digits,
1 x 8 x 8 inputs, batch 128) and of an encoder (4 layers, 256 wide, 64 tokens, batch 16). One process has two intra-op
threads; the replicas have one each. ``step`` is ``DataParallel.step``, which runs backward in the replicas, "gathered"
is ``loss(DataParallel(x))`` and ``backward()``, whose backward is one pass of the engine, which has one thread for all
of the CPU. One process with one thread shows what there is to gain.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import Case, arguments, interleaved, ms, ratio, table
from torch import nn
from torch.nn import functional

from lockstep import DataParallel


class Digits(nn.Sequential):
    """Two convolutions and a linear layer for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
        )  # fmt: skip


def encoder(layers: int = 4, width: int = 256) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def step(model: nn.Module, loss: Callable[[], object]) -> Case:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run() -> None:
        optimizer.zero_grad()
        loss()
        optimizer.step()

    return Case(run)


def on_threads(case: Case, count: int) -> Case:
    return Case(case.run, before=lambda: torch.set_num_threads(count))


def compare(
    make: Callable[[], nn.Module],
    loss_fn: Callable[..., torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    rounds: int,
    turn: int,
) -> dict[str, float]:
    one, single, stepped, gathered = make(), make(), make(), make()
    dp_step = DataParallel(stepped, ["cpu", "cpu"])
    dp_gather = DataParallel(gathered, ["cpu", "cpu"])
    cases = {
        "one, 2 threads": on_threads(step(one, lambda: loss_fn(one(x), y).backward()), 2),
        "one, 1 thread": on_threads(step(single, lambda: loss_fn(single(x), y).backward()), 1),
        "step": on_threads(step(stepped, lambda: dp_step.step(loss_fn, x, y)), 2),
        "gathered": on_threads(step(gathered, lambda: loss_fn(dp_gather(x), y).backward()), 2),
    }
    # many steps a turn, as in training: for the first few the system has yet to spread the threads over its cores
    return interleaved(cases, rounds, inner=turn, settle=0.05, lead=turn)


def main() -> None:
    args = arguments(__doc__, 12)
    batch, tokens = (8, 8) if args.quick else (16, 64)
    images, labels = torch.randn(16 if args.quick else 128, 1, 8, 8), torch.randint(10, (16 if args.quick else 128,))
    texts, targets = torch.randn(batch, tokens, 256), torch.randn(batch, tokens, 256)
    results = {
        "digits": compare(Digits, functional.cross_entropy, images, labels, args.rounds, 1 if args.quick else 10),
        "encoder": compare(encoder, functional.mse_loss, texts, targets, args.rounds, 1 if args.quick else 3),
    }
    names = list(results["digits"])
    rows = [[name, *(ms(medians[case]) for case in names)] for name, medians in results.items()]
    table("A training step, two CPU replicas of one thread each", ("model", *(f"{n} ms" for n in names)), rows)
    print()
    for name, medians in results.items():
        for way in ("step", "gathered"):
            ratio(f"{name}, {way} / one process, 2 threads", medians[way], medians["one, 2 threads"])
        ratio(f"{name}, one process, 2 threads / 1 thread", medians["one, 2 threads"], medians["one, 1 thread"])


if __name__ == "__main__":
    main()
