"""Snapshots: checkpoints in the memory of each host, taken often; only the newest one is kept."""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from torch.optim import Optimizer

from lockstep._base.tree import tensors_in
from lockstep.checkpoints.folders import discard
from lockstep.checkpoints.layout import UNFINISHED, list_saved
from lockstep.checkpoints.lineage import lineage_of
from lockstep.checkpoints.memory import MemoryFiles, MemoryFolder, check_room, has_memory, mark
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.saving import Saving
from lockstep.distributed.replication.in_sync import Values, compared_in_save
from lockstep.errors import CheckpointError, OptionError


class SnapshotPace:
    """Determines the call of the next snapshot from the time that snapshots have taken; the same on all ranks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls, self._next = 0, 2  # between the first two calls is a step
        self._at = 1
        self._begin = self._since = self._due = clock()
        self._spent = 0.0

    def is_due(self, every: int | None, at_most: float) -> bool:
        """Count a call, and return True if it is to take a snapshot. Most calls are not, and have to cost nothing."""
        if (every is not None and every < 1) or not 0 < at_most <= 1:
            raise OptionError(
                f"snapshot(every={every}, at_most={at_most}): every is a number of calls from 1 on, or None, and "
                "at_most a share of the time, above 0 and at most 1"
            )
        self._calls += 1
        if self._calls == 1:
            self._begin = self._since = self._clock()
        if self._calls < self._next if every is None else self._calls % every:
            return False
        self._due = self._clock()
        return True

    def times(self) -> tuple[float, float, float]:
        """Return, after a snapshot, the seconds that it took, those before it since the first call, and those of a
        step since the last snapshot."""
        step_seconds = (self._due - self._since) / max(1, self._calls - self._at)
        return self._clock() - self._due, self._due - self._begin, step_seconds

    def took(self, seconds: float, elapsed: float, step_seconds: float, at_most: float) -> None:
        """Record the :meth:`times` of a snapshot, on which the ranks have agreed.

        The next one is due when it and all before it are ``at_most`` of the time since the first call. Time without
        snapshots, such as an evaluation, does not make later ones more frequent.
        """
        self._spent += seconds
        wait = max(seconds, self._spent + seconds - at_most * (elapsed + seconds)) / at_most
        self._at = self._calls
        self._since = self._clock()
        self._next = self._calls + max(1, math.ceil(wait / max(step_seconds, 1e-6)))


class Snapshots:
    """The snapshots of one run, on one rank."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        if not has_memory():
            raise CheckpointError("run.snapshot() needs memory that outlives the ranks, /dev/shm: there is none here")
        MemoryFolder.of(path)  # raises if others can write there
        self._path = path
        self._ranks = ranks
        self.pace = SnapshotPace()
        self._memory: MemoryFolder | None = None
        self._lock: IO[bytes] | None = None
        self._last: int | None = None
        self._checked = False
        """True once there was room for a snapshot."""

    def take(self, state: Mapping[str, Any], every: int | None, at_most: float, step: int | None, above: int) -> int:
        """Take a snapshot, which is due, and return its number; every rank calls it."""
        if self._memory is None:
            self._ranks.together("snapshot()", lambda: mark(self._path))
            self._ranks.together("snapshot()", self._make)
        assert self._memory is not None
        saving = _Snapshot(self._path, self._memory, self._ranks, above, self._last)
        saving.save(state, 1, step, check=not self._checked)
        self._checked = True
        self._last = saving.number
        if every is None:
            times_of_ranks = self._ranks.tell(list(self.pace.times()), "what a snapshot has cost")
            # Whoever has come last has waited least for others, which they would have done in the next step anyway.
            seconds, elapsed, step_seconds = (min(each) for each in zip(*times_of_ranks, strict=True))
            self.pace.took(seconds, elapsed, step_seconds, at_most)
        return saving.number

    def _make(self) -> None:
        """Make the folder in memory; the path has its place by now, which all ranks of a disk read alike."""
        self._memory, self._lock = MemoryFolder.make(self._path)

    def resumed(self, number: int) -> None:
        """Record that this run continues from the state with this number, so that the snapshots up to it are its
        own."""
        memory = self._memory or MemoryFolder.of(self._path)
        there = [] if memory is None else list_saved(memory.folder)
        self._last = max([number, *(each.number for each in there)])

    def close(self, *, remove: bool) -> None:
        """Release the lock on the memory; with ``remove``, also remove the snapshots."""
        if remove and self._last is not None:
            memory = self._memory or MemoryFolder.of(self._path)
            if memory is not None:
                memory.remove()
        if self._lock is not None:
            self._lock.close()


class _Snapshot(Saving):
    """One snapshot, on one rank: a checkpoint in memory, of the run whose checkpoints on the disk are at ``path``."""

    def __init__(self, path: Path, memory: MemoryFolder, ranks: Ranks, above: int, last: int | None) -> None:
        super().__init__(memory.folder, MemoryFiles(), ranks, above)
        self._disk = path
        self._memory = memory
        self._last = last

    def _prepare(self, state: Mapping[str, Any]) -> dict[str, Any]:
        answer = super()._prepare(state)
        if self._checks:
            size = sum(each.nbytes for parts in self._parts.values() for each in tensors_in([parts.shared, parts.own]))
            check_room(self._path, 2 * size - self._memory.size)
        return answer

    def _compared(self) -> tuple[Values, list[Optimizer]]:
        """Return what the first snapshot compares: what is replicated over a part of the ranks, since one file has it
        for all."""
        return compared_in_save(self._alike, apart_from=self._ranks.size) if self._checks else ([], [])

    def _own_run(self) -> str:
        found = [each.number for each in list_saved(self._path) if each.is_finished]
        newest = max(found, default=0)
        if self._last is None and found:
            warnings.warn(
                f"the memory of this host holds a snapshot of an earlier run of {self._disk}, and this run has not "
                "resumed from it: those of this run take its place",
                stacklevel=6,
            )
        elif self._last is not None and newest > self._last:
            raise CheckpointError(
                f"another run takes snapshots for {self._disk}: {newest} is newer than all that this run has taken or "
                "resumed from. End one of them, or give each a folder"
            )
        return lineage_of(self._disk).run

    def _remember(self) -> None:
        """Do nothing: the lineage is that of the checkpoints on the disk."""

    def _clear(self) -> None:
        """Remove all other snapshots, since this one is whole on every rank."""
        for each in list_saved(self._path):
            if each.number != self.number:
                discard(self._files, each.folder)
        for folder in self._path.glob(UNFINISHED + "*"):
            discard(self._files, folder)
