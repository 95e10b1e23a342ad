"""The device of a rank: one accelerator for each process of a host, or the CPU; else an error that says what to type.

Accelerators are simulated.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
import sim as simulator
from lockstep._base.devices import accelerator, wait_for_accelerator
from lockstep.errors import DeviceError, PeerFailure
from processes import on_processes, run_processes


def device_of_a_session(rank, accelerators, device):
    """The session's device, or what it raises instead."""
    if accelerators:
        assert not isinstance(found := simulator.load(accelerators), str), found
    try:
        with lockstep.session(device=device, timeout=60.0) as run:
            model = lockstep.replicate(nn.Linear(2, 2).to(run.device))
            model(torch.ones(1, 2, device=run.device)).sum().backward()
            return str(run.device)
    except DeviceError as error:
        return str(error)


def devices(world, accelerators, device=None):
    return run_processes(world, device_of_a_session, accelerators, device, launched=True)


@pytest.mark.parametrize(
    ("accelerators", "device", "found"),
    [
        (2, None, ["sim:0", "sim:1"]),
        (1, None, ["sim:0"]),
        (0, None, ["cpu", "cpu"]),
        (1, "cpu", ["cpu", "cpu"]),
        (1, "sim:0", ["sim:0", "sim:0"]),
    ],
)
def test_each_process_has_an_accelerator_of_its_own_or_the_device_that_is_asked_for(accelerators, device, found):
    assert devices(len(found), accelerators, device) == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told():
    (told,) = devices(1, 0, "cuda:0")
    assert told.startswith("session(device='cuda:0'): PyTorch sees no accelerator in this process; leave the device ")


@pytest.mark.parametrize(("count", "there", "device"), [(1, "1 accelerator", None), (2, "2 accelerators", "sim")])
def test_more_processes_than_accelerators_are_an_error_on_every_rank_that_says_what_to_type(count, there, device):
    told = f"3 processes on this host, which has {there} of type sim: type `torchrun --nproc-per-node {count}`, or "
    assert devices(3, count, device) == [f'{told}`session(device="cpu")` for the CPU'] * 3


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("gpu", "expected a device such as 'cpu' or 'cuda:0', got 'gpu'"),
        ("cuda", "device cuda is not available; this process has 'cpu' and sim:0 to sim:0"),
        ("sim:1", "there is no accelerator with index 1"),
    ],
)
def test_a_device_that_is_not_there_is_named(device, said):
    (told,) = devices(1, 1, device)
    assert said in told


class Stream:
    """The stream of an accelerator that is at work until another rank fails, or whose kernels fail."""

    def __init__(self, fails):
        self.fails = fails

    def query(self):
        if self.fails:
            raise RuntimeError("device-side assert triggered")
        return False


@on_processes(2, device="sim")
def test_what_the_device_says_at_the_end_of_a_session_is_told_to_all(rank):
    dist.all_reduce(torch.ones(1))
    words = "device-side assert triggered"
    told = f"^rank 0 stops, because rank 1 failed in tear-down: RuntimeError: {words}"
    error, words = [(PeerFailure, told), (RuntimeError, f"^{words}$")][rank.rank]
    with pytest.raises(error, match=words), lockstep.session(device="sim", timeout=60.0):
        # until the process ends
        mock.patch.object(torch.accelerator, "current_stream", return_value=Stream(rank.rank == 1)).start()


@on_processes(1, device="sim")
def test_a_device_whose_module_does_not_say_if_it_is_in_use_is_not_waited_for(rank):
    assert accelerator() is not None  # and it stays known
    with mock.patch.object(torch, "get_device_module", return_value=object()):
        wait_for_accelerator(lambda: None)
