"""A checkpoint's folder: written under a temporary name until all of it is on the disk; later removed, marker first."""

import contextlib
import os
import time
from pathlib import Path

from lockstep._base.run_all import RunAll
from lockstep.checkpoints.files import FileSystem, OpenFile
from lockstep.checkpoints.layout import MANIFEST, MARKER, UNFINISHED, list_saved, seal
from lockstep.checkpoints.lineage import of_run

ABANDONED_AFTER = 3600.0
"""Seconds without a change after which an unfinished folder is taken to be left by a process that has ended."""


class NewFolder:
    """A checkpoint that counts only after :meth:`finish` has returned; every rank may write to it."""

    def __init__(self, files: FileSystem, path: Path) -> None:
        self.path = path
        """Its present path."""
        self.is_renamed = False
        """True if this rank has given it its final name."""
        self._files = files
        self._open = list[OpenFile]()
        self._seal: bytes | None = None
        """The content of the marker, on the rank that has written the manifest."""

    def create(self, name: str) -> OpenFile:
        """Create a file in the folder; it stays open until it is on the disk."""
        file = self._files.create(self.path / name)
        self._open.append(file)
        return file

    def sync(self, manifest: bytes | None) -> None:
        """Sync this rank's files to the disk; with a manifest, also the manifest and the names of all ranks' files."""
        folders = []
        if manifest is not None:
            self.create(MANIFEST).write(manifest)
            self._seal = seal(manifest)
            folders = [self.path]
        if self._open:
            self._files.sync(*self._open, *folders)
        self.close()

    def finish(self, folder: Path) -> None:
        """On the rank that has written the manifest: make the complete checkpoint count, as ``folder``, or leave
        nothing."""
        if self._seal is None:
            return
        try:
            self._commit(folder, self._seal)
        except BaseException:
            self.discard()
            raise

    def _commit(self, folder: Path, marked_by: bytes) -> None:
        """Rename the folder, then write the marker. Both may reach the disk in any order: the files are there
        already."""
        self._files.rename(self.path, folder)
        self.path = folder
        self.is_renamed = True
        marker = self.create(MARKER)
        marker.write(marked_by)
        path = folder.parent.absolute()
        around = [path.parent] if os.access(path.parent, os.R_OK) else []  # it may have been made just before
        self._files.sync(marker, folder, path, *around)
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.pop().close()

    def discard(self) -> None:
        """Remove the folder, as far as that is possible."""
        self.close()
        discard(self._files, self.path)


def remove_old(files: FileSystem, path: Path, run: str, newest: int, keep: int) -> list[str]:
    """Remove the run's oldest checkpoints after save number ``newest``, except the newest ``keep``, and torn folders.

    Complete checkpoints of other runs stay. Returns why some could not be removed; that keeps no other one.
    """
    saved = [each for each in list_saved(path) if each.number <= newest]
    whole = [each for each in saved if each.is_finished]
    mine = [each for each in whole if of_run(each, run)]
    torn = [each for each in saved if each not in whole]
    problems = []
    for each in (*torn, *mine[: max(0, len(mine) - keep)]):
        if each.number < newest:
            try:
                remove(files, each.folder)
            except OSError as error:
                problems.append(str(error))
    return problems


def remove_unfinished(files: FileSystem, path: Path, run: str, now: Path) -> None:
    """Before a run's save writes to the folder ``now``, remove what processes that were killed have left of others.

    The saves of a run do not overlap, so that what it finds of its own is abandoned. So is everything where no
    checkpoint counts yet: a run that was killed in its first save is not resumed, and has another id when it starts
    again. What other runs write is removed if it has not changed for a long time.
    """
    first = not any(each.is_finished for each in list_saved(path))
    for folder in path.glob(UNFINISHED + "*"):
        own = first or folder.name.startswith(f"{UNFINISHED}{run}-")
        if folder != now and (own or _last_change(folder) < time.time() - ABANDONED_AFTER):
            discard(files, folder)


def remove(files: FileSystem, folder: Path) -> None:
    """Remove a checkpoint, its marker first: if the process ends meanwhile, the rest counts as torn.

    Of a link to a checkpoint elsewhere, the link is removed. A folder inside is nothing that was saved: it stays, and
    raises ``OSError`` when all else is removed.
    """
    if folder.is_symlink():
        files.remove(folder)
        return
    marker = folder / MARKER
    if marker.exists():
        files.remove(marker)
        files.sync_folder(folder)
    steps = RunAll()
    for each in sorted(folder.iterdir()):
        with steps, contextlib.suppress(FileNotFoundError):  # another rank removes the same folder
            files.remove(each)
    steps.end()
    files.remove_folder(folder)  # this need not reach the disk: without its marker the folder does not count


def discard(files: FileSystem, folder: Path) -> None:
    """Remove an unfinished folder, as far as that is possible."""
    with contextlib.suppress(OSError):
        remove(files, folder)


def _last_change(folder: Path) -> float:
    times = []
    with contextlib.suppress(OSError):
        times.append(folder.stat().st_mtime)
        times += [each.stat().st_mtime for each in folder.iterdir()]
    return max(times, default=time.time())
