"""Every call that changes the file system: few enough that a test can stop after each.

What is promised of it, and no more: bytes of a file are on the disk when :meth:`OpenFile.sync` has returned; names in
a folder (of files that were made, renamed or removed) when :meth:`FileSystem.sync_folder` has; a rename happens as a
whole or not at all. Everything else may be lost in a crash, or be there early, in any order.
"""

import contextlib
import hashlib
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

_PIECE, _AHEAD = 1 << 22, 8
"""Bytes that are digested at once, and how many such pieces may wait for it: copies, so not many."""


class _Digest:
    """A SHA-256 that is computed by a thread of its own, while what was added is written."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_AHEAD)
        self._thread: threading.Thread | None = None

    def add(self, data: Any) -> None:
        """Append bytes; they are copied, since they are the caller's again afterwards."""
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
        """The digest of all, or of what there is if it has failed; the thread ends."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None
        return self._sha256.hexdigest()


class OpenFile:
    """A new file, with the digest of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115  (closed by close())
        self._digest = _Digest()
        self.bytes = 0
        self.error: OSError | None = None
        """What :meth:`write` has raised, of which ``torch.save`` makes an error that does not say it."""

    def write(self, data: Any) -> int:
        """Append bytes."""
        self._digest.add(data)
        try:
            self.append(data)
        except OSError as error:
            self.error = error
            raise
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
        """Let go of the file; what :meth:`sync` has not put on the disk is lost if it cannot be written now."""
        self._digest.end()
        with contextlib.suppress(OSError):  # of what was held back, which is flushed once more
            self._file.close()

    @property
    def sha256(self) -> str:
        """The digest of what was written so far."""
        return self._digest.end()


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
