"""Snapshots in memory: as whole as checkpoints, one at a time, found by all ranks, gone when they are not needed."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

import lockstep
from checkpoints.disk import names_in, ranks_on
from lockstep.checkpoints import memory, per_rank
from lockstep.checkpoints.layout import MARKER, UNFINISHED, list_saved
from lockstep.checkpoints.memory import MemoryFiles, MemoryFolder, check_room
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.resuming import Resuming
from lockstep.checkpoints.snapshots import SnapshotPace, _Snapshot
from lockstep.errors import AgreementError, CheckpointError, OptionError
from processes import run_processes
from programs.ranks import on_ranks
from threaded import run_ranks


@pytest.fixture(autouse=True)
def host_memory(tmp_path, monkeypatch):
    """A host of our own."""
    monkeypatch.setattr(memory, "ROOT", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def folders(host_memory):
    return sorted(host_memory.glob("*/*"))


@contextlib.contextmanager
def killed():
    """A session of a run that is killed in it, as far as this process can be: it ends with an error."""
    with pytest.raises(KeyError), lockstep.session() as run:
        yield run
        raise KeyError("killed")


def train(folder, steps, **snapshot):
    """A run that is killed after some steps."""
    weight = torch.zeros(3)
    with killed() as run:
        run.resume(folder, weight=weight)
        for _ in run.batches(range(steps)):
            weight += 1
            run.snapshot(folder, weight=weight, **snapshot)


def resumed(folder):
    weight = torch.zeros(3)
    with lockstep.session() as run:
        found = run.resume(folder, weight=weight)
        return found and (found.step, run.step, weight.unique().item())


def test_a_run_goes_on_from_its_newest_snapshot(tmp_path, host_memory):
    train(tmp_path / "run", 3, every=1)
    (folder,) = folders(host_memory)
    assert [each.folder.name for each in list_saved(folder)] == ["save-000003-step-00000003"]
    assert stat.S_IMODE(folder.parent.stat().st_mode) == stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.joinpath("PATH").read_text() == f"{(tmp_path / 'run').resolve()}\n"
    train(tmp_path / "run", 2, every=2)
    (saved,) = list_saved(folder)
    assert saved.folder.name == "save-000005-step-00000005"  # the number after the third may be on a host that was lost
    assert resumed(tmp_path / "run") == (5, 5, 5.0)


def test_the_memory_is_free_when_the_run_ends_well(tmp_path, host_memory):
    train(tmp_path / "run", 3, every=1)
    with lockstep.session() as run:
        run.resume(tmp_path / "run")
        assert folders(host_memory)
    assert list(host_memory.iterdir()) == []


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_was_asked_to_stop_leaves_what_is_newer_than_the_disk(saves, tmp_path, host_memory):
    with lockstep.session(time_limit=0.0) as run:
        assert not run.should_stop
        for _ in run.batches(range(2)):
            run.snapshot(tmp_path / "run", every=1, x=1)
        assert run.agree(False) is False
        assert run.should_stop
        if saves:
            run.save(tmp_path / "run", x=1)
    assert bool(folders(host_memory)) is not saves


@pytest.mark.parametrize("calls", [("save", "snapshot"), ("snapshot", "save")])
def test_the_newer_one_of_memory_and_disk_counts(calls, tmp_path):
    x = torch.zeros(())
    with killed() as run:
        for value, call in enumerate(calls, 1):
            more = {"every": 1} if call == "snapshot" else {}
            getattr(run, call)(tmp_path / "run", x=x.fill_(value), step=9, **more)
    with killed() as run:
        at = run.resume(tmp_path / "run", x=x.zero_())
        assert x == 2
        assert (at.folder.parent == tmp_path / "run") == (calls[1] == "save")


def test_a_snapshot_of_a_run_whose_checkpoints_were_moved_away_does_not_count(tmp_path, host_memory):
    train(tmp_path / "run", 3, every=1)
    (old,) = folders(host_memory)
    (tmp_path / "run").rename(tmp_path / "before")
    assert resumed(tmp_path / "run") is None
    gone = pytest.warns(UserWarning, match=rf"a snapshot in {old} is of checkpoints that are no longer there")
    with gone, killed() as run:
        run.snapshot(tmp_path / "run", every=1, x=1)
    (new,) = folders(host_memory)
    assert new != old
    with lockstep.session() as run:
        assert run.resume(tmp_path / "run").values == {"x": 1}


def is_used(_rank, folder):
    return MemoryFolder(folder).is_used


def is_used_for_another_process(folder):
    """A lock of this process does not keep this process from taking it, so the question goes to another one."""
    return run_processes(1, is_used, folder)[0]


def test_another_disk_at_the_same_path_has_snapshots_of_its_own(tmp_path, host_memory, monkeypatch):
    """Two containers that share the memory of their host: what the other one uses is not removed."""
    path = tmp_path / "run"
    monkeypatch.setattr(MemoryFolder, "is_used", property(lambda each: is_used_for_another_process(each.folder)))
    with killed() as first:
        first.snapshot(path, every=1, x="first")
        (of_first,) = folders(host_memory)
        path.rename(tmp_path / "first")
        with killed() as second:
            assert second.resume(path) is None
            second.snapshot(path, every=1, x="second")
        path.rename(tmp_path / "second")
        assert len(folders(host_memory)) == 2
    assert not is_used_for_another_process(of_first)
    for name in ("first", "second"):
        (tmp_path / name).rename(path)
        with lockstep.session() as run:
            assert run.resume(path).values == {"x": name}
        path.rename(tmp_path / name)
    assert folders(host_memory) == []


GONE = r"\. The launcher counts starts"
REFUSED = {
    "a place that is empty": (
        "snapshot",
        {"every": 1},
        CheckpointError,
        r"\.snapshots cannot be read, or is empty: re",
    ),
    "give_up_after": ("resume", {"give_up_after": None}, OptionError, f"option give_up_after{GONE}"),
    "skip_poison": ("resume", {"skip_poison": None}, OptionError, f"option skip_poison{GONE}"),
    "every 0": ("snapshot", {"every": 0}, OptionError, "every is a number of calls"),
    "at most 0.0": ("snapshot", {"at_most": 0.0}, OptionError, "every is a number of calls"),
    "at most 1.5": ("snapshot", {"at_most": 1.5}, OptionError, "every is a number of calls"),
}


@pytest.mark.parametrize(("call", "options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call, options, error, words, tmp_path):
    (tmp_path / ".snapshots").touch()
    with lockstep.session() as run, pytest.raises(error, match=words):
        getattr(run, call)(tmp_path, **options)


def test_another_run_that_takes_snapshots_of_the_same_path(tmp_path, host_memory):
    with lockstep.session() as run:
        run.snapshot(tmp_path / "run", every=1, x=1)
        (folder,) = folders(host_memory)
        (saved,) = list_saved(folder)
        shutil.copytree(saved.folder, folder / "save-000009-step-00000009")
        with pytest.raises(CheckpointError, match=r"another run takes snapshots for .*: 9 is newer"):
            run.snapshot(tmp_path / "run", every=1, x=1)


def test_too_little_memory_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"snapshots need 1,099,511,627,776.0 MiB .* for two copies .* has"):
        check_room(tmp_path, 1 << 60)
    check_room(tmp_path, 1 << 20)
    monkeypatch.setattr(memory, "ROOT", tmp_path / "nowhere")
    with lockstep.session() as run:
        assert run.resume(tmp_path / "run") is None
        with pytest.raises(CheckpointError, match=r"needs memory that outlives the ranks, /dev/shm"):
            run.snapshot(tmp_path / "run", x=1)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path, host_memory):
    folder = host_memory / f"lockstep-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with lockstep.session() as run:
        for call in (run.snapshot, run.resume):
            with pytest.raises(CheckpointError, match="others can write there"):
                call(tmp_path / "run")


# ------------------------------------------------------------------------------------------- pace


class Paced:
    """A training of steps of 10 ms."""

    def __init__(self):
        self.now = 0.0
        self.pace = SnapshotPace(lambda: self.now)

    def train(self, steps, seconds=0.0029):
        """The steps after which a snapshot is taken, which takes some seconds."""
        taken = []
        for step in range(1, steps + 1):
            self.now += 0.01
            if self.pace.is_due(None, 0.02):
                taken.append(step)
                self.now += seconds
                self.pace.took(*self.pace.times(), 0.02)
        return taken


def test_snapshots_take_the_share_of_the_time_that_they_may():
    paced = Paced()
    taken = paced.train(1000)
    assert taken[:4] == [2, 30, 45, 60]  # the first two calls show what a step takes; the second one waits for two
    assert 0.9 < 0.0029 * len(taken) / (0.02 * paced.now) <= 1.0


@pytest.mark.parametrize(
    ("pause", "seconds", "least", "most"),
    [
        (60, 0.0029, 0, 8),  # an evaluation: one more than before, since the pause looks like a slow step
        (0, 0.029, 1, 1),  # snapshots become slower
    ],
)
def test_after_a_pause_snapshots_are_not_more_frequent_and_slower_ones_come_later(pause, seconds, least, most):
    paced = Paced()
    paced.train(100)
    paced.now += pause
    assert least <= len(paced.train(100, seconds)) <= most


def test_every_counts_calls():
    pace = SnapshotPace()
    assert [call for call in range(1, 10) if pace.is_due(3, 0.02)] == [3, 6, 9]


def test_a_call_that_takes_no_snapshot_looks_at_nothing(tmp_path):
    class Module(torch.nn.Linear):
        def state_dict(self, *args, **kwargs):
            calls.append(run.step)
            return super().state_dict(*args, **kwargs)

    calls, model = [], Module(1, 1)
    with lockstep.session() as run:
        for _ in run.batches(range(6)):
            with pytest.MonkeyPatch.context() as patch:
                if run.step > 1 and run.step % 3:
                    patch.setattr(run.progress, "phase", None)  # nor does it write where the rank is
                    patch.setattr(Path, "resolve", None)
                assert run.snapshot(tmp_path / "run", every=3, model=model) is (run.step % 3 == 0)
    assert calls == [3, 6]


# ------------------------------------------------------------------------------------------ hosts


def snapshot(rank, folder, hosts, number):
    """One snapshot of ranks on several hosts, which have one disk."""
    made = MemoryFolder(folder / "hosts" / hosts[rank.rank])
    made.folder.mkdir(parents=True, exist_ok=True)
    state = {"x": torch.full((900,), float(number)), "own": per_rank(rank.rank)}
    taken = _Snapshot(folder / "disk", made, ranks_on(rank, hosts), 0, number - 1 or None)
    taken.save(state, 1, number)
    rank.gather(torch.zeros(1))
    assert taken.number == number


def on_rank_0(rank, call):
    if rank.rank == 0:
        call()
    rank.gather(torch.zeros(1))


def resume(rank, folder, hosts):
    x = torch.zeros(900)
    resuming = Resuming(folder / "disk", ranks_on(rank, hosts), folder / "hosts" / hosts[rank.rank])
    found = resuming.resume({"x": x})
    return found and (found.step, x.unique().item(), found.values.get("own"), resuming.in_memory)


def both(rank, folder, hosts, change=lambda: None, later=None):
    """Two snapshots, and a resume on the hosts of later, if there are ranks then."""
    for number in (1, 2):
        snapshot(rank, folder, hosts, number)
    on_rank_0(rank, change)
    return later and resume(rank, folder, later)


@pytest.mark.parametrize("gone", ["a", "b", "c"])
@pytest.mark.parametrize("saved", [False, True])
def test_all_go_on_from_the_disk_when_a_host_has_lost_its_memory(saved, gone, tmp_path):
    if saved:
        run_ranks(4, save, tmp_path)
    lose = functools.partial(shutil.rmtree, tmp_path / "hosts" / gone)
    words = r"skipped memory/save-000002-.*: rank \d .host .*it is not in this host's mem"
    with pytest.warns(UserWarning, match=words):
        results = run_ranks(4, both, tmp_path, "abbc", lose, "abbc")
    assert results == [(0, 7.0, rank, False) if saved else None for rank in range(4)]


def save(rank, folder):
    lockstep.save(folder / "disk", step=0, group=rank.group, x=torch.full((900,), 7.0), own=per_rank(rank.rank))


@pytest.mark.filterwarnings("ignore:.*skipped memory/save-000002")
@on_ranks(3)
def test_the_snapshot_before_one_that_not_all_hosts_have_counts(rank, tmp_path):
    """A process of host b is killed in the second snapshot, when host a has it already."""
    hosts, before = tmp_path / "hosts", tmp_path / "before"
    snapshot(rank, tmp_path, "abb", 1)
    on_rank_0(rank, lambda: shutil.copytree(hosts, before))
    snapshot(rank, tmp_path, "abb", 2)
    on_rank_0(rank, lambda: shutil.copytree(before, hosts, dirs_exist_ok=True))
    on_rank_0(rank, lambda: next(hosts.glob(f"b/save-000002-*/{MARKER}")).unlink())
    assert resume(rank, tmp_path, "abb") == (1, 1.0, rank.rank, True)


LATER = {
    "new hosts in the place of all but one": ("abc", "bde", [None] * 3),
    "fewer ranks get what is shared": ("abbc", "bb", [(2, 2.0, None, True)] * 2),
    "all hosts are gone": ("abc", "xyz", [None] * 3),
}


@pytest.mark.filterwarnings("ignore:.*skipped memory/save-000002")
@pytest.mark.filterwarnings("ignore:.*saved by 4 rank.* so that what each rank had of its own is not loaded")
@pytest.mark.parametrize(("hosts", "later", "found"), LATER.values(), ids=LATER)
def test_other_hosts(hosts, later, found, tmp_path):
    run_ranks(len(hosts), both, tmp_path, hosts)
    assert run_ranks(len(later), resume, tmp_path, later) == found


@on_ranks(2)
def test_what_killed_processes_have_not_finished_goes_with_the_next_snapshot(rank, tmp_path):
    host = tmp_path / "hosts" / "a"
    snapshot(rank, tmp_path, "aa", 1)
    on_rank_0(rank, (host / f"{UNFINISHED}killed").mkdir)
    snapshot(rank, tmp_path, "aa", 2)
    assert names_in(host) == ["save-000002-step-00000002"]


@on_ranks(2)
def test_ranks_that_take_snapshots_of_different_steps(rank, tmp_path):
    taken = _Snapshot(tmp_path / "disk", MemoryFolder(tmp_path), Ranks(rank.group), 0, None)
    with pytest.raises(AgreementError, match="ranks differ in step: 1 on rank 0, 2 on rank 1"):
        taken.save({}, 1, 1 + rank.rank)


def test_nothing_is_waited_for_in_memory(tmp_path, monkeypatch):
    files = MemoryFiles()
    monkeypatch.setattr(os, "fsync", None)
    files.make_folder(tmp_path / "new")
    file = files.create(tmp_path / "new" / "file")
    file.write(b"data")
    files.sync(file, tmp_path)
    file.close()
    assert (tmp_path / "new" / "file").read_bytes() == b"data"


def test_snapshots_go_on_after_a_resume_from_the_disk(tmp_path, host_memory):
    train(tmp_path / "run", 3, every=1)
    for _ in range(2):
        with killed() as run:
            run.resume(tmp_path / "run")
            run.save(tmp_path / "run", x=1)
    with lockstep.session(time_limit=0.0) as run:
        assert not run.should_stop
        run.resume(tmp_path / "run")
        run.snapshot(tmp_path / "run", every=1, x=2)
        run.save(tmp_path / "run", x=3)
        assert run.agree(False) is False
        assert run.should_stop
    assert folders(host_memory) == []


def test_snapshots_go_on_after_a_resume_that_could_not_read_the_last_one(tmp_path, host_memory):
    with killed() as run:
        run.save(tmp_path / "run", x=1)
        for _ in range(3):
            run.snapshot(tmp_path / "run", every=1, x=2)
    (file,) = host_memory.rglob("rank-*")
    file.write_bytes(bytes(file.stat().st_size))
    with killed() as run:
        with pytest.warns(UserWarning, match="skipped memory/save-000004"):
            assert run.resume(tmp_path / "run").values == {"x": 1}
        run.snapshot(tmp_path / "run", every=1, x=3)
    with lockstep.session() as run:
        assert run.resume(tmp_path / "run").values == {"x": 3}
