"""Saves the state of a session's run, takes snapshots of it, and resumes from it."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lockstep._base.store import in_background
from lockstep.checkpoints.files import FileSystem
from lockstep.checkpoints.memory import MemoryFolder, has_memory
from lockstep.checkpoints.ranks import Ranks, RanksByStore
from lockstep.checkpoints.resuming import Resumed, Resuming
from lockstep.checkpoints.saving import Saving
from lockstep.checkpoints.snapshots import SnapshotPace, Snapshots
from lockstep.checkpoints.state import HostCopies
from lockstep.distributed.comm.groups import Group
from lockstep.errors import CommunicationError
from lockstep.failures.channel import FailureChannel

ANSWER_SECONDS = 10.0
"""Seconds in which the store at which the ranks have met has to answer a save behind the training; it may have been
killed since then."""


class PathState:
    """The checkpoints and snapshots that a session knows of one path."""

    def __init__(self) -> None:
        self.newest = 0
        """The highest number of a checkpoint or snapshot that this run has, or may have, anywhere."""
        self.on_disk = 0
        """The number of the newest checkpoint on the disk."""
        self.in_memory = 0
        """The number of the newest snapshot."""
        self.snapshots: Snapshots | None = None

    def __repr__(self) -> str:
        return f"PathState({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class RunState:
    """The checkpoints and snapshots of a session, on one rank.

    The ``channel`` is None if there is one rank. ``timeout`` is the number of seconds to wait for a rank behind the
    training.
    """

    def __init__(self, group: Group, channel: FailureChannel | None, timeout: float) -> None:
        self._group = group
        self._channel = channel
        self._timeout = timeout
        self._paths: dict[Path, PathState] = {}
        self._paces: dict[str, SnapshotPace] = {}
        self._in_flight: Future[Path] | None = None
        """The save that a thread writes behind the training, or its error."""
        self._copies = HostCopies()
        self._saves_behind = 0
        self._ended = False
        self._process = os.getpid()

    def __repr__(self) -> str:
        writes = "writes behind the training" if self._in_flight is not None else "writes nothing"
        return f"RunState({writes}, {self._paths})"

    def save(self, path: Path, keep: int, step: int, state: dict[str, Any], *, wait: bool, check: bool) -> Path:
        """See :meth:`Session.save`."""
        self._wait_for_save()
        known, ranks = self._of(path), Ranks(self._group)
        saving = Saving(path, FileSystem(), ranks, known.newest)
        saving.begin(state, keep, step, copies=None if wait else self._copies, check=check)
        if wait:
            saving.write(ranks)
        else:
            self._in_flight = in_background(self._writing_behind(saving, ranks))
        known.newest = known.on_disk = saving.number
        return saving.folder

    def _wait_for_save(self) -> None:
        """Wait until no save is in flight; raise the error of the last one, if it has failed, once. In a forked process
        none is."""
        written, self._in_flight = self._in_flight, None
        if written is not None and self._process == os.getpid():
            written.result()

    def _writing_behind(self, saving: Saving, ranks: Ranks) -> Callable[[], Path]:
        """Return what writes a save on another thread; counts the saves, alike on all ranks."""
        channel = self._channel
        if channel is None:
            return lambda: saving.write(ranks)
        self._saves_behind += 1
        store = channel.part_of_store(f"save {self._saves_behind}", min(self._timeout, ANSWER_SECONDS))

        def check() -> None:
            if self._ended:
                raise CommunicationError("the session has ended with an error")
            channel.check()

        return lambda: saving.write(RanksByStore(ranks, store, check, self._timeout))

    def snapshot_is_due(self, path: str | os.PathLike[str], every: int | None, at_most: float) -> bool:
        """Count a call of :meth:`Session.snapshot`; return True if it is to take a snapshot, on all ranks alike."""
        name = os.fspath(path)
        pace = self._paces.get(name)
        if pace is None:
            pace = self._paces[name] = self._snapshots(Path(path)).pace
        return pace.is_due(every, at_most)

    def snapshot(self, path: Path, every: int | None, at_most: float, step: int, state: dict[str, Any]) -> None:
        """Take a snapshot, which is due: see :meth:`Session.snapshot`."""
        known = self._of(path)
        known.newest = known.in_memory = self._snapshots(path).take(state, every, at_most, step, known.newest)

    def resume(self, path: Path, state: dict[str, Any]) -> Resumed | None:
        """See :meth:`Session.resume`."""
        self._wait_for_save()
        memory = MemoryFolder.of(path)
        resuming = Resuming(path, Ranks(self._group), None if memory is None else memory.folder)
        found = resuming.resume(state)
        known = self._of(path)
        if found is not None:
            # A host that was cut off may hold one more, with the next number.
            known.newest = max(known.newest, resuming.number + 1)
            if has_memory():
                self._snapshots(path).resumed(known.newest)
        if resuming.in_memory:
            known.in_memory = resuming.number
        else:
            known.on_disk = resuming.number
        return found

    def end(self, error: BaseException | None) -> None:
        """Wait for a save in flight, and raise its error if it has failed; after an error of the session, give it
        up."""
        self._ended = error is not None
        if error is None:
            self._wait_for_save()

    def close(self, *, remove: bool, unless_newer: bool = False) -> None:
        """Release the memory of snapshots; with ``unless_newer``, keep a snapshot that is newer than all
        checkpoints."""
        if self._process != os.getpid():
            return
        paths, self._paths, self._copies = self._paths, {}, HostCopies()
        for known in paths.values():
            if known.snapshots is not None:
                needed = unless_newer and known.in_memory > known.on_disk
                known.snapshots.close(remove=remove and not needed)

    def _of(self, path: Path) -> PathState:
        return self._paths.setdefault(path.resolve(), PathState())

    def _snapshots(self, path: Path) -> Snapshots:
        known = self._of(path)
        if known.snapshots is None:
            known.snapshots = Snapshots(path, Ranks(self._group))
        return known.snapshots
