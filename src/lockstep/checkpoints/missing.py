"""Finds out which files of a checkpoint ranks lack (PURE), and broadcasts each from the first rank that has it.

If the checkpoint is not on a host's disk, as on a new host, the files that are the same on all ranks are written to
that disk by the host's first rank, and form a checkpoint there. The own parts of a rank go to that rank alone.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep._base.run_all import RunAll
from lockstep.checkpoints.files import FileSystem, OpenFile, make_folders
from lockstep.checkpoints.folders import NewFolder
from lockstep.checkpoints.layout import UNFINISHED, Manifest, StoredFile, entry_file, rank_file
from lockstep.checkpoints.ranks import Ranks

PIECE = 1 << 22
"""Number of bytes of a file that are sent at once."""


def what_is_here(manifest: Manifest, absent: Sequence[bool], lacking: Sequence[bool]) -> dict[str, Any]:
    """Return, on the first rank of a host, which of the files that other ranks need are here.

    ``absent`` is True for ranks without this checkpoint, ``lacking`` for ranks without their own part.
    """
    wanted = {rank_file(rank) for rank, lacks in enumerate(lacking) if lacks}
    if any(absent):
        wanted |= {entry_file(name) for name in manifest.entries} | set(sorted(manifest.own_files)[:1])
    files = {name: asdict(manifest.files[name]) for name in sorted(wanted & manifest.files.keys())}
    return {"manifest": asdict(replace(manifest, files={})), "files": files}


@dataclass(frozen=True)
class Holdings:
    """PURE: the ranks that have files of a checkpoint, and those that need some; the same on all ranks."""

    manifest: Manifest
    """The manifest without its files."""
    files: dict[str, StoredFile]
    """Files that some rank has and another may need."""
    sources: dict[str, int]
    """For each of these files the first rank that has it."""
    lacking: list[bool]
    """True for each rank that cannot read all that it needs on its own host."""
    absent_first: list[int]
    """The first rank of each host on which there is no such checkpoint."""

    @classmethod
    def of(
        cls, told: Sequence[Mapping[str, Any] | None], absent_first: Sequence[int], lacking: Sequence[bool]
    ) -> "Holdings":
        """Combine the results of :func:`what_is_here` on the first rank of each host; None for other ranks.

        Values that are the same on all ranks may be stored in different bytes on each host. The lowest rank's file is
        sent.
        """
        files: dict[str, StoredFile] = {}
        sources: dict[str, int] = {}
        for rank, each in enumerate(told):
            for name, file in (each or {"files": {}})["files"].items():
                if name not in files:
                    files[name], sources[name] = StoredFile(**file), rank
        header = next(filter(None, told))["manifest"]
        return cls(Manifest(**header), files, sources, list(lacking), list(absent_first))

    @property
    def same_ranks(self) -> bool:
        """True if the same number of ranks has saved the checkpoint, so that each can have its own part again."""
        return self.manifest.world_size == len(self.lacking)

    @property
    def lost(self) -> list[int]:
        """The ranks whose own part is nowhere."""
        if not self.same_ranks:
            return []
        return [rank for rank, lacks in enumerate(self.lacking) if lacks and rank_file(rank) not in self.files]

    @property
    def shared(self) -> list[str]:
        """The files that a host needs: the files that are the same on all ranks, and one with some rank's own part."""
        entries = [entry_file(name) for name in self.manifest.entries]
        own = sorted(self.files.keys() - set(entries))[:1]
        return [name for name in entries if name in self.files] + own

    def needs(self, writers: Sequence[int], *, own: bool) -> list[set[str]]:
        """Return the files to send to each rank: to each of ``writers`` its host's files, with ``own`` also own
        parts."""
        own = own and self.same_ranks
        needs = [{rank_file(rank)} if own and lacks else set[str]() for rank, lacks in enumerate(self.lacking)]
        for rank in writers:
            needs[rank] |= set(self.shared)
        return needs


