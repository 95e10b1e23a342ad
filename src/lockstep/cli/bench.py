"""``lockstep bench``: what a training step takes in PyTorch's way and in ours, on this host, with one's own model."""

import argparse
from pathlib import Path
from typing import Any

from lockstep.cli import printing
from lockstep.cli.drawing import Bar, lanes
from lockstep.cli.findings import usable_backends
from lockstep.cli.local_ranks import run_ranks
from lockstep.errors import OptionError

DESCRIPTION = """
Train a model in several ways that take turns in one run: alone (every rank for itself), with PyTorch's
DistributedDataParallel, and with lockstep, on each backend that suits the model's device. For each way: the time of a
step, what of it is communication that nothing hides (beyond the step alone), what the processor does beyond that, and
memory. With --one-process: alone, torch.nn.DataParallel (where there are accelerators) and lockstep.DataParallel.
"""
MODEL = """
your model, as MODULE:FUNCTION: a function without arguments that returns a module, and a function that gives the loss
of one batch when it is called with that module (default: a small encoder)
"""


def add_to(subparsers: Any) -> None:
    """Add the subcommand to a parser's."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="what a step of a model takes: alone, with PyTorch's wrapper, with ours", description=DESCRIPTION
    )
    parser.add_argument("--model", default="", help=MODEL)
    parser.add_argument(
        "--ranks", type=int, default=2, help="how many processes, or replicas of one (default: %(default)s)"
    )
    parser.add_argument("--one-process", action="store_true", help="all replicas in one process, on threads")
    parser.add_argument("--rounds", type=int, default=15, help="how many steps of each way (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON document, for machines")
    parser.add_argument("--picture", type=Path, help="write a picture of the times to this file, an SVG")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for all of it (default: %(default)s)")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    if options.ranks < 1 or options.rounds < 1:
        raise OptionError(f"--ranks {options.ranks} --rounds {options.rounds}: expected at least 1 of each")
    if options.picture is not None and options.picture.suffix != ".svg":
        raise OptionError(f"--picture {options.picture}: expected a name that ends with .svg")
    wanted = {
        "model": options.model,
        "backends": usable_backends(),
        "replicas": options.ranks if options.one_process else 0,
        "rounds": options.rounds,
        "warmup": 2,
        "timeout": options.timeout,
    }
    processes = 1 if options.one_process else options.ranks
    by_rank = run_ranks("lockstep.cli.training_times", wanted, processes, options.timeout)
    devices = by_rank[0]["devices"]
    ways = {name: _slowest([found["ways"][name] for found in by_rank]) for name in by_rank[0]["ways"]}
    for way in [] if options.one_process else ways.values():
        way["exposed_seconds"] = way["seconds"] - ways["alone"]["seconds"]
    if options.json:
        place = {"devices": devices} if options.one_process else {"ranks": options.ranks}
        printing.print_json({**place, "rounds": options.rounds, "ways": ways})
    elif options.one_process:
        _show_replicas(ways, devices)
    else:
        _show_ranks(ways, options.ranks)
    if options.picture is not None:
        options.picture.write_text(_picture(ways, devices, options.ranks))
    return 0


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def _show_ranks(ways: dict[str, dict[str, float]], ranks: int) -> None:
    alone = ways["alone"]
    reference = ways.get("DDP, nccl") or ways["DDP, gloo"]
    rows = [
        (
            name,
            printing.seconds(way["seconds"]),
            "" if way is alone else printing.seconds(way["exposed_seconds"]),
            "" if way is alone else printing.seconds(way["host_seconds"] - alone["host_seconds"]),
            printing.size(way["memory"]),
            "" if way is alone else f"{way['seconds'] / reference['seconds']:.2f}",
        )
        for name, way in ways.items()
    ]
    headers = ("way", "step", "exposed communication", "processor beyond alone", "memory", "step / DDP")
    printing.print_table(f"{ranks} ranks on this host; medians, of the slowest rank", headers, rows)
    print("\nDDP is PyTorch's DistributedDataParallel. Times vary with whatever else this host does, so that a little")
    print("communication may come out below zero: repeat them on a quiet host.")


def _show_replicas(ways: dict[str, dict[str, float]], devices: list[str]) -> None:
    reference = "torch.nn.DataParallel" if "torch.nn.DataParallel" in ways else "alone"
    rows = [
        (
            name,
            printing.seconds(way["seconds"]),
            printing.seconds(way["host_seconds"]),
            printing.size(way["memory"]),
            "" if name == reference else f"{way['seconds'] / ways[reference]['seconds']:.2f}",
        )
        for name, way in ways.items()
    ]
    headers = ("way", "step", "processor", "memory", f"step / {reference}")
    printing.print_table(f"{len(devices)} replicas in one process, on {', '.join(devices)}; medians", headers, rows)
    print("\nAlone is the whole batch on the first device, with all of PyTorch's threads where that is the CPU.")
    if reference == "alone":
        print("There is no row of torch.nn.DataParallel: without accelerators it calls the module once, as alone does.")


def _picture(ways: dict[str, dict[str, float]], devices: list[str], ranks: int) -> str:
    alone = ways["alone"]["seconds"] * 1e3
    rows = []
    for name, way in ways.items():
        took = way["seconds"] * 1e3
        computed = (
            took if devices else min(alone, took)
        )  # of replicas in one process, nothing is known of what they send
        bars = [Bar(0.0, computed, "compute", f"{computed:.2f} ms")]
        if took > computed:
            bars.append(Bar(computed, took, "communication", f"{took - computed:.2f} ms that nothing hides"))
        rows.append((f"{name}: {took:.3g} ms", bars))
    place = f"{len(devices)} replicas in one process" if devices else f"{ranks} ranks on one host"
    return lanes(f"A training step, {place}", rows, "milliseconds")
