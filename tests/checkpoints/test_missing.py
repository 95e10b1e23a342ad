"""What a host or a rank lacks of a checkpoint is sent to it by those that have it."""

from __future__ import annotations

import itertools
import random
import shutil

import pytest
import torch

import lockstep
from lockstep.checkpoints import missing, resuming
from lockstep.checkpoints.files import FileSystem, OpenFile
from lockstep.checkpoints.missing import Holdings, what_is_here
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.resuming import Resuming
from lockstep.checkpoints.saving import Saving
from lockstep.errors import CheckpointError
from threaded import count_collectives, run_ranks


def names_in(folder):
    return sorted(each.name for each in folder.iterdir())


# ----------------------------------------------------------------------------------------- hosts


def ranks_of(rank, hosts):
    made = Ranks(rank.group)
    made.host = hosts[rank.rank]
    return made


def save(rank, folder, hosts, steps=(1, 2)):
    for number in steps:
        state = {"x": torch.full((900,), float(number)), "own": lockstep.checkpoints.per_rank(rank.rank)}
        Saving(folder / hosts[rank.rank], FileSystem(), ranks_of(rank, hosts)).save(state, 3, number)
    rank.gather(torch.zeros(1))


def resume(rank, folder, hosts):
    x = torch.zeros(900)
    found = Resuming(folder / hosts[rank.rank], ranks_of(rank, hosts)).resume({"x": x})
    return found.step, x.unique().tolist(), found.values.get("own"), found.folder.parent.name


def both(rank, folder, hosts, change):
    """Save, change the disks, resume; and once more, which finds all that was sent before."""
    save(rank, folder, hosts)
    if rank.rank == 0:
        change(folder)
    rank.gather(torch.zeros(1))
    return resume(rank, folder, hosts)


LOST = r"ignore:.*nobody has rank-.* so that what each rank had of its own is not loaded"


