"""Traces of several ranks: read, put on one clock, and what they say of communication and waiting."""

import gzip
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import InspectionError

_ROUND = re.compile(r"lockstep::finish \(round (\d+)\)")
_FIRST = re.compile(r"lockstep::collective \(all_reduce, bucket 1 of \d+, round (\d+)\)")

_PROCESSES = 1000
"""How many process numbers each rank has in the merged trace."""


@dataclass(frozen=True)
class Span:
    """What one rank did from one moment to another, in microseconds."""

    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """What ``torch.profiler`` has written on one rank."""

    rank: int
    host: str
    document: dict[str, Any]
    rounds: dict[int, Span]
    """By number: when this rank began to wait for the last bucket, and when it had everything."""
    first: dict[int, float]
    """By number of a round: when this rank sent the first bucket."""
    offset: float = 0.0
    """What has to be added to its times to have those of the lowest rank's clock."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events, as they are in the file."""
        found: list[dict[str, Any]] = self.document["traceEvents"]
        return found


def read_traces(folder: Path) -> list[Trace]:
    """All traces in a folder, by rank, on the clock of the lowest one."""
    files = sorted(each for each in folder.glob("*.json*") if each.suffix in (".json", ".gz"))
    traces = sorted((trace for file in files if (trace := _read(file))), key=lambda trace: trace.rank)
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
    """Ranks of one host have one clock. Between hosts: ranks have the last result of a round at the same time, nearly.

    The median over the rounds, since now and then a rank is not woken at once.
    """
    if trace.host and trace.host == reference.host:
        return 0.0
    both = trace.rounds.keys() & reference.rounds.keys()
    return statistics.median([reference.rounds[n].end - trace.rounds[n].end for n in both]) if both else 0.0


@dataclass(frozen=True)
class Summary:
    """What the traces of a run say, in seconds."""

    rounds: int
    """Rounds that every trace has."""
    exposed: dict[int, float]
    """By rank: how long it stood still for communication that nothing hid, the others' lateness included."""
    waited_for: dict[int, float]
    """By rank: how long the others stood still since this one was the last to come, added up over them."""
    last: dict[int, int]
    """By rank: in how many rounds it was the last to come."""
    offsets: dict[int, float]
    """By rank: what was added to its clock."""


def summarize(traces: Sequence[Trace]) -> Summary:
    """Who waited, for whom, and how long."""
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
    """One document for Perfetto: each rank has processes of its own, all on one clock."""
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
        if "id" in moved:  # of an arrow from forward to backward: of this rank alone
            moved["id"] = f"{trace.rank}.{moved['id']}"
        if event.get("ph") == "M" and event.get("name") == "process_name":
            moved["args"] = {"name": f"rank {trace.rank}, {event.get('args', {}).get('name', '')}"}
        elif event.get("ph") == "M" and event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": process}
        yield moved
