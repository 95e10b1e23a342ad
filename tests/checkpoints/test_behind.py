"""save(wait=False): the checkpoint has the state of its moment, counts when it is whole, and its failure is told."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from checkpoints.disk import raising
from lockstep._base.store import BoundedStore
from lockstep.checkpoints import per_rank, saving
from lockstep.checkpoints.files import FileSystem
from lockstep.checkpoints.layout import list_saved
from lockstep.checkpoints.memory import MemoryFolder
from lockstep.checkpoints.ranks import Ranks, RanksByStore
from lockstep.checkpoints.state import HostCopies, Parts, entries_of, read
from lockstep.errors import CheckpointError, CommunicationError, PeerFailure
from lockstep.session import run_state
from processes import be_launched, on_processes, run_processes
from programs.ranks import on_ranks
from tensor_classes import Packed
from threaded import run_ranks


class HeldFiles(FileSystem):
    """A disk that creates no file before it may."""

    may = threading.Event()

    def create(self, path):
        assert self.may.wait(60)
        return super().create(path)


class FullDisk(FileSystem):
    create = raising(OSError(28, "No space left on device"))


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr(run_state, "FileSystem", HeldFiles)
    HeldFiles.may.clear()
    yield HeldFiles.may
    HeldFiles.may.set()


def test_the_state_is_that_of_the_call_and_counts_when_it_is_whole(held, tmp_path):
    model, history, noise = nn.Linear(2, 2), [1], torch.Generator().manual_seed(3)
    model.tied = model.weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    number = torch.rand(1, generator=noise.clone_state())
    with lockstep.session() as run:
        folder = run.save(tmp_path, wait=False, model=model, history=history, noise=noise)
        with torch.no_grad():
            model.weight.zero_()
        history.append(2)
        torch.rand(1, generator=noise)
        assert not folder.exists()
        held.set()
    assert [each.folder for each in list_saved(tmp_path)] == [folder]
    assert lockstep.resume(tmp_path, model=model, noise=noise).values["history"] == [1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.rand(1, generator=noise), number)


def test_a_second_save_waits_for_the_first(held, tmp_path):
    order = []
    with lockstep.session() as run:
        run.save(tmp_path, wait=False, x=1)
        threading.Timer(0.2, lambda: (order.append("may"), held.set())).start()
        run.save(tmp_path, x=2)
        order.append("saved")
        assert order == ["may", "saved"]
        assert [each.number for each in list_saved(tmp_path) if each.is_finished] == [1, 2]
        assert run.resume(tmp_path).values == {"x": 2}


def test_resume_waits_for_what_is_in_flight(held, tmp_path):
    with lockstep.session() as run:
        run.save(tmp_path, wait=False, x=1)
        threading.Timer(0.2, held.set).start()
        assert run.resume(tmp_path).values == {"x": 1}


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()])  # sys.exit(), and a generator that is closed
def test_a_program_that_leaves_without_a_failure_waits_for_what_is_in_flight(held, tmp_path, error):
    with pytest.raises(type(error)), lockstep.session() as run:
        run.save(tmp_path, wait=False, x=1)
        run.snapshot(tmp_path, every=1, x=2)
        threading.Timer(0.2, held.set).start()
        raise error
    assert lockstep.resume(tmp_path).values == {"x": 1}
    assert not MemoryFolder.of(tmp_path).folder.exists()


def leaves_before_the_others(rank, path):
    with lockstep.session(timeout=60.0) as run:
        model = lockstep.replicate(nn.Linear(2, 1))
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            run.snapshot(path, every=1, model=model)
            if step == 1 and run.rank == 1:
                sys.exit(0)


def test_snapshots_stay_where_a_rank_leaves_the_others_too_early(tmp_path):
    """The launcher starts them again."""
    first, _ = run_processes(2, leaves_before_the_others, tmp_path, errors=True, launched=True)
    assert isinstance(first.error, PeerFailure)
    assert MemoryFolder.of(tmp_path).folder.exists()


def test_a_session_that_is_interrupted_while_it_waits_for_what_is_in_flight_has_ended(held, tmp_path):
    with pytest.raises(KeyboardInterrupt), lockstep.session() as run:
        run.save(tmp_path, wait=False, x=1)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert not dist.is_initialized()


SAVES = """
import atexit, os, sys, threading, warnings
import lockstep
from lockstep.checkpoints.files import FileSystem
from lockstep.session import run_state

