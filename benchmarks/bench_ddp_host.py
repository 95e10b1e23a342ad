"""Claim: a synchronising backward costs the host less than in PyTorch's DDP with bucket views, on any model.

Measured: processor time (``time.process_time``: of all threads, without the time in which other processes had the core)
of one process of one intra-op thread, on a Gloo group of one rank, whose collectives move nothing. Batches have one row
or a few, so that little is computed. "over plain" is the time of forward and backward beyond that of the plain module,
divided by the number of parameter tensors. DDP sends buffers in forward, lockstep in backward, so both are counted. All
of them take turns. All but lockstep use PyTorch's own engine, as in a program that replicates nothing. "lockstep again"
measures the same module a second time: the difference is the noise of the run. "plain, watched" is the plain module in
a program that also has a replicated one, whose parameters are compared before and after each pass. "one of two on a
group" is measured apart, in a program with two replicated modules, of which each step trains one.

Two reducers that check nothing show how much could still be gained. "hook" is the plain module with a hook on each
parameter that does nothing. "floor" is what a reducer in Python does at least: such a hook, written in C
(``list.append``), on each parameter, a hook on the output that queues a callback, and in that callback one copy of all
gradients side by side, one all-reduce, one comparison of a row of numbers, and views handed out. It has one bucket,
checks nothing, and notices no difference between ranks.

For each model it counts, too, how many bytecodes of the library a settled step runs, with what DDP imports.

With ``--instructions`` it counts the instructions of a settled step instead, by callgrind, which is to be installed
(Debian's package valgrind). They hardly depend on what else the machine does. A minute or two for each way and model:
each has a process of its own, in which PyTorch uses AVX2.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from bench_ddp_cost import Flat, lockstep_ddp, torch_ddp, world
from ddp_models import Branches, ConvNet, SmallGPT, encoder, small_layers, tiny_layers
from harness import arguments, ratio, table
from rank_processes import loopback
from torch import nn
from torch.autograd import Variable
from torch.utils.benchmark import Timer

import lockstep

Task = tuple[Callable[[], nn.Module], tuple[int, ...] | None, bool]  # model, its batch if it takes one, partly unused
Way = tuple[nn.Module, Callable]  # a module, and the context in which it is trained
COUNTED = "plain", "floor", "DDP, view", "lockstep", "lockstep, one of two", "lockstep, no_sync"
AIM_NO_SYNC = 0.6  # microseconds a tensor
AIM_OF_TWO = 1.1
PARTS = "forward and backward", "backward"


def tasks(quick: bool) -> dict[str, Task]:
    """Name -> task; tiny ones with ``quick``."""
    if quick:
        return {
            "64x64": (lambda: small_layers(3, 8), (1, 8), False),
            "unused": (lambda: Branches(3, 8), (1, 8), True),
        }
    return {
        "64x64": (lambda: small_layers(200, 64), (1, 64), False),
        "1,000 of 16": (lambda: Flat(1000, 16), None, False),
        "conv-BN": (lambda: ConvNet(53, 16), (2, 3, 4, 4), False),
        "encoder": (lambda: encoder(6, 256), (1, 4, 256), False),
        "unused": (lambda: Branches(60, 128), (1, 128), True),
        "MLP": (tiny_layers, (16, 32), False),
        "GPT-2 of width 64": (SmallGPT, (1, 8), False),
    }


def makers(task: Task) -> dict[str, Callable[[], nn.Module]]:
    """Name -> what makes the module, each with a group of its own."""
    make, _, partly_unused = task

    def hooked() -> nn.Module:
        module = make()
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(nothing)
        return module

    def ddp(view: bool) -> nn.Module:
        return torch_ddp(make(), dist.new_group(), find_unused_parameters=partly_unused, gradient_as_bucket_view=view)

    return {
        "plain": make,
        "hook": hooked,
        "floor": lambda: floor(make(), dist.new_group()),
        "DDP": lambda: ddp(False),
        "DDP, view": lambda: ddp(True),
        "lockstep": lambda: lockstep_ddp(make(), dist.new_group()),
    }


def ways(task: Task) -> dict[str, Way]:
    """Name -> way, of all that take turns."""
    modules = {name: make() for name, make in makers(task).items()}
    found: dict[str, Way] = {name: (module, nullcontext) for name, module in modules.items()}
    found |= {"lockstep again": found["lockstep"], "plain, watched": found["plain"]}
    return found | {f"{name}, no_sync": (modules[name], modules[name].no_sync) for name in ("DDP", "lockstep")}


def two_on_a_group(task: Task) -> dict[str, Way]:
    """As :func:`ways`, in a program that has these two replicated modules and no other."""
    make, group = task[0], dist.new_group()
    return {
        "plain": (make(), nullcontext),
        "lockstep, one of two": (lockstep_ddp(make(), group), nullcontext),
        "lockstep, the other": (lockstep_ddp(make(), group), nullcontext),
    }


def nothing(parameter: nn.Parameter) -> None:
    """A hook on a parameter."""


def floor(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Reduce the gradients of ``module`` in the least that takes."""
    members, arrived, said = list(module.parameters()), [], torch.zeros(8)
    flat = torch.zeros(sum(p.numel() for p in members) + said.numel())
    pieces = flat.split([*(p.numel() for p in members), said.numel()])
    views, row = [piece.view_as(p) for piece, p in zip(pieces, members, strict=False)], pieces[-1]
    options = dist.AllreduceOptions()
    options.asyncOp = True

    def end() -> None:
        grads = [p.grad for p in members]
        used = [(p, view, grad) for p, view, grad in zip(members, views, grads, strict=True) if grad is not None]
        torch._foreach_copy_([view for _, view, _ in used], [grad for _, _, grad in used])
        row.copy_(said)
        group.allreduce([flat], options).wait()
        torch.equal(row, said)
        for p, view, _ in used:
            p.grad = view
        arrived.clear()

    def reached(grad: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(end)

    for p in members:
        p.register_post_accumulate_grad_hook(arrived.append)
    module.register_forward_hook(lambda module, inputs, output: output.register_hook(reached) and None)
    return module


def processor_times(
    make_cases: Callable[[Task], dict[str, Way]], task: Task, rounds: int, inner: int
) -> dict[str, list[tuple[float, float]]]:
    """For each way and round: the seconds of forward and backward, and of backward alone."""
    gc.collect()  # other modules, at whose parameters each pass would look
    cases = make_cases(task)
    watched, engine = Variable._execution_engine, torch._C._ImperativeEngine()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    x = [torch.randn(task[1])] if task[1] else []

    def step(module: nn.Module, context: Callable) -> tuple[float, float]:
        module.zero_grad(set_to_none=True)
        with context():
            begin = time.process_time()
            loss = module(*x).square().mean()
            middle = time.process_time()
            loss.backward()
            end = time.process_time()
        return end - begin, end - middle

    gc.collect()
    gc.disable()
    try:
        for number in range(-2, rounds):
            names = list(cases) if number % 2 == 0 else list(cases)[::-1]
            for name in names:
                enters_own = name.startswith("lockstep") or name == "plain, watched"
                Variable._execution_engine = watched if enters_own else engine
                step(*cases[name])  # brings caches back
                times = [step(*cases[name]) for _ in range(inner)]
                if number >= 0:
                    taken[name].append(tuple(sum(part) / inner for part in zip(*times, strict=True)))
            gc.collect(0)
    finally:
        Variable._execution_engine = watched
        gc.enable()
    return taken


def compare(name: str, task: Task, rounds: int, inner: int) -> None:
    taken = processor_times(ways, task, rounds, inner)
    of_two = {
        way: statistics.median(part for part, _ in times)
        for way, times in processor_times(two_on_a_group, task, rounds, inner).items()
    }
    count = sum(1 for _ in task[0]().parameters())
    whole = {way: [statistics.median(part) for part in zip(*times, strict=True)] for way, times in taken.items()}
    over = {
        way: [(a - b) / count * 1e6 for a, b in zip(times, whole["plain"], strict=True)] for way, times in whole.items()
    }
    rows = [
        [way, *(cell for part in (0, 1) for cell in (f"{whole[way][part] * 1e3:.3f}", f"{over[way][part]:.2f}"))]
        for way in whole
    ]
    headers = ("way", *(cell for part in PARTS for cell in (f"{part} ms", "over plain, us a tensor")))
    table(f"{name}: {count:,} parameter tensors", headers, rows)
    print()
    for reference in ("DDP", "DDP, view"):
        for part, title in enumerate(PARTS):
            aim = (1.1 if name == "encoder" else 0.8) if part == 0 and reference == "DDP, view" else None
            ratio(
                f"{name}: {title}, over plain, lockstep / {reference}",
                over["lockstep"][part],
                over[reference][part],
                aim,
            )
        ratio(f"{name}: forward and backward, over plain, floor / {reference}", over["floor"][0], over[reference][0])
    ratio(f"{name}: forward and backward, over plain, lockstep / floor", over["lockstep"][0], over["floor"][0])
    ratio(f"{name}: over plain, lockstep again / lockstep (noise)", over["lockstep again"][0], over["lockstep"][0])
    each_of_two = [(of_two[way] - of_two["plain"]) / count * 1e6 for way in of_two if way != "plain"]
    ratio(
        f"{name}: forward and backward, over plain, lockstep, one of two on a group / lockstep",
        statistics.mean(each_of_two),
        over["lockstep"][0],
        AIM_OF_TWO,
    )
    ratio(f"{name}: a look at a pass of another module, us a tensor", over["plain, watched"][0], 1.0)
    ratio(f"{name}: no_sync, over plain, us a tensor", over["lockstep, no_sync"][0], 1.0, AIM_NO_SYNC)


def count_bytecodes(task: Task, steps: int = 3) -> tuple[float, float]:
    """How many bytecodes of the library a settled step runs, and in how many calls."""
    gc.collect()  # other modules, at whose parameters each pass would look
    module, package = lockstep_ddp(task[0](), dist.new_group()), str(Path(lockstep.__file__).parent)
    x = [torch.randn(task[1])] if task[1] else []
    counted = {"call": 0, "opcode": 0}

    def trace(frame: FrameType, event: str, _: object) -> Callable | None:
        if not frame.f_code.co_filename.startswith(package):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event in counted:
            counted[event] += 1
        return trace

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(*x).square().mean().backward()

    for _ in range(10):
        step()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.settrace(before)
    return counted["opcode"] / steps, counted["call"] / steps


def settled_step(name: str, way: str, quick: bool) -> Callable[[], None]:
    """Return a step of one way, for a process of its own that counts instructions: it has no collector any more."""
    if not dist.is_initialized():  # a timer runs its setup more than once
        loopback()
        _world.enter_context(world("gloo", 1))
    task = tasks(quick)[name]
    if "of two" in way:
        cases = two_on_a_group(task)
    else:
        module = makers(task)[way.removesuffix(", no_sync")]()
        cases = {way: (module, module.no_sync if way.endswith("no_sync") else nullcontext)}
    if not way.startswith("lockstep"):
        Variable._execution_engine = torch._C._ImperativeEngine()
    x = [torch.randn(task[1])] if task[1] else []

    def step(of: str = way) -> None:
        module, context = cases[of]
        module.zero_grad(set_to_none=True)
        with context():
            module(*x).square().mean().backward()

    for _ in range(12):
        for each in cases:
            step(each)
    gc.collect()
    gc.disable()
    return step


_world = ExitStack()


def compare_instructions(name: str, quick: bool, steps: int = 20) -> None:
    counted = {}
    for way in COUNTED:
        setup = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench_ddp_host as bench"
        timer = Timer("step()", f"{setup}; step = bench.settled_step({name!r}, {way!r}, {quick})")
        with redirect_stderr(StringIO()):  # its progress
            counted[way] = timer.collect_callgrind(number=steps, collect_baseline=False).counts() / steps
    over = {way: count - counted["plain"] for way, count in counted.items()}
    rows = [[way, *(f"{part[way] / 1e6:.3f}" for part in (counted, over))] for way in COUNTED]
    table(f"{name}: millions of instructions", ("way", "a step", "over plain"), rows)
    print()
    for of, reference, aim in (
        ("lockstep", "DDP, view", 1.0 if name == "MLP" else None),
        ("floor", "DDP, view", None),
        ("lockstep", "floor", None),
        ("lockstep, one of two", "lockstep", AIM_OF_TWO),
        ("lockstep, no_sync", "lockstep", None),
    ):
        ratio(f"{name}: instructions over plain, {of} / {reference}", over[of], over[reference], aim)


def main() -> None:
    known = list(tasks(False))
    options = (
        ("--models", {"nargs": "+", "choices": known, "default": known}),
        ("--steps", {"type": int, "default": 3, "help": "steps a turn (default 3)"}),
        ("--instructions", {"action": "store_true", "help": "count instructions in place of time"}),
    )
    args = arguments(__doc__, 60, *options)
    chosen = {name: task for name, task in tasks(args.quick).items() if args.quick or name in args.models}
    if args.instructions:
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of Timer's "python"
        for name in chosen:
            compare_instructions(name, args.quick)
        return
    loopback()
    with world("gloo", 1):
        for name, task in chosen.items():
            compare(name, task, args.rounds, args.steps)
            bytecodes, calls = count_bytecodes(task)
            print(f"{name}: a settled step runs {bytecodes:,.0f} bytecodes of lockstep in {calls:,.0f} calls")


if __name__ == "__main__":
    main()
