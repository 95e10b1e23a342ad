"""Every call that changes the file system: few enough that a test can stop after each.

Checkpoints rely on three properties. The bytes of a file are on the disk when :meth:`OpenFile.sync` has returned. The
names in a folder (of files that were made, renamed or removed) are on the disk when :meth:`FileSystem.sync_folder` has
returned. A rename happens completely or not at all. Anything else may be lost in a crash, or get to the disk early, in
any order.
"""

import contextlib
import errno
import hashlib
import os
import queue
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

from lockstep._base.store import all_in_background

_PIECE, _AHEAD = 1 << 22, 8
"""Bytes that are digested at once, and how many such pieces may be queued: they are copies, so not many."""


class _Digest:
    """A SHA-256 that a thread of its own computes while the data are written."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_AHEAD)
        self._thread: threading.Thread | None = None

    def add(self, data: Any) -> None:
        """Append bytes; they are copied, since the caller may change them afterwards."""
        if self._thread is None and len(data) < _PIECE // 16:
            self._sha256.update(data)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lockstep digests", daemon=True)
            self._thread.start()
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _PIECE):
            self._pieces.put(bytes(view[begin : begin + _PIECE]))

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._sha256.update(piece)

    def end(self) -> str:
        """End the thread, and return the digest of all data, or of the data so far if it has failed."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None
        return self._sha256.hexdigest()


class OpenFile:
    """A new file, with the digest of the data written to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "xb")  # noqa: SIM115  (closed by close())
        self._digest = _Digest()
        self.bytes = 0
        self.error: OSError | None = None
        """The error that :meth:`write` raised; ``torch.save`` hides it behind one of its own."""

    def write(self, data: Any) -> int:
        """Append bytes."""
        self._digest.add(data)
        try:
            with _naming(self.path):
                self.append(data)
        except OSError as error:
            self.error = error
            raise
        self.bytes += len(data)
        return len(data)

    def append(self, data: Any) -> None:
        """Append bytes to the file itself, without the digest."""
        self._file.write(data)

    def flush(self) -> None:
        """Do nothing: :meth:`sync` comes at the end. ``torch.save`` expects the method."""

    def hand_over(self) -> None:
        """Hand the written bytes to the system, so that other processes see them."""
        with _naming(self.path):
            self._file.flush()

    def sync(self) -> None:
        """Return when all written data are on the disk."""
        self.hand_over()
        with _naming(self.path):
            _sync(self._file.fileno())

    def close(self) -> None:
        """Close the file; data that were not synced are lost if they cannot be written now."""
        self._digest.end()
        with contextlib.suppress(OSError):  # closing flushes buffered data once more
            self._file.close()

    @property
    def sha256(self) -> str:
        """The digest of the data written so far."""
        return self._digest.end()


class FileSystem:
    """The calls that change folders and files."""

    def create(self, path: Path) -> OpenFile:
        """Create a file; raise ``FileExistsError`` if there is one of that name."""
        return OpenFile(path)

    def make_folder(self, path: Path) -> None:
        """Make a folder in an existing one."""
        os.mkdir(path)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in the folder are on the disk."""
        if os.name == "nt":  # Windows has no such call, and needs none
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with _naming(path):
                _sync(descriptor)
        finally:
            os.close(descriptor)

    def sync(self, *what: OpenFile | Path) -> None:
        """Return when the bytes of these files and the names in these folders are on the disk.

        All are requested at once, because a file system with a journal syncs them together, as fast as one of them.
        """
        calls = [each.sync if isinstance(each, OpenFile) else partial(self.sync_folder, each) for each in what]
        answers = all_in_background(calls, threads=16)
        wait(answers)
        for answer in answers:
            answer.result()

    def rename(self, path: Path, new: Path) -> None:
        """Rename a folder within its parent; raise ``OSError`` if the new name is a folder that is not empty."""
        os.rename(path, new)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


def make_folders(files: FileSystem, path: Path) -> None:
    """Make a folder and its parents, as far as they do not exist; names of new ones are on the disk."""
    path = path.absolute()
    missing = [each for each in (path, *path.parents) if not each.is_dir()]
    for each in reversed(missing):
        try:
            files.make_folder(each)
        except FileExistsError:  # another rank was faster
            if not each.is_dir():
                raise
        files.sync_folder(each.parent)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the path, and the room on a full disk, to errors of calls that know only a descriptor.

    A disk may say that it is full when bytes are written, when they are flushed, or not before they are synced.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(path.parent).free
                error.add_note(f"{free:,} bytes are free on that disk: make room, or save to another one")
        raise


def _sync(descriptor: int) -> None:
    try:
        import fcntl

        full = fcntl.F_FULLFSYNC  # type: ignore[attr-defined]  # macOS, whose fsync stops at the disk's cache
    except (ImportError, AttributeError):
        os.fsync(descriptor)
    else:
        fcntl.fcntl(descriptor, full)
