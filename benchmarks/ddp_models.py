"""What the DDP benchmarks share: models, the ways to train them that are compared, a training step, and the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from harness import mib, ms, ratio, table
from rank_processes import Turn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

PAGE = 4096  # bytes: the least memory that a ratio is taken of
RATE = 1e-4  # small, so that weights stay about what they were, however many steps are measured


@dataclass(frozen=True)
class Task:
    """A model, the shape of one rank's batch, and what PyTorch's DDP has to be told about the model."""

    make: Callable[[], nn.Module]
    batch: tuple[int, ...]
    partly_unused: bool = False
    aim: float | None = None
    """What communication may add to a step on `shm`, as a part of what it adds with PyTorch's DDP on Gloo."""
    step_aim: float = 1.0
    """What a step may take, as a part of DDP's with bucket views, where both are given a Gloo group."""
    dtype: torch.dtype = torch.float32

    def module(self, device: torch.device) -> nn.Module:
        """The model, with the same weights at every call."""
        torch.manual_seed(0)
        return self.make().to(device, self.dtype)

    def data(self, rank: int, device: torch.device) -> torch.Tensor:
        """A batch, another one on each rank, the same at every call."""
        generator = torch.Generator().manual_seed(1 + rank)
        return torch.randn(self.batch, generator=generator).to(device, self.dtype)

    def of(self, dtype: torch.dtype) -> Task:
        """The same with parameters and batches of another dtype."""
        return replace(self, dtype=dtype)


def tasks(quick: bool) -> dict[str, Task]:
    """Name -> task; tiny ones with ``quick``."""
    if quick:
        return {
            "many small": Task(lambda: small_layers(10, 8), (4, 8)),
            "wide": Task(lambda: wide_layers(3, 64), (4, 64)),
            "encoder": Task(lambda: encoder(1, 16), (2, 4, 16)),
            "conv-BN": Task(lambda: ConvNet(3, 4), (2, 3, 4, 4)),
            "unused": Task(lambda: Branches(3, 8), (4, 8), partly_unused=True),
        }
    return {
        "many small": Task(lambda: small_layers(200, 64), (32, 64), aim=1 / 3, step_aim=0.8),
        "wide": Task(lambda: wide_layers(3, 2880), (32, 2880), aim=1 / 3, step_aim=0.8),
        "encoder": Task(lambda: encoder(6, 256), (8, 64, 256), aim=1 / 5, step_aim=0.95),
        "conv-BN": Task(lambda: ConvNet(53, 64), (8, 3, 8, 8), step_aim=0.92),
        "unused": Task(lambda: Branches(60, 128), (32, 128), partly_unused=True, step_aim=0.7),
    }


def small_layers(count: int, width: int) -> nn.Module:
    """Linear layers one after the other; orthogonal, so that nothing fades to denormal numbers, which are slow."""
    layers = [nn.Linear(width, width) for _ in range(count)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


def wide_layers(count: int, width: int) -> nn.Module:
    """A few layers that hold nearly all of the bytes: 25 million parameters as three of 2,880."""
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())))


def encoder(layers: int, width: int) -> nn.Module:
    """A transformer encoder; without dropout, so that all ways compute the same."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def tiny_layers() -> nn.Module:
    """A multi-layer perceptron that computes next to nothing."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())))


