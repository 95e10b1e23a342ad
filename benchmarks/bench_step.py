"""Claim, without an aim: what forward and backward of two CPU replicas take, against the plain module.

Measured in one run: gradients to None, forward, loss and backward of a perceptron (3 layers, 256 wide, batch 64), of a
small convolutional network with batch normalisation (digits, 1 x 8 x 8 inputs, batch 128) and of an encoder (4 layers,
256 wide, 64 tokens, batch 16). Replicas on the CPU take turns, so both sides have all intra-op threads (``--threads``,
2 if not given). ``step`` is ``DataParallel.step``, "gathered" is ``loss(DataParallel(x))`` and ``backward()``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import Case, arguments, interleaved, ms, ratio, table
from torch import nn
from torch.nn import functional

from lockstep import DataParallel


class Perceptron(nn.Sequential):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


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


def training(model: nn.Module, loss: Callable[[], object]) -> Case:
    def run() -> None:
        model.zero_grad()
        loss()

    return Case(run)


def compare(
    make: Callable[[], nn.Module],
    loss_fn: Callable[..., torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    rounds: int,
    turn: int,
) -> dict[str, float]:
    plain, stepped, gathered = make(), make(), make()
    dp_step = DataParallel(stepped, ["cpu", "cpu"])
    dp_gather = DataParallel(gathered, ["cpu", "cpu"])
    cases = {
        "plain": training(plain, lambda: loss_fn(plain(x), y).backward()),
        "step": training(stepped, lambda: dp_step.step(loss_fn, x, y)),
        "gathered": training(gathered, lambda: loss_fn(dp_gather(x), y).backward()),
    }
    # many steps a turn, as in training: for the first few the system has yet to spread the threads over its cores
    return interleaved(cases, rounds, inner=turn, settle=0.05, lead=turn)


def main() -> None:
    args = arguments(__doc__, 12, ("--threads", {"type": int, "default": 2}))
    torch.set_num_threads(args.threads)
    batch, tokens = (8, 8) if args.quick else (16, 64)
    points, classes = torch.randn(64, 64), torch.randint(10, (64,))
    images, labels = torch.randn(16 if args.quick else 128, 1, 8, 8), torch.randint(10, (16 if args.quick else 128,))
    texts, targets = torch.randn(batch, tokens, 256), torch.randn(batch, tokens, 256)
    inner = (1, 1, 1) if args.quick else (30, 10, 3)
    results = {
        "perceptron": compare(Perceptron, functional.cross_entropy, points, classes, args.rounds, inner[0]),
        "digits": compare(Digits, functional.cross_entropy, images, labels, args.rounds, inner[1]),
        "encoder": compare(encoder, functional.mse_loss, texts, targets, args.rounds, inner[2]),
    }
    names = list(results["digits"])
    rows = [[name, *(ms(medians[case]) for case in names)] for name, medians in results.items()]
    title = f"Forward and backward, two CPU replicas, {args.threads} intra-op threads"
    table(title, ("model", *(f"{n} ms" for n in names)), rows)
    print()
    for name, medians in results.items():
        for way in ("step", "gathered"):
            ratio(f"{name}, {way} / plain module", medians[way], medians["plain"])


if __name__ == "__main__":
    main()