@pytest.mark.filterwarnings(LOST)
@pytest.mark.parametrize(
    ("gone", "piece"),
    [
        ("a", 100),
        ("b", 1 << 22),
        ("c", 1 << 22),
        *(pytest.param(*each, marks=pytest.mark.around) for each in [("a", 1 << 22), ("b", 100), ("c", 100)]),
    ],
)
def test_a_new_host_gets_what_is_the_same_on_all_ranks(gone, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(missing, "PIECE", piece)
    results = run_ranks(4, both, tmp_path, "abbc", lambda folder: shutil.rmtree(folder / gone))
    assert results == [(2, [2.0], None, host) for host in "abbc"]
    name = "save-000002-step-00000002"
    assert names_in(tmp_path / gone) == [name]  # and nothing that was not finished
    lowest = "rank-0000.pt" if gone != "a" else "rank-0001.pt"
    assert names_in(tmp_path / gone / name) == ["COMPLETE", "manifest.json", lowest, "x.pt"]

    def again(rank):
        with count_collectives(rank) as seen:
            result = resume(rank, tmp_path, "abbc")
        return result, {each.name for each in seen}

    for (result, names), host in zip(run_ranks(4, again), "abbc", strict=True):
        assert result == (2, [2.0], None, host)
        assert names == {"all_reduce", "all_gather"}  # nothing is sent a second time


def test_what_is_lost_is_told(tmp_path):
    with pytest.warns(UserWarning, match="nobody has") as told:
        run_ranks(3, both, tmp_path, "abb", lambda folder: shutil.rmtree(folder / "b"))
    (text,) = {str(each.message) for each in told}
    assert text == (
        f"{tmp_path}/a: save-000002-step-00000002: nobody has rank-0001.pt, rank-0002.pt of rank 1, 2, written on host "
        "b, to a disk of its own, so that what each rank had of its own is not loaded: random numbers, state of "
        "communication hooks, own"
    )


def swap(folder):
    (folder / "a").rename(folder / "z")
    (folder / "b").rename(folder / "a")
    (folder / "z").rename(folder / "b")


@pytest.mark.parametrize("hosts", ["ab", "aab", "abb"])
def test_ranks_that_have_changed_places_get_what_is_theirs(hosts, tmp_path):
    results = run_ranks(len(hosts), both, tmp_path, hosts, swap)
    assert results == [(2, [2.0], rank, host) for rank, host in enumerate(hosts)]


def test_a_host_that_was_not_there_before_among_more_ranks(tmp_path):
    run_ranks(2, save, tmp_path, "ab")
    with pytest.warns(UserWarning, match=r"saved by 2 rank\(s\) and resumed by 4"):
        results = run_ranks(4, resume, tmp_path, "abcc")
    assert results == [(2, [2.0], None, host) for host in "abcc"]
    assert names_in(tmp_path / "c" / "save-000002-step-00000002") == [
        "COMPLETE", "manifest.json", "rank-0000.pt", "x.pt"
    ]  # fmt: skip


@pytest.mark.filterwarnings(LOST)
def test_one_that_was_saved_before_the_new_host_has_anything_is_no_reason_to_go_back(tmp_path):
    """What a rank had of its own is on no host any more in either."""
    assert run_ranks(2, both, tmp_path, "ab", lambda folder: shutil.rmtree(folder / "b"))[0][0] == 2


def test_an_older_one_that_has_all_is_preferred(tmp_path):
    def change(folder):
        shutil.rmtree(folder / "b" / "save-000002-step-00000002")

    with pytest.warns(
        UserWarning, match=r"skipped save-000002-.*: nobody has rank-0001.pt of rank 1, written on host b"
    ):
        results = run_ranks(2, both, tmp_path, "ab", change)
    assert results == [(1, [1.0], rank, host) for rank, host in enumerate("ab")]


def test_one_disk_for_all_sends_nothing(tmp_path):
    def call(rank):
        for number in (1, 2):
            lockstep.save(tmp_path, step=number, group=rank.group, own=lockstep.checkpoints.per_rank(rank.rank))
        made = ranks_of(rank, "ab")  # two hosts that see the same folder
        with count_collectives(rank) as seen:
            found = Resuming(tmp_path, made).resume({})
        return found.values["own"], {each.name for each in seen}

    assert run_ranks(2, call) == [(rank, {"all_reduce", "all_gather"}) for rank in range(2)]


@pytest.mark.filterwarnings(LOST)
def test_new_hosts_that_share_a_disk_write_it_once(tmp_path):
    def call(rank):
        save(rank, tmp_path, "abc")
        if rank.rank == 0:
            for host in "bc":
                shutil.rmtree(tmp_path / host)
        rank.gather(torch.zeros(1))
        path = tmp_path / ("a" if rank.rank == 0 else "shared")
        return Resuming(path, ranks_of(rank, "abc")).resume({}).values

    assert all(torch.equal(each["x"], torch.full((900,), 2.0)) for each in run_ranks(3, call))
    assert names_in(tmp_path / "shared") == ["save-000002-step-00000002"]


@pytest.mark.filterwarnings(LOST)
def test_a_run_goes_on_where_the_first_rank_is_on_the_new_host(tmp_path):
    def call(rank):
        both(rank, tmp_path, "ab", lambda folder: shutil.rmtree(folder / "a"))
        save(rank, tmp_path, "ab", steps=(3,))
        return resume(rank, tmp_path, "ab")

    assert run_ranks(2, call) == [(3, [3.0], 0, "a"), (3, [3.0], 1, "b")]
    assert names_in(tmp_path / "a") == ["save-000002-step-00000002", "save-000003-step-00000003"]


class FullDisk(FileSystem):
    """Every file that is begun is one too many."""

    def create(self, path):
        raise OSError(28, "No space left on device")


def test_a_new_host_whose_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "FileSystem", FullDisk)
    for error in run_ranks(2, both, tmp_path, "ab", lambda folder: shutil.rmtree(folder / "b"), errors=True):
        assert type(error) is CheckpointError
        assert "resume() failed on rank 1 (host b): OSError: [Errno 28] No space left on device" in str(error)
    assert names_in(tmp_path / "b") == []


def test_a_file_that_goes_before_it_is_sent(tmp_path, monkeypatch):
    class Deleting(FileSystem):
        """Takes the file away from the other host when the new one begins its folder."""

        def make_folder(self, path):
            (tmp_path / "a" / "save-000002-step-00000002" / "x.pt").unlink(missing_ok=True)
            super().make_folder(path)

    monkeypatch.setattr(resuming, "FileSystem", Deleting)
    for error in run_ranks(3, both, tmp_path, "abb", lambda folder: shutil.rmtree(folder / "b"), errors=True):
        assert type(error) is CheckpointError
        assert "resume() failed on rank 0 (host a): FileNotFoundError: [Errno 2]" in str(error)
    assert names_in(tmp_path / "b") == []


