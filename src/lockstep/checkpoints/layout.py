"""The layout of a checkpoint on the disk, and the check that it is whole.

::

    path/
        save-000012-step-00000120/     one checkpoint; the number counts saves, so the highest is the newest
            model.pt, optimizer.pt     what is the same on all ranks: a file for each name, as torch.save writes it
            rank-0000.pt, ...          what each rank has of its own
            manifest.json              every file with its size, its SHA-256 and the rank that wrote it
            COMPLETE                   the SHA-256 of the manifest; written last
        .unfinished-RUN-ID             what is being written, or was when the process ended

If the hosts have disks of their own, each host has such a folder, with the files that are the same on all ranks and the
files of its own ranks. The folders of one save have the same name and the same ``id``.
"""

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST, MARKER, UNFINISHED = "manifest.json", "COMPLETE", ".unfinished-"
FORMAT = 1
OWN = ", of each rank"
"""The end of an entry's kind if each rank has its own."""
_SEAL = re.compile(rb"[0-9a-f]{64}\n")
_NAME = re.compile(r"save-(\d{6,})(?:-step-(\d{8,}))?")
_RANK_FILE = re.compile(r"rank-[0-9]{4,}\.pt")
_ID = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint, as it was written."""

    bytes: int
    sha256: str
    rank: int
    host: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint."""

    number: int
    """The number of this save in its folder: 1, 2, ..."""
    step: int | None
    id: str
    """The id of this save, the same on all hosts."""
    run: str
    """The id of the run that saved it, which runs that continue from it keep."""
    world_size: int
    hosts: list[str]
    """The host of each rank."""
    entries: dict[str, str]
    """The kind of each saved entry, by name: see ``state.py``."""
    files: dict[str, StoredFile]
    versions: dict[str, str] = field(default_factory=dict)
    """The versions of the software that wrote it, for people."""
    time: str = ""
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """Return the manifest as it is written."""
        self.check()
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @property
    def shared_files(self) -> set[str]:
        """The files with the state that is the same on all ranks."""
        return {entry_file(name) for name, kind in self.entries.items() if not kind.endswith(OWN)}

    @property
    def own_files(self) -> set[str]:
        """The files with each rank's own state."""
        return self.files.keys() - self.shared_files

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        """Parse the bytes that :meth:`to_bytes` returned; raise ``ValueError`` for anything else."""
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields.get("format") != FORMAT:
                raise ValueError(f"it has format {fields.get('format')}, this version of lockstep reads {FORMAT}")
            files = {name: StoredFile(**each) for name, each in fields.pop("files").items()}
            made = cls(**fields, files=files)
            made.check()
        except (AttributeError, TypeError, KeyError, RecursionError) as error:  # JSON of another form
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return made

    def check(self) -> None:
        """Raise ``ValueError`` unless all fields are of their types, and all names are such as ``save()`` gives.

        Names become paths, and somebody else may have written the manifest.
        """
        numbers: list[Any] = [self.number, 0 if self.step is None else self.step, self.world_size]
        texts: list[Any] = [self.time, *self.hosts, *self.entries.values(), *self.versions.values()]
        for file in self.files.values():
            numbers += [file.bytes, file.rank]
            texts += [file.sha256, file.host]
        wrong = [each for each in numbers if type(each) is not int or each < 0]
        wrong += [each for each in texts if not isinstance(each, str)]
        wrong += [] if isinstance(self.hosts, list) and len(self.hosts) == self.world_size else [self.hosts]
        if wrong:
            raise ValueError(f"{wrong[0]!r} stands where there is a number, a text or a host for each rank")
        wrong = [each for each in (self.id, self.run) if not _ID.fullmatch(each)]
        wrong += [name for name in self.entries if not name.isidentifier()]
        wrong += [name for name in self.own_files if not _RANK_FILE.fullmatch(name)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is none of its names: an identifier, identifier.pt, rank-NNNN.pt, or an id")
        if lacking := self.shared_files - self.files.keys():
            raise ValueError(f"it says nothing of {min(lacking)}")


class Saved(NamedTuple):
    """A folder with a checkpoint's name; it may or may not be complete."""

    number: int
    folder: Path

    @property
    def is_finished(self) -> bool:
        """True if the checkpoint was completely written; parts of it may have been removed since."""
        try:
            return _SEAL.fullmatch(read_regular(self.folder / MARKER)) is not None
        except OSError:
            return False


class TornError(Exception):
    """The reason why a checkpoint is not complete."""


def folder_name(number: int, step: int | None) -> str:
    """Return the name of a checkpoint's folder."""
    return f"save-{number:06d}" + ("" if step is None else f"-step-{step:08d}")


def unfinished_name(run: str, id: str) -> str:
    """Return the name of the folder while a run's save ``id`` writes to it; raise ``ValueError`` if one is no id."""
    if not _ID.fullmatch(run) or not _ID.fullmatch(id):
        raise ValueError(f"{run!r} or {id!r} is no id")
    return f"{UNFINISHED}{run}-{id}"


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's own state."""
    return f"rank-{rank:04d}.pt"


def entry_file(name: str) -> str:
    """Return the name of the file with an entry's state that is the same on all ranks."""
    return f"{name}.pt"


def list_saved(path: Path) -> list[Saved]:
    """Return the folders with the name of a checkpoint, oldest first; none if ``path`` does not exist."""
    try:
        names = [each.name for each in path.iterdir()]
    except FileNotFoundError:
        return []
    found = ((match, name) for name in names if (match := _NAME.fullmatch(name)))
    return sorted(Saved(int(match[1]), path / name) for match, name in found)


def seal(manifest: bytes) -> bytes:
    """Return the content of the marker for a manifest."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files all exist; does not read the contents of the others.

    Raises :class:`TornError` with the reason if a file is missing, or has another size than when it was written.
    """
    try:
        marker = read_regular(folder / MARKER)
    except FileNotFoundError:
        raise TornError(f"writing it was not finished: it has no file {MARKER}") from None
    except OSError as error:
        raise TornError(f"{MARKER} cannot be read: {error}") from error
    try:
        data = read_regular(folder / MANIFEST)
    except OSError as error:
        raise TornError(f"{MANIFEST} cannot be read: {error}") from error
    if not _SEAL.fullmatch(marker):
        raise TornError(f"writing it was not finished: its file {MARKER} is not whole")
    if marker != seal(data):
        raise TornError(f"{MANIFEST} is not what was written: its SHA-256 is another than {MARKER} says")
    try:
        manifest = Manifest.parse(data)
    except ValueError as error:
        raise TornError(f"{MANIFEST} cannot be understood: {error}") from error
    for name, file in manifest.files.items():
        _check_size(folder / name, file)
    return manifest


def size_of_regular(path: Path) -> int:
    """Return the size of a file; raise ``OSError`` if it is none, but a link or a pipe for example.

    Somebody else may have made the checkpoint: a link leads out of its folder, and a pipe has no end.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} is a link, or no regular file: put the file itself there")
    return found.st_size


def read_regular(path: Path) -> bytes:
    """Return the content of a file; raise ``OSError`` as :func:`size_of_regular`."""
    size_of_regular(path)
    return path.read_bytes()


def _check_size(path: Path, file: StoredFile) -> None:
    try:
        size = size_of_regular(path)
    except OSError as error:
        raise TornError(f"{path.name}, written by rank {file.rank} on {file.host}, is missing: {error}") from error
    if size != file.bytes:
        raise TornError(f"{path.name}, written by rank {file.rank} on {file.host}, has {size} bytes, not {file.bytes}")


def check_contents(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Raise :class:`TornError` if a file does not hold the data that were written to it; reads all of them."""
    for name, file in files.items():
        try:
            with open(folder / name, "rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise TornError(f"{name} cannot be read: {error}") from error
        if digest != file.sha256:
            raise TornError(f"{name} is not what rank {file.rank} on {file.host} wrote: it has another SHA-256")
