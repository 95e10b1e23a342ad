"""The file system as saving uses it: every change is one of a few calls here, so that a test can stop after each.

What is promised of it, and no more: bytes of a file are on the disk when :meth:`OpenFile.sync` has returned; names in
a folder (of files that were made, renamed or removed) when :meth:`FileSystem.sync_folder` has; a rename happens as a
whole or not at all. Everything else may be lost in a crash, or be there early, in any order.
"""

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

_LARGE = 1 << 18
"""Bytes from which a thread to compute their digest is worth its start."""


class OpenFile:
    """A new file, with the digest of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115  (closed by close())
        self._digest = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None
        """What :meth:`write` has raised, of which ``torch.save`` makes an error that does not say it."""

    def write(self, data: Any) -> int:
        """Append bytes; the digest of many is computed at the same time, by another thread."""
        digest = partial(self._digest.update, data)
        hashing = threading.Thread(target=digest) if len(data) >= _LARGE else None
        if hashing is not None:
            hashing.start()
        try:
            self.append(data)
        except OSError as error:
            self.error = error
            raise
        finally:
            if hashing is not None:
                hashing.join()  # the bytes are the caller's again afterwards
        if hashing is None:
            digest()
        self.bytes += len(data)
        return len(data)

    def append(self, data: Any) -> None:
        """Append bytes to the file itself."""
        self._file.write(data)

    def flush(self) -> None:
        """Nothing: :meth:`sync` comes at the end. ``torch.save`` expects the method."""

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        self._file.flush()
        _sync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @property
    def sha256(self) -> str:
        """The digest of what was written so far."""
        return self._digest.hexdigest()


class FileSystem:
    """What changes folders and files."""

    def create(self, path: Path) -> OpenFile:
        """A new file; raises ``FileExistsError`` if there is one of that name."""
        return OpenFile(path)

    def make_folder(self, path: Path) -> None:
        """A new folder, in one that is there."""
        os.mkdir(path)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in the folder are on the disk."""
        if os.name == "nt":  # which has no such call, and needs none
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _sync(descriptor)
        finally:
            os.close(descriptor)

    def sync(self, *what: OpenFile | Path) -> None:
        """Return when the bytes of these files and the names in these folders are on the disk.

        All are asked for at once: a file system with a journal answers them together, as fast as one of them.
        """
        calls = [each.sync if isinstance(each, OpenFile) else partial(self.sync_folder, each) for each in what]
        with ThreadPoolExecutor(min(len(calls), 16)) as threads:
            for answer in [threads.submit(call) for call in calls]:
                answer.result()

    def rename(self, path: Path, new: Path) -> None:
        """Another name in the same folder; raises ``OSError`` if a folder that is not empty has it."""
        os.rename(path, new)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder in which nothing is left."""
        os.rmdir(path)


def make_folders(files: FileSystem, path: Path) -> None:
    """The folder and those around it, as far as they are not there; names of new ones are on the disk."""
    path = path.absolute()
    missing = [each for each in (path, *path.parents) if not each.is_dir()]
    for each in reversed(missing):
        try:
            files.make_folder(each)
        except FileExistsError:  # another rank was faster
            if not each.is_dir():
                raise
        files.sync_folder(each.parent)


def _sync(descriptor: int) -> None:
    try:
        import fcntl

        full = fcntl.F_FULLFSYNC  # type: ignore[attr-defined]  # macOS, whose fsync stops at the disk's cache
    except (ImportError, AttributeError):
        os.fsync(descriptor)
    else:
        fcntl.fcntl(descriptor, full)
