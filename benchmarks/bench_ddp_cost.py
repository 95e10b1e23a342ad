"""Claim: data parallelism costs the host no more for a parameter tensor than in PyTorch's DDP; the number of
collectives a step does not depend on the number of tensors, and its cost does not depend on the number of ranks.

Measured on models that compute next to nothing:

1. What backward, and forward with backward, take beyond the plain module's, divided by the number of parameter tensors;
   one process, on a Gloo group of one rank, and as the first of eight ranks of PyTorch's ``fake`` backend, which moves
   nothing, so that only the host's work is left. There PyTorch's DDP needs a comm hook, and gets one that has its
   result at once.
2. Collectives in one step of two ranks, as PyTorch's profiler sees them (``c10d::`` operators) and, for lockstep, as
   ``lockstep.loop.statistics`` counts them. 4 MiB of parameters, with and without unused ones (a third of them;
   PyTorch's DDP is told so) and with and without eight buffers of 4 KiB.
3. A whole step, as the first of more and more ranks of the ``fake`` backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from harness import Case, arguments, interleaved, ms, ratio, table
from rank_processes import launch, loopback
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

FLOATS = 2**20  # parameters of the models whose collectives are counted
Context = Callable[[], AbstractContextManager]


class Flat(nn.Module):
    """``count`` parameter tensors, and buffers; forward does hardly more than read the parameters it uses."""

    def __init__(self, count: int, size: int, partly_unused: bool = False, buffers: int = 0) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.ones(size) for _ in range(count))
        for number in range(buffers):
            self.register_buffer(f"buffer{number}", torch.zeros(1024))
        self.used = list(self.tensors)[: count - count // 3 if partly_unused else count]
        self.weights = torch.ones(len(self.used) * size)

    def forward(self) -> torch.Tensor:
        """One number."""
        return torch.cat(self.used) @ self.weights


@contextmanager
def world(backend: str, size: int) -> Iterator[None]:
    """Make this process rank 0 of ``size``."""
    dist.init_process_group(backend, rank=0, world_size=size, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def torch_ddp(module: nn.Module, group: dist.ProcessGroup, **options: bool) -> nn.Module:
    parallel = DistributedDataParallel(module, process_group=group, **options)
    if dist.get_backend(group) == "fake":  # its work has no future, without which DDP's own all-reduce fails
        parallel.register_comm_hook(group, complete_at_once)
    return parallel


def complete_at_once(state, bucket):  # without annotations: DDP refuses those that are strings
    dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def lockstep_ddp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return lockstep.replicate(module, process_group=group)


# ------------------------------------------------------------------------------- 1. for each parameter tensor


def backward(module: nn.Module, context: Context, forward_too: bool) -> Case:
    losses: list[torch.Tensor] = []

    def before() -> None:
        module.zero_grad(set_to_none=True)
        if not forward_too:
            with context():
                losses.append(module())

    def run() -> None:
        with context():
            (module() if forward_too else losses.pop()).backward()

    return Case(run, before)


def cases_of_all_ways(count: int, forward_too: bool) -> dict[str, Case]:
    """Each with a model and a group of its own."""
    cases = {"plain": backward(Flat(count, 16), nullcontext, forward_too)}
    for suffix in ("", ", no_sync"):
        modules = {
            "DDP": torch_ddp(Flat(count, 16), dist.new_group()),
            "DDP, view": torch_ddp(Flat(count, 16), dist.new_group(), gradient_as_bucket_view=True),
            "lockstep": lockstep_ddp(Flat(count, 16), dist.new_group()),
        }
        for way, module in modules.items():
            cases[way + suffix] = backward(module, module.no_sync if suffix else nullcontext, forward_too)
    return cases


def cost_of_tensors(where: str, count: int, rounds: int) -> None:
    phases = ("backward", "forward and backward")
    found = {
        phase: interleaved(cases_of_all_ways(count, phase != phases[0]), rounds, warmup=2, inner=3, lead=1)
        for phase in phases
    }
    over = {
        phase: {way: (value - times["plain"]) / count for way, value in times.items()} for phase, times in found.items()
    }
    rows = [
        [way, *(cell for phase in phases for cell in (ms(found[phase][way]), f"{over[phase][way] * 1e6:.3f}"))]
        for way in found[phases[0]]
    ]
    headers = ("way", *(header for phase in phases for header in (f"{phase} ms", "over plain, us a tensor")))
    table(f"{count:,} parameter tensors, {where}", headers, rows)
    print()
    for phase in phases:
        for suffix in ("", ", no_sync"):
            for reference in ("DDP", "DDP, view"):
                name, measured, other = (
                    f"{count:,} tensors, {where}: {phase}{suffix}",
                    "lockstep" + suffix,
                    reference + suffix,
                )
                ratio(f"{name}, lockstep / {reference}", found[phase][measured], found[phase][other], 1.0)
                if over[phase][other] > 0:  # else noise is larger than what is measured
                    ratio(f"{name}, over plain, lockstep / {reference}", over[phase][measured], over[phase][other])


# ---------------------------------------------------------------------------------------------- 2. collectives

Model = tuple[int, bool, int]  # parameter tensors, whether a third is unused, buffers


def collectives(rank: int, models: list[Model]) -> dict[Model, tuple[int, int, int]]:
    """On one rank, in one step: the collectives of DDP and of lockstep, and those that lockstep counts."""
    found = {}
    for count, partly_unused, buffers in models:
        first, second = (Flat(count, FLOATS // count, partly_unused, buffers) for _ in range(2))
        of_ddp = torch_ddp(first, dist.new_group(), find_unused_parameters=partly_unused)
        of_lockstep = lockstep_ddp(second, dist.new_group())
        seen = collectives_of_a_step(of_ddp), collectives_of_a_step(of_lockstep)
        before = lockstep.loop.statistics(of_lockstep).calls["collective"]
        of_lockstep().backward()
        found[count, partly_unused, buffers] = *seen, lockstep.loop.statistics(of_lockstep).calls["collective"] - before
    return found


def collectives_of_a_step(module: nn.Module) -> int:
    for _ in range(3):  # plans may change after the first steps
        module().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        module().backward()
    return sum(event.count for event in profile.key_averages() if event.key.startswith("c10d::"))


def count_collectives(counts: list[int]) -> None:
    models = [(count, unused, buffers) for count in counts for unused in (False, True) for buffers in (0, 8)]
    found = launch(collectives, models)[0]
    rows = [
        [f"{count:,}", "a third" if unused else "none", buffers, *found[count, unused, buffers]]
        for count, unused, buffers in models
    ]
    headers = ("parameter tensors", "unused", "buffers", "DDP", "lockstep", "lockstep, by its statistics")
    table("Collectives a step, two ranks", headers, rows)
    print()
    for count, unused, buffers in models:
        name = f"{count:,} tensors, unused: {'a third' if unused else 'none'}, {buffers} buffers: collectives a step"
        of_ddp, of_lockstep, _ = found[count, unused, buffers]
        ratio(f"{name}, lockstep / DDP", of_lockstep, of_ddp, 1.0)


# ---------------------------------------------------------------------------------------------- 3. world sizes


def step(module: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6, foreach=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        module().backward()
        optimizer.step()

    return run


def cost_of_ranks(sizes: list[int], count: int, rounds: int) -> None:
    cases = {("plain", 1): step(Flat(count, 64))}
    with world("fake", max(sizes)):
        for size in sizes:
            for way, make in (("DDP", torch_ddp), ("lockstep", lockstep_ddp)):
                cases[way, size] = step(make(Flat(count, 64), dist.new_group(list(range(size)))))
        times = interleaved({f"{way} {size}": case for (way, size), case in cases.items()}, rounds, warmup=2, inner=3)
    plain = times["plain 1"]
    rows = [
        [
            size,
            *(
                ms(value)
                for way in ("DDP", "lockstep")
                for value in (times[f"{way} {size}"], times[f"{way} {size}"] - plain)
            ),
        ]
        for size in sizes
    ]
    headers = ("ranks", "DDP, step ms", "over plain ms", "lockstep, step ms", "over plain ms")
    table(
        f"A step of {count:,} parameter tensors, fake backend; the plain module's takes {ms(plain)} ms", headers, rows
    )
    print()
    first, last = sizes[0], sizes[-1]
    ratio(f"lockstep: step, {last} ranks / {first} ranks", times[f"lockstep {last}"], times[f"lockstep {first}"], 1.1)
    ratio(f"DDP: step, {last} ranks / {first} ranks", times[f"DDP {last}"], times[f"DDP {first}"])
    ratio(f"step, {last} ranks, lockstep / DDP", times[f"lockstep {last}"], times[f"DDP {last}"], 1.0)


def main() -> None:
    args = arguments(__doc__, 30)
    loopback()
    for where, backend, size in (("one rank, Gloo", "gloo", 1), ("8 ranks, fake", "fake", 8)):
        for count in [20] if args.quick else [1000, 4000]:
            with world(backend, size):
                cost_of_tensors(where, count, args.rounds)
    count_collectives([10] if args.quick else [10, 100, 1000])
    cost_of_ranks([2, 8] if args.quick else [2, 8, 32, 128, 512], 20 if args.quick else 300, args.rounds)


if __name__ == "__main__":
    main()
