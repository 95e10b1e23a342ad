"""``lockstep trace``: who waited for whom, from the profiler's traces of several ranks, and all of them in one file."""

import argparse
import dataclasses
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.cli import printing
from lockstep.cli.drawing import Bar, lanes
from lockstep.cli.traces import Summary, Trace, merged, read_traces, summarize
from lockstep.errors import InspectionError

DESCRIPTION = """
Read the traces that the ranks of a run have written with torch.profiler (export_chrome_trace, one file a rank) and say
for how long communication was hidden by nothing, and for which rank the others waited. Writes one trace of all ranks,
for https://ui.perfetto.dev, and one picture of the last step. Ranks of different hosts are put on one clock by the
ends of their collectives.
"""


def add_to(subparsers: Any) -> None:
    """Add the subcommand to a parser's."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace", help="who waited for whom, from the profiler's traces of several ranks", description=DESCRIPTION
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the traces are: *.json or *.json.gz")
    parser.add_argument("--json", action="store_true", help="one JSON document, for machines")
    parser.add_argument("--output", type=Path, help="where to write (default: lockstep/ in DIR)")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Print the numbers and write the files; raises :class:`InspectionError` where there are no traces."""
    traces = read_traces(options.folder)
    if not any(trace.rounds for trace in traces):
        raise InspectionError(
            f"{options.folder}: no trace has a whole round of a replicated module (lockstep::finish and what it waits "
            "for); record at least one step"
        )
    summary = summarize(traces)
    output: Path = options.output or options.folder / "lockstep"
    output.mkdir(parents=True, exist_ok=True)
    together, picture = output / "all_ranks.json.gz", output / "last_step.svg"
    together.write_bytes(gzip.compress(json.dumps(merged(traces)).encode(), 5))
    picture.write_text(_picture(traces))
    if options.json:
        printing.print_json({**dataclasses.asdict(summary), "files": [str(together), str(picture)]})
        return 0
    _show(summary)
    print(f"\nwrote {together} (open it in https://ui.perfetto.dev) and {picture}")
    return 0


def _show(summary: Summary) -> None:
    worst = max(summary.waited_for, key=lambda rank: summary.waited_for[rank])
    longest = max(summary.exposed.values())
    print(f"communication that nothing hid: up to {printing.seconds(longest)} a rank, in {summary.rounds} rounds")
    if summary.waited_for[worst]:
        print(f"the others waited longest for rank {worst}: {printing.seconds(summary.waited_for[worst])} in all")
    rows = [
        (
            f"rank {rank}",
            printing.seconds(summary.exposed[rank]),
            printing.seconds(summary.waited_for[rank]),
            f"{summary.last[rank]} of {summary.rounds}",
            printing.seconds(summary.offsets[rank]) if summary.offsets[rank] else "0",
        )
        for rank in summary.exposed
    ]
    headers = ("", "stood still", "others waited for it", "came last in", "clock moved by")
    printing.print_table("", headers, rows)


def _picture(traces: Sequence[Trace]) -> str:
    """The last round that all ranks have: backward with the first bucket on its way, then waiting."""
    common = set.intersection(*(set(trace.rounds) & set(trace.first) for trace in traces))
    if not common:
        return lanes("No round is in the traces of all ranks", [], "milliseconds")
    number = max(common)
    begin = min(trace.first[number] + trace.offset for trace in traces)
    came = max(trace.rounds[number].begin + trace.offset for trace in traces)
    rows = []
    for trace in traces:
        first, wait = trace.first[number] + trace.offset, trace.rounds[number]
        times = [(each - begin) / 1e3 for each in (first, wait.begin + trace.offset, wait.end + trace.offset)]
        split = min(max((came - begin) / 1e3, times[1]), times[2])
        rows.append(
            (
                f"rank {trace.rank}",
                [
                    Bar(times[0], times[1], "compute", "backward, from the first full bucket on"),
                    Bar(times[1], split, "waiting", "for the rank that came last"),
                    Bar(split, times[2], "communication", "of the last bucket"),
                ],
            )
        )
    return lanes(
        f"Round {number}: backward from the first full bucket on, and what it waited for", rows, "milliseconds"
    )
