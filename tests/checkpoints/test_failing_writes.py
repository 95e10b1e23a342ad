"""A save that fails on one rank is an error on every rank that names it, and costs no older checkpoint."""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import resource
import signal
import warnings

import pytest
import torch

import lockstep
from checkpoints.disk import FailingFileSystem, names_in, put, raising
from lockstep.checkpoints import files
from lockstep.checkpoints.files import OpenFile
from lockstep.checkpoints.layout import list_saved
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.saving import Saving
from lockstep.errors import CheckpointError, CommunicationError
from processes import on_processes
from programs.ranks import on_ranks


@pytest.mark.filterwarnings("ignore:.*an old checkpoint could not be removed")
@pytest.mark.parametrize(("failing", "least", "kinds"), [(0, 20, {"make_folder", "rename", "remove"}), (1, 3, set())])
@on_ranks(2)
def test_every_call_that_can_fail(rank, failing, least, kinds, tmp_path):
    """Saves of which one rank's calls fail, the first, the second, and so on, until there are no more."""
    path, ranks, seen = tmp_path / "run", Ranks(rank.group), set()
    for last in (1, 2):
        lockstep.save(path, step=last, keep=2, group=rank.group, x=torch.tensor(last))
    for at in itertools.count(1):
        before = names_in(path)
        rank.gather(torch.zeros(1))
        files = FailingFileSystem(at if rank.rank == failing else 0)
        try:
            Saving(path, files, ranks).save({"x": torch.tensor(last + 1)}, 2, last + 1)
            error, last = "", last + 1
        except CheckpointError as raised:
            error = str(raised)
        found = lockstep.resume(path, group=rank.group)
        assert (found.step, found.values["x"].item()) == (last, last)
        failed = "".join(ranks.tell(files.failed, "what failed"))
        seen.add(failed)
        if error:
            assert f"save() failed on rank {failing} (host " in error
            assert "No space left on device" in error
            assert names_in(path) == before
        elif failed:  # the new checkpoint was there, and an old one could not be removed
            assert failed in ("remove", "remove_folder", "sync_folder")
            last += 1
            lockstep.save(path, step=last, keep=2, group=rank.group, x=torch.tensor(last))
        else:
            break
        rank.gather(torch.zeros(1))
    assert at > least
    assert seen >= kinds | {"create", "write", "sync", ""}
    assert len(list_saved(path)) == 2


LIMITS = [0, 1, 50, 700, 1500, 5000, 50_000]
"""Bytes at which a file cannot grow: in the first piece that is held back, between two, at the end of the headers."""


def limited_to(bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("failing", [0, 1])
@on_processes(2, backend="shm")
def test_a_file_that_cannot_grow(rank, failing, tmp_path):
    """A real limit, of one rank's process alone, which every write meets, and what was held back meets again at the
    file's end."""
    folder, own = tmp_path / "run", lockstep.checkpoints.per_rank({"large": torch.zeros(100_000), "x": torch.zeros(10)})
    lockstep.save(folder, step=1, own=own)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in LIMITS:
        if rank.rank == failing:
            limited_to(limit)
        with pytest.raises(CheckpointError) as caught:
            lockstep.save(folder, step=2, own=own)
        limited_to(resource.RLIM_INFINITY)
        assert f"save() failed on rank {failing} (host" in str(caught.value)
        assert f"File too large: '{folder}/.unfinished-" in str(caught.value)
        rank.gather(torch.zeros(1))  # both have tidied up
        assert names_in(folder) == ["save-000001-step-00000001"]
        assert lockstep.resume(folder).step == 1
    lockstep.save(folder, step=3, own=own)
    rank.gather(torch.zeros(1))
    assert names_in(folder) == ["save-000001-step-00000001", "save-000002-step-00000003"]


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=r"save\(\) failed: (FileExists|NotADirectory)Error.*run'"):
        lockstep.save(tmp_path / "run", x=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        lockstep.save(tmp_path / "run", x=1)


class Raising:
    """State that some ranks can neither read nor take: what they raise."""

    def __init__(self, reads=None, takes=None):
        self.reads, self.takes = reads, takes

    def state_dict(self):
        if self.reads:
            raise self.reads
        return {"x": 1}

    def load_state_dict(self, state):
        if self.takes:
            raise self.takes


@on_ranks(2)
def test_a_reason_of_megabytes_is_cut(rank, tmp_path):
    part = Raising(ValueError("no momentum " + "x" * 5_000_000 + "\udce9") if rank.rank else None)
    with pytest.raises(CheckpointError, match=r"save\(\) failed on rank 1 .*: ValueError: no momentum x") as caught:
        lockstep.save(tmp_path, group=rank.group, part=part)
    assert len(str(caught.value).encode()) < 20_000


@on_ranks(2)
def test_state_that_raises_on_one_rank(rank, tmp_path):
    with pytest.raises(CheckpointError, match=r"save\(\) failed on rank 1 \(host .*\): KeyError: 'momentum'"):
        lockstep.save(tmp_path, group=rank.group, part=Raising(KeyError("momentum") if rank.rank else None))
    rank.gather(torch.zeros(1))  # the first rank has tidied up
    assert names_in(tmp_path) == []
    rank.gather(torch.zeros(1))
    lockstep.save(tmp_path, group=rank.group, part=Raising())
    part = Raising(takes=None if rank.rank else ValueError("state of another model"))
    with pytest.raises(CheckpointError, match=r"resume\(\) failed on rank 0 .*: ValueError: state of another model"):
        lockstep.resume(tmp_path, group=rank.group, part=part)


@pytest.mark.parametrize("interrupted", [0, 1])
@on_ranks(2)
def test_an_interrupt_while_a_rank_writes(rank, interrupted, tmp_path):
    """Ctrl-C reaches one rank's thread while it writes."""
    lockstep.save(tmp_path, step=1, group=rank.group)
    files = FailingFileSystem(0)
    if rank.rank == interrupted:
        files.create = raising(KeyboardInterrupt("stop"))
    error, words = (KeyboardInterrupt, "stop") if rank.rank == interrupted else (CheckpointError, "Keyboard")
    with pytest.raises(error, match=words):
        Saving(tmp_path, files, Ranks(rank.group)).save({}, 3, 2)
    assert lockstep.resume(tmp_path, group=rank.group).step == 1
    assert names_in(tmp_path) == ["save-000001-step-00000001"]


@pytest.mark.parametrize(("error", "kept"), [(CommunicationError("no answer"), True), (CheckpointError("full"), False)])
def test_a_checkpoint_that_is_finished_here_goes_only_if_a_rank_says_that_it_has_failed(error, kept, tmp_path):
    class WithOthers(Ranks):
        def together(self, what, step):
            results = super().together(what, step)
            if list_saved(tmp_path):
                raise error
            return results

    with pytest.raises(type(error), match=str(error)):
        Saving(tmp_path, FailingFileSystem(0), WithOthers(None)).save({}, 3, 2)
    assert len(names_in(tmp_path)) == kept


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path):
    lockstep.save(tmp_path, keep=1)
    files = FailingFileSystem(0)
    files.remove = raising(PermissionError(13, "Permission denied"))
    with pytest.warns(UserWarning, match="an old checkpoint could not be removed: .*Permission denied"):
        Saving(tmp_path, files, Ranks(None)).save({}, 1, 7)
    with warnings.catch_warnings():
        assert lockstep.resume(tmp_path).step == 7