class FlippingFile(OpenFile):
    """What is written to it arrives with one bit changed."""

    def write(self, data):
        return super().write(bytes([data[0] ^ 1]) + data[1:] if data else data)


class FlippingFiles(FileSystem):
    def create(self, path):
        return FlippingFile(path) if path.suffix == ".pt" else super().create(path)


@pytest.mark.filterwarnings("ignore:.*skipped save-00000")
def test_what_arrives_with_another_digest_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "FileSystem", FlippingFiles)
    for error in run_ranks(2, both, tmp_path, "ab", lambda folder: shutil.rmtree(folder / "b"), errors=True):
        assert type(error) is CheckpointError
        assert "none is whole on every rank" in str(error)
    assert names_in(tmp_path / "b") == []


@pytest.mark.filterwarnings(LOST, "ignore:.*skipped save-000002")
def test_a_torn_one_is_not_sent(tmp_path):
    def change(folder):
        shutil.rmtree(folder / "b")
        file = folder / "a" / "save-000002-step-00000002" / "x.pt"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    assert [result[:2] for result in run_ranks(2, both, tmp_path, "ab", change)] == [(1, [1.0])] * 2
    assert names_in(tmp_path / "b") == ["save-000001-step-00000001"]


def test_hosts_say_what_others_lack_and_no_more(tmp_path):
    run_ranks(3, save, tmp_path, "abb")
    name = "save-000002-step-00000002"
    manifests = {host: lockstep.checkpoints.layout.read_manifest(tmp_path / host / name) for host in "ab"}
    lacking = [True, False, False]
    told = what_is_here(manifests["a"], [False] * 3, lacking)
    assert sorted(told["files"]) == ["rank-0000.pt"]
    told = what_is_here(manifests["b"], [True, False, False], lacking)
    assert sorted(told["files"]) == ["rank-0001.pt", "x.pt"]
    holdings = Holdings.of([None, told, None], [0], lacking)
    assert (holdings.lost, holdings.shared) == ([0], ["x.pt", "rank-0001.pt"])
    assert holdings.sources == {"x.pt": 1, "rank-0001.pt": 1}
    assert holdings.needs([0], own=True) == [{"rank-0000.pt", "x.pt", "rank-0001.pt"}, set(), set()]
    assert holdings.needs([0], own=False) == [{"x.pt", "rank-0001.pt"}, set(), set()]


def disks_at_random(rank, folder, seed):
    """Hosts lose their disks, or some checkpoints of them, at random."""
    numbers = random.Random(seed)
    hosts = "".join(sorted(numbers.choices("abc", k=rank.world)))
    save(rank, folder, hosts, steps=(1, 2, 3))
    left = {}
    for host, number in itertools.product(sorted(set(hosts)), (1, 2, 3)):
        left[host, number] = numbers.random() < 0.6
        if rank.rank == 0 and not left[host, number]:
            shutil.rmtree(folder / host / f"save-{number:06d}-step-{number:08d}")
    rank.gather(torch.zeros(1))
    whole = [number for number in (1, 2, 3) if all(left[host, number] for host in hosts)]
    some = [number for number in (1, 2, 3) if any(left[host, number] for host in hosts)]
    if not some:
        return Resuming(folder / hosts[rank.rank], ranks_of(rank, hosts)).resume({}) is None
    step, values, own, _ = resume(rank, folder, hosts)
    assert (step, own) == ((max(whole), rank.rank) if whole else (max(some), None))
    return values == [float(step)]


@pytest.mark.filterwarnings(LOST, "ignore:.*skipped save-")
@pytest.mark.parametrize(("world", "seeds"), [(2, 8), (4, 2), pytest.param(4, 16, marks=pytest.mark.around)])
def test_disks_at_random(world, seeds, tmp_path):
    for seed in range(seeds):
        assert run_ranks(world, disks_at_random, tmp_path / str(seed), seed) == [True] * world
