"""Finds out which parts of a checkpoint ranks lack (PURE), and sends them from ranks that have them.

If the checkpoint is not on a host's disk, as on a new host, the files that are the same on all ranks are written to
that disk by the host's first rank, and form a checkpoint there. The own parts of a rank go to that rank alone.
"""

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoints.files import FileSystem, OpenFile, make_folders
from lockstep.checkpoints.folders import NewFolder
from lockstep.checkpoints.layout import UNFINISHED, Manifest, StoredFile, entry_file, rank_file
from lockstep.checkpoints.ranks import Ranks

PIECE = 1 << 22
"""Number of bytes that a rank sends, or receives, at once."""


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
    has: list[set[str]]
    """The files that each rank has; only the first rank of each host lists the host's files."""
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
        for each in filter(None, told):
            files |= {name: StoredFile(**file) for name, file in each["files"].items() if name not in files}
        has = [
            {name for name, file in (each or {"files": {}})["files"].items() if StoredFile(**file) == files[name]}
            for each in told
        ]
        header = next(filter(None, told))["manifest"]
        return cls(Manifest(**header), files, has, list(lacking), list(absent_first))

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
        sizes = {name: file.bytes for name, file in holdings.files.items()}
        move(plan_waves(holdings.has, needs), sizes, ranks, "resume()", self._read, self._write)
        reasons = ranks.together("resume()", lambda: self._compare(needs[ranks.rank]))
        if any(reasons):
            return reasons
        files = {name: holdings.files[name] for name in holdings.shared}
        manifest = replace(holdings.manifest, files=files).to_bytes() if self._writes else None
        ranks.together("resume()", lambda: self._new.sync(manifest))
        ranks.together("resume()", lambda: self._new.finish(self._folder))
        return reasons

    def _read(self, item: str, begin: int, length: int) -> bytes:
        if item == self._own_name and self._own:
            return bytes(self._own[begin : begin + length])
        if begin == 0 and item in self._written:  # it was received here before
            self._written[item].hand_over()
        folder = self._new.path if item in self._written else self._folder
        with open(folder / item, "rb") as file:
            file.seek(begin)
            return file.read(length)

    def _write(self, item: str, data: bytes) -> None:
        if item == self._own_name and self._wants_own:
            self._own += data
        if not self._writes or item not in self._holdings.shared:
            return
        if item not in self._written:
            self._written[item] = self._new.create(item)
        self._written[item].write(data)

    def _compare(self, needed: set[str]) -> str:
        for name in sorted(needed):
            digests = {self._written[name].sha256} if name in self._written else set[str]()
            if name == self._own_name and self._wants_own:
                digests.add(hashlib.sha256(self._own).hexdigest())
            file = self._holdings.files[name]
            if digests != {file.sha256}:
                return f"{name} has come with another SHA-256 than rank {file.rank} on {file.host} has written"
        return ""


# ------------------------------------------------------------------------------------------ from rank to rank


class Transfer(NamedTuple):
    """The sending of one item from one rank to another."""

    item: str
    source: int
    target: int


def plan_waves(has: Sequence[Collection[str]], needs: Sequence[Collection[str]]) -> list[list[Transfer]]:
    """PURE: plan the transfers after which every rank has what it needs, from the items of each rank, in rank order.

    In one wave, a rank sends at most one item and receives at most one. It can send a received item in the next wave,
    so that an item of one rank reaches many others in few waves. Raises ``ValueError`` for an item that no rank has.

    Example:
        >>> plan_waves([{"model"}, set(), set()], [set(), {"model"}, {"model"}])
        [[Transfer(item='model', source=0, target=1)], [Transfer(item='model', source=0, target=2)]]
    """
    there = [set(own) for own in has]
    left = [sorted(set(wanted) - own) for wanted, own in zip(needs, there, strict=True)]
    waves: list[list[Transfer]] = []
    while any(left):
        wave: list[Transfer] = []
        for target, items in enumerate(left):
            free = set(range(len(there))) - {each.source for each in wave}
            found = next(((item, rank) for item in items for rank in sorted(free) if item in there[rank]), None)
            if found is not None:
                wave.append(Transfer(*found, target))
        if not wave:
            raise ValueError(f"no rank has {', '.join(sorted({item for items in left for item in items}))}")
        for each in wave:
            there[each.target].add(each.item)
            left[each.target].remove(each.item)
        waves.append(wave)
    return waves


def move(
    waves: Sequence[Sequence[Transfer]],
    sizes: Mapping[str, int],
    ranks: Ranks,
    what: str,
    read: Callable[[str, int, int], bytes],
    write: Callable[[str, bytes], object],
) -> None:
    """Carry out the plan; every rank calls this, with the same ``waves`` and ``sizes`` in bytes.

    ``read(item, begin, length)`` returns a piece of an item that this rank sends, and ``write`` gets the pieces of an
    item that it receives, in order. Holds two pieces in memory. If either raises on some rank, raises
    :class:`CheckpointError` on every rank at the end of the wave.

    Communicates an all-to-all for each piece of the largest item of a wave, in which every rank takes part.
    """
    for wave in waves:
        ranks.together(what, partial(_move_wave, wave, sizes, ranks, what, read, write))


def _move_wave(
    wave: Sequence[Transfer],
    sizes: Mapping[str, int],
    ranks: Ranks,
    what: str,
    read: Callable[[str, int, int], bytes],
    write: Callable[[str, bytes], object],
) -> None:
    """Raise the error of this rank, if any, at the end: it takes part until then, as the others wait for its pieces."""
    sent = next((each for each in wave if each.source == ranks.rank), None)
    taken = next((each for each in wave if each.target == ranks.rank), None)
    problem: Exception | None = None
    for begin in range(0, max(sizes[each.item] for each in wave), PIECE):
        outgoing, incoming = (0 if each is None else _left(sizes[each.item], begin) for each in (sent, taken))
        data = bytes(outgoing)
        if sent is not None and problem is None:
            try:
                data = _exactly(outgoing, read(sent.item, begin, outgoing), sent.item)
            except Exception as error:
                problem = error
        received = ranks.exchange(
            data, 0 if sent is None else sent.target, incoming, 0 if taken is None else taken.source, what
        )
        if taken is not None and problem is None:
            try:
                write(taken.item, received)
            except Exception as error:
                problem = error
    if problem is not None:
        raise problem


def _left(size: int, begin: int) -> int:
    return max(0, min(PIECE, size - begin))


def _exactly(length: int, data: bytes, item: str) -> bytes:
    if len(data) != length:
        raise EOFError(f"{item} has become shorter while it was sent: {len(data)} bytes where there were {length}")
    return data
