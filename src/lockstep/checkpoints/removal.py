"""Removes old and torn checkpoints, in such an order that each one with a marker is whole at each moment."""

import contextlib
import time
from pathlib import Path

from lockstep.checkpoints.files import FileSystem
from lockstep.checkpoints.layout import MARKER, UNFINISHED, list_saved
from lockstep.checkpoints.lineage import of_run

ABANDONED_AFTER = 3600.0
"""Seconds without a change after which an unfinished folder is taken to be left by a process that has ended."""


def remove_old(files: FileSystem, path: Path, run: str, newest: int, keep: int) -> None:
    """Remove the run's oldest checkpoints after save number ``newest``, except the newest ``keep``, and torn folders.

    Complete checkpoints of other runs stay.
    """
    saved = [each for each in list_saved(path) if each.number <= newest]
    whole = [each for each in saved if each.is_finished]
    mine = [each for each in whole if of_run(each, run)]
    torn = [each for each in saved if each not in whole]
    for each in (*torn, *mine[: max(0, len(mine) - keep)]):
        if each.number < newest:
            remove(files, each.folder)
    for folder in path.glob(UNFINISHED + "*"):
        if _last_change(folder) < time.time() - ABANDONED_AFTER:
            remove(files, folder)


def remove(files: FileSystem, folder: Path) -> None:
    """Remove a checkpoint, its marker first: if the process ends meanwhile, the rest counts as torn."""
    marker = folder / MARKER
    if marker.exists():
        files.remove(marker)
        files.sync_folder(folder)
    for each in sorted(folder.iterdir()):
        files.remove(each)
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