class SmallGPT(nn.Module):
    """GPT-2's blocks (pre-norm, causal), two of width 64: a language model small enough for a unit test."""

    def __init__(self, layers: int = 2, width: int = 64, vocabulary: int = 64, longest: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits for the next token at every place; ``x`` is a batch of any numbers, which are taken for tokens."""
        tokens = (x.abs() * 1000).long() % self.tokens.num_embeddings
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        h = self.tokens(tokens) + self.places.weight[:length]
        return self.head(self.blocks(h, mask=mask, is_causal=True))


class ConvNet(nn.Module):
    """Convolutions, each with batch normalisation (two parameters, three buffers) and a residual connection."""

    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        sizes = [3] + [channels] * (layers - 1)
        self.convs = nn.ModuleList(nn.Conv2d(size, channels, 3, padding=1, bias=False) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to features."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(x)).relu()
            x = y + x if y.shape == x.shape else y
        return x


class Branches(nn.Module):
    """Three equal stacks of small layers, of which forward uses the first two, on every rank."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(small_layers(layers // 3, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first two stacks one after the other."""
        return self.branches[1](self.branches[0](x))


# --------------------------------------------------------------------------------------------------- ways

Way = Callable[[nn.Module, dist.ProcessGroup, bool], nn.Module]

WAYS: dict[str, Way] = {
    "no communication": lambda module, group, partly_unused: module,
    "DDP": lambda module, group, partly_unused: DistributedDataParallel(
        module, process_group=group, find_unused_parameters=partly_unused
    ),
    "DDP, view": lambda module, group, partly_unused: DistributedDataParallel(
        module, process_group=group, find_unused_parameters=partly_unused, gradient_as_bucket_view=True
    ),
    "lockstep": lambda module, group, partly_unused: lockstep.DistributedDataParallel(module, process_group=group),
    "lockstep, replicate": lambda module, group, partly_unused: lockstep.replicate(module, process_group=group),
}
PLAIN, DDP, VIEW = "no communication", "DDP", "DDP, view"
LOCKSTEP = ("lockstep", "lockstep, replicate")
LOCKSTEP_SHM, DDP_SHM = "lockstep, shm", "DDP, shm"
SHM_WAYS: dict[str, Way] = {LOCKSTEP_SHM: WAYS["lockstep"], DDP_SHM: WAYS[DDP]}
"""The same on a group of the `shm` backend."""


def training_step(parallel: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """zero_grad, forward, backward and SGD on one batch."""
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE, foreach=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        parallel(x).square().mean().backward()
        optimizer.step()

    return step


def steps_of_all_ways(
    task: Task, rank: int, device: torch.device, backend: str = "gloo", shm: bool = False
) -> dict[str, Callable]:
    """A step for each way, each with a model and a process group of its own; checks that they train alike."""
    steps, modules, x = {}, {}, task.data(rank, device)
    ways = [*((each, backend) for each in WAYS.items()), *((each, "shm") for each in SHM_WAYS.items() if shm)]
    for (name, way), used in ways:
        modules[name] = task.module(device)
        steps[name] = training_step(way(modules[name], dist.new_group(backend=used), task.partly_unused), x)
        steps[name]()
    for name in (*LOCKSTEP, *(SHM_WAYS if shm else ())):
        _same_gradients(name, modules[name], modules[DDP], 1e-3 if task.dtype == torch.float32 else 0.05)
    return steps


def _same_gradients(name: str, module: nn.Module, reference: nn.Module, tolerance: float) -> None:
    """A way that computes something else is no faster."""
    largest = max(float(p.grad.norm()) for p in reference.parameters() if p.grad is not None)
    for (key, own), other in zip(module.named_parameters(), reference.parameters(), strict=True):
        if own.grad is None or other.grad is None:
            same = own.grad is other.grad
        else:
            allowed = tolerance * (float(other.grad.norm()) + 0.01 * largest)
            same = float((own.grad - other.grad).norm()) <= allowed
        if not same:
            raise RuntimeError(f"{name}: after one step the gradient of {key} is not that of PyTorch's DDP")


# ------------------------------------------------------------------------------------------------- table


def report(title: str, task: Task, times: Mapping[str, Turn], extra: Mapping[str, float]) -> None:
    """A table of the ways, and the ratios; ``extra`` is memory beyond the plain module's, or empty."""
    parameters = list(task.module(torch.device("cpu")).parameters())
    size = sum(p.nbytes for p in parameters)
    seconds = {way: whole for way, (_, whole) in times.items()}
    over = {way: value - seconds[PLAIN] for way, value in seconds.items()}
    rows = []
    for way in seconds:
        memory = [mib(extra[way]), f"{extra[way] / size:.2f}"] if way in extra else ["-", "-"]
        rows.append([way, ms(seconds[way]), ms(over[way]), ms(times[way][0]), *memory])
    headers = ("way", "step ms", "over plain ms", "host ms", "extra memory MiB", "/ gradients")
    table(f"{title}: {len(parameters):,} parameter tensors, {mib(size)} MiB", headers, rows)
    print()
    for way in LOCKSTEP:
        for reference, aim in ((DDP, 1.0), (VIEW, task.step_aim)):
            ratio(f"{title}: step, {way} / {reference}", seconds[way], seconds[reference], aim)
            if over[reference] > 0:  # else noise is larger than what is measured
                ratio(f"{title}: time over plain, {way} / {reference}", over[way], over[reference])
        if extra:
            ratio(f"{title}: extra memory, {way} / {DDP}", extra[way], max(extra[DDP], PAGE), 1)
            ratio(f"{title}: extra memory, {way} / {VIEW}", extra[way], max(extra[VIEW], PAGE))
    if LOCKSTEP_SHM in over and over[DDP] > 0:
        ratio(f"{title}: time over plain, {LOCKSTEP_SHM} / {DDP} on gloo", over[LOCKSTEP_SHM], over[DDP], task.aim)
        ratio(f"{title}: time over plain, {DDP_SHM} / {DDP} on gloo", over[DDP_SHM], over[DDP])
