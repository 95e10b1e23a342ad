"""Claim: calling 8 modules on the CPU, in turns, costs at most half of starting 8 new threads.

Measured, host time only, in one run: ``parallel_apply`` of 8 modules that do nothing, on the CPU, against starting and
joining 8 threads that do nothing, and against 8 new threads that do what those of
``torch.nn.parallel.parallel_apply`` do around the module's call (set grad mode, enter autocast, put the result under a
lock); PyTorch's own function refuses to run without an accelerator.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from harness import arguments, interleaved, ms, ratio, table

from lockstep.local import parallel_apply


def nothing(*args: object) -> None:
    """Do nothing."""


def new_threads(count: int) -> None:
    threads = [threading.Thread(target=nothing) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def like_torch(modules: Sequence[object], inputs: Sequence[tuple]) -> list[object]:
    grad, autocast, lock = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), threading.Lock()
    results: dict[int, object] = {}

    def work(index: int) -> None:
        torch.set_grad_enabled(grad)
        with torch.autocast("cpu", enabled=autocast):
            output = modules[index](*inputs[index])
        with lock:
            results[index] = output

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(modules))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(modules))]


def main() -> None:
    args = arguments(__doc__, 100)
    inner, rows, lines = 2 if args.quick else 20, [], []
    for count in (2, 4, 8):
        modules, inputs, devices = [nothing] * count, [()] * count, ["cpu"] * count
        cases = {
            "lockstep": lambda m=modules, i=inputs, d=devices: parallel_apply(m, i, devices=d),
            "new threads": lambda n=count: new_threads(n),
            "like torch": lambda m=modules, i=inputs: like_torch(m, i),
        }
        medians = interleaved(cases, args.rounds, inner=inner)
        own = medians["lockstep"]
        rows.append(
            [count, *map(ms, medians.values()), *(f"{own / medians[n]:.3f}" for n in ("new threads", "like torch"))]
        )
        aim = 0.5 if count == 8 else None
        lines.append((f"{count} empty modules, lockstep / new threads", own, medians["new threads"], aim))
        lines.append((f"{count} empty modules, lockstep / like torch", own, medians["like torch"], aim))
    table(
        "One call of modules that do nothing",
        ("modules", "lockstep ms", "new threads ms", "like torch ms", "lockstep / new", "lockstep / like torch"),
        rows,
    )
    print()
    for line in lines:
        ratio(*line)


if __name__ == "__main__":
    main()
