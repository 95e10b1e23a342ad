"""Folders in the host's memory, which outlives the ranks: the snapshots of runs.

::

    /dev/shm/lockstep-UID/         of this user alone
        NAME-DIGEST/               of one folder of checkpoints: its name, and a digest of its path and its place
            save-.../              snapshots, with the layout of checkpoints
            PATH                   the path
            lock                   locked by each process that takes snapshots there

The place is a random text in the folder of checkpoints itself, in the file ``.snapshots``: containers that share
``/dev/shm`` may have other disks at the same path. If the folder is removed or moved, its snapshots no longer count.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import warnings
from pathlib import Path
from typing import IO

from lockstep._base.user_folder import user_folder
from lockstep.checkpoints.files import FileSystem, OpenFile, make_folders
from lockstep.checkpoints.layout import MARKER, list_saved, read_regular
from lockstep.errors import CheckpointError

ROOT = Path("/dev/shm")
"""The file system in memory that all processes of a host share."""
PATH, LOCK, PLACE = "PATH", "lock", ".snapshots"


class MemoryFolder:
    """The folder in memory for one path of checkpoints, which may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, path: Path) -> "MemoryFolder | None":
        """Return the folder for a path of checkpoints; None if no snapshot was taken for what lies there now.

        Raises :class:`CheckpointError` if other users can write there.
        """
        if not has_memory():
            return None
        user, whole, place = _of_user(), path.resolve(), _place_of(path)
        digest = hashlib.sha256(f"{whole}\n{place}".encode()).hexdigest()[:12]
        return cls(user / f"{whole.name}-{digest}") if place else None

    @classmethod
    def make(cls, path: Path) -> "tuple[MemoryFolder, IO[bytes]]":
        """Make the folder for checkpoints in ``path``, which has a place; it is locked while the file is open.

        Removes the folders of checkpoints that lay in ``path`` before, and that no process uses.
        """
        made = cls.of(path)
        if made is None:
            raise CheckpointError(f"{path / PLACE} cannot be read, or is empty: remove it")
        for _ in range(3):  # another run may have ended, and have removed the one that was empty
            _of_user(make=True)
            with contextlib.suppress(FileNotFoundError):
                made.folder.mkdir(mode=0o700, exist_ok=True)
                break
        # Before others can see the path: they remove what is not locked.
        lock = open(made.folder / LOCK, "ab+")  # noqa: SIM115  (closed by the caller)
        fcntl.lockf(lock, fcntl.LOCK_SH)  # of this process alone: those that it forks do not hold it
        if not (made.folder / PATH).exists():
            new = made.folder / f"{PATH}.{secrets.token_hex(4)}"
            new.write_text(f"{path.resolve()}\n")
            os.replace(new, made.folder / PATH)
        for each in sorted(made.folder.parent.iterdir()):
            old = cls(each)
            if each != made.folder and old.path == made.path and not old.is_used:
                warnings.warn(
                    f"{path}: a snapshot in {each} is of checkpoints that are no longer there, and is removed",
                    stacklevel=2,
                )
                old.remove()
        return made, lock

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


def has_memory() -> bool:
    """Return True on a system with memory that outlives processes."""
    return ROOT.is_dir()


def mark(path: Path) -> None:
    """Give a folder of checkpoints a place, unless it has one; the first of all ranks does it."""
    make_folders(FileSystem(), path)
    with contextlib.suppress(FileExistsError), open(path / PLACE, "x") as file:
        file.write(f"{secrets.token_hex(8)}\n")


def _place_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return read_regular(path / PLACE).decode(errors="replace").strip()
    return ""


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
            f"{free / 2**20:,.1f} MiB: give it more (`docker run --shm-size`, an emptyDir with medium: Memory), remove "
            f"what other runs have left in {folder.parent}, or save to the disk, by run.save(wait=False)"
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
