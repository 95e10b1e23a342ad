"""Claim: on one host, communication through `shm` adds little more to a step than copying and summing gradients must.

Measured: two ranks of one intra-op thread; the time of a step (forward and backward) beyond that of the plain module,
for PyTorch's DDP on Gloo with and without bucket views, lockstep on Gloo and on `shm`, and two bounds on `shm`.
``flat`` has no hooks: after backward it copies all gradients into one tensor of ``group.allocate``, runs one
all-reduce, and hands out views. ``arrive`` is a reducer of forty lines: a closure for each parameter copies each
gradient of 4 KB or more into its bucket when it comes, and frees it; the other gradients are copied together when the
bucket is full. Both also send the module's buffers behind the gradients, as all others do. Neither bound notices errors
or allows differences between ranks. If the ranks use all cores, communication does not overlap with backward.

All of them take turns in the same two processes. "median" and "quartile" are of the slower rank's steps: on a machine
with other work, the lower quartile is nearer to the time of the step itself. "lockstep shm again" measures lockstep on
`shm` a second time: the difference is the noise of the run."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from ddp_models import SmallGPT, tiny_layers
from harness import arguments, ratio, table
from rank_processes import launch
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

import lockstep

Task = tuple[Callable[[], nn.Module], tuple[int, ...]]
AIM_BOUND, AIM_GLOO = 1.25, 1.0
BOUNDS = "flat", "arrive"


class ThirdUnused(nn.Module):
    """48 layers, of which forward leaves out every third."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make of rows."""
        for i, layer in enumerate(self.layers):
            if i % 3:
                x = torch.relu(layer(x))
        return x


def layers(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(width, width), nn.ReLU())))


def wide(width: int) -> nn.Module:
    """Three layers, one of them 16 times ``width`` squared."""
    sizes = (width, 4 * width), (4 * width, 4 * width), (4 * width, width)
    return nn.Sequential(*(m for size in sizes for m in (nn.Linear(*size), nn.ReLU())))


