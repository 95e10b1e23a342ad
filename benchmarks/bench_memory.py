"""Claim, without an aim: two replicas need hardly more memory than one device, and hardly more than they must.

Measured: the peak of a training step (forward, loss, backward) of an encoder on the CPU, each way in a process of its
own (Linux): the process' largest resident size (``VmHWM``) beyond its resident size before the step, with the model
built, and a step of two rows behind it whose gradients are gone. What replicas keep from one step to the next is in the
growth from the built model to the state after that first step.

"must have" is counted, not measured: one set of gradients for each replica, plus the tensors that autograd saves for
half the batch, twice. It leaves out all temporaries, which one device has as well. The C library is told to give large
blocks back at once, so that the numbers are those of tensors and not of its free lists.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
from harness import arguments, mib, ratio, table
from torch import nn
from torch.nn import functional

from lockstep import DataParallel

WAYS = ("one device", "step", "gathered")


def encoder(quick: bool) -> nn.Module:
    width = 64 if quick else 256
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 1 if quick else 6, enable_nested_tensor=False)


def batch(rows: int, quick: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (rows, 32 if quick else 128, 64 if quick else 256)
    return torch.randn(shape), torch.randn(shape)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    # not ru_maxrss: a new process starts with that of the one that started it
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(way: str, rows: int, quick: bool) -> None:
    """In a process of its own: print the bytes that the set-up and the step add."""
    torch.set_num_threads(2)
    model = encoder(quick)
    parallel = DataParallel(model, ["cpu", "cpu"])

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        if way == "one device":
            functional.mse_loss(model(x), y).backward()
        elif way == "step":
            parallel.step(functional.mse_loss, x, y)
        else:
            functional.mse_loss(parallel(x), y).backward()

    x, y = batch(rows, quick)
    built = resident()
    step(x[:2], y[:2])
    model.zero_grad()
    ready = resident()
    step(x, y)
    print(ready - built, peak() - ready)


def needed(rows: int, quick: bool) -> tuple[int, int]:
    """Bytes of the gradients, and of what autograd saves in one forward of ``rows`` rows."""
    model = encoder(quick)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    x, y = batch(rows, quick)
    own |= {x.untyped_storage().data_ptr(), y.untyped_storage().data_ptr()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        functional.mse_loss(model(x), y)
    gradients = sum(p.nbytes for p in model.parameters())
    return gradients, sum(t.untyped_storage().nbytes() for t in saved.values())


def in_a_process(way: str, rows: int, quick: bool) -> tuple[int, int]:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--measure", way, *(["--quick"] if quick else [])]
    command += ["--rows", str(rows)]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split("\n")
    setup, step = lines[-2].split()
    return int(setup), int(step)


def main() -> None:
    options = (("--measure", {"choices": WAYS, "help": "for the processes it starts"}), ("--rows", {"type": int}))
    args = arguments(__doc__, 3, *options)
    rows = args.rows or (4 if args.quick else 32)
    if args.measure:
        measure(args.measure, rows, args.quick)
        return
    gradients, saved = needed(rows // 2, args.quick)
    whole, saved_whole = needed(rows, args.quick)
    must = {"one device": whole + saved_whole, "step": 2 * (gradients + saved), "gathered": 2 * (gradients + saved)}
    found: dict[str, list[tuple[int, int]]] = {way: [] for way in WAYS}
    for _ in range(1 if args.quick else args.rounds):
        for way in WAYS:
            found[way].append(in_a_process(way, rows, args.quick))
    medians = {
        way: [sorted(column)[len(column) // 2] for column in zip(*pairs, strict=True)] for way, pairs in found.items()
    }
    lines = [
        [way, mib(setup), mib(step), mib(must[way]), f"{step / must[way]:.3f}"]
        for way, (setup, step) in medians.items()
    ]
    table(
        f"Peak memory of a training step, {rows} rows, in MiB",
        ("way", "first step of 2 rows adds", "step adds", "must have", "step / must have"),
        lines,
    )
    print()
    for way in WAYS[1:]:
        ratio(f"{way}, two replicas / one device", medians[way][1], medians["one device"][1])
        ratio(f"{way}, measured / must have", medians[way][1], must[way])
    ratio("one device, measured / must have", medians["one device"][1], must["one device"])


if __name__ == "__main__":
    main()
