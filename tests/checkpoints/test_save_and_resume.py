"""What is saved and how it comes back; which checkpoint is taken; what is refused, and in which words."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import json
import os
import random
import re
import shutil
import threading
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import lockstep
from checkpoints.disk import names_in, ranks_on
from lockstep.checkpoints import lineage, loadable, per_rank
from lockstep.checkpoints.files import FileSystem
from lockstep.checkpoints.folders import ABANDONED_AFTER
from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.resuming import Resuming
from lockstep.checkpoints.saving import Saving
from lockstep.checkpoints.streams import read_streams, set_streams
from lockstep.distributed.replication.replication import replications_in
from lockstep.errors import AgreementError, CheckpointError
from programs.ranks import on_ranks
from threaded import run_ranks

# ------------------------------------------------------------------------------------------- values


def test_values_are_filled_in_place_or_come_with_the_result(tmp_path):
    tensor, history, best = torch.arange(3.0), [1, 2], {"loss": 0.5}
    lockstep.save(tmp_path, step=7, tensor=tensor, history=history, best=best, epoch=3, nothing=None)
    tensor.zero_()
    history.append(3)
    best.clear()
    found = lockstep.resume(tmp_path, tensor=tensor, history=history, best=best)
    assert (tensor.tolist(), history, best) == ([0.0, 1.0, 2.0], [1, 2], {"loss": 0.5})
    values = {"epoch": 3, "nothing": None}
    assert found == lockstep.checkpoints.Resumed(7, tmp_path / "save-000001-step-00000007", 1, values)


def test_nothing_is_there(tmp_path):
    model = nn.Linear(2, 1)
    assert lockstep.resume(tmp_path / "none", model=model) is None
    assert lockstep.resume(tmp_path, model=model) is None


def test_a_file_of_its_own_for_each_name(tmp_path):
    model = nn.Linear(2, 1)
    folder = lockstep.save(tmp_path / "a" / "b", model=lockstep.DataParallel(model, ["cpu", "cpu"]))
    assert folder == tmp_path / "a" / "b" / "save-000001"
    assert names_in(folder) == ["COMPLETE", "manifest.json", "model.pt", "rank-0000.pt"]
    nn.Linear(2, 1).load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["model.pt"]["bytes"] == (folder / "model.pt").stat().st_size
    assert lockstep.resume(tmp_path / "a" / "b").step is None


def test_compiled_and_plain_modules_are_interchangeable(tmp_path):
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    lockstep.save(tmp_path, model=torch.compile(one, backend="eager"))
    lockstep.resume(tmp_path, model=other)
    assert torch.equal(one.weight, other.weight)


def test_every_stream_of_random_numbers_goes_on(tmp_path):
    def numbers():
        return [torch.rand(1).item(), random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()]

    generator = torch.Generator().manual_seed(5)
    random.gauss(0, 1)  # keeps a second number for the next call, as NumPy does
    numpy.random.randn()
    lockstep.save(tmp_path, generator=generator)
    wanted = [*numbers(), torch.rand(1, generator=generator).item()]
    other = torch.Generator()
    lockstep.resume(tmp_path, generator=other)
    assert [*numbers(), torch.rand(1, generator=other).item()] == wanted


def test_streams_of_accelerators(sim):
    for index in range(torch.accelerator.device_count()):
        torch.sim.manual_seed_all(index)
    streams = read_streams()
    assert len(streams["accelerator"]["states"]) == torch.accelerator.device_count() > 1
    wanted = [torch.rand(2, device=f"sim:{index}").tolist() for index in (0, 1)]
    set_streams(streams)
    assert [torch.rand(2, device=f"sim:{index}").tolist() for index in (0, 1)] == wanted
    streams["accelerator"]["states"] = streams["accelerator"]["states"][:1]  # of a machine with one
    set_streams(streams)


# -------------------------------------------------------------------------------------- ownership


def keep_own(rank, folder, given, resumed):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.own = nn.Parameter(torch.tensor(float(rank.rank)))
    options = {"buffer_policy": "local", "params_and_buffers_to_ignore": ["own"], "process_group": rank.group}
    ddp = lockstep.DistributedDataParallel(model, **options)
    nn.init.constant_(model[1].running_mean, rank.rank)
    of = {"wrapper": ddp, "module": model, "holder": nn.ModuleList([ddp])}
    assert [name for name, _ in replications_in(of[given])] == ["0" if given == "holder" else ""]
    if given != "holder":  # which has no group, and there is no default one
        lockstep.check_in_sync(of[given])
    lockstep.save(folder, group=rank.group, model=of[given], mine=per_rank([rank.rank]), generator=rank.generator())

    with torch.no_grad():
        for tensor in (model.own, model[1].running_mean, model[0].weight):
            tensor.fill_(9.0)
    mine = []
    found = lockstep.resume(folder, group=rank.group, model=of[resumed], mine=mine)
    assert (model.own.item(), model[1].running_mean[0].item(), mine) == (rank.rank, rank.rank, [rank.rank])
    assert (model[0].weight != 9).all()
    assert found.world_size == 2
    files = json.loads((found.folder / "manifest.json").read_text())["files"]
    assert sorted(files) == ["model.pt", "rank-0000.pt", "rank-0001.pt"]


@pytest.mark.parametrize(
    ("given", "resumed"),
    [("wrapper", "module"), ("module", "wrapper"), ("module", "module"), ("holder", "holder")],
)
def test_what_is_a_ranks_own_comes_back_to_it(given, resumed, tmp_path):
    run_ranks(2, keep_own, tmp_path, given, resumed)
    if given == "holder":
        return

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.own = nn.Parameter(torch.tensor(5.0))
    mine, state = [7], torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"saved by 2 rank\(s\) and resumed by 1, so that .* hooks, generator, mine"):
        found = lockstep.resume(tmp_path, model=model, mine=mine)
    assert (model.own.item(), mine, found.world_size, found.values) == (0.0, [7], 2, {})
    assert torch.equal(torch.get_rng_state(), state)


# -------------------------------------------------------------------------- which one, and which stay


def test_the_newest_stay_and_the_last_saved_is_the_newest(tmp_path):
    for step in (10, 20, 15, 15):
        lockstep.save(tmp_path, step=step, keep=2, x=step)
    assert names_in(tmp_path) == ["save-000003-step-00000015", "save-000004-step-00000015"]
    assert lockstep.resume(tmp_path).folder.name == "save-000004-step-00000015"


def flip_a_bit(file):
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])


DAMAGE = {
    # the file, and what becomes of it: it may have other bytes
    "no marker": ("COMPLETE", Path.unlink, "writing it was not finished: it has no file COMPLETE"),
    "half a marker": ("COMPLETE", b"1f", "its file COMPLETE is not whole"),
    "no manifest": ("manifest.json", Path.unlink, "manifest.json cannot be read: .*No such file"),
    "another manifest": ("manifest.json", b"{}", "its SHA-256 is another than COMPLETE says"),
    "a file less": ("x.pt", Path.unlink, r"x.pt, written by rank 0 on .*, is missing"),
    "half a file": ("x.pt", b"x", r"x.pt, written by rank 0 on .*, has 1 bytes, not \d+"),
    "a flipped bit": ("x.pt", flip_a_bit, "x.pt is not what rank 0 on .* wrote: it has another SHA-256"),
}


@pytest.mark.parametrize(("name", "damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_torn_one_is_skipped_with_the_reason(name, damage, reason, tmp_path):
    for step in (1, 2):
        file = lockstep.save(tmp_path, step=step, x=torch.ones(9)) / name
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    else:
        damage(file)
    with pytest.warns(UserWarning, match=f"skipped save-000002-step-00000002: .*{reason}"):
        assert lockstep.resume(tmp_path).step == 1
    lockstep.save(tmp_path, step=3, keep=9, x=1)  # and the number of the torn one is not used again
    assert lockstep.resume(tmp_path).folder.name == "save-000003-step-00000003"


def test_a_folder_in_which_nothing_is_whole(tmp_path):
    folder = lockstep.save(tmp_path, x=torch.ones(9))
    (folder / "x.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none is whole on every rank: save-000001: x.pt, .* has 0 bytes"):
        lockstep.resume(tmp_path)
    (folder / "COMPLETE").unlink()  # it never was
    with pytest.warns(UserWarning, match="skipped save-000001: writing it was not finished"):
        assert lockstep.resume(tmp_path) is None


def leave_unfinished(path, run):
    """Make what a process of a run leaves when it is killed in its save."""
    folder = path / f".unfinished-{run}-0"
    folder.mkdir(parents=True)
    (folder / "x.pt").write_text("")
    return folder


def test_what_a_dead_process_has_left_is_removed(tmp_path):
    lockstep.save(tmp_path)
    others, old = leave_unfinished(tmp_path, "a"), leave_unfinished(tmp_path, "b")
    long_ago = (tmp_path.stat().st_mtime - 2 * ABANDONED_AFTER,) * 2
    for path in (old / "x.pt", old):
        os.utime(path, long_ago)
    lockstep.save(tmp_path)
    assert names_in(tmp_path) == [others.name, "save-000001", "save-000002"]


class Killed(BaseException):
    """Ends a save where SIGKILL would."""


class KillingFiles(FileSystem):
    """Ends the process, as far as it can, before the new checkpoint gets its name, and keeps it from tidying up."""

    def rename(self, path, new):
        self.remove = lambda path: None
        raise Killed


@pytest.mark.parametrize("whole", [0, 1])
def test_a_run_that_is_killed_in_each_save_leaves_one_copy_at_most(whole, tmp_path):
    for _ in range(whole):
        lockstep.save(tmp_path)
    for _ in range(3):
        another_process(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lockstep.resume(tmp_path)
        with pytest.raises(Killed):
            Saving(tmp_path, KillingFiles(), Ranks(None)).save({}, 3, None)
        for each in tmp_path.glob(".unfinished-*/*"):
            each.touch()
        assert len(list(tmp_path.glob(".unfinished-*"))) == 1
    lockstep.save(tmp_path)
    assert names_in(tmp_path) == [f"save-00000{number + 1}" for number in range(whole + 1)]


def test_the_last_copy_goes_before_the_next_is_written(tmp_path):
    """A disk that is full of it has room for the next one."""
    lockstep.save(tmp_path)
    left = leave_unfinished(tmp_path, lineage.lineage_of(tmp_path).run)

    class Files(FileSystem):
        def create(self, path):
            assert not left.exists()
            return super().create(path)

    Saving(tmp_path, Files(), Ranks(None)).save({"x": 1}, 3, None)


# ------------------------------------------------------------------------------------ several runs


def another_process(path):
    """What this process knows of a path is forgotten, as in one that has just begun."""
    return lineage._lineages.pop(path.resolve(), None)


def test_another_runs_checkpoints_are_kept(tmp_path):
    lockstep.save(tmp_path, step=100, keep=1)
    another_process(tmp_path)
    with pytest.warns(UserWarning, match=r"holds checkpoints of an earlier run, the newest is save-000001-step-0"):
        lockstep.save(tmp_path, step=1, keep=1)
    lockstep.save(tmp_path, step=2, keep=1)
    assert names_in(tmp_path) == ["save-000001-step-00000100", "save-000003-step-00000002"]
    another_process(tmp_path)
    assert lockstep.resume(tmp_path).step == 2
    lockstep.save(tmp_path, step=3, keep=1)
    assert names_in(tmp_path) == ["save-000001-step-00000100", "save-000004-step-00000003"]


def test_two_runs_that_write_to_one_path_are_noticed(tmp_path):
    lockstep.save(tmp_path, step=1)
    first = another_process(tmp_path)
    lockstep.resume(tmp_path)  # the same run, started once more while the first is still there
    lockstep.save(tmp_path, step=2)
    lineage._lineages[tmp_path.resolve()] = first
    with pytest.raises(CheckpointError, match=r"another run writes to .*: save-000002-step-00000002, saved by host"):
        lockstep.save(tmp_path, step=2)
    assert names_in(tmp_path) == ["save-000001-step-00000001", "save-000002-step-00000002"]


def test_two_runs_that_save_at_the_same_moment(tmp_path):
    lockstep.save(tmp_path, step=1)

    class Late(FileSystem):
        def rename(self, path, new):
            shutil.copytree(tmp_path / "save-000001-step-00000001", new)
            super().rename(path, new)

    with pytest.raises(CheckpointError, match=r"(?s)not empty|exists"):
        Saving(tmp_path, Late(), Ranks(None)).save({}, 3, 2)
    assert names_in(tmp_path) == ["save-000001-step-00000001", "save-000002-step-00000002"]
    assert (tmp_path / "save-000002-step-00000002" / "COMPLETE").exists()


# --------------------------------------------------------------------------- hosts with their own disks


def on_own_disks(rank, folder, hosts, later=None, damage=lambda path: None):
    """Two saves of ranks on hosts with disks of their own, and a resume of the ranks, by then perhaps on others."""
    path, ranks = folder / hosts[rank.rank], ranks_on(rank, hosts)
    for number in (1, 2):
        state = {"x": torch.full((9,), float(number)), "own": per_rank(rank.rank)}
        Saving(path, FileSystem(), ranks).save(state, 3, number)
    rank.gather(torch.zeros(1))
    if rank.rank == rank.world - 1:
        damage(path)
    rank.gather(torch.zeros(1))
    ranks = ranks_on(rank, later or hosts)
    found = Resuming(folder / ranks.host, ranks).resume({})
    return found.step, found.values["x"][0].item(), found.values["own"]


def test_hosts_with_disks_of_their_own_each_have_a_whole_checkpoint(tmp_path):
    assert run_ranks(3, on_own_disks, tmp_path, "abb") == [(2, 2.0, n) for n in range(3)]
    for host, own in {"a": ["rank-0000.pt"], "b": ["rank-0001.pt", "rank-0002.pt"]}.items():
        assert names_in(tmp_path / host) == ["save-000001-step-00000001", "save-000002-step-00000002"]
        for each in (tmp_path / host).iterdir():
            assert names_in(each) == ["COMPLETE", "manifest.json", *own, "x.pt"]


@pytest.mark.filterwarnings("ignore:.*skipped save-000002.*rank 1 .host b.* is missing")
def test_one_that_is_torn_on_one_host_is_skipped_on_all(tmp_path):
    def damage(path):
        (path / "save-000002-step-00000002" / "x.pt").unlink()

    assert run_ranks(2, on_own_disks, tmp_path, "ab", None, damage) == [(1, 1.0, 0), (1, 1.0, 1)]


LACKING = [
    ("ab", "ac", r"rank 1 \(host c\): it is not on this host's disk: save to a disk that all hosts see, or start"),
    ("ab", "ba", r"rank 0 \(host b\): rank-0000\.pt is not here, since rank 0 has saved it on host a, to a disk of"),
    ("abb", "aba", r"rank 2 \(host a\): rank-0002\.pt is not here, since rank 2 has saved it on host b, to a disk of"),
]


@pytest.mark.parametrize(("saved_on", "hosts", "why"), LACKING)
def test_what_a_host_lacks_is_refused_by_name(saved_on, hosts, why, tmp_path):
    for error in run_ranks(len(hosts), on_own_disks, tmp_path, saved_on, hosts, errors=True):
        assert type(error) is CheckpointError
        assert re.search(rf"none is whole on every rank: save-000002-\S* (.*, and )?{why}", str(error))


# ----------------------------------------------------------------------------------------- refused


@dataclasses.dataclass
class History:
    losses: list


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")
LOCK, NOTED = threading.Lock(), nn.Parameter(torch.ones(1))
NOTED.note = History([])

UNLOADABLE = {
    "an object": ({"a": [History([])]}, r"state\['a'\]\[0\] is a .*History, which torch.load"),
    "one of NumPy's numbers": ({"lr": numpy.float64(1)}, r"state\['lr'\] is a numpy.float64"),
    "an array": ((1, numpy.ones(2)), r"state\[1\] is a numpy.ndarray"),
    "an enum": ({Color.RED: 1}, r"the key <Color.RED: 1> of state is a .*Color"),
    "a function": ([lambda: 1], r"state\[0\] is a function, which cannot be pickled: "),
    "a lock": ({"a": [(LOCK,)]}, r"state\['a'\]\[0\]\[0\] is a _thread.lock, which cannot be pickled"),
    "a defaultdict": (collections.defaultdict(int), r"state is a collections.defaultdict"),
    "a named tuple": (Point(1, 2), r"state is a .*Point"),
    "an attribute": (NOTED, r"state.note is a .*History"),
}


@pytest.mark.parametrize(("state", "message"), UNLOADABLE.values(), ids=UNLOADABLE)
def test_what_could_not_be_loaded_is_refused_by_key_and_type_when_it_is_saved(state, message, tmp_path):
    lockstep.save(tmp_path, step=1)
    with pytest.raises(CheckpointError, match=f"(?s){message}.*Save tensors, numbers, strings"):
        lockstep.save(tmp_path, step=2, state=state)
    assert names_in(tmp_path) == ["save-000001-step-00000001"]


@pytest.mark.parametrize(("value", "allow"), [(lambda: 1, False), (Point(1, 2), True)])
def test_only_what_can_be_pickled_may_be_allowed(value, allow, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        lockstep.save(tmp_path, state={"a": value})
    assert ("add_safe_globals" in str(caught.value)) == allow
    assert ("leave out functions, locks" in str(caught.value)) != allow


LOADABLE = [
    None, True, 2**200, 1.5, 1j, "x", b"x", bytearray(b"x"), {1, 2}, (1, [2]), {"a": {1: torch.ones(2)}},
    collections.OrderedDict(a=1), collections.Counter("ab"), torch.Size([1]), torch.float16, torch.device("cpu"),
    torch.ones(2, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(1)), torch.ones(2).to_sparse(),
    nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict(),
]  # fmt: skip


@pytest.mark.parametrize("value", LOADABLE, ids=lambda value: type(value).__name__)
def test_what_is_allowed_can_be_loaded(value):
    assert loadable.problems(value, "x", whole=True) == []
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    torch.load(file, weights_only=True)


def test_a_type_that_the_program_allows(tmp_path):
    with torch.serialization.safe_globals([History]):
        lockstep.save(tmp_path, history=History([1]))
        assert lockstep.resume(tmp_path).values == {"history": History([1])}


REFUSED = {
    "a name that is no file's": (lambda p: lockstep.save(p, **{"a/b": 1}), "'a/b' cannot be the name of something"),
    "two names of one file": (lambda p: lockstep.save(p, a=1, A=2), "differs from the other names by more than"),
    "no state of a loader": (
        lambda p: lockstep.save(p, data=torch.utils.data.DataLoader([1])),
        "data is a DataLoader without .* give the loader a lockstep.ResumableSampler",
    ),
    "keep": (lambda p: lockstep.save(p, keep=0), "keep=0 and step=None: at least one checkpoint"),
    "step": (lambda p: lockstep.save(p, step=-1), "steps count from 0"),
    "a name that is not there": (lambda p: lockstep.resume(p, other={}), r"has no 'other'; it has epoch, model"),
    "what cannot be filled": (lambda p: lockstep.resume(p, epoch=1), r"take it from the result: .values\['epoch'\]"),
    "another kind": (lambda p: lockstep.resume(p, model={}), "model was saved as a module, and is .* into a dict"),
    "another shape": (lambda p: lockstep.resume(p, t=torch.ones(3)), r"t was saved with shape \(2,\) and dtype torch."),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused(call, message, tmp_path):
    lockstep.save(tmp_path, model=nn.Linear(2, 1), epoch=2, t=torch.ones(2))
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        call(tmp_path)


@on_ranks(2)
def test_ranks_that_save_other_things(rank, tmp_path):
    for given, error, words in [
        ({"step": rank.rank}, AgreementError, r"save\(\): ranks differ in step: 0 on rank 0, 1 on rank 1"),
        ({"ba"[rank.rank]: 1}, AgreementError, r"differ in what is saved as 'b': value on rank 0, nothing on rank 1"),
        ({"step": -rank.rank}, CheckpointError, r"save\(\) failed on rank 1 .*steps count from 0"),
    ]:
        with pytest.raises(error, match=words):
            lockstep.save(tmp_path, group=rank.group, **given)
    lockstep.save(tmp_path, group=rank.group, x=[1])
    with pytest.raises(AgreementError, match=r"resume\(\): ranks differ in the names to be filled"):
        lockstep.resume(tmp_path, group=rank.group, **({"x": []} if rank.rank else {}))
    rank.gather(torch.zeros(1))
    assert names_in(tmp_path) == ["save-000001"]
