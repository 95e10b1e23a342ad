"""Device lists: what they may hold, how balanced they are, and whether copies between them arrive."""

from __future__ import annotations

import warnings

import pytest
import torch

from lockstep._base.devices import (
    accelerator,
    all_accelerators,
    device_label,
    direct_copy_works,
    resolve_destination,
    resolve_device,
    resolve_devices,
    side_stream,
    warn_if_unbalanced,
)
from lockstep._base.inner_tensors import copied
from lockstep.local import comm
from lockstep.local.functions import Broadcast, Gather, Scatter
from lockstep.local.scatter_gather import move
from processes import output_of
from tensor_classes import Attributed

CPU = torch.device("cpu")


@pytest.fixture
def untried(sim):
    """Simulated devices between which no connection has been tried yet."""
    direct_copy_works.cache_clear()
    yield sim
    direct_copy_works.cache_clear()


SIM = [torch.device("sim", index) for index in range(8)]


def zeros(*places):
    return [torch.zeros(1, device=place) for place in places]


RESOLVED = {  # while sim:3 is the current device
    **{f"device {device!r}": (lambda device=device: resolve_device(device), CPU)
        for device in ("cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0))},
    **{f"device {device!r}": (lambda device=device: resolve_device(device), torch.device("sim", index))
        for device, index in ((2, 2), ("sim:2", 2), (torch.device("sim", 2), 2), ("sim", 3), (torch.device("sim"), 3))},
    "a list": (lambda: resolve_devices([1, "cpu", "sim:1"]), [SIM[1], CPU, SIM[1]]),
    "a tuple": (lambda: resolve_devices((1, "cpu", SIM[1])), [SIM[1], CPU, SIM[1]]),
    "a range": (lambda: resolve_devices(range(2)), SIM[:2]),
    "the type": (accelerator, torch.device("sim")),
    "all, in the order of their indices": (all_accelerators, SIM),
    "labels": (lambda: [device_label(torch.device(d)) for d in ("cpu", "sim:3", "cuda:0")], ["cpu", "3", "0"]),
    "a destination": (lambda: resolve_destination("cpu", zeros("sim:1")), CPU),
    "a destination by index": (lambda: resolve_destination(5), SIM[5]),
    "no destination": (lambda: resolve_destination(None), SIM[3]),
    "no destination of tensors": (lambda: resolve_destination(None, zeros("sim:1")), SIM[3]),
    "no destination of tensors on both": (lambda: resolve_destination(None, zeros("cpu", "sim:1")), SIM[3]),
    "no destination of tensors on the CPU": (lambda: resolve_destination(None, zeros("cpu")), CPU),
}  # fmt: skip


@pytest.mark.parametrize("name", RESOLVED)
def test_devices_are_named_by_index_string_or_device(sim, name):
    call, expected = RESOLVED[name]
    with torch.accelerator.device_index(3):
        assert call() == expected


def test_each_device_has_one_side_stream_and_the_cpu_none(sim):
    one, other = sim.devices(2)
    assert side_stream(CPU) is None
    assert side_stream(one) is side_stream(one)
    assert side_stream(one) != torch.accelerator.current_stream(one)
    assert (side_stream(one).device, side_stream(other).device) == (one, other)


def processors(**counts):
    return {int(name[1:]): {"multi_processor_count": count} for name, count in counts.items()}


MEMORY, PROCESSORS = 16 << 30, 64  # of each simulated device
BALANCE = {  # what some devices have instead, which devices are looked at, and the warning; None: there is none
    "half of the memory": (
        {2: {"total_memory": MEMORY // 2}},
        SIM[:3],
        f"imbalance between your devices: sim:2 has {MEMORY // 2} and sim:0 has {MEMORY} (memory)",
    ),
    "half of the processors": (processors(_2=32), SIM[:3], "devices: sim:2 has 32 and sim:0 has 64 (processors)"),
    "less of both, on two": ({i: {"total_memory": 1 << 30, "multi_processor_count": i} for i in (1, 2)}, SIM[:3], ""),
    "a quarter less": (processors(_1=48), SIM[:2], None),
    "over a quarter less": (processors(_1=47), SIM[:2], "sim:1 has 47"),
    "a third more": (processors(_1=85), SIM[:2], None),
    "over a third more": (processors(_1=86), SIM[:2], "sim:1 has 86"),
    "equal ones": ({}, SIM[:2], None),
    "nothing known": (processors(_1=0), [CPU, CPU, *SIM[:3]], None),
    "one device twice": (processors(_3=1), [SIM[3]] * 2, None),
}


@pytest.mark.parametrize("name", BALANCE)
def test_devices_that_differ_by_over_a_quarter_are_named_once(sim, name):
    properties, devices, words = BALANCE[name]
    for index, values in properties.items():
        sim.set_properties(index, **values)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_unbalanced(devices)
    assert len(caught) == (words is not None)
    assert all(words in str(w.message) and "split=" in str(w.message) for w in caught)


# ---------------------------------------------------------------------------- broken connections


@pytest.mark.parametrize("how", ["flip", "zero", "stale"])
def test_a_connection_that_delivers_garbage_is_noticed_and_named_once(untried, how):
    untried.break_peer_copies(0, 1, how=how)
    d0, d1 = untried.devices(2)
    with pytest.warns(UserWarning, match="a direct copy from sim:0 to sim:1 did not deliver what was sent.*host"):
        assert not direct_copy_works(d0, d1)
    assert not direct_copy_works(d0, d1)  # a second warning would be an error
    assert direct_copy_works(d1, d0)
    assert direct_copy_works(d0, d0)
    assert direct_copy_works(CPU, d1)
    assert direct_copy_works(d1, CPU)


def test_a_connection_can_be_tried_whatever_the_default_device_is(untried):
    d0, d1 = untried.devices(2)
    torch.set_default_device(d1)
    try:
        assert direct_copy_works(d0, d1)
    finally:
        torch.set_default_device(None)


def test_a_connection_is_tried_once(untried):
    d0, d1 = untried.devices(2)
    assert direct_copy_works(d0, d1)
    assert untried.copies()["sim:0", "sim:1"].calls == 1
    assert direct_copy_works(d0, d1)
    assert untried.copies()["sim:0", "sim:1"].calls == 1


def on(device, *values):
    return torch.tensor(values, device=device)


CALLS = {
    "broadcast": lambda: comm.broadcast(on("sim:0", 1.0, 2.0), [1])[0],
    "broadcast out": lambda: comm.broadcast(on("sim:0", 1.0, 2.0), out=[torch.empty(2, device="sim:1")])[0],
    "broadcast_coalesced": lambda: comm.broadcast_coalesced([on("sim:0", 9.0), on("sim:0", 1.0, 2.0)], [1])[0][1],
    "reduce_add": lambda: comm.reduce_add([on("sim:0", 1.0, 1.0), on("sim:1", 0.0, 1.0)], 1),
    "reduce_add_coalesced": lambda: comm.reduce_add_coalesced([[on("sim:0", 1.0, 1.0)], [on("sim:1", 0.0, 1.0)]], 1)[0],
    "scatter": lambda: comm.scatter(on("sim:0", 0.0, 0.0, 1.0, 2.0), [0, 1])[1],
    "scatter out": lambda: comm.scatter(on("sim:0", 1.0, 2.0), out=[torch.empty(2, device="sim:1")])[0],
    "gather": lambda: comm.gather([on("sim:0", 1.0), on("sim:1", 2.0)], 0, 1),
    "gather out": lambda: comm.gather([on("sim:0", 1.0), on("sim:1", 2.0)], out=torch.empty(2, device="sim:1")),
    "Broadcast": lambda: Broadcast.apply([1], on("sim:0", 1.0, 2.0))[0],
    "Scatter": lambda: Scatter.apply([1], None, 0, on("sim:0", 1.0, 2.0))[0],
    "Gather": lambda: Gather.apply(1, 0, on("sim:0", 1.0), on("sim:0", 2.0)),
    "copied": lambda: copied(Attributed(on("sim:0", 1.0, 2.0)), torch.device("sim:1")).as_subclass(torch.Tensor),
    "move": lambda: move([on("sim:0", 1.0, 2.0)], 1)[0],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_over_a_broken_connection_every_call_goes_through_the_host(untried, call):
    untried.break_peer_copies(0, 1)
    with pytest.warns(UserWarning, match="sim:0 to sim:1"):
        first = call()
    untried.reset_copies()
    second = call()
    for result in (first, second):
        assert result.device == torch.device("sim:1")
        assert result.cpu().tolist() == [1.0, 2.0]
    copies = untried.copies()
    assert ("sim:0", "sim:1") not in copies
    assert copies["sim:0", "cpu"].calls > 0


def test_gradients_go_around_a_broken_connection_too(untried):
    untried.break_peer_copies(1, 0)
    weight = torch.ones(3, device="sim:0", requires_grad=True)
    with pytest.warns(UserWarning, match="sim:1 to sim:0"):
        sum((copy * 2).sum().cpu() for copy in Broadcast.apply([0, 1], weight)).backward()
    assert weight.grad.tolist() == [4, 4, 4]


def test_connections_that_work_are_used_directly(untried):
    tensor = on("sim:0", 1.0)
    comm.broadcast(tensor, [1])
    untried.reset_copies()
    comm.broadcast(tensor, [1])
    assert dict(untried.copies()) == {("sim:0", "sim:1"): (1, 4)}


WITHOUT_ACCELERATORS = """
import torch
from lockstep._base.devices import all_accelerators, resolve_destination, resolve_device

assert all_accelerators() == []
assert resolve_destination(None) == resolve_device("cpu") == torch.device("cpu")
for device in (0, "cuda"):
    try:
        resolve_device(device)
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.skipif(torch._C._get_privateuse1_backend_name() != "sim", reason="this machine has accelerators")
def test_without_accelerators_the_errors_say_to_use_the_cpu():
    assert output_of(WITHOUT_ACCELERATORS).splitlines() == [
        "there is no accelerator with index 0; this process has no accelerator: use 'cpu', as often as replicas are "
        "wanted",
        "device cuda is not available; this process has no accelerator: use 'cpu', as often as replicas are wanted",
    ]
