"""``lockstep check``: trains a case in one process and in several, and says what differs and why."""

import argparse
from typing import Any

from lockstep.check import compare_with_one_process
from lockstep.check.dropout import DROPOUTS
from lockstep.check.job import PRECISIONS
from lockstep.check.sources import parse_source
from lockstep.check.wrapping import WRAPS
from lockstep.cli import printing
from lockstep.cli.parser import positive

DESCRIPTION = """
Compare N ranks with one process. CASE is a function that returns a lockstep.check.Case: a model, its batches, and a
loss. One process trains it on whole batches, the ranks train it wrapped, each on its rows, on the CPU of this host.
Gradients, weights and buffers are compared on every rank. The exit code is 0 if all is equal, 1 if not, and 2 if the
case cannot be checked.
"""


def add_to(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check", help="compare N ranks with one process", description=DESCRIPTION
    )
    parser.add_argument("case", metavar="CASE", help="FILE.py:FUNCTION, which returns a lockstep.check.Case")
    parser.add_argument("--ranks", type=positive, default=2, help="the number of ranks (default: %(default)s)")
    parser.add_argument(
        "--wrap",
        default="lockstep",
        help=f"what wraps the model: {', '.join(WRAPS)}, or FILE.py:FUNCTION(model) -> model (default: %(default)s)",
    )
    parser.add_argument(
        "--split", default="even", help="even, strided, or rows for each rank in proportion: 6,2 (default: %(default)s)"
    )
    parser.add_argument("--precision", default="float64", choices=list(PRECISIONS), help="(default: %(default)s)")
    parser.add_argument(
        "--dropout", default="off", choices=DROPOUTS, help="off, masks by row, or as drawn (default: %(default)s)"
    )
    parser.add_argument("--tolerance", type=float, help="the largest difference that is equal, relative to a norm")
    parser.add_argument("--backend", help="of the process group (default: shm for lockstep, and gloo)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for all (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; return 0 if all is equal, else 1."""
    wrap = options.wrap if options.wrap in WRAPS or ":" not in options.wrap else parse_source(options.wrap, "--wrap")
    with printing.ProgressLine("training in one process and in several"):
        report = compare_with_one_process(
            parse_source(options.case, "CASE"),
            options.ranks,
            wrap,
            split=options.split,
            precision=options.precision,
            dropout=options.dropout,
            tolerance=options.tolerance,
            backend=options.backend,
            timeout=options.timeout,
        )
    if options.json:
        printing.print_json(report.as_json())
    else:
        if report.comparisons:
            printing.print_table(report.title, ("", "largest difference", "differ"), report.rows())
        print(f"\n{report.conclusion()}")
    return int(not report.is_equal)
