"""File systems for tests: one that writes down what it is asked for, a disk that loses what was not synced, and one
that fails; and ranks that say on which hosts they are."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.checkpoints.files import FileSystem, OpenFile
from lockstep.checkpoints.ranks import Ranks


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def ranks_on(rank, hosts: str) -> Ranks:
    """The ranks of a group, which are on hosts that are named by letters."""
    made = Ranks(rank.group)
    made.host = hosts[rank.rank]
    return made


def raising(error: BaseException):
    """A call that fails."""

    def call(*_):
        raise error

    return call


class Call(NamedTuple):
    """One change, or a note between two."""

    what: str
    path: Path
    more: object = None


class _RecordedFile(OpenFile):
    """Its many small writes are noted as one, of which any part may be lost."""

    def __init__(self, path, note):
        super().__init__(path)
        self._path, self._note, self._data = path, note, b""

    def write(self, data):
        self._data += bytes(data)
        return super().write(data)

    def note_write(self):
        self._note("write", self._path, self._data)

    def sync(self):
        self._file.flush()  # a crash of the machine is the test's
        self._note("sync", self._path)


def sync_in_order(files: FileSystem, what) -> None:
    for each in what:
        if isinstance(each, OpenFile):
            each.sync()
        else:
            files.sync_folder(each)


def _noted(name: str):
    """A method that does what it is asked for, and notes it then."""

    def call(self, path, *new):
        getattr(FileSystem, name)(self, path, *new)
        self.note(name, path, *new)

    return call


class RecordingFileSystem(FileSystem):
    """Does what it is asked for and keeps a list of it; several ranks share one."""

    make_folder, rename, remove, remove_folder = map(_noted, ["make_folder", "rename", "remove", "remove_folder"])

    def __init__(self):
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def note(self, what, path, more=None):
        with self._lock:
            self.calls.append(Call(what, Path(path), more))

    def create(self, path):
        self.note("create", path)
        return _RecordedFile(path, self.note)

    def sync(self, *what):
        """One after the other, so that a crash may come between any two."""
        for each in what:
            if isinstance(each, OpenFile):
                each.note_write()
        sync_in_order(self, what)

    def sync_folder(self, path):
        self.note("sync_folder", path)


def _failing(name: str):
    """A method that may be the one at which the disk is full."""

    def call(self, path, *new):
        self._next(name)
        getattr(FileSystem, name)(self, path, *new)

    return call


class FailingFileSystem(FileSystem):
    """The disk is full at one of its calls."""

    make_folder, sync_folder, rename = map(_failing, ["make_folder", "sync_folder", "rename"])
    remove, remove_folder = map(_failing, ["remove", "remove_folder"])

    def __init__(self, at: int):
        self.at, self.count, self.failed = at, 0, ""

    def _next(self, what):
        self.count += 1
        if self.count == self.at:
            self.failed = what
            raise OSError(errno.ENOSPC, "No space left on device", what)

    def create(self, path):
        self._next("create")
        file = super().create(path)
        append, sync, writes = file.append, file.sync, iter(["write"])

        def failing_append(data):
            for what in writes:  # the first one stands for the many that torch.save makes
                self._next(what)
            append(data)

        def failing_sync():
            self._next("sync")
            sync()

        file.append, file.sync = failing_append, failing_sync
        return file

    def sync(self, *what):
        sync_in_order(self, what)


# --------------------------------------------------------------------------------------- the disk


class _File:
    def __init__(self):
        self.data, self.synced = b"", b""


class _Folder:
    def __init__(self):
        self.now: dict[str, _File | _Folder] = {}
        self.synced: dict[str, _File | _Folder] = {}
        self.pending: list[tuple[str, str, _File | _Folder | None]] = []  # name gone, name come, what

    def change(self, gone, come, what):
        if gone:
            del self.now[gone]
        if come:
            self.now[come] = what
        self.pending.append((gone, come, what))

    def sync(self):
        self.synced, self.pending = dict(self.now), []


Tree = dict[str, "bytes | Tree"]


class Disk:
    """What the calls so far have put on a disk: what is certain, and what a crash may take or leave."""

    def __init__(self, root: Path):
        self._root, self._top = root, _Folder()

    def apply(self, call: Call) -> None:
        """One more call."""
        folder, name = self._find(call.path.parent), call.path.name
        if call.what == "make_folder":
            folder.change("", name, _Folder())
        elif call.what == "create":
            folder.change("", name, _File())
        elif call.what == "write":
            folder.now[name].data += call.more
        elif call.what == "sync":
            folder.now[name].synced = folder.now[name].data
        elif call.what == "sync_folder":
            self._find(call.path).sync()
        elif call.what == "rename":
            folder.change(name, call.more.name, folder.now[name])
        elif call.what in ("remove", "remove_folder"):
            folder.change(name, "", None)

    def _find(self, path: Path) -> _Folder:
        found = self._top
        for part in path.relative_to(self._root).parts if path != self._root.parent else ():
            found = found.now[part]
        return found

    def after_crashes(self, rng: random.Random, at_random: int) -> Iterator[Tree]:
        """What may be there after a crash now: all and nothing of what is not certain, with files empty, whole, torn
        and full of zeros; all but one change, one change alone; and some at random."""
        everything = [
            (id(folder), number) for folder in self._folders(self._top) for number in range(len(folder.pending))
        ]
        for data in ("lost", "whole", "torn", "zeros"):
            yield self._tree(self._top, everything, data, rng)
            yield self._tree(self._top, [], data, rng)
        for each in everything:
            others = [other for other in everything if other != each]
            for subset in ([each], others):
                yield self._tree(self._top, subset, rng.choice(("lost", "whole", "torn")), rng)
        for _ in range(at_random):
            share = rng.choice((0.3, 0.95))
            yield self._tree(self._top, [each for each in everything if rng.random() < share], "any", rng)

    def _folders(self, folder: _Folder) -> Iterator[_Folder]:
        """All that may be reached from a folder."""
        yield folder
        inside = [*folder.synced.values(), *(what for _, _, what in folder.pending)]
        for each in {id(each): each for each in inside if isinstance(each, _Folder)}.values():
            yield from self._folders(each)

    def _tree(self, folder: _Folder, kept: list, data: str, rng: random.Random) -> Tree:
        entries = dict(folder.synced)
        for number, (gone, come, what) in enumerate(folder.pending):
            if (id(folder), number) in kept:
                entries.pop(gone, None)
                if come:
                    entries[come] = what
        return {
            name: self._tree(each, kept, data, rng) if isinstance(each, _Folder) else self._bytes(each, data, rng)
            for name, each in sorted(entries.items())
        }

    @staticmethod
    def _bytes(file: _File, data: str, rng: random.Random) -> bytes:
        sure, rest = len(file.synced), len(file.data) - len(file.synced)
        kind = rng.choice(("lost", "whole", "torn", "zeros", "holes")) if data == "any" else data
        if not rest or kind == "lost":
            return file.synced
        if kind == "whole":
            return file.data
        if kind == "torn":
            return file.data[: sure + rng.randrange(rest)]
        if kind == "holes":
            start = sure + rng.randrange(rest)
            return file.data[:start] + bytes(min(rest, 512)) + file.data[start + 512 :]
        return file.synced + bytes(rest)


def put(tree: Tree, folder: Path) -> None:
    """Make real files of it."""
    folder.mkdir()
    for name, each in tree.items():
        if isinstance(each, dict):
            put(each, folder / name)
        else:
            (folder / name).write_bytes(each)
