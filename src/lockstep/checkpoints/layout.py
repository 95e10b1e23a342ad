"""The layout of a checkpoint on the disk, and the check that one is whole.

::

    path/
        save-000012-step-00000120/     one checkpoint; the number counts saves, so the highest is the newest
            model.pt, optimizer.pt     what is the same on all ranks: a file for each name, as torch.save writes it
            rank-0000.pt, ...          what each rank has of its own
            manifest.json              every file with its size, its SHA-256 and the rank that wrote it
            COMPLETE                   the SHA-256 of the manifest; written last
        .unfinished-...                what is being written, or was when the process ended

Where the hosts have disks of their own, each host has such a folder, with what is the same on all ranks and with what
its own ranks have; the checkpoints of one save have the same name and the same ``id``.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST, MARKER, UNFINISHED = "manifest.json", "COMPLETE", ".unfinished-"
FORMAT = 1
_SEAL = re.compile(rb"[0-9a-f]{64}\n")
_NAME = re.compile(r"save-(\d{6,})(?:-step-(\d{8,}))?")


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint, as it was written."""

    bytes: int
    sha256: str
    rank: int
    host: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    number: int
    """Which save of its folder this is: 1, 2, ..."""
    step: int | None
    id: str
    """Of this save, the same on all hosts."""
    run: str
    """Of the run that has saved it, and of those that went on from it."""
    world_size: int
    hosts: list[str]
    """The host of each rank."""
    entries: dict[str, str]
    """What was saved, by name, and of which kind: see ``state.py``."""
    files: dict[str, StoredFile]
    versions: dict[str, str] = field(default_factory=dict)
    """Of what has written it; for people."""
    time: str = ""
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """As it is written."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @property
    def own_files(self) -> set[str]:
        """The files with what each rank had of its own."""
        return self.files.keys() - {entry_file(name) for name in self.entries}

    @classmethod
    def parse(cls, data: bytes) -> "Manifest":
        """What :meth:`to_bytes` has written; raises ``ValueError`` if it is not."""
        fields: dict[str, Any] = json.loads(data)
        if fields.get("format") != FORMAT:
            raise ValueError(f"it has format {fields.get('format')}, this version of lockstep reads format {FORMAT}")
        files = {name: StoredFile(**each) for name, each in fields.pop("files").items()}
        return cls(**fields, files=files)


class Saved(NamedTuple):
    """A folder with a checkpoint's name; whether it is whole is another question."""

    number: int
    folder: Path

    @property
    def is_finished(self) -> bool:
        """Whether writing it was finished; whether all of it is still there is another question."""
        try:
            return _SEAL.fullmatch((self.folder / MARKER).read_bytes()) is not None
        except OSError:
            return False


class TornError(Exception):
    """Why a checkpoint is not whole."""


def folder_name(number: int, step: int | None) -> str:
    """The name of a checkpoint's folder."""
    return f"save-{number:06d}" + ("" if step is None else f"-step-{step:08d}")


def rank_file(rank: int) -> str:
    """The file with what a rank has of its own."""
    return f"rank-{rank:04d}.pt"


def entry_file(name: str) -> str:
    """The file with what is the same on all ranks."""
    return f"{name}.pt"


def list_saved(path: Path) -> list[Saved]:
    """The folders with the name of a checkpoint, oldest first; none if there is no ``path``."""
    try:
        names = [each.name for each in path.iterdir()]
    except FileNotFoundError:
        return []
    found = ((match, name) for name in names if (match := _NAME.fullmatch(name)))
    return sorted(Saved(int(match[1]), path / name) for match, name in found)


def seal(manifest: bytes) -> bytes:
    """What the marker says of a manifest."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint of which everything is there; contents of the other files are not looked at.

    Raises :class:`TornError` with the reason if something is missing, or has another size than it had.
    """
    try:
        marker = (folder / MARKER).read_bytes()
    except FileNotFoundError:
        raise TornError(f"writing it was not finished: it has no file {MARKER}") from None
    except OSError as error:
        raise TornError(f"{MARKER} cannot be read: {error}") from error
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise TornError(f"{MANIFEST} cannot be read: {error}") from error
    if not _SEAL.fullmatch(marker):
        raise TornError(f"writing it was not finished: its file {MARKER} is not whole")
    if marker != seal(data):
        raise TornError(f"{MANIFEST} is not what was written: its SHA-256 is another than {MARKER} says")
    try:
        manifest = Manifest.parse(data)
    except (ValueError, TypeError, KeyError) as error:
        raise TornError(f"{MANIFEST} cannot be understood: {error}") from error
    for name, file in manifest.files.items():
        _check_size(folder / name, file)
    return manifest


def _check_size(path: Path, file: StoredFile) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TornError(f"{path.name}, written by rank {file.rank} on {file.host}, is missing: {error}") from error
    if size != file.bytes:
        raise TornError(f"{path.name}, written by rank {file.rank} on {file.host}, has {size} bytes, not {file.bytes}")


def check_contents(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Raise :class:`TornError` if some file does not hold what was written to it; reads all of them."""
    for name, file in files.items():
        try:
            with open(folder / name, "rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise TornError(f"{name} cannot be read: {error}") from error
        if digest != file.sha256:
            raise TornError(f"{name} is not what rank {file.rank} on {file.host} wrote: it has another SHA-256")