def test_an_old_checkpoint_that_cannot_be_removed_keeps_no_other_one(tmp_path):
    """A folder cannot be removed with an old checkpoint, nor files on another disk."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    odd, _, linked, _ = [lockstep.save(run, keep=4, step=step, x=1) for step in range(4)]
    (odd / "plots").mkdir()
    (odd / "plots" / "loss.png").write_text("")
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    files_elsewhere = names_in(elsewhere)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(4, 8):
            lockstep.save(run, keep=2, step=step, x=1)
    assert names_in(run) == [odd.name, "save-000007-step-00000006", "save-000008-step-00000007"]
    assert names_in(odd) == ["plots"]
    assert names_in(odd / "plots") == ["loss.png"]
    assert names_in(elsewhere) == files_elsewhere  # only the link is gone
    (text,) = {str(each.message) for each in told}
    assert re.search(r"could not be removed: .*save-000001-step-00000000/plots'", text)


def test_a_link_in_the_place_of_an_unfinished_folder(tmp_path):
    """What it leads to is not removed."""
    run, elsewhere = tmp_path / "disk" / "run", tmp_path / "disk" / "elsewhere"
    put({"run": {}, "elsewhere": {"file": b""}}, tmp_path / "disk")
    (run / ".unfinished-0-0").symlink_to(elsewhere)
    lockstep.save(run)
    assert (names_in(run), names_in(elsewhere)) == (["save-000001"], ["file"])


@pytest.mark.parametrize("when", ["write", "flush", "sync", "sync of the folder"])
def test_a_full_disk_is_told_with_the_path_and_the_room(when, tmp_path, monkeypatch):
    def full(*_):  # an error of its own for each of the threads that write
        raise OSError(errno.ENOSPC, "No space left on device")

    class Buffer(io.BufferedWriter):
        flush = full

    def open_with_buffer(path, mode="r", **options):
        return Buffer(open(path, mode, buffering=0)) if mode == "xb" else open(path, mode, **options)

    def sync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}") == (when == "sync of the folder"):
            full()

    if when == "write":
        monkeypatch.setattr(OpenFile, "append", full)
    elif when == "flush":
        monkeypatch.setattr(files, "open", open_with_buffer, raising=False)
    else:
        monkeypatch.setattr(files, "_sync", sync)
    path = r"\.unfinished-[\w-]*" if when == "sync of the folder" else r"\.unfinished-[\w-]*/(model|rank-0000)\.pt"
    words = rf"No space left on device: '.*/{path}'\n[\d,]+ bytes are free on that disk"
    with pytest.raises(CheckpointError, match=words):
        lockstep.save(tmp_path, model=torch.nn.Linear(8, 8))
