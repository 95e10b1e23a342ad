"""``lockstep trace``: merges the profiler's traces of several ranks, and shows which rank waited for which."""

import argparse
import dataclasses
import gzip
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.cli import printing
from lockstep.errors import InspectionError

DESCRIPTION = """
Read the traces that the ranks of a run have written with torch.profiler (export_chrome_trace, one file for each rank).
Print how long each rank waited for communication, and for which rank the others waited. Write one trace of all ranks,
for https://ui.perfetto.dev, and a picture of the last step. The clocks of different hosts are aligned by the
ends of their collectives.
"""
_ROUND = re.compile(r"lockstep::finish \(round (\d+)\)")
_FIRST = re.compile(r"lockstep::collective \(all_reduce, bucket 1 of \d+, round (\d+)\)")

_PROCESSES = 1000
"""Number of process numbers for each rank in the merged trace."""
KINDS = {
    "compute": ("#9dbdf0", "backward, from the first full bucket on"),
    "waiting": ("#e9e2d6", "for the rank that came last"),
    "communication": ("#f2a65a", "of the last bucket"),
}
"""The bars of the picture: their colours and descriptions."""
INK = "#112233"


@dataclass(frozen=True)
class Span:
    """A span of time on one rank, in microseconds."""

    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """A trace that ``torch.profiler`` has written on one rank."""

    rank: int
    host: str
    document: dict[str, Any]
    rounds: dict[int, Span]
    """By number: from when this rank began to wait for the last bucket to when it had everything."""
    first: dict[int, float]
    """By number of a round: the time at which this rank sent the first bucket."""
    offset: float = 0.0
    """The difference to add to its times to get those of the lowest rank's clock."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events, as they are in the file."""
        found: list[dict[str, Any]] = self.document["traceEvents"]
        return found


@dataclass(frozen=True)
class Summary:
    """The results from the traces of a run, in seconds."""

    rounds: int
    """Number of rounds that every trace has."""
    exposed: dict[int, float]
    """By rank: time that it stood still for communication that nothing hid, including the others' lateness."""
    waited_for: dict[int, float]
    """By rank: time that the others stood still because this one was the last to come, added up over them."""
    last: dict[int, int]
    """By rank: number of rounds in which it was the last to come."""
    offsets: dict[int, float]
    """By rank: the difference that was added to its clock."""


def add_to(subparsers: Any) -> None:
    """Add the subcommand to a parser's."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace", help="show which ranks waited for which, from the profiler's traces", description=DESCRIPTION
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder with the traces: *.json or *.json.gz")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--output", type=Path, help="the folder for the results (default: lockstep/ in DIR)")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Print the numbers and write the files; raise :class:`InspectionError` if there are no traces."""
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


# --------------------------------------------------------------------------------- the traces, on one clock


def read_traces(folder: Path) -> list[Trace]:
    """Return all traces in a folder, by rank, on the clock of the lowest one."""
    files = sorted(each for each in folder.glob("*.json*") if each.suffix in (".json", ".gz"))
    with printing.ProgressLine("reading traces") as line:
        read = []
        for number, file in enumerate(files, 1):
            line.show(f"file {number} of {len(files)}")
            read.append(_read(file))
    traces = sorted((trace for trace in read if trace), key=lambda trace: trace.rank)
    if not traces:
        raise InspectionError(
            f"{folder}: {len(files)} JSON files, and no trace of torch.profiler among them; have each rank write one "
            "with profiler.export_chrome_trace"
        )
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise InspectionError(f"{folder}: several traces of rank {twice}; give the folder of one run, one file a rank")
    return [replace(trace, offset=_offset(trace, traces[0])) for trace in traces]


def _read(file: Path) -> Trace | None:
    try:
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        document = json.loads(text)
    except (OSError, ValueError) as error:
        raise InspectionError(f"{file} cannot be read as a trace: {error}") from error
    if not isinstance(document, dict) or "traceEvents" not in document or "lockstep_ranks" in document:
        return None
    base = float(document.get("baseTimeNanoseconds", 0)) / 1e3
    rank = (document.get("distributedInfo") or {}).get("rank")
    if rank is None:
        number = re.search(r"(\d+)(?!.*\d)", file.name.partition(".json")[0])
        rank = int(number[1]) if number else 0
    host = str(document.get("host_name") or (document.get("distributedInfo") or {}).get("host_name") or "")
    spans = [each for each in document["traceEvents"] if each.get("ph") == "X"]
    waits = sorted((Span(base + e["ts"], base + e["ts"] + e["dur"]) for e in spans if e["name"] == "lockstep::wait"),
                   key=lambda span: span.begin)  # fmt: skip
    finishes = {
        int(match[1]): Span(base + e["ts"], base + e["ts"] + e["dur"])
        for e in spans
        if (match := _ROUND.match(e["name"]))
    }
    first = {int(match[1]): base + e["ts"] for e in spans if (match := _FIRST.match(e["name"]))}
    return Trace(int(rank), host, document, dict(_waits_of_rounds(finishes, waits)), first)


