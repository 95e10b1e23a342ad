"""The ranks on this host, found through the memory that their processes share: there is no registry."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.errors import InspectionError
from lockstep.failures import proc
from lockstep.failures.progress import Snapshot, pages_of


@dataclass(frozen=True)
class RunningRank:
    """A rank on this host, and how far it had come when it was looked at."""

    pid: int
    """The number of its process here; inside of a container it may have another."""
    snapshot: Snapshot


def ranks_of_process(pid: int) -> list[RunningRank]:
    """The ranks of a process: one, as a rule. Raises :class:`InspectionError` if it has none, and says why."""
    _need_linux()
    if proc.status_of(pid).ended:
        raise InspectionError(f"process {pid} has ended; its parent has not noticed yet")
    ranks = list(_ranks(pid))
    if not ranks:
        raise InspectionError(f"process {pid} has no session of lockstep. {overview()}")
    return ranks


def ranks_of_run(name: str) -> list[RunningRank]:
    """The ranks of a run on this host, in order. Raises :class:`InspectionError` if there is none of that name."""
    found = [rank for rank in all_ranks() if rank.snapshot.run == name]
    if not found:
        raise InspectionError(f"this user has no run {name!r} on this host. {overview()}")
    return sorted(found, key=lambda rank: (rank.snapshot.rank, rank.pid))


def all_ranks() -> list[RunningRank]:
    """All ranks on this host that this user may look at."""
    _need_linux()
    found: list[RunningRank] = []
    for pid in proc.processes():
        with contextlib.suppress(InspectionError):  # another user's, or ended meanwhile
            found += _ranks(pid)
    return found


def overview() -> str:
    """One sentence: which runs there are, with their ranks' processes."""
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
        with page:
            yield RunningRank(pid, page.read())


def _need_linux() -> None:
    if not proc.available():
        raise InspectionError(f"processes can be looked into on Linux only; this is {sys.platform}")
