"""Claim: preparing persistent replicas for a training forward costs at most a tenth of rebuilding them.

Measured, host time only, in one run: ``ReplicaSet.refresh()`` in grad mode after all parameters were written (as an
optimizer does), against ``torch.nn.parallel.replicate``, which copies the module tree for every forward. On a machine
without GPUs PyTorch's broadcast cannot run; a stand-in takes its place that moves nothing, but makes the tensors and
the autograd node that PyTorch's makes ("rebuilt"). "rebuilt, free copies" leaves these out, too: only the tree is
copied. Both therefore cost less than the reference does with real transfers.

On the CPU replicas share the parameters' storage, so lockstep has nothing to move either. In the second table the
network is on the CPU and the replicas are on the "meta" device, where a copy costs its call but moves nothing. So the
table includes packing, transfers and version counters of the path for several devices, but not waiting for data.
bench_cuda.py measures that on GPUs.

Also: the same without gradients and with nothing changed (evaluation). Buffers are copied and attributes set then, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from harness import Case, arguments, interleaved, ms, ratio, table
from torch import nn

from lockstep.local import ReplicaSet, comm

CPU, META = torch.device("cpu"), torch.device("meta")
reference = importlib.import_module("torch.nn.parallel.replicate")


class _Aliases(torch.autograd.Function):
    """As many differentiable copies of each tensor as there are devices, without copying."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.detach() for _ in range(count) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("the benchmark runs no backward")


def _aliases(tensors: Sequence[torch.Tensor], devices: Sequence[Any], detach: bool = False) -> list[list[torch.Tensor]]:
    if detach or not torch.is_grad_enabled() or not tensors:
        return [[t.detach() for t in tensors] for _ in devices]
    copies = _Aliases.apply(len(devices), *tensors)
    return [list(copies[i : i + len(tensors)]) for i in range(0, len(copies), len(tensors))]


def _same(tensors: Sequence[torch.Tensor], devices: Sequence[Any], detach: bool = False) -> list[list[torch.Tensor]]:
    return [list(tensors) for _ in devices]


@contextmanager
def broadcast_is(stand_in: Callable[..., Any]) -> Iterator[None]:
    with (
        patch.object(reference, "_broadcast_coalesced_reshape", stand_in),
        patch.object(reference, "_get_device_index", lambda device, *_: device),
    ):
        yield


def rebuild(network: nn.Module, count: int, stand_in: Callable[..., Any], detach: bool = False) -> None:
    with broadcast_is(stand_in):
        reference.replicate(network, [CPU] * count, detach)


# -------------------------------------------------------------------------------------- networks