def encoder(count: int, width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


def conv_bn(count: int) -> nn.Module:
    """Convolutions of 16 channels, each with batch normalisation."""
    sizes = [3] + [16] * (count - 1)
    return nn.Sequential(
        *(m for size in sizes for m in (nn.Conv2d(size, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()))
    )


def tasks(quick: bool) -> dict[str, Task]:
    """Name -> model, and its batch; tiny ones with ``quick``."""
    if quick:
        return {
            "tiny": (tiny_layers, (2, 32)),
            "unused": (lambda: ThirdUnused(3, 8), (2, 8)),
        }
    return {
        "tiny": (tiny_layers, (16, 32)),
        "GPT-2 of width 64": (SmallGPT, (4, 16)),
        "small": (lambda: layers(200, 64), (16, 64)),
        "wide": (lambda: wide(1024), (16, 1024)),
        "encoder": (lambda: encoder(6, 256), (4, 64, 256)),
        "conv-BN": (lambda: conv_bn(53), (2, 3, 16, 16)),
        "unused": (lambda: ThirdUnused(48, 256), (16, 256)),
    }


# ------------------------------------------------------------------------------------------------ bounds


class Bucket:
    """Gradients of ``arrive`` that travel together."""

    def __init__(
        self, members: list[nn.Parameter], buffers: list[torch.Tensor], group: dist.ProcessGroup, copy_from: int
    ) -> None:
        self.members, self.buffers, self.missing, self.is_sent = members, buffers, len(members), False
        self.flat, views = together([*members, *buffers], group)
        self.views, self.buffer_views = views[: len(members)], views[len(members) :]
        cold = [i for i, p in enumerate(members) if p.nbytes < copy_from]
        self.cold = [self.views[i] for i in cold] + self.buffer_views, [members[i] for i in cold]


def together(members: list[torch.Tensor], group: dist.ProcessGroup) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Shared memory for as many elements side by side, and a view for each."""
    flat = group.allocate(sum(p.numel() for p in members), torch.float32)
    pieces = flat.split([p.numel() for p in members])
    return flat, [piece.view_as(p) for piece, p in zip(pieces, members, strict=True)]


def arrive(module: nn.Module, group: dist.ProcessGroup, cap: int = 25 << 20, copy_from: int = 4096) -> nn.Module:
    """Reduce the gradients of ``module``, which uses all its parameters in every step, over a shm group of two."""
    groups: list[list[nn.Parameter]] = [[]]
    for p in list(module.parameters())[::-1]:
        groups[-1].append(p)
        if sum(each.nbytes for each in groups[-1]) >= (1 << 20 if len(groups) == 1 else cap):
            groups.append([])
    groups = [members for members in groups if members]
    carried = [[]] * (len(groups) - 1) + [list(module.buffers())]
    buckets = [Bucket(*each, group, copy_from) for each in zip(groups, carried, strict=True)]
    is_open = False

    def send(b: Bucket) -> None:
        b.is_sent = True
        views, members = b.cold
        if views:
            torch._foreach_copy_(views, [p.grad for p in members] + b.buffers)
        b.work = group.allreduce(b.flat, factor=0.5)

    def end() -> None:
        nonlocal is_open
        is_open = False
        for b in buckets:
            if not b.is_sent:
                send(b)
        for b in buckets:
            b.work.wait()
            for p, view in zip(b.members, b.views, strict=True):
                p.grad = view
            if b.buffers:
                torch._foreach_copy_(b.buffers, b.buffer_views)
            b.is_sent, b.missing = False, len(b.members)

    def hook_of(b: Bucket, view: torch.Tensor | None) -> Callable[[nn.Parameter], None]:
        def hook(p: nn.Parameter) -> None:
            nonlocal is_open
            if not is_open:
                is_open = True
                Variable._execution_engine.queue_callback(end)
            if view is not None:
                view.copy_(p.grad)
                p.grad = None
            b.missing -= 1
            if not b.missing:
                send(b)

        return hook

    for b in buckets:
        for p, view in zip(b.members, b.views, strict=True):
            p.register_post_accumulate_grad_hook(hook_of(b, view if p.nbytes >= copy_from else None))
    return module


def flat_after_backward(module: nn.Module, group: dist.ProcessGroup) -> Callable[[], None]:
    """Return what ``flat`` does after backward."""
    members, buffers = list(module.parameters()), list(module.buffers())
    flat, views = together([*members, *buffers], group)
    buffer_views = views[len(members) :]

    def reduce() -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        torch._foreach_copy_(views, grads + buffers)
        group.allreduce(flat, factor=0.5).wait()
        for p, view in zip(members, views, strict=False):
            p.grad = view
        if buffers:
            torch._foreach_copy_(buffers, buffer_views)

    return reduce


# ------------------------------------------------------------------------------------------------ steps


def steps_of_all_ways(task: Task, partly_unused: bool, rank: int, shm: dist.ProcessGroup) -> dict[str, Callable]:
    """A step for each way."""
    torch.manual_seed(0)
    make, batch = task
    base = make()
    x = torch.randn(batch) + rank

    def step(module: nn.Module, after: Callable[[], None] = lambda: None) -> Callable[[], None]:
        def run() -> None:
            module.zero_grad(set_to_none=True)
            module(x).square().mean().backward()
            after()

        return run

    def ddp(view: bool) -> nn.Module:
        options = {"find_unused_parameters": partly_unused, "gradient_as_bucket_view": view}
        return DistributedDataParallel(copy.deepcopy(base), process_group=dist.new_group(backend="gloo"), **options)

    def replicated(group: dist.ProcessGroup) -> nn.Module:
        return lockstep.replicate(copy.deepcopy(base), process_group=group)

    flat = copy.deepcopy(base)
    steps = {
        "plain": step(copy.deepcopy(base)),
        "DDP": step(ddp(False)),
        "DDP, view": step(ddp(True)),
        "lockstep": step(replicated(dist.new_group(backend="gloo"))),
        "lockstep shm": step(replicated(dist.new_group(backend="shm"))),
        "lockstep shm again": step(replicated(dist.new_group(backend="shm"))),
        "flat": step(flat, flat_after_backward(flat, shm)),
    }
    if not partly_unused:
        steps["arrive"] = step(arrive(copy.deepcopy(base), shm))
    return steps


def time_ways(rank: int, names: list[str], quick: bool, rounds: int, inner: int) -> dict[str, dict[str, list[float]]]:
    """On one rank: the seconds of each step, for each model and way."""
    found = {}
    for name in names:
        shm, one = dist.new_group(backend="shm"), torch.zeros(1)
        steps = steps_of_all_ways(tasks(quick)[name], name == "unused", rank, shm)
        times: dict[str, list[float]] = {way: [] for way in steps}
        for number in range(-2, rounds):
            gc.collect(0)
            for way in list(steps) if number % 2 else list(steps)[::-1]:
                for turn in range(-1, inner):
                    shm.allreduce(one).wait()  # both begin together
                    begin = time.perf_counter()
                    steps[way]()
                    if number >= 0 and turn >= 0:
                        times[way].append(time.perf_counter() - begin)
        found[name] = times
    return found


def main() -> None:
    known = list(tasks(False))
    options = (
        ("--models", {"nargs": "+", "choices": known, "default": known}),
        ("--steps", {"type": int, "default": 3, "help": "steps a turn (default 3)"}),
    )
    args = arguments(__doc__, 15, *options)
    names = list(tasks(True)) if args.quick else args.models
    for name in names:
        ranks = launch(time_ways, [name], args.quick, args.rounds, args.steps)
        slower = {
            way: sorted(max(each) for each in zip(*(rank[name][way] for rank in ranks), strict=True))
            for way in ranks[0][name]
        }
        for kind in ("median", "quartile"):
            compare(f"{name}, {kind}", {way: _at(times, kind) for way, times in slower.items()})


def _at(times: list[float], kind: str) -> float:
    return statistics.median(times) if kind == "median" else times[len(times) // 4]


def compare(title: str, seconds: dict[str, float]) -> None:
    over = {way: value - seconds["plain"] for way, value in seconds.items()}
    table(title, ("way", "step ms", "over plain ms"), [
        [way, f"{seconds[way] * 1e3:.3f}", f"{over[way] * 1e3:.3f}"] for way in seconds
    ])  # fmt: skip
    print()
    for reference in ("DDP", "DDP, view"):
        ratio(f"{title}: step on Gloo, lockstep / {reference}", seconds["lockstep"], seconds[reference], AIM_GLOO)
    bound = min((way for way in BOUNDS if way in over), key=over.__getitem__)
    ratio(f"{title}: over plain, lockstep shm / DDP, view on Gloo", over["lockstep shm"], over["DDP, view"])
    ratio(f"{title}: over plain, lockstep shm / {bound}", over["lockstep shm"], over[bound], AIM_BOUND)
    ratio(
        f"{title}: step, lockstep shm again / lockstep shm (noise)",
        seconds["lockstep shm again"],
        seconds["lockstep shm"],
    )


if __name__ == "__main__":
    main()
