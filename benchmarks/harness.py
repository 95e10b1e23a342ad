"""What the benchmarks share: interleaved rounds, medians, tables, and the line that says on what they ran.

Every comparison comes from one run. The things compared take turns, one call each a round, so that a machine that
slows down for a while slows all of them down; what is printed is the median over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

Call = Callable[[], object]

# Of plain steps, which are timed beside replicated ones.
warnings.filterwarnings("ignore", message="rank .* each rank trains its own")


@dataclass(frozen=True)
class Case:
    """One of the things compared: what is timed, and what runs, untimed, before and after each time."""

    run: Call
    before: Call | None = None
    after: Call | None = None


def arguments(doc: str | None, rounds: int, *more: tuple[str, dict]) -> argparse.Namespace:
    """The command line: ``--rounds``, ``--quick`` and ``more`` options; prints what is measured, and on what."""
    text = (doc or "").strip()
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"rounds of each comparison (default {rounds}; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, measures nothing")
    for name, options in more:
        parser.add_argument(name, **options)
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else rounds)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a benchmark that wants more says so
    gc.collect()
    gc.freeze()  # what PyTorch's import left is not searched before every time
    print(text)
    print(f"\n{machine()}")
    return args


def machine() -> str:
    """Processor, PyTorch, threads and GPUs, in one line."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    parts = [
        f"machine: {_processor()}, {torch.get_num_threads()} intra-op thread(s) to start with",
        f"torch {torch.__version__}, Python {platform.python_version()}",
        *([f"CUDA {torch.version.cuda}, {', '.join(gpus)}"] if gpus else []),
    ]
    return "; ".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def interleaved(
    cases: Mapping[str, Case | Call],
    rounds: int,
    *,
    warmup: int = 1,
    inner: int = 1,
    settle: float = 0.0,
    lead: int = 0,
) -> dict[str, float]:
    """The median seconds of one run of each case, over ``rounds`` in which they take turns, ``inner`` runs a turn.

    ``settle`` seconds before each turn let the intra-op threads of the one before come to rest, which spin for a while;
    ``lead`` runs that are not timed then bring the threads and the caches of this one back.
    """
    whole = {name: case if isinstance(case, Case) else Case(case) for name, case in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in whole}
    with _frozen():
        for number in range(-warmup, rounds):
            names = list(whole) if number % 2 == 0 else list(whole)[::-1]
            for name in names:
                time.sleep(settle)
                took = _time(whole[name], inner, lead)
                if number >= 0:
                    seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextmanager
def _frozen() -> Iterator[None]:
    """Within, collecting garbage does not search what is there already, which takes longer than what is measured."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _time(case: Case, inner: int, lead: int) -> float:
    gc.collect()
    took = 0.0
    for number in range(-lead, inner):
        if case.before is not None:
            case.before()
        start = time.perf_counter()
        case.run()
        took += time.perf_counter() - start if number >= 0 else 0.0
        if case.after is not None:
            case.after()
    return took / inner


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: the first column to the left, all others to the right."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        padded = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]  # noqa: B905
        print("  ".join(padded).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:,.3f}" if seconds < 0.1 else f"{seconds * 1e3:,.1f}"


def mib(size: float) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:,.1f}"


def ratio(name: str, measured: float, reference: float, aim: float | None = None) -> float:
    """Print measured / reference, and whether it is at most ``aim``."""
    value = measured / reference
    verdict = "" if aim is None else f"  (aim: at most {aim:.3g}; {'met' if value <= aim else 'MISSED'})"
    print(f"ratio  {name}: {value:.4f}{verdict}")
    return value