class Receiving:
    """The sending and receiving of missing files; every rank takes part."""

    def __init__(self, folder: Path, files: FileSystem, holdings: Holdings, ranks: Ranks, *, own: bool) -> None:
        self._folder = folder
        self._files = files
        self._holdings = holdings
        self._ranks = ranks
        self._wants_own = own and holdings.same_ranks
        self._new = NewFolder(files, folder.parent / (UNFINISHED + secrets.token_hex(8)))
        self._written: dict[str, OpenFile] = {}
        self._own_name = rank_file(ranks.rank)
        self._own = bytearray()
        self._writes = False

    @property
    def own(self) -> bytes | None:
        """The own part of this rank, if it was sent."""
        return bytes(self._own) or None

    def receive(self) -> list[str]:
        """Return for each rank why its received files cannot be used, "" if they can; their digests must be right.

        Raises :class:`CheckpointError` on every rank if one cannot read or write.
        """
        try:
            writers = self._begin()
            reasons = self._receive(writers)
        except BaseException:
            self._new.discard()
            raise
        if any(reasons) or self._ranks.rank not in writers:
            self._new.discard()
        return reasons

    def _begin(self) -> list[int]:
        """Begin a folder on each host without the checkpoint; return the ranks that write, one for each disk."""
        ranks, first = self._ranks, self._holdings.absent_first

        def begin() -> str:
            if ranks.rank not in first:
                return ""
            make_folders(self._files, self._folder.parent)
            self._files.make_folder(self._new.path)
            return self._new.path.name

        begun = ranks.together("resume()", begin)
        around = self._folder.parent
        seen = ranks.tell([bool(name) and (around / name).is_dir() for name in begun], "who sees which folder")
        return sorted({next(other for other in first if seen[rank][other]) for rank in first})

    def _receive(self, writers: Sequence[int]) -> list[str]:
        holdings, ranks = self._holdings, self._ranks
        self._writes = ranks.rank in writers
        needs = holdings.needs(writers, own=self._wants_own)
        for name in sorted(set().union(*needs)):
            ranks.together("resume()", partial(self._broadcast, name, name in needs[ranks.rank]))
        reasons = ranks.together("resume()", lambda: self._compare(needs[ranks.rank]))
        if any(reasons):
            return reasons
        files = {name: holdings.files[name] for name in holdings.shared}
        manifest = replace(holdings.manifest, files=files).to_bytes() if self._writes else None
        ranks.together("resume()", lambda: self._new.sync(manifest))
        ranks.together("resume()", lambda: self._new.finish(self._folder))
        return reasons

    def _broadcast(self, name: str, needed: bool) -> None:
        """Send a file to all ranks; write it if it is ``needed`` here.

        Raises the error of this rank, if any, at the end: until then the others wait for its pieces.
        """
        source, size = self._holdings.sources[name], self._holdings.files[name].bytes
        steps = RunAll()
        for begin in range(0, size, PIECE):
            data = bytes(min(PIECE, size - begin))
            with steps:
                if source == self._ranks.rank and not steps.problem:
                    data = self._read(name, begin, len(data))
            received = self._ranks.broadcast(data, source, "missing files of a checkpoint")
            with steps:
                if needed and not steps.problem:
                    self._write(name, received)
        steps.end()

    def _read(self, name: str, begin: int, length: int) -> bytes:
        with open(self._folder / name, "rb") as file:
            file.seek(begin)
            data = file.read(length)
        if len(data) != length:
            raise EOFError(f"{name} has become shorter while it was sent: {len(data)} bytes where there were {length}")
        return data

    def _write(self, name: str, data: bytes) -> None:
        if name == self._own_name and self._wants_own:
            self._own += data
        if not self._writes or name not in self._holdings.shared:
            return
        if name not in self._written:
            self._written[name] = self._new.create(name)
        self._written[name].write(data)

    def _compare(self, needed: set[str]) -> str:
        for name in sorted(needed):
            digests = {self._written[name].sha256} if name in self._written else set[str]()
            if name == self._own_name and self._wants_own:
                digests.add(hashlib.sha256(self._own).hexdigest())
            file = self._holdings.files[name]
            if digests != {file.sha256}:
                return f"{name} has come with another SHA-256 than rank {file.rank} on {file.host} has written"
        return ""
