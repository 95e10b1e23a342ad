"""``lockstep doctor``: what this host has for training, how fast it communicates, and what to do about it."""

import argparse
import dataclasses
from typing import Any

from lockstep.cli import printing
from lockstep.cli.findings import Finding, look, usable_backends
from lockstep.cli.local_ranks import run_ranks
from lockstep.errors import CommunicationError

DESCRIPTION = """
Look at versions, devices, backends, shared memory, limits and threads, and time an all-reduce between ranks on this
host on each usable backend, beside one copy of as much memory. Each finding that wants something done says what. The
exit code is 1 if something will not work. Reports of issues ask for the output of `lockstep doctor --json`.
"""
SIZES = (4 << 10, 1 << 20, 64 << 20)


def add_to(subparsers: Any) -> None:
    """Add the subcommand to a parser's."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="what this host has for training, and how fast it communicates", description=DESCRIPTION
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, for machines")
    parser.add_argument("--ranks", type=int, default=2, help="between how many ranks to time (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often to time (default: %(default)s)")
    parser.add_argument("--no-timing", action="store_true", help="look only; start no processes")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the timing (default: %(default)s)")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Print the findings and the times; 1 if there is a problem."""
    findings = look()
    times: list[dict[str, Any]] = []
    if not options.no_timing:
        try:
            times = _times(options)
        except CommunicationError as error:
            findings.append(Finding("all-reduce", "failed", "problem", str(error)))
    if options.json:
        printing.print_json({"findings": [dataclasses.asdict(each) for each in findings], "all_reduce": times})
    else:
        _show(findings, times, options.ranks)
    return int(any(each.status == "problem" for each in findings))


def _times(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of the slowest rank, by backend and size."""
    wanted = {
        "backends": usable_backends(),
        "sizes": SIZES,
        "rounds": options.rounds,
        "timeout": options.timeout,
    }
    by_rank = run_ranks("lockstep.cli.all_reduce_times", wanted, options.ranks, options.timeout)
    rows = [max(rows, key=lambda row: row["seconds"]) for rows in zip(*by_rank, strict=True)]
    return [{**row, "copies": row["seconds"] / row["copy_seconds"]} for row in rows]


def _show(findings: list[Finding], times: list[dict[str, Any]], ranks: int) -> None:
    width = max(len(each.name) for each in findings)
    for each in findings:
        mark = {"ok": " ", "note": "?", "problem": "!"}[each.status]
        print(f"{mark} {each.name.ljust(width)}  {each.value}")
        if each.advice:
            print(f"  {' ' * width}  -> {each.advice}")
    if times:
        rows = [
            (
                f"{printing.size(row['bytes'])}, {row['backend']}",
                printing.seconds(row["seconds"]),
                f"{row['bytes'] / row['seconds'] / 1e9:.3g} GB/s",
                f"{row['copies']:.1f}",
            )
            for row in times
        ]
        headers = ("size, backend", "time", "bandwidth", "times one copy")
        printing.print_table(f"all-reduce between {ranks} ranks on this host", headers, rows)