def _waits_of_rounds(finishes: dict[int, Span], waits: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    for number, finish in finishes.items():
        inside = [wait for wait in waits if finish.begin <= wait.begin and wait.end <= finish.end]
        if inside:
            yield number, Span(inside[0].begin, inside[-1].end)


def _offset(trace: Trace, reference: Trace) -> float:
    """Return the offset of a trace's clock: 0 on the same host; between hosts, ranks have a round's last result at
    nearly the same time.

    It is the median over the rounds, since now and then a rank is not woken at once.
    """
    if trace.host and trace.host == reference.host:
        return 0.0
    both = trace.rounds.keys() & reference.rounds.keys()
    return statistics.median([reference.rounds[n].end - trace.rounds[n].end for n in both]) if both else 0.0


def summarize(traces: Sequence[Trace]) -> Summary:
    """Return which rank waited for which, and how long."""
    ranks = [trace.rank for trace in traces]
    waited_for, last = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0)
    exposed = {t.rank: sum(span.end - span.begin for span in t.rounds.values()) / 1e6 for t in traces}
    common = sorted(set.intersection(*(set(trace.rounds) for trace in traces)))
    for number in common if len(traces) > 1 else []:
        spans = {t.rank: Span(t.rounds[number].begin + t.offset, t.rounds[number].end + t.offset) for t in traces}
        late = max(ranks, key=lambda rank: spans[rank].begin)
        last[late] += 1
        came = spans[late].begin
        waited_for[late] += sum(max(0.0, min(span.end, came) - span.begin) for span in spans.values()) / 1e6
    return Summary(len(common), exposed, waited_for, last, {t.rank: t.offset / 1e6 for t in traces})


def merged(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return one document for Perfetto: each rank has processes of its own, all on one clock."""
    base = min(float(trace.document.get("baseTimeNanoseconds", 0)) for trace in traces)
    events = [event for trace in traces for event in _moved(trace, base)]
    return {"traceEvents": events, "baseTimeNanoseconds": int(base), "lockstep_ranks": [t.rank for t in traces]}


def _moved(trace: Trace, base: float) -> Iterator[dict[str, Any]]:
    shift = trace.offset + (float(trace.document.get("baseTimeNanoseconds", 0)) - base) / 1e3
    numbers: dict[Any, int] = {}
    for event in trace.events:
        process = numbers.setdefault(event.get("pid"), trace.rank * _PROCESSES + len(numbers))
        moved = {**event, "pid": process}
        if "ts" in moved:
            moved["ts"] = moved["ts"] + shift
        if "id" in moved:  # an arrow from forward to backward: belongs to this rank alone
            moved["id"] = f"{trace.rank}.{moved['id']}"
        if event.get("ph") == "M" and event.get("name") == "process_name":
            moved["args"] = {"name": f"rank {trace.rank}, {event.get('args', {}).get('name', '')}"}
        elif event.get("ph") == "M" and event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": process}
        yield moved


# ---------------------------------------------------------------------- the picture: SVG, which needs no library


def _picture(traces: Sequence[Trace]) -> str:
    """Draw the last round that all ranks have: backward with the first bucket under way, then waiting."""
    common = set.intersection(*(set(trace.rounds) & set(trace.first) for trace in traces))
    if not common:
        return _lanes("No round is in the traces of all ranks", [])
    number = max(common)
    begin = min(trace.first[number] + trace.offset for trace in traces)
    came = max(trace.rounds[number].begin + trace.offset for trace in traces)
    rows = []
    for trace in traces:
        first, wait = trace.first[number] + trace.offset, trace.rounds[number]
        times = [(each - begin) / 1e3 for each in (first, wait.begin + trace.offset, wait.end + trace.offset)]
        split = min(max((came - begin) / 1e3, times[1]), times[2])
        rows.append((f"rank {trace.rank}", (times[0], times[1], split, times[2])))
    return _lanes(f"Round {number}: backward from the first full bucket on, and what it waited for", rows)


def _lanes(title: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Draw rows of bars over one axis of milliseconds; each row has the ends of its bars, one for each kind."""
    left, width, height = 190, 720, 30
    end = max((ends[-1] for _, ends in rows), default=1.0) or 1.0
    scale, bottom = width / end, 70 + height * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {bottom + 50}" font-family="Helvetica, Arial, '
        f'sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="960" height="{bottom + 50}" fill="#fff"/>',
        f'<text x="20" y="26" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (kind, (colour, _)) in enumerate(KINDS.items()):
        x = left + 150 * number
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="49">{kind}</text>')
    for number, (name, ends) in enumerate(rows):
        y = 62 + number * height
        parts.append(f'<text x="{left - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        parts += [
            f'<rect x="{left + first * scale:.2f}" y="{y}" width="{max((last - first) * scale, 0.5):.2f}" '
            f'height="{height - 8}" fill="{colour}"><title>{label}</title></rect>'
            for (first, last), (colour, label) in zip(pairwise(ends), KINDS.values(), strict=True)
        ]
    parts.append(f'<line x1="{left}" y1="{bottom}" x2="{left + width}" y2="{bottom}" stroke="{INK}"/>')
    for part in range(6):
        at = left + width * part / 5
        parts.append(f'<line x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 4}" stroke="{INK}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{end * part / 5:.3g}</text>')
    parts.append(f'<text x="{left + width}" y="{bottom + 36}" text-anchor="end">milliseconds</text>')
    return "\n".join([*parts, "</svg>\n"])
