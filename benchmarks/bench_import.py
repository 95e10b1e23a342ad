"""Claim: ``import lockstep`` takes at most 0.1 s of processor time more than ``import torch``.

Interpreters of their own import torch, then lockstep, then use names of lockstep, whose parts are imported when they
are first used. Printed are the medians of the processor time, user's and system's, of each of these.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from harness import arguments, ratio, table

STATEMENTS = ["import torch", "import lockstep", "lockstep.session", "lockstep.DataParallel", "lockstep.shares"]
PROGRAM = """
import json, sys, time

found = {}
for statement in json.loads(sys.argv[1]):
    start = time.process_time()
    exec(statement)
    found[statement] = time.process_time() - start
print(json.dumps(found))
"""


def measure() -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(STATEMENTS)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def main() -> None:
    args = arguments(__doc__, 10)
    rounds = [measure() for _ in range(args.rounds)]
    median = {each: statistics.median(found[each] for found in rounds) for each in STATEMENTS}
    rows = [[each, f"{median[each]:.3f}", f"{max(found[each] for found in rounds):.3f}"] for each in STATEMENTS]
    table(f"seconds of processor time, {args.rounds} rounds", ["", "median", "maximum"], rows)
    ratio("import lockstep after import torch / 0.1 s", median["import lockstep"], 0.1, 1.0)
    ratio("import torch and lockstep / import torch", sum(list(median.values())[:2]), median["import torch"])


if __name__ == "__main__":
    main()
