"""`lockstep trace`: who waited for whom, clocks of several hosts, the merged trace and the picture."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import lockstep
from lockstep.cli.main import main
from lockstep.cli.trace import KINDS, read_traces, summarize
from processes import run_processes


def event(name, begin, end):
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "pid": 100, "tid": 1}


def trace(rank, rounds, host="one", clock=0.0):
    """A trace as the profiler writes it; rounds are (first bucket sent, wait begins, wait ends), in microseconds."""
    events = [{"ph": "M", "name": "process_name", "pid": 100, "args": {"name": "python"}}]
    for number, (first, begin, end) in enumerate(rounds, 1):
        first, begin, end = first - clock, begin - clock, end - clock
        events += [
            event(f"lockstep::collective (all_reduce, bucket 1 of 2, round {number})", first, first + 1),
            event(f"lockstep::finish (round {number})", begin - 1, end + 1),
            event("lockstep::wait", begin, end),
        ]
    return {"traceEvents": events, "distributedInfo": {"rank": rank}, "host_name": host, "baseTimeNanoseconds": 0}


def write(folder, *traces):
    for number, each in enumerate(traces):
        (folder / f"trace{number}.json").write_text(json.dumps(each))
    return folder


EARLY = [(0.0, 100.0, 500.0), (1000.0, 1100.0, 1400.0)]
LATE = [(50.0, 400.0, 500.0), (1000.0, 1300.0, 1400.0)]


def test_the_rank_that_comes_last_is_who_the_others_waited_for(tmp_path):
    summary = summarize(read_traces(write(tmp_path, trace(0, EARLY), trace(1, LATE), trace(2, EARLY))))
    assert summary.rounds == 2
    assert summary.last == {0: 0, 1: 2, 2: 0}
    assert summary.waited_for == pytest.approx({0: 0.0, 1: 2 * (300e-6 + 200e-6), 2: 0.0})
    assert summary.exposed == pytest.approx({0: 700e-6, 1: 200e-6, 2: 700e-6})


def test_clocks_of_other_hosts_are_found_from_the_ends_of_rounds(tmp_path):
    other = trace(1, LATE, host="two", clock=7e6)
    summary = summarize(read_traces(write(tmp_path, trace(0, EARLY), other)))
    assert summary.offsets == pytest.approx({0: 0.0, 1: 7.0})
    assert summary.waited_for == pytest.approx({0: 0.0, 1: 500e-6})


def test_ranks_of_one_host_keep_their_clock(tmp_path):
    woken_late = [(first, begin, end + 90.0) for first, begin, end in LATE]
    traces = read_traces(write(tmp_path, trace(0, EARLY), trace(1, woken_late)))
    assert [each.offset for each in traces] == [0.0, 0.0]


def test_all_ranks_are_in_one_file_on_one_clock_and_are_told_apart(tmp_path, capsys):
    write(tmp_path, trace(0, EARLY), trace(1, LATE, host="two", clock=7e6))
    assert main(["trace", str(tmp_path), "--json"]) == 0
    together, picture = map(Path, json.loads(capsys.readouterr().out)["files"])
    events = json.loads(gzip.decompress(together.read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0, python", "rank 1, python"]
    ends = {names[e["pid"]]: e["ts"] + e["dur"] for e in events if e["name"] == "lockstep::wait"}
    assert ends == {"rank 0, python": pytest.approx(1400.0), "rank 1, python": pytest.approx(1400.0)}
    texts = [each.text for each in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 1", "waiting", "milliseconds"} <= set(texts)
    lanes = list(ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}title"))
    assert [each.text for each in lanes[:3]] == [label for _, label in KINDS.values()]


def test_its_own_output_is_not_taken_for_a_trace(tmp_path, capsys):
    write(tmp_path, trace(0, EARLY), trace(1, LATE))
    assert main(["trace", str(tmp_path), "--output", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    assert "the others waited longest for rank 1: 500 us in all" in first
    assert main(["trace", str(tmp_path), "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("traces", "told"),
    [
        ([], "no trace of torch.profiler"),
        ([{"something": "else"}], "no trace of torch.profiler"),
        ([trace(0, EARLY), trace(0, LATE)], "several traces of rank 0"),
        ([trace(0, []), trace(1, [])], "record at least one step"),
    ],
)
def test_a_folder_without_what_it_needs_is_told(tmp_path, traces, told, capsys):
    assert main(["trace", str(write(tmp_path, *traces))]) == 1
    assert told in capsys.readouterr().err


def test_a_file_that_is_cut_is_told_by_name(tmp_path, capsys):
    (tmp_path / "rank3.json").write_text('{"traceEvents": [')
    assert main(["trace", str(tmp_path)]) == 1
    assert "rank3.json cannot be read as a trace" in capsys.readouterr().err


def test_traces_that_the_profiler_has_written(tmp_path, capsys):
    run_processes(2, record, str(tmp_path), backend="gloo")
    assert main(["trace", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rounds"] == 2
    assert told["last"] == {"0": 0, "1": 2}
    assert told["waited_for"]["1"] > told["waited_for"]["0"] == 0


def record(rank, folder):
    model = lockstep.replicate(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    model(torch.ones(2, 4)).sum().backward()  # in the first round, ranks wait for each other to compare what they have
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            loss = model(torch.ones(2, 4)).sum()
            torch.distributed.barrier()
            if rank.rank == 1:
                time.sleep(0.3)  # what is measured: rank 1 is late
            loss.backward()
    profiler.export_chrome_trace(f"{folder}/rank{rank.rank}.json")
