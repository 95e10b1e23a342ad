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
DistributedDataParallel, and with lockstep, on each usable backend. For each way: the time of a step, what of it is
communication that nothing hides (beyond the step alone), what the processor does beyond that, and memory.
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
    parser.add_argument("--ranks", type=int, default=2, help="how many processes (default: %(default)s)")
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
    backends = usable_backends()
    wanted = {
        "model": options.model,
        "ways": ["alone", *(f"{kind}, {backend}" for kind in ("DDP", "lockstep") for backend in backends)],
        "rounds": options.rounds,
        "warmup": 2,
        "timeout": options.timeout,
    }
    by_rank = run_ranks("lockstep.cli.training_times", wanted, options.ranks, options.timeout)
    ways = {name: _slowest([found[name] for found in by_rank]) for name in wanted["ways"]}
    for way in ways.values():
        way["exposed_seconds"] = way["seconds"] - ways["alone"]["seconds"]
    if options.json:
        printing.print_json({"ranks": options.ranks, "rounds": options.rounds, "ways": ways})
    else:
        _show(ways, options.ranks)
    if options.picture is not None:
        options.picture.write_text(_picture(ways, options.ranks))
    return 0


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def _show(ways: dict[str, dict[str, float]], ranks: int) -> None:
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


def _picture(ways: dict[str, dict[str, float]], ranks: int) -> str:
    alone = ways["alone"]["seconds"] * 1e3
    rows = []
    for name, way in ways.items():
        took = way["seconds"] * 1e3
        beyond = (
            [Bar(alone, took, "communication", f"{took - alone:.2f} ms that nothing hides")] if took > alone else []
        )
        rows.append((f"{name}: {took:.3g} ms", [Bar(0.0, min(alone, took), "compute", f"{took:.2f} ms"), *beyond]))
    return lanes(f"A training step, {ranks} ranks on one host", rows, "milliseconds")
