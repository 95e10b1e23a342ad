"""``lockstep check``: trains a case in one process and in several, and says what differs and why."""

import argparse

from lockstep.check import compare_with_one_process
from lockstep.check.sources import parse_source
from lockstep.check.wrapping import WRAPS
from lockstep.cli import printing


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
