"""Which rank did the others wait for? Reads the traces of one host that its ranks have written with torch.profiler."""

import argparse
import json
import re
from pathlib import Path


def waited_for(folder: Path) -> dict[str, float]:
    """Seconds, by file, that the other ranks stood still because this one came last."""
    begins: dict[int, dict[str, float]] = {}
    """By round and file: when this rank had ended its backward, and began to wait for gradients."""
    for file in sorted(folder.glob("*.json")):
        trace = json.loads(file.read_text())
        base = trace.get("baseTimeNanoseconds", 0) / 1e3  # all times are in microseconds
        spans = [(each["name"], base + each["ts"], each["dur"]) for each in trace["traceEvents"] if each["ph"] == "X"]
        waits = sorted(start for name, start, _ in spans if name == "lockstep::wait")
        for name, start, seconds in spans:
            if match := re.fullmatch(r"lockstep::finish \(round (\d+)\)", name):
                inside = [wait for wait in waits if start <= wait <= start + seconds]
                begins.setdefault(int(match[1]), {})[file.name] = min(inside, default=start)
    files = {file for each in begins.values() for file in each}
    waited = dict.fromkeys(sorted(files), 0.0)
    for each in begins.values():
        if each.keys() == files:  # a round that all ranks have recorded
            last = max(each, key=lambda file: each[file])
            waited[last] += sum(each[last] - begin for begin in each.values()) / 1e6
    return waited


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with one trace for each rank, from export_chrome_trace")
    for file, seconds in waited_for(parser.parse_args().folder).items():
        print(f"{file}: the others waited {seconds:.3f} s for this rank")
