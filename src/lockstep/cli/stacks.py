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
from lockstep.failures.program_lines import is_of_program, place_of, program_frame
from lockstep.failures.progress import Snapshot, pages_of
from lockstep.failures.stacks import Stacks, Thread, ask


@dataclass(frozen=True)
class RunningRank:
    """A rank on this host, and its progress when it was looked at."""

    pid: int
    """The number of its process here; inside a container it may have another."""
    snapshot: Snapshot


@dataclass(frozen=True)
class _SeenProcess:
    """A process with the ranks in it, as it was looked at."""

    ranks: list[RunningRank]
    stacks: Stacks | None
    """None if it could not show them."""
    problem: str = ""
    """Why it could not."""

    @property
    def waits(self) -> bool:
        """True if it is known to wait for other ranks."""
        return self.stacks is not None and all(rank.snapshot.waits_for for rank in self.ranks)


def run(options: argparse.Namespace) -> int:
    """Print the requested information; return 1 if a process could not show its stacks."""
    if options.target is None:
        print(overview())
        return 0
    ranks = ranks_of_process(int(options.target)) if options.target.isdecimal() else ranks_of_run(options.target)
    seen = [_look(pid, list(of_process), options.seconds) for pid, of_process in groupby(ranks, lambda rank: rank.pid)]
    seen.sort(key=lambda each: each.waits)  # whom the others wait for comes first
    for each in seen:
        print("\n".join(_heading(each)))
    for each in seen:
        if each.stacks is not None:
            print("\n".join(_stacks(each.ranks, each.stacks, options.all)))
    if not options.all:
        print("\nAll threads, and the frames of libraries: --all", flush=True)
    return int(any(each.stacks is None for each in seen))


def _look(pid: int, ranks: list[RunningRank], seconds: float) -> _SeenProcess:
    try:
        return _SeenProcess(ranks, ask(pid, seconds))
    except InspectionError as error:
        return _SeenProcess(ranks, None, str(error))


def _heading(seen: _SeenProcess) -> Iterator[str]:
    """Yield a line for each rank: since when it is where."""
    for rank in seen.ranks:
        page, now = rank.snapshot, time.monotonic()
        since = page.waits_since if page.waits_for else page.changed
        waits = f", waits for other ranks in {page.waits_for}" if page.waits_for else ""
        thread = None if seen.stacks is None else seen.stacks.of(page.thread)
        at = place_of(thread) or seen.problem or "no line of the program"
        of_run = f"run {page.run}, rank {page.rank} of {page.world} (process {rank.pid})"
        yield f"{of_run}, {page.where}{waits}, for {_duration(now - since)}: {at}"


def _stacks(ranks: list[RunningRank], stacks: Stacks, everything: bool) -> Iterator[str]:
    """Yield the lines of the stacks, beginning with the threads that train: the program's own frames, or
    ``everything``."""
    training = {rank.snapshot.thread: rank.snapshot.rank for rank in ranks}
    for thread in sorted(stacks.threads, key=lambda thread: thread.ident not in training):
        trains = f"rank {training[thread.ident]}" if thread.ident in training else ""
        if everything:
            what = f"{trains} trains here" if trains else thread.name
            yield f"\nprocess {ranks[0].pid}, thread {thread.ident:#x}{what and f' ({what})'}, innermost frame last:"
            yield from _frames(thread)
        elif own := [frame for frame in thread.frames if is_of_program(frame.file)]:
            which = trains or f"thread {thread.ident:#x} of process {ranks[0].pid}"
            yield f"\n{which}, the program's own frames, innermost last:"
            yield from map(str, own)


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