class HeldFiles(FileSystem):
    may = threading.Event()

    def create(self, path):
        assert self.may.wait(60)
        return super().create(path)

def save(run):
    run.save(sys.argv[1], wait=False, x=1)

def save_and_resume(run):
    save(run)
    assert run.resume(sys.argv[1]).values == {"x": 1}

def in_thread():
    with lockstep.session() as run:
        save(run)

def with_another_process():
    with lockstep.session() as run:
        save(run)
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            HeldFiles.may.set()
        else:
            assert run.resume(sys.argv[1]) is None

def at_the_end():
    threading.main_thread().join()
    HeldFiles.may.set()

run_state.FileSystem = HeldFiles
threading.Thread(target=at_the_end, daemon=True).start()
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of a fork beside threads
"""


@pytest.mark.parametrize(
    "end",
    [
        "save(lockstep.session().__enter__())",
        pytest.param("atexit.register(save_and_resume, lockstep.session().__enter__())", marks=pytest.mark.around),
        pytest.param("threading.Thread(target=in_thread).start()", marks=pytest.mark.around),
        pytest.param("with_another_process()", marks=pytest.mark.around),
    ],
)
def test_what_is_in_flight_when_a_program_ends(end, tmp_path):
    """It is written before the process ends: of a session that nobody closes, and of one in a thread; a process that
    was forked meanwhile does not wait for it."""
    program = [sys.executable, "-W", "ignore:Failed to initialize NumPy", "-c", SAVES + end, tmp_path / "run"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    assert lockstep.resume(tmp_path / "run").values == {"x": 1}


def test_it_is_older_than_a_snapshot_that_was_taken_meanwhile(held, tmp_path):
    with lockstep.session() as run:
        run.save(tmp_path, wait=False, x=1)
        run.snapshot(tmp_path, every=1, x=2)
        held.set()
        assert run.resume(tmp_path).values == {"x": 2}


@pytest.mark.parametrize("when", ["save", "end"])
def test_a_failure_is_raised_once_at_the_next_save_or_at_the_end(when, tmp_path):
    failed = pytest.raises(CheckpointError, match=r"save\(\) failed: OSError: .*No space left on device")
    with failed, lockstep.session() as run:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_state, "FileSystem", FullDisk)
            run.save(tmp_path / "run", wait=False, x=1)
        if when == "save":
            try:
                run.save(tmp_path / "run", x=2)
            except CheckpointError:
                run.save(tmp_path / "run", x=3)
                raise
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["save-000002-step-00000000"] * (when == "save")


def test_what_cannot_be_saved_is_an_error_at_once(tmp_path):
    refused = pytest.raises(CheckpointError, match=r"x is a threading.Event, which cannot be pickled")
    with lockstep.session() as run, refused:
        run.save(tmp_path, wait=False, x=threading.Event())


def test_copies_share_the_memory_of_tied_parameters():
    layer = nn.Linear(300, 300)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    parts = HostCopies().of({entry.name: read(entry) for entry in entries_of({"model": model})})["model"]
    assert parts.shared["0.weight"] is parts.shared["2.weight"]
    assert parts.shared["0.weight"] is not layer.weight
    assert parts.shared._metadata == model.state_dict()._metadata


def test_the_memory_of_copies_is_used_again():
    copies, x, y = HostCopies(), torch.arange(6.0).view(2, 3), torch.ones(2, 3, dtype=torch.int64)

    def copied(**state):
        return {name: parts.shared for name, parts in copies.of({k: Parts(v, {}) for k, v in state.items()}).items()}

    with torch.inference_mode():
        first = copied(x=x, y=y, z=x.t())
    places = {name: each.data_ptr() for name, each in first.items()}
    x += 1
    again = copied(x=x, y=y, z=x.t())
    assert {name: each.data_ptr() for name, each in again.items()} == places
    assert torch.equal(again["x"], x)
    assert torch.equal(again["z"], x.t())
    assert again["z"].stride() == (1, 3)
    fewer = copied(z=x.t().clone().requires_grad_())["z"]
    assert fewer.requires_grad
    assert fewer.untyped_storage().nbytes() == 24
    kept = weakref.ref(again["y"].untyped_storage())
    del first, again
    assert kept() is None  # memory that is not needed any more is given up


# -------------------------------------------------------------------------------------- many ranks


def by_store(rank, store, timeout=20.0, check=lambda: None):
    return RanksByStore(Ranks(rank.group), BoundedStore(store), check, timeout)


def begun(rank, folder, files, **more):
    """A save that has taken its state."""
    made = saving.Saving(folder, files, Ranks(rank.group))
    made.begin({"x": 1, **more}, 3, 7, copies=HostCopies())
    return made


@on_ranks(3)
def test_ranks_write_behind_the_training_without_the_group(rank, store, tmp_path):
    made = begun(rank, tmp_path / "run", FileSystem(), own=per_rank(rank.rank))
    with ThreadPoolExecutor() as pool:
        written = pool.submit(made.write, by_store(rank, store))
        for _ in range(20):
            rank.gather(torch.ones(1))  # the group is free for the training
        written.result()
    rank.gather(torch.zeros(1))
    found = lockstep.resume(tmp_path / "run", group=rank.group)
    assert (found.step, found.values) == (7, {"x": 1, "own": rank.rank})


@on_ranks(2)
def test_a_failure_on_one_rank_is_one_on_all(rank, store, tmp_path):
    made = begun(rank, tmp_path / "run", FullDisk() if rank.rank == 1 else FileSystem())
    with pytest.raises(CheckpointError, match=r"save\(\) failed on rank 1 \(host .*\): OSError: .*No space left"):
        made.write(by_store(rank, store))
    rank.gather(torch.zeros(1))
    assert list((tmp_path / "run").iterdir()) == []


class CountedStore:
    """A store that notes which values are read of it."""

    def __init__(self, store):
        self.store, self.read = store, []

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get(self, key):
        self.read.append(key)
        return self.store.get(key)


def tell_all(rank, store):
    counted = CountedStore(store)
    ranks = by_store(rank, counted)
    assert ranks.tell(rank.rank // 2, "save()") == [0, 0, 1, 1]
    assert ranks.tell(None, "save()") == [None] * 4
    assert ranks.tell({"of": rank.rank}, "save()") == [{"of": each} for each in range(4)]
    assert counted.read == ["0 of all", "1 of all", "2 of all"]  # one value in each


def test_exchanges_that_are_over_leave_the_store(store):
    run_ranks(4, tell_all, store)
    assert store.check(["2 of all"])
    assert store.num_keys() == 1


def test_what_neighbours_say_alike_is_written_once(store):
    run_ranks(4, lambda rank: by_store(rank, store).tell(rank.rank // 2, "save()"))
    assert store.get("0 of all") == b'[["0", 2], ["1", 2]]'


SILENT = r"save\(\), behind the training: rank 1, 2 has not answered"
FAILED = PeerFailure("rank 1 has ended", rank=1, step=1, phase="", reason="", traceback=None, stacks=None)
ENDS = {
    "a time-out": ({"timeout": 0.2}, CommunicationError, SILENT),
    "a failed rank": ({"check": raising(FAILED)}, PeerFailure, "rank 1 has ended"),
}


@pytest.mark.parametrize(("options", "error", "words"), ENDS.values(), ids=ENDS)
@on_ranks(3)
def test_ranks_that_do_not_answer_behind_the_training(rank, store, options, error, words):
    if rank.rank == 0:
        with pytest.raises(error, match=words):
            by_store(rank, store, **options).tell(1, "save()")
    rank.gather(torch.zeros(1))


@on_processes(2, launched=True)
def test_sessions_save_behind_their_training(rank, tmp_path):
    """Saves in flight while the ranks train, of two sessions of the same processes."""
    for last in (False, True):
        with lockstep.session() as run:
            model = lockstep.replicate(nn.Linear(20, 20))
            run.resume(tmp_path, model=model)
            for number in run.batches(range(3)):
                model(torch.full((1, 20), float(number))).sum().backward()
                run.save(tmp_path, wait=False, model=model, own=per_rank(number))
            if last:
                assert run.resume(tmp_path).values == {"own": 2}
                assert [each.number for each in list_saved(tmp_path)] == [5, 6, 7]


def save_without_a_store(rank, port, pid, number, folder):
    """The store is gone, of which the training hears nothing; the session waits no longer than it has to, and leaves no
    thread and no connection."""
    dist.destroy_process_group()
    be_launched(rank, port)
    threads, connections = set(threading.enumerate()), set(sockets())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CommunicationError) as raised:
        patch.setattr(run_state, "ANSWER_SECONDS", 0.5)
        with lockstep.session(timeout=600.0) as run:
            run.save(folder, wait=False, x=0)
            assert not run.agree(False)
            if rank.rank == 0:
                os.kill(pid, number)
            assert not run.agree(False)
            run.save(folder, wait=False, x=1)
    for each in set(threading.enumerate()) - threads:
        each.join(30)
        assert not each.is_alive(), each
    text = str(raised.value)
    del raised, run
    gc.collect()
    assert set(sockets()) <= connections
    return text


def sockets():
    """The sockets of this process."""
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (link := os.readlink(each)).startswith("socket:"):
                yield link


@pytest.mark.around
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_is_gone_meanwhile(number, tmp_path):
    code = (
        "import torch.distributed as dist, signal; "
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
        "print(store.port, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline())
            results = run_processes(2, save_without_a_store, port, process.pid, number, tmp_path / "run")
        finally:
            process.kill()
    assert all("store" in each for each in results)


# ------------------------------------------------------------------------------------- accelerators


class Tagged(nn.Parameter):
    """A parameter with attributes."""


def state_on_an_accelerator(device):
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 6, device=device)).sum().backward()
    optimizer.step()
    tagged = Tagged(torch.arange(3.0, device=device))
    tagged.scale, tagged.name_of = torch.ones(2, device=device), "tag"
    packed = Packed(torch.arange(6, dtype=torch.int8, device=device).view(2, 3), torch.ones(2, 1, device=device))
    kept = {"parameter": nn.Parameter(torch.ones(2, device=device)), "tagged": tagged, "packed": packed, "number": 3}
    return {"model": model, "optimizer": optimizer, "kept": kept}


def test_state_on_an_accelerator_is_copied_to_pinned_memory_and_waited_for_once(sim):
    (device,) = sim.devices(1)
    copies = HostCopies()
    parts = {entry.name: read(entry) for entry in entries_of(state_on_an_accelerator(device))}
    del parts["kept"].shared["packed"]
    copies.of(parts)
    sim.reset_stream_log()
    found = copies.of(parts)
    waits = [line for line in sim.stream_log() if line.action == "sync stream"]
    assert [(line.device, line.stream) for line in waits] == [("sim:0", 0)]
    assert sim.stream_log()[-1].action == "sync stream"
    for name, tensor in found["model"].shared.items():
        assert tensor.is_pinned()
        assert torch.equal(tensor, parts["model"].shared[name].cpu())
    moments = found["optimizer"].shared["state"][0]
    assert moments["exp_avg"].is_pinned()


def test_copies_of_tensors_of_other_classes_are_on_the_host_too(sim):
    kept = state_on_an_accelerator(sim.devices(1)[0])["kept"]
    found = HostCopies().of({"kept": Parts(kept, {})})["kept"].shared
    assert {type(found["parameter"]), type(found["tagged"])} == {nn.Parameter, Tagged}
    assert found["parameter"].requires_grad
    assert found["tagged"].name_of == "tag"
    devices = {found[name].device.type for name in ("parameter", "tagged", "packed")}
    assert devices == {"cpu"} == {found["tagged"].scale.device.type, found["packed"].payload.device.type}
    assert type(found["packed"]) is Packed
    assert torch.equal(found["packed"].payload, kept["packed"].payload.cpu())
