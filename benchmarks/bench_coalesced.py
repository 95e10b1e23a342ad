"""Claim: coalesced calls cost less than the same calls made tensor by tensor.

Measured in one run, one intra-op thread: 300 small tensors on 4 CPU replicas, ``reduce_add_coalesced`` against 300
times ``reduce_add``, ``broadcast_coalesced`` against 300 times ``broadcast``. On one device a broadcast is no copy, so
for the way through flat buffers that tensors take to another device its parts are called by hand: pack 300 tensors,
copy the flat buffer 4 times, unpack it 4 times, against 1,200 copies. Where there is a GPU, the calls are also measured
from the CPU to that GPU 4 times over and back (synchronised).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import Case, arguments, interleaved, ms, ratio, table

from lockstep._base.buckets import TensorSpec, plan_buckets
from lockstep.local import broadcast, broadcast_coalesced, reduce_add, reduce_add_coalesced
from lockstep.local.comm import pack, unpack


def through_buffers(tensors: list[torch.Tensor], replicas: int) -> list[list[torch.Tensor]]:
    plan = plan_buckets([TensorSpec.of(t) for t in tensors])
    copies: list[list[torch.Tensor]] = [[] for _ in range(replicas)]
    for bucket in plan.buckets:
        flat = pack(bucket, bucket.take(tensors))
        for copy in copies:
            copy += unpack(bucket, flat.clone())
    return copies


def calls(
    tensors: list[torch.Tensor], rows: list[list[torch.Tensor]], devices: list[str], home: str
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """For each comparison the coalesced call, and the calls for one tensor after the other."""
    return {
        "broadcast": (
            lambda: broadcast_coalesced(tensors, devices),
            lambda: [broadcast(t, devices) for t in tensors],
        ),
        "reduce_add": (
            lambda: reduce_add_coalesced(rows, home),
            lambda: [reduce_add(column, home) for column in zip(*rows, strict=True)],
        ),
    }


def synchronised(call: Callable[[], object]) -> Case:
    """The call until its work is done, on the GPU too."""
    if not torch.cuda.is_available():
        return Case(call)
    return Case(lambda: (call(), torch.cuda.synchronize()), before=torch.cuda.synchronize)


def main() -> None:
    args = arguments(__doc__, 30)
    number, replicas = 20 if args.quick else 300, 4
    results, lines = [], []
    for size in (16, 1024, 16384):
        tensors = [torch.randn(size) for _ in range(number)]
        rows = [[t.clone() for t in tensors] for _ in range(replicas)]
        compared = {f"{k}, CPU": v for k, v in calls(tensors, rows, ["cpu"] * replicas, "cpu").items()}
        compared["pack, copy, unpack, CPU"] = (
            lambda t=tensors: through_buffers(t, replicas),
            lambda t=tensors: [[x.clone() for x in t] for _ in range(replicas)],
        )
        if torch.cuda.is_available():
            there = [[t.cuda() for t in tensors] for _ in range(replicas)]
            to_gpu = calls(tensors, there, ["cuda:0"] * replicas, "cpu")
            compared |= {f"{k}, CPU and GPU": v for k, v in to_gpu.items()}
        for what, (together, apart) in compared.items():
            cases = {"together": synchronised(together), "apart": synchronised(apart)}
            medians = interleaved(cases, args.rounds)
            quotient = medians["together"] / medians["apart"]
            results.append([what, number, size, ms(medians["together"]), ms(medians["apart"]), f"{quotient:.3f}"])
            name = f"{what}, {number} tensors of {size} floats, coalesced / one by one"
            lines.append((name, medians["together"], medians["apart"], 1.0))
    table(
        f"{replicas} replicas",
        ("call", "tensors", "floats each", "coalesced ms", "one by one ms", "ratio"),
        results,
    )
    print()
    for line in lines:
        ratio(*line)


if __name__ == "__main__":
    main()