def encoder(layers: int, width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, nhead=12 if width % 12 == 0 else 2, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Block(nn.Module):
    """A residual block of six layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels), nn.ReLU()
        self.conv2, self.bn2, self.relu2 = nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels), nn.ReLU()


def residual(blocks: int) -> nn.Module:
    """7 modules a block and 3 around them: 213 for 30 blocks."""
    return nn.Sequential(*(Block(16) for _ in range(blocks)), nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10))


def convolutions(count: int) -> nn.Module:
    """4 modules each, and 1 around them: 4,001 for 1,000."""
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(count)))


# ----------------------------------------------------------------------------------- measurements


def training(network: nn.Module, device: torch.device, count: int, rounds: int) -> tuple[dict[str, float], float]:
    """Seconds to prepare the replicas for a training forward, and to build them once."""
    parameters = list(network.parameters())
    touch = partial(torch.autograd.graph.increment_version, parameters)
    replicas = ReplicaSet(network, [device] * count)
    # lists from users may only name devices that have data; here they are torch.device objects already
    with patch.object(comm, "resolve_devices", list):
        return _training(network, replicas, touch, rounds)


def _training(
    network: nn.Module, replicas: ReplicaSet, touch: Callable[[], None], rounds: int
) -> tuple[dict[str, float], float]:
    device, count = replicas.devices[0], len(replicas.devices)
    build = interleaved({"build": lambda: ReplicaSet(network, [device] * count).refresh()}, min(rounds, 3), warmup=0)
    cases = {
        "lockstep": Case(replicas.refresh, before=touch),
        "rebuilt": partial(rebuild, network, count, _aliases),
        "free": partial(rebuild, network, count, _same),
    }
    medians = interleaved(cases, rounds, inner=3)
    assert replicas.builds == 1
    return medians, build["build"]


def evaluation(network: nn.Module, count: int, rounds: int) -> dict[str, float]:
    """Seconds without gradients and with parameters unchanged."""
    network.eval()
    replicas = ReplicaSet(network, [CPU] * count)
    cases = {"lockstep": replicas.refresh, "rebuilt": partial(rebuild, network, count, _aliases, True)}
    with torch.no_grad():
        medians = interleaved(cases, rounds, warmup=2, inner=3)
    network.train()
    return medians


HEADERS = (
    "network", "modules", "params", "buffers", "replicas", "lockstep ms", "rebuilt ms", "ratio",
    "rebuilt, free copies ms", "ratio", "build once ms",
)  # fmt: skip


def described(name: str, network: nn.Module, count: int) -> list[object]:
    sizes = (len(list(network.modules())), len(list(network.parameters())), len(list(network.buffers())))
    return [name, *(f"{size:,}" for size in sizes), count]


def training_row(
    name: str, network: nn.Module, device: torch.device, count: int, rounds: int
) -> tuple[list[object], dict[str, float]]:
    medians, build = training(network, device, count, rounds)
    own, rebuilt, free = medians["lockstep"], medians["rebuilt"], medians["free"]
    row = [ms(own), ms(rebuilt), f"{own / rebuilt:.3f}", ms(free), f"{own / free:.3f}", ms(build)]
    return described(name, network, count) + row, medians


def main() -> None:
    args = arguments(__doc__, 7)
    small = args.quick
    networks = {
        "encoder, 24 layers, 768 wide": partial(encoder, 2 if small else 24, 16 if small else 768),
        "residual, 30 blocks": partial(residual, 3 if small else 30),
        "conv + bn + relu, 1,000 times": partial(convolutions, 10 if small else 1000),
    }
    growth = {f"conv + bn + relu, {n:,} times": partial(convolutions, n) for n in (10, 100, 300)} | {
        f"encoder, {n} layers": partial(encoder, n, 24) for n in (6, 12, 48)
    }
    growth, counts = ({}, (2,)) if small else (growth, (2, 8))
    rows, away, unchanged, lines = [], [], [], []
    for name, make in (networks | growth).items():
        network = make()
        for count in counts:
            row, medians = training_row(name, network, CPU, count, args.rounds)
            rows.append(row)
            if name in networks:
                what = f"training, {name}, {count} replicas"
                lines.append((f"{what}, lockstep / rebuilt", medians["lockstep"], medians["rebuilt"], 0.1))
                medians = evaluation(network, count, args.rounds)
                own, rebuilt = medians["lockstep"], medians["rebuilt"]
                unchanged.append([*described(name, network, count), ms(own), ms(rebuilt), f"{own / rebuilt:.4f}"])
                lines.append((f"no_grad, unchanged, {name}, {count} replicas, lockstep / rebuilt", own, rebuilt, 0.1))
        del network
    narrow = {
        "encoder, 24 layers, 24 wide": partial(encoder, 2 if small else 24, 24),
        **dict(list(networks.items())[1:]),
    }
    for name, make in narrow.items():
        network = make()
        for count in counts:
            row, medians = training_row(name, network, META, count, args.rounds)
            away.append(row)
            what = f"training, replicas elsewhere (meta), {name}, {count} replicas, lockstep / rebuilt"
            lines.append((what, medians["lockstep"], medians["rebuilt"], None))
        del network
    table("Training forward, every parameter changed, replicas on the network's device", HEADERS, rows)
    table("The same, replicas on another device (meta: calls without data)", HEADERS, away)
    table("No gradients, nothing changed", (*HEADERS[:8],), unchanged)
    print()
    for line in lines:
        ratio(*line)


if __name__ == "__main__":
    main()
