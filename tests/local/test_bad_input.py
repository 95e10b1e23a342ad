"""A batch or a replica that fails on its way: the error says where, nothing is left, and the next one is right."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from local.refusal import refused
from lockstep import DataParallel
from lockstep.errors import DeviceError, LayoutError
from lockstep.local import data_parallel
from programs.networks import Applying
from small_modules import fails_in_backward, one_weight


@pytest.fixture
def python():
    """A function that starts a program without accelerators; what is left of it ends with the test."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.ExitStack() as stack:

        def start(program, *arguments):
            run = subprocess.Popen(
                [sys.executable, "-u", "-W", "error", "-c", program, *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(run)
            stack.callback(run.kill)
            return run

        yield start


def test_a_parameter_on_another_device(sim):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("sim:0")
    net[1].bias = nn.Parameter(torch.zeros(2, device="sim:1"))
    x = torch.ones(4, 2, device="sim:0")
    message = ("device sim:0 (device_ids[0])", "on device: sim:1", "parameter 1.bias", "module.to('sim:0')")
    for ids in ([0], [0, 1]):
        with refused(DeviceError, *message):
            data_parallel(net, x, ids)
    parallel = DataParallel(net, [0, 1])
    for call in (lambda: parallel(x), lambda: parallel.step(lambda output: output.mean(), x)):
        with refused(DeviceError, *message):
            call()
    net[1].bias = nn.Parameter(torch.zeros(2, device="sim:0"))
    torch.testing.assert_close(parallel(x), net(x))
    parallel.cpu()
    with refused(DeviceError, "device sim:0 (device_ids[0])", "parameter 0.weight"):
        parallel(x)
    parallel.to("sim:0", torch.float64)
    torch.testing.assert_close(parallel(x.double()), net(x.double()))


@pytest.mark.parametrize("built", [False, True])
def test_a_buffer_on_another_device(sim, built):
    net = nn.BatchNorm1d(2).to("sim:0")
    parallel, x = DataParallel(net, [0, 1]), torch.randn(4, 2, device="sim:0")
    if built:
        parallel(x)
    net.running_var = net.running_var.to("cpu")
    with refused(DeviceError, "on device sim:0", "on device: cpu", "buffer running_var"):
        parallel(x)
    net.running_var = net.running_var.to("sim:0")
    parallel(x)


# ------------------------------------------------------------------------------------------ outputs


def test_a_loss_that_is_not_one_number_leaves_no_gradient(devices, first):
    net, x = nn.Linear(1, 1).to(first), torch.ones(4, 1, device=first)
    parallel = DataParallel(net, devices(2))
    with refused(LayoutError, "loss_fn must return one number"):
        parallel.step(lambda output: output, x)
    assert net.weight.grad is None
    parallel.step(lambda output: output.sum(), x)
    assert net.bias.grad.tolist() == [2]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["loss", "backward"])
def test_a_step_that_fails_leaves_nothing_for_the_next_to_add(devices, first, failing, where):
    """Such as what the other replica has already summed up."""
    net, x = nn.Linear(1, 1).to(first), torch.arange(2.0, device=first)[:, None]
    parallel = DataParallel(net, devices(2))

    def loss(output, row):
        if int(row) == failing:
            if where == "loss":
                raise ArithmeticError("a bad batch")
            output = fails_in_backward(output)
        return output.sum()

    with refused(ArithmeticError, f"replica {failing} " if where == "loss" else "", "a bad batch"):
        parallel.step(loss, x, x)
    assert where == "backward" or net.weight.grad is None
    net.zero_grad()
    parallel.step(lambda output, row: output.sum(), x, x)
    assert net.weight.grad.tolist() == [[0.5]]
    assert net.bias.grad.tolist() == [1]


# -------------------------------------------------------------------------------- replicas that raise


class NeedsTwo(Exception):
    def __init__(self, code, reason):
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class NeedsKeyword(Exception):
    def __init__(self, code=0, *, reason):
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class OwnText(Exception):
    def __str__(self):
        return f"<< {self.args[0]} >>"


class NoText(Exception):
    def __init__(self, detail):
        super().__init__()
        self.detail = detail


class Row(NamedTuple):
    number: int


def failing(*kinds):
    """A network that raises what the maker with the number of its first row makes, and a dict of that."""
    raised = {}

    def function(m, x):
        number = int(x[0, 0])
        if kinds[number] is not None:
            raised[number] = error = kinds[number]()
            raise error
        return x

    return Applying(function), raised


ERRORS = {
    "value": lambda: ValueError("wonderful"),
    "no arguments": ValueError,
    "two arguments": lambda: NeedsTwo(3, "wonderful"),
    "keyword": lambda: NeedsKeyword(reason="wonderful"),
    "argument and keyword": lambda: NeedsKeyword(3, reason="wonderful"),
    "own text": lambda: OwnText("wonderful"),
    "no text": lambda: NoText("wonderful"),
    "key": lambda: KeyError("wonderful"),
    "key of another type": lambda: KeyError(Row(3)),
    "os": lambda: FileNotFoundError(2, "wonderful", "name"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "wonderful"),
    "assertion": lambda: AssertionError("wonderful"),
    "stop": lambda: StopIteration("wonderful"),
    "not implemented": lambda: NotImplementedError("wonderful"),
    "memory": lambda: torch.OutOfMemoryError("wonderful"),
    "group": lambda: ExceptionGroup("wonderful", [ValueError("inside")]),
}


@pytest.mark.parametrize("which", [[0], [1], [0, 1, 2]], ids=["first", "second", "all"])
@pytest.mark.parametrize("name", ERRORS)
def test_a_replica_that_raises(devices, first, name, which):
    make, where = ERRORS[name], "cpu" if first.type == "cpu" else str(which[0])
    network, raised = failing(*(make if i in which else None for i in range(3)))
    x = torch.arange(3.0, device=first)[:, None]
    kind = type(make())
    lines = [re.compile(f"Caught {kind.__name__} in replica {which[0]} on device {where}.\nOriginal .*Traceback")]
    lines += [re.compile(r"in function\n[ |]+raise error"), traceback.format_exception_only(make())[0].split("\n")[0]]
    lines += [re.compile(f"Also failed: replica {i} on device .*{kind.__name__}") for i in which[1:]]
    with refused(kind, *lines) as caught:
        DataParallel(network.to(first), devices(3))(x)
    assert sorted(raised) == which
    error = raised[which[0]]
    assert caught.value.__cause__ is error
    assert type(caught.value) is kind
    assert "function" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    for attribute in ("code", "reason", "detail"):
        if hasattr(error, attribute):
            assert getattr(caught.value, attribute) == getattr(error, attribute)


def test_an_error_in_backward_reaches_the_caller(devices, first):
    net = one_weight().to(first)
    parallel, x = DataParallel(net, devices(2)), torch.ones(4, 1, device=first)
    for call in (
        lambda: fails_in_backward(parallel(x)).sum().backward(),
        lambda: parallel.step(lambda o: fails_in_backward(o).sum(), x),
    ):
        with refused(ArithmeticError, "a bad batch"):
            call()
        assert net.weight.grad is None
    parallel(x).sum().backward()
    assert net.weight.grad == 4


# ---------------------------------------------------------------------------------------- Ctrl-C


CTRL_C = """
import logging, os, signal, sys, threading, torch
from lockstep import DataParallel
from lockstep.local import current_replica

class Net(torch.nn.Module):
    wait = True
    def forward(self, x):
        replica = current_replica()
        if "meet" in sys.argv:
            replica.all_gather("begin", None)
        if self.wait:
            if "again" in sys.argv and replica.index == 0:
                replica.all_gather("again", None)
            print("running")
            if replica.index == 1:
                stuck.set()
            os.read(0, 1)  # until the parent writes
        return x

stuck, wanted = threading.Event(), ["the first interrupt"]

def handler(*args):
    if wanted:
        wanted.pop()
        print("caught")
        signal.default_int_handler(*args)

def caller_waits(record):
    stuck.wait()
    wanted.append("the second interrupt")
    return True

if "twice" in sys.argv:
    logging.getLogger("lockstep.local").addFilter(caller_waits)
signal.signal(signal.SIGINT, handler)
net = Net()
parallel, x = DataParallel(net, ["cpu", "cpu"]), torch.arange(2.0)[:, None]
try:
    parallel(x)
except KeyboardInterrupt:
    print("interrupted")
net.wait = False
print(torch.equal(parallel(x), x), threading.active_count())
"""


def interrupt(run, answer):
    """Send SIGINT until the program prints ``answer``, and return all that it prints before.

    Python may handle one that comes just before the main thread waits only when another one comes. So many are sent;
    the program takes those for an interrupt that it wants.
    """
    lines, read = [], threading.Event()

    def read_lines():
        for line in run.stdout:
            if line == answer:
                break
            lines.append(line)
        read.set()

    thread = threading.Thread(target=read_lines, daemon=True)
    thread.start()
    while not read.wait(0.1):
        run.send_signal(signal.SIGINT)
    thread.join()
    return lines


@pytest.mark.around
def test_ctrl_c_ends_a_forward_at_once(python):
    """Replicas on one device run in the main thread; the second one does not begin."""
    run = python(CTRL_C)
    assert run.stdout.readline() == "running\n"
    assert interrupt(run, "caught\n") == []
    assert (run.stdout.read(), run.stderr.read()) == ("interrupted\nTrue 1\n", "")
    assert run.wait(60) == 0


IN_FORWARD, AT_A_MEETING = ["meet"], ["meet", "again"]


@pytest.mark.around
@pytest.mark.parametrize("where", [IN_FORWARD, AT_A_MEETING])
def test_ctrl_c_waits_for_the_workers(python, where):
    """The first replica, which runs in the main thread, ends at once."""
    run = python(CTRL_C, *where)
    assert run.stdout.readline() == "running\n"
    assert interrupt(run, "caught\n") == []
    assert run.stderr.readline() == (
        "lockstep: KeyboardInterrupt waits until 1 replicas have ended; a second one does not wait\n"
    )
    out, err = run.communicate("a")
    assert (out.removeprefix("running\n"), err) == ("interrupted\nTrue 2\n", "")
    assert run.returncode == 0


@pytest.mark.around
@pytest.mark.parametrize("where", [AT_A_MEETING, IN_FORWARD])
def test_ctrl_c_twice_does_not_wait(python, where):
    """The worker is stuck, and stays so; the caller goes on with others."""
    run = python(CTRL_C, *where, "twice")
    assert run.stdout.readline() == "running\n"
    lines = interrupt(run, "interrupted\n")
    assert [line for line in lines if line != "running\n"] == ["caught\n", "caught\n"]
    assert run.stdout.readline() == "True 3\n"
    assert run.wait(60) == 0


@pytest.mark.around
def test_ctrl_c_in_a_training_loop_ends_the_process(python):
    program = CTRL_C.replace(
        "try:\n    parallel(x)\nexcept KeyboardInterrupt:\n", "while True:\n    parallel(x)\nif True:\n"
    )
    run = python(program)
    assert run.stdout.readline() == "running\n"
    assert interrupt(run, "caught\n") == []
    out, err = run.communicate()
    assert (out, run.returncode) == ("", -signal.SIGINT)
    assert err.strip().endswith("KeyboardInterrupt")
