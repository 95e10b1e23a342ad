"""Folders in the host's memory, which outlives the ranks: the snapshots of runs.

::

    /dev/shm/lockstep-UID/         of this user alone
        NAME-DIGEST/               of one path: that of the checkpoints, by its name and a digest of all of it
            save-.../              snapshots, with the layout of checkpoints
            PATH                   the path
            history.jsonl          when ranks began and failed
            lock                   locked by each process that takes snapshots there

A snapshot counts only together with the folder of checkpoints that it was made for, in which ``.run`` holds the id of
the run. If that folder is removed or moved, a new run begins.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lockstep._base.user_folder import user_folder
from lockstep.checkpoints.files import FileSystem, OpenFile
from lockstep.checkpoints.layout import MARKER, list_saved, read_regular
from lockstep.errors import CheckpointError

ROOT = Path("/dev/shm")
"""The file system in memory that all processes of a host share."""
PATH, LOCK, RUN = "PATH", "lock", ".run"


class MemoryFolder:
    """The folder in memory for one path of checkpoints, which may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, path: Path) -> "MemoryFolder | None":
        """Return the folder for a path of checkpoints; None on a system without ``/dev/shm``.

        Raises :class:`CheckpointError` if other users can write there.
        """
        if not ROOT.is_dir():
            return None
        whole = str(path.resolve())
        return cls(_of_user() / f"{path.resolve().name}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}")

    def make(self, path: Path) -> None:
        """Make the folder, for checkpoints in ``path``."""
        for _ in range(3):  # another run may have ended, and have removed the one that was empty
            _of_user(make=True)
            with contextlib.suppress(FileNotFoundError):
                self.folder.mkdir(mode=0o700, exist_ok=True)
                break
        if not (self.folder / PATH).exists():
            _write(self.folder / PATH, f"{path.resolve()}\n")

    @property
    def path(self) -> str:
        """The path of the checkpoints; empty if it was not recorded."""
        with contextlib.suppress(OSError):
            return (self.folder / PATH).read_text().rstrip("\n")
        return ""

    @property
    def size(self) -> int:
        """The size of the folder in bytes."""
        with contextlib.suppress(OSError):
            return sum(each.stat().st_blocks * 512 for each in self.folder.rglob("*"))
        return 0

    def lock(self) -> IO[bytes]:
        """Lock the folder while the returned file is open; the lock also ends with a killed process."""
        file = open(self.folder / LOCK, "ab+")  # noqa: SIM115  (closed by the caller)
        fcntl.lockf(file, fcntl.LOCK_SH)  # of this process alone: those that it forks do not hold it
        return file

    @property
    def is_used(self) -> bool:
        """True if a running process on this host takes snapshots in this folder."""
        try:
            with open(self.folder / LOCK, "rb+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def remove(self) -> None:
        """Remove the folder, if it exists; if this process ends meanwhile, the rest counts as torn."""
        for each in list_saved(self.folder):
            (each.folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # others are in use
            self.folder.parent.rmdir()


def all_folders() -> Iterator[MemoryFolder]:
    """Yield the folders of this user on this host."""
    if not ROOT.is_dir():
        return
    parent = _of_user()
    if parent.is_dir():
        yield from (MemoryFolder(each) for each in sorted(parent.iterdir()) if each.is_dir())


def run_of(path: Path) -> str:
    """Return the id of the run whose snapshots count for a folder of checkpoints; empty if there is none."""
    with contextlib.suppress(OSError):
        return read_regular(path / RUN).decode(errors="replace").strip()
    return ""


def note_run(path: Path, run: str) -> None:
    """Record the id of the run whose snapshots count for a folder of checkpoints."""
    if run_of(path) != run:
        _write(path / RUN, f"{run}\n")


def check_room(folder: Path, needed: int) -> None:
    """Raise :class:`CheckpointError` if the host has less free memory than a folder needs."""
    there = os.statvfs(folder)
    free, what = there.f_bavail * there.f_frsize, f"{ROOT} has"
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
        free, what = min((free, what), (left, "this host has"))
    with contextlib.suppress(OSError, ValueError):  # of a container
        group = Path("/sys/fs/cgroup")
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        free, what = min((free, what), (left, "the memory limit of this container leaves"))
    if free < needed:
        raise CheckpointError(
            f"snapshots need {needed / 2**20:,.1f} MiB of memory, for two copies of the state, and {what} "
            f"{free / 2**20:,.1f} MiB: give it more (`docker run --shm-size`, an emptyDir with medium: Memory), take "
            "away what other runs have left (`lockstep runs --clean`), or save to the disk, by run.save(wait=False)"
        )


class MemoryFiles(FileSystem):
    """Files in memory: no later call makes a written file safer, so nothing is synced."""

    def make_folder(self, path: Path) -> None:
        """Make a folder of this user alone in an existing one."""
        os.mkdir(path, 0o700)

    def sync_folder(self, path: Path) -> None:
        """Do nothing."""

    def sync(self, *what: OpenFile | Path) -> None:
        """Wait until all processes of the host see the contents of these files."""
        for each in what:
            if isinstance(each, OpenFile):
                each.hand_over()


def _of_user(*, make: bool = False) -> Path:
    try:
        return user_folder(ROOT, make=make)
    except PermissionError as error:
        raise CheckpointError(f"snapshots are neither taken nor found: {error}; remove it") from None


def _write(path: Path, text: str) -> None:
    """Write a small file in one piece, also if other processes do the same at that moment."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    new.write_text(text)
    os.replace(new, path)
