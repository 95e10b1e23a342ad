"""A save is stopped between any two of its calls to the file system, and what was not synced is lost or comes early."""

from __future__ import annotations

import itertools
import random
import shutil

import pytest
import torch

import lockstep
from checkpoints.disk import Disk, RecordingFileSystem, put
from lockstep.checkpoints.layout import TornError, check_contents, list_saved, read_manifest
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.saving import Saving
from threaded import run_ranks

SAVES, KEEP = 4, 2

pytestmark = pytest.mark.filterwarnings("ignore:.*skipped save-", "ignore:.*not resumed from it")


def meet(rank):
    """Go on when all ranks are here."""
    rank.gather(torch.zeros(1))


def state_of(number, rank):
    return {
        "model": {"weight": torch.full((300,), float(number))},
        "number": number,
        "own": lockstep.checkpoints.per_rank(torch.full((5,), 10.0 * number + rank.rank)),
    }


def record(rank, path, files):
    """Some saves, and what they have asked of the file system."""
    for number in range(1, SAVES + 1):
        Saving(path, files, Ranks(rank.group)).save(state_of(number, rank), KEEP, step=number)
        meet(rank)
        if rank.rank == 0:
            files.note("saved", path, number)
        meet(rank)
    return files.calls


def whole_ones(path):
    found = set()
    for saved in list_saved(path):
        try:
            check_contents(saved.folder, read_manifest(saved.folder).files)
        except TornError:
            continue
        found.add(saved.number)
    return found


def check_resumed(rank, path, completed):
    """The newest whole checkpoint is found; those that were saved before are still whole."""
    found = lockstep.resume(path, group=rank.group)
    number = 0 if found is None else found.step
    assert number in (completed, completed + 1), f"{number} after {completed}"
    if found is not None:
        for name, value in state_of(number, rank).items():
            wanted = value.value if isinstance(value, lockstep.checkpoints.PerRank) else value
            torch.testing.assert_close(found.values[name], wanted, rtol=0, atol=0)
    whole = whole_ones(path)
    assert {*range(max(1, number - KEEP + 1), completed + 1)} <= whole
    assert max(whole, default=0) == number
    assert {saved.number for saved in list_saved(path) if saved.is_finished} == whole


def frozen(tree):
    return frozenset((name, frozen(each) if isinstance(each, dict) else hash(each)) for name, each in tree.items())


def states_after_crashes(calls, root, at_random):
    """Each state once: what is there, and the last save that had returned."""
    disk, completed, seen, rng = Disk(root), 0, set(), random.Random(7)
    for call in (None, *calls):
        if call is not None and call.what == "saved":
            completed = call.more
        elif call is not None:
            disk.apply(call)
        for tree in disk.after_crashes(rng, at_random):
            key = completed, frozen(tree)
            if key not in seen:
                seen.add(key)
                yield completed, tree


def crash_everywhere(rank, folder, files, at_random, every):
    """The number of states in which a crash may leave a disk; from each of which the run is resumed."""
    path = folder / "disk" / "run"
    if rank.rank == 0:
        path.parent.mkdir()
    meet(rank)
    states = states_after_crashes(list(record(rank, path, files)), path.parent, at_random)
    count = 0
    for count, (completed, tree) in enumerate(itertools.islice(states, 0, None, every), 1):
        here = folder / f"crash-{count}"
        if rank.rank == 0:
            put(tree, here)
        meet(rank)
        check_resumed(rank, here / "run", completed)
        if count % 10 == 1:  # and the run goes on from there
            lockstep.save(here / "run", step=99, group=rank.group, number=99)
            assert lockstep.resume(here / "run", group=rank.group).values == {"number": 99}
        meet(rank)
        if rank.rank == 0:
            shutil.rmtree(here)
    return count


# Through some of the states; that of two ranks through fewer, since their collectives take most of the time.
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("world", "at_random", "every", "least"),
    [
        (1, 2, 3, 50),
        pytest.param(2, 1, 6, 40, marks=pytest.mark.around),
        pytest.param(1, 100, 1, 300, marks=pytest.mark.soak),
        pytest.param(2, 10, 1, 300, marks=pytest.mark.soak),
    ],
)
def test_a_crash_at_any_moment_loses_no_whole_checkpoint(world, at_random, every, least, tmp_path, capsys):
    files, timeout = RecordingFileSystem(), 90.0 if every > 1 else 2900.0
    results = run_ranks(world, crash_everywhere, tmp_path, files, at_random, every, timeout=timeout, group_timeout=60.0)
    assert {call.what for call in files.calls} == {
        "make_folder", "create", "write", "sync", "sync_folder", "rename", "remove", "remove_folder", "saved"
    }  # fmt: skip
    with capsys.disabled():
        print(f"\n{world} rank(s), {len(files.calls)} calls to the file system: {results[0]} states after a crash")
    assert results[0] > least
