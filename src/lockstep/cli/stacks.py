"""``lockstep stacks``: shows what the ranks of a run are doing, if the run seems to hang."""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from lockstep.errors import InspectionError
from lockstep.failures import proc
from lockstep.failures.program_lines import program_frame
from lockstep.failures.progress import Snapshot, pages_of
from lockstep.failures.stacks import Stacks, Thread, ask


@dataclass(frozen=True)
class RunningRank:
    """A rank on this host, and its progress when it was looked at."""

    pid: int
    """The number of its process here; inside a container it may have another."""
    snapshot: Snapshot


def run(options: argparse.Namespace) -> int:
    """Print the requested information; return 1 if a process could not show its stacks."""
    if options.target is None:
        print(overview())
        return 0
    ranks = ranks_of_process(int(options.target)) if options.target.isdecimal() else ranks_of_run(options.target)
    failed = 0
    for pid, of_process in groupby(ranks, key=lambda rank: rank.pid):
        failed += not _show(pid, list(of_process), options.seconds)
    return min(failed, 1)


def _show(pid: int, ranks: list[RunningRank], seconds: float) -> bool:
    for rank in ranks:
        print("\n".join(_heading(rank)))
    try:
        stacks = ask(pid, seconds)
    except InspectionError as error:
        sys.stdout.flush()
        print(f"  no stacks: {error}\n", file=sys.stderr, flush=True)
        return False
    print("\n".join(_stacks(stacks, {rank.snapshot.thread: rank.snapshot.rank for rank in ranks})) + "\n", flush=True)
    return True


def _heading(rank: RunningRank) -> Iterator[str]:
    seen, now = rank.snapshot, time.monotonic()
    yield f"run {seen.run}, rank {seen.rank} of {seen.world}, process {rank.pid}"
    yield f"  {seen.where}, for {_duration(now - seen.changed)}; running for {_duration(now - seen.started)}"
    if seen.waits_for:
        yield f"  waiting for {seen.waits_for}, for {_duration(now - seen.waits_since)}"


def _stacks(stacks: Stacks, training: dict[int, int]) -> Iterator[str]:
    """Yield the lines of the stacks, beginning with the threads that train."""
    for thread in sorted(stacks.threads, key=lambda thread: thread.ident not in training):
        what = f"rank {training[thread.ident]} trains here" if thread.ident in training else thread.name
        yield f"\n  thread {thread.ident:#x}{f' ({what})' if what else ''}, innermost frame last:"
        yield from _frames(thread)


def _frames(thread: Thread) -> Iterator[str]:
    """Yield the lines of a stack, with a mark at the innermost frame of the program's own code."""
    program_s_frame = program_frame(thread)
    for frame in thread.frames:
        yield from (f"{'>' if frame is program_s_frame else ' '} {line}" for line in str(frame).splitlines())
    if not thread.frames:
        yield "    no Python frame"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(max(seconds, 0.0), 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds:.0f} s" if minutes else f"{seconds:.1f} s"


# ------------------------------ the ranks on this host, found through the memory that their processes share


def ranks_of_process(pid: int) -> list[RunningRank]:
    """Return the ranks of a process, usually one; raise :class:`InspectionError` with the reason if it has none."""
    _need_linux()
    if proc.status_of(pid).ended:
        raise InspectionError(f"process {pid} has ended; its parent has not noticed yet")
    ranks = list(_ranks(pid))
    if not ranks:
        raise InspectionError(f"process {pid} has no session of lockstep. {overview()}")
    return ranks


def ranks_of_run(name: str) -> list[RunningRank]:
    """Return the ranks of a run on this host, in order; raise :class:`InspectionError` if there is no such run."""
    ranks = [rank for rank in all_ranks() if rank.snapshot.run == name]
    if not ranks:
        raise InspectionError(f"this user has no run {name!r} on this host. {overview()}")
    return sorted(ranks, key=lambda rank: (rank.snapshot.rank, rank.pid))


def all_ranks() -> list[RunningRank]:
    """Return all ranks on this host that this user may inspect."""
    _need_linux()
    ranks: list[RunningRank] = []
    for pid in proc.processes():
        with contextlib.suppress(InspectionError):  # another user's, or ended meanwhile
            ranks += _ranks(pid)
    return ranks


def overview() -> str:
    """Return one sentence with all runs and their ranks' processes."""
    runs: dict[str, list[RunningRank]] = {}
    for rank in all_ranks():
        runs.setdefault(rank.snapshot.run, []).append(rank)
    if not runs:
        return "No process on this host that this user may look at has a session"
    return "Runs on this host: " + "; ".join(f"{name} ({_processes(ranks)})" for name, ranks in sorted(runs.items()))


def _processes(ranks: list[RunningRank]) -> str:
    ranks = sorted(ranks, key=lambda rank: (rank.snapshot.rank, rank.pid))
    return ", ".join(f"rank {rank.snapshot.rank}: process {rank.pid}" for rank in ranks)


def _ranks(pid: int) -> Iterator[RunningRank]:
    for page in pages_of(pid):
        yield RunningRank(pid, page.read())


def _need_linux() -> None:
    if not proc.available():
        raise InspectionError(f"processes can be looked into on Linux only; this is {sys.platform}")
