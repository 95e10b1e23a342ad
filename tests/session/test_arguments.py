"""Wrong arguments are refused at the call, by name; what a run says of itself."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.errors import CommunicationError, DeviceError, LockstepError, OptionError, UnknownOptionError

WRONG = {
    "seed": ({"seed": "a"}, "seed is 'a', expected an int"),
    "seed, a truth value": ({"seed": True}, "seed is True, expected an int"),
    "backend": ({"backend": "shmm"}, "there is no backend 'shmm'; did you mean shm? There are gloo, "),
    "one of several backends": ({"backend": "cpu:gloo,cuda:ncl"}, "there is no backend 'ncl'; "),
    "backend, no name": ({"backend": 3}, 'backend is 3, expected a name such as "shm"'),
    "device": ({"device": "cpuu"}, "expected a device such as 'cpu' or 'cuda:0', got 'cpuu'"),
    "timeout": ({"timeout": "10"}, "timeout is '10', expected a number of seconds above 0"),
    "no timeout": ({"timeout": None}, "timeout is None, expected a number of seconds above 0"),
    "timeout, not a number": ({"timeout": math.nan}, "timeout is nan, expected a number of seconds above 0"),
    "stall_factor": ({"stall_factor": 0}, "stall_factor is 0, expected a number above 0"),
    "a timedelta": (
        {"timeout": timedelta(minutes=5)},
        "timeout is datetime.timedelta(seconds=300), expected a number of seconds above 0; write 300.0",
    ),
    "stall_minimum": ({"stall_minimum": -1.0}, "stall_minimum is -1.0, expected a number of seconds above 0"),
    "time_limit": ({"time_limit": "1h"}, "time_limit is '1h', expected a number of seconds, or None"),
    "link_timeout": ({"link_timeout": "5"}, "link_timeout is '5', expected a number of seconds of at least 1"),
}


@pytest.mark.parametrize(("given", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_option_of_a_session_is_refused_before_it_begins(given, words):
    with pytest.raises(LockstepError) as caught:
        lockstep.session(**given)
    assert type(caught.value) is (DeviceError if "device" in given else OptionError)
    assert f"session(): {words}" in str(caught.value)


def test_a_misspelt_option_of_a_session_is_told():
    with pytest.raises(UnknownOptionError, match=r"session\(\) got .*'time_out'; did you mean timeout\? There are "):
        lockstep.session(time_out=3)


def test_a_backend_that_pytorch_is_built_without_is_told(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    told = r"session\(\): PyTorch is built without .* 'nccl' here; there are gloo, .*shm$"
    with pytest.raises(OptionError, match=told):
        lockstep.session("nccl")
    with pytest.raises(OptionError, match=r"there is no backend 'ncl'; there are gloo, ") as caught:
        lockstep.session("ncl")
    assert "nccl" not in str(caught.value)


@pytest.mark.parametrize("name", ["rank", "device", "save", "is_main"])
def test_an_attribute_of_a_session_that_has_not_begun(name):
    told = rf"session\(\) has no attribute '{name}': .*`with lockstep.session\(\) as"
    with pytest.raises(AttributeError, match=told):
        getattr(lockstep.session(), name)


def test_a_run_says_what_it_is():
    with lockstep.session(alone=True, device="cpu", backend="gloo") as run:
        assert repr(run) == "rank 0 of 1 on cpu, gloo"


def test_the_names_that_the_package_shows():
    rooms = {"distributed", "errors", "local", "loop", "sharding", "shares"}
    assert set(dir(lockstep)) == {*lockstep.__all__, *rooms, "__version__"}
    assert all(hasattr(lockstep, name) for name in dir(lockstep))


NO_DATA_SETS = {
    "loader": (DataLoader([1, 2]), "a DataLoader: shard the data set that it loads, DataLoader(run.shard(dataset)"),
    "no order": (Dataset(), "a Dataset without a length"),
    "set": ({1, 2}, "a set, whose samples have no indices"),
}


@pytest.mark.parametrize(("given", "words"), NO_DATA_SETS.values(), ids=NO_DATA_SETS)
def test_what_cannot_be_cut_into_shards(given, words):
    with lockstep.session(alone=True, device="cpu") as run, pytest.raises(OptionError) as caught:
        run.shard(given)
    assert f"shard() got {words}" in str(caught.value)


def test_what_is_no_module():
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(OptionError, match=r"check_in_sync\(\): expected a torch.nn.Module, got list"):
        lockstep.check_in_sync([net], optimizer)
    with pytest.raises(OptionError, match=r"DataParallel\(\): expected a torch.nn.Module, got list"):
        lockstep.DataParallel([net], ["cpu", "cpu"])
    with pytest.raises(OptionError, match=r"expected a torch.nn.Module to replicate, got list"):
        lockstep.replicate([net])
    with pytest.raises(OptionError, match=r"expected a torch.nn.Module to replicate, got list"):
        lockstep.DistributedDataParallel([net])


# --------------------------------------------------------------------------- what beginners write


def resume_into_another(run, path):
    run.save(path, model=torch.nn.Linear(2, 2))
    run.resume(path, model=torch.nn.Linear(3, 3))


MISTAKES = {
    "a state without a name": (
        lambda run, path: run.save(path, torch.nn.Linear(1, 1)),
        r"save\(\) got a Linear without a name; .*: save\(path, model=model, optimizer=optimizer\)",
    ),
    "resume without a name": (lambda run, path: run.resume(path, {}), r"resume\(\) got a dict without a name"),
    "snapshot without a name": (lambda run, path: run.snapshot(path, 3), r"snapshot\(\) got a int without a name"),
    "another model": (resume_into_another, r"the model in .*save-000001-.* cannot be loaded into this Linear: Runtime"),
    "a number of batches": (lambda run, _: run.batches(5), r"batches\(\) got 5 of type int; expected a loader"),
    "a layer without anything": (
        lambda *_: lockstep.replicate(torch.nn.ReLU()),
        r"replicate\(\) got a ReLU, which has neither parameters nor buffers",
    ),
    "a module to shard": (
        lambda *_: lockstep.shard_optimizer(torch.nn.Linear(1, 1)),
        r"shard_optimizer\(\) got a Linear; expected an optimizer, such as",
    ),
    "twice": (
        lambda *_: lockstep.replicate(lockstep.replicate(torch.nn.Linear(1, 1))),
        r"Call replicate\(\) once, and use the module that you gave it",
    ),
    "barrier": (lambda run, _: run.barrier(), r"no attribute 'barrier'; write torch.distributed.barrier\(run.group\)"),
    "join": (lambda run, _: run.join(), r"no attribute 'join'; write run.batches\(loader\)"),
    "the name of a file": (
        lambda run, path: run.save(path / "model.pt"),
        r"save\(\): the path is a folder.*Write '.*/model'",
    ),
    "is_main_process": (lambda run, _: run.is_main_process, r"no attribute 'is_main_process'; write run.is_main$"),
    "prepare": (lambda run, _: run.prepare, r"write lockstep.replicate\(model\) and run.batches\(loader\)"),
    "misspelt": (lambda run, _: run.rnak, r"the session has no attribute 'rnak'$"),
}


@pytest.mark.parametrize(("call", "words"), MISTAKES.values(), ids=MISTAKES)
def test_what_beginners_write_is_refused_at_the_call(call, words, tmp_path):
    with lockstep.session(alone=True) as run, pytest.raises((LockstepError, AttributeError), match=words):
        call(run, tmp_path / "ck")


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with lockstep.session(alone=True) as run:
        assert tmp_path in run.save("~/ck", value=1).parents
        assert run.resume("~/ck").values == {"value": 1}
        assert lockstep.resume("~/ck").values == {"value": 1}


def test_a_folder_that_is_there_may_have_the_name_of_a_file(tmp_path):
    folder = tmp_path / "earlier.pt"
    folder.mkdir()
    lockstep.save(folder, value=1)
    assert lockstep.resume(folder).values == {"value": 1}


def test_a_question_may_stand_in_a_condition_without_being_called():
    with lockstep.session(alone=True) as run:
        for question in (lockstep.should_stop, lockstep.loop.skipped):
            assert bool(question) is question() is False
        model = lockstep.replicate(torch.nn.Linear(1, 1))
        run.skip_batch(model)
        assert bool(lockstep.loop.skipped) is lockstep.loop.skipped() is run.skipped is True


CALLS_AFTER_THE_END = {
    "agree": lambda run, model: run.agree(True),
    "batches": lambda run, model: run.batches([1]),
    "backward": lambda run, model: model(torch.ones(2, 2)).sum().backward(),
}


@pytest.mark.parametrize("call", CALLS_AFTER_THE_END.values(), ids=CALLS_AFTER_THE_END)
def test_a_call_after_the_session_is_told_where_it_belongs(call):
    with lockstep.session(alone=True) as run:
        model = lockstep.replicate(torch.nn.Linear(2, 2))
    with pytest.raises(CommunicationError, match=r"^rank 0: the session has ended; indent this line below `with lock"):
        call(run, model)


@pytest.mark.parametrize(
    "call",
    [lambda: lockstep.mean(1.0), lambda: lockstep.check_in_sync(torch.nn.Linear(1, 1)), lockstep.should_stop],
    ids=["mean", "check_in_sync", "should_stop"],
)
def test_without_a_group_the_session_is_named(call):
    with pytest.raises(CommunicationError, match=r"no process group yet: begin one by `with lockstep.session\(\) as"):
        call()
