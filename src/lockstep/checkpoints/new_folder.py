"""A checkpoint's folder while it is written: under a temporary name until all of it is on the disk."""

import os
from pathlib import Path

from lockstep.checkpoints.files import FileSystem, OpenFile
from lockstep.checkpoints.layout import MANIFEST, MARKER, seal
from lockstep.checkpoints.removal import discard


class NewFolder:
    """A checkpoint that counts only after :meth:`finish` has returned; every rank may write to it."""

    def __init__(self, files: FileSystem, path: Path) -> None:
        self.path = path
        """Its present path."""
        self.is_renamed = False
        """True if this rank has given it its final name."""
        self._files = files
        self._open = list[OpenFile]()

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
            folders = [self.path]
        self._files.sync(*self._open, *folders)
        self.close()

    def flush(self) -> None:
        """Hand all written bytes to the system, so that other processes see them."""
        for file in self._open:
            file.hand_over()

    def finish(self, folder: Path, manifest: bytes) -> None:
        """Make the complete checkpoint count, as ``folder``, or leave nothing."""
        try:
            self._commit(folder, manifest)
        except BaseException:
            self.discard()
            raise

    def _commit(self, folder: Path, manifest: bytes) -> None:
        """Rename the folder, then write the marker. Both may reach the disk in any order: the files are there
        already."""
        self._files.rename(self.path, folder)
        self.path = folder
        self.is_renamed = True
        marker = self.create(MARKER)
        marker.write(seal(manifest))
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
