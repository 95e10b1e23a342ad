"""Every mistake gives an error that says what, where, what was expected and what was got; then all goes on."""

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
from torch.nn.utils.rnn import pack_padded_sequence

from lockstep import DataParallel
from lockstep.errors import (
    DeviceError,
    LayoutError,
    LengthError,
    LockstepError,
    NotReplicableError,
    StructureError,
)
from lockstep.local import data_parallel, gather, parallel_apply, replicate, scatter, scatter_kwargs
from lockstep.local.comm import reduce_add
from lockstep.local.comm import scatter as plain_scatter
from processes import output_of
from small_modules import fails_in_backward

CPU2 = ["cpu", "cpu"]


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


class Lambda(nn.Module):
    """A module made of a function that is given the row numbers of its share."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x):
        return self.function(x) if self.function is not None else x * self.weight


@contextlib.contextmanager
def refused(kind, *words):
    """The block raises `kind` with all of `words` (patterns) in its message, leaves no thread, and hurts nothing."""
    healthy, x = DataParallel(nn.Linear(1, 1), ["cpu"] * 3), torch.arange(3.0)[:, None]
    expected = healthy(x)
    before = workers()
    with pytest.raises(kind) as caught:
        yield caught
    if issubclass(kind, LockstepError):
        assert type(caught.value) is kind
    for word in words:
        assert re.search(word, str(caught.value)), f"{word!r} is not in: {caught.value}"
    assert torch.equal(healthy(x), expected)
    assert workers() <= max(before, 3)


def workers() -> int:
    """Threads that run replicas; others may begin and end in earlier tests of this process."""
    return sum(thread.name.startswith("lockstep-worker") for thread in threading.enumerate())


# ---------------------------------------------------------------------------------------- devices


def test_a_parameter_on_another_device(sim):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("sim:0")
    net[1].bias = nn.Parameter(torch.zeros(2, device="sim:1"))
    x = torch.ones(4, 2, device="sim:0")
    message = (r"device sim:0 \(device_ids\[0\]\)", "on device: sim:1", r"parameter 1\.bias", r"module\.to\('sim:0'\)")
    for ids in ([0], [0, 1]):
        with refused(DeviceError, *message):
            data_parallel(net, x, ids)
    parallel = DataParallel(net, [0, 1])
    for call in (lambda: parallel(x), lambda: parallel.step(lambda output: output.mean(), x)):
        with refused(DeviceError, *message):
            call()
    net[1].bias = nn.Parameter(torch.zeros(2, device="sim:0"))
    torch.testing.assert_close(parallel(x), net(x))


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


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("gpu", ["'gpu'"]),
        ("sim:9", ["index 9", "'cpu' and sim:0 to sim:7"]),
        (8, ["index 8", "sim:0 to sim:7"]),
        (-2, ["index -2", "sim:0 to sim:7"]),
        ("cuda:0", ["cuda:0 is not available", "sim:0 to sim:7"]),
        (torch.device("meta"), ["meta is not available"]),
        (1.5, ["int, str or torch.device", "1.5 of type float"]),
        (True, ["True of type bool"]),
        (None, ["None of type NoneType"]),
    ],
)
def test_a_device_that_does_not_exist(sim, device, words):
    net, x = nn.Linear(1, 1), torch.ones(2, 1)
    with refused(DeviceError, *words):
        DataParallel(net, [device, device])
    with refused(DeviceError, *words):
        data_parallel(net, x, ["cpu", device])
    with refused(DeviceError, *words):
        scatter(x, ["cpu", device])
    with refused(DeviceError, *words):
        replicate(net, ["cpu", device])
    if device is not None:  # for these two, None means something
        with refused(DeviceError, *words):
            parallel_apply([net], [x], devices=[device])
        with refused(DeviceError, *words):
            DataParallel(net, CPU2, output_device=device)


NO_ACCELERATOR = """
import torch
from lockstep.local import replicate
for ids in ([0, 1], ["cuda:0"]):
    try:
        replicate(torch.nn.Linear(1, 1), ids)
    except RuntimeError as error:
        print(error)
"""


def test_an_index_where_there_is_no_accelerator():
    hint = "this process has no accelerator: use 'cpu', as often as replicas are wanted\n"
    assert (
        output_of(NO_ACCELERATOR)
        == f"there is no accelerator with index 0; {hint}device cuda:0 is not available; {hint}"
    )


def test_no_device(sim):
    net, x = nn.Linear(1, 1), torch.ones(2, 1)
    for call in (
        lambda: DataParallel(net, []),
        lambda: data_parallel(net, x, []),
        lambda: scatter(x, []),
    ):
        with refused(LengthError, "expected at least one device, got an empty device list"):
            call()
        with pytest.raises(IndexError):  # as PyTorch's, which takes the first one for outputs
            call()
    assert replicate(net, []) == []  # as PyTorch has it
    for lone in ("cpu", torch.device("cpu")):
        with refused(DeviceError, "expected a list of devices", "write"):
            DataParallel(net, lone)


# ---------------------------------------------------------------------------------- sizes and lengths


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([torch.ones(1)],), ["number of modules 2", "number of inputs 1"]),
        (([torch.ones(1)] * 2, [{}]), ["number of modules 2", "number of kwargs_tup 1"]),
        (([torch.ones(1)] * 2, None, ["cpu"] * 3), ["number of modules 2", "number of devices 3"]),
    ],
)
def test_parallel_apply_with_lists_of_other_lengths(arguments, words):
    calls = []
    with refused(LengthError, *words) as caught:
        parallel_apply([calls.append] * 2, *arguments)
    assert isinstance(caught.value, AssertionError)  # PyTorch asserts it
    assert calls == []


def test_inputs_whose_sizes_disagree(devices, first):
    parallel = DataParallel(nn.Bilinear(2, 2, 1).to(first), devices(2))
    one, other = torch.ones(4, 2, device=first), torch.ones(3, 2, device=first)
    words = [r"inputs\[0\] has size 4", r"inputs\[1\] has 3", "along dim 0"]
    with refused(LayoutError, *words):
        parallel(one, other)
    with refused(LayoutError, *words):
        parallel.step(lambda output: output.mean(), one, other)
    with refused(LayoutError, r"kwargs\['input1'\] has size 4", r"kwargs\['input2'\] has 1", r"shape \(1, 2\)"):
        parallel(input1=one, input2=one[:1])
    with refused(LayoutError, r"inputs\[0\]\['a'\]\[1\]", r"inputs\[0\]\['b'\] has 5"):
        scatter_kwargs(({"a": [None, one], "b": torch.ones(5)},), {}, devices(2))
    torch.testing.assert_close(parallel(one, one), parallel.module(one, one))


def test_a_dimension_that_is_not_there(devices, first):
    parallel = DataParallel(nn.Linear(2, 2).to(first), devices(2), dim=2)
    with refused(LayoutError, r"inputs\[0\] along dim 2", r"shape is \(4, 2\)"):
        parallel(torch.ones(4, 2, device=first))


def test_chunk_sizes_that_do_not_fit(devices, first):
    x = torch.arange(6, device=first)
    with refused(LayoutError, "sum to 6", r"\(2, 3\), which sum to 5"):
        plain_scatter(x, devices(2), [2, 3])
    with refused(LayoutError, "at least 0", r"\(7, -1\)"):
        plain_scatter(x, devices(2), [7, -1])
    with refused(LengthError, r"len\(devices\) = 2", r"len\(chunk_sizes\) = 3"):
        plain_scatter(x, devices(2), [2, 2, 2])


@pytest.mark.parametrize("split", [[1], [1, 2, 3], []])
def test_split_weights_of_another_number(split):
    with refused(LengthError, "one weight in split for each of 2 devices", re.escape(f"got {split}")):
        DataParallel(nn.Linear(1, 1), CPU2, split=split)


@pytest.mark.parametrize("split", [[1, -1], [0, 1], [float("nan"), 1]])
def test_split_weights_that_are_not_positive(split):
    with refused(LayoutError, "above 0", re.escape(f"got {split}")):
        DataParallel(nn.Linear(1, 1), CPU2, split=split)


# ------------------------------------------------------------------------------------------ outputs


def outputs_of(devices, *outputs):
    """A DataParallel whose replicas return these."""
    module = Lambda(lambda x: outputs[int(x[0, 0])]).to(devices(1)[0])
    return DataParallel(module, devices(len(outputs))), torch.arange(float(len(outputs)))[:, None]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ((torch.ones(2), torch.ones(2, dtype=torch.int64)), ["outputs along dim 0", "index 1", "int64", "float32"]),
        ((torch.ones(2, 3), torch.ones(2, 4)), ["outputs along dim 0", "index 1", r"\(2, 4\)", r"\(2, 3\)"]),
        ((torch.ones(2, 3), torch.ones(2)), ["outputs along dim 0", "same number of dimensions", "index 1 has 1"]),
        (({"a": [torch.ones(2, 3)]}, {"a": [torch.ones(2, 4)]}), [r"outputs\['a'\]\[0\] along dim 0", r"\(2, 4\)"]),
    ],
)
def test_replicas_whose_outputs_differ_in_layout(devices, outputs, words):
    parallel, x = outputs_of(devices, *outputs)
    with refused(LayoutError, *words):
        parallel(x)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ((torch.ones(1), None), ["outputs", "replica 0: Tensor", "replica 1: NoneType"]),
        (((torch.ones(1),), [torch.ones(1)]), ["replica 0: tuple", "replica 1: list"]),
        (
            ((torch.ones(1),), (torch.ones(1),) * 2),
            [r"replica 0: tuple with \[0\];", r"replica 1: tuple with \[0\], \[1\]"],
        ),
        (({"a": torch.ones(1)}, {"b": torch.ones(1)}), ["same keys", r"\['a'\]", r"\['b'\]"]),
        (([{"a": torch.ones(1)}], [{"a": 3}]), [r"outputs\[0\]\['a'\]", "replica 1: int"]),
    ],
)
def test_replicas_whose_outputs_differ_in_structure(devices, outputs, words):
    parallel, x = outputs_of(devices, *outputs)
    with refused(StructureError, *words, "gather_outputs=False"):
        parallel(x)
    parallel.gather_outputs = False
    assert len(parallel(x)) == 2


def test_a_packed_sequence_cannot_be_split_or_gathered(devices, first):
    packed = pack_padded_sequence(torch.ones(3, 2, 1, device=first), torch.tensor([3, 2]))
    parallel, x = outputs_of(devices, packed, packed)
    with refused(StructureError, "PackedSequence", "pack inside forward"):
        parallel(x)
    with refused(StructureError, r"inputs\[0\] is a PackedSequence"):
        parallel(packed)


def test_gather_of_nothing():
    with refused(LengthError, "gather expects the outputs of at least one replica, got none"):
        gather([], "cpu")
    with refused(LengthError, "reduce_add expects at least one tensor, got none"):
        reduce_add([])


# ------------------------------------------------------------------------------------- step's own


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda output: output, r"\(2, 1\)"),
        (lambda output: output.sum().item(), "float"),
        (lambda output: None, "NoneType"),
        (lambda output: {"loss": output.sum()}, "dict"),
    ],
)
def test_a_loss_that_is_not_one_number(devices, first, loss, got):
    net, x = nn.Linear(1, 1).to(first), torch.ones(4, 1, device=first)
    parallel = DataParallel(net, devices(2))
    with refused(LayoutError, "loss_fn must return one number", "in replica 0", f"gave {got}"):
        parallel.step(loss, x)
    assert net.weight.grad is None
    parallel.step(lambda output: output.sum(), x)
    assert net.bias.grad.tolist() == [2]


def test_step_without_a_batch(devices, first):
    with refused(LengthError, r"step\(loss_fn, \*inputs, target\)"):
        DataParallel(nn.Linear(1, 1).to(first), devices(2)).step(nn.MSELoss())


@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_that_fails_leaves_no_part_of_a_gradient(devices, first, failing):
    """What the other replica has already summed up is not left for the next step to add."""
    net, x = nn.Linear(1, 1).to(first), torch.arange(2.0, device=first)[:, None]
    parallel = DataParallel(net, devices(2))

    def loss(output, row):
        if int(row) == failing:
            raise ArithmeticError("no loss")
        return output.sum()

    with refused(ArithmeticError, f"replica {failing} .*\n[\\s\\S]*no loss"):
        parallel.step(loss, x, x)
    assert net.weight.grad is None
    parallel.step(lambda output, row: output.sum(), x, x)
    assert net.weight.grad.tolist() == [[0.5]]


# ------------------------------------------------------------------------------ modules without replicas


def test_a_lazy_module_without_shapes(devices, first):
    net = nn.Sequential(nn.ReLU(), nn.LazyLinear(2, device=first))
    parallel, x = DataParallel(net, devices(2)), torch.ones(4, 3, device=first)
    for call in (lambda: parallel(x), lambda: replicate(net, devices(2)), lambda: data_parallel(net, x, devices(2))):
        with refused(NotReplicableError, "uninitialized parameter", r"\b1 is a LazyLinear", "dummy forward"):
            call()
    net(x)
    torch.testing.assert_close(parallel(x), net(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_scripted_module_with_python_children(devices, first):
    half = torch.jit.script(nn.Sequential(nn.Linear(1, 1)))
    half._modules._python_modules["child"] = Lambda(None)  # no public way leads to one any more
    net = nn.Sequential(half).to(first)
    with refused(NotReplicableError, "python modules are children of ScriptModule", r"0\.child is a Lambda"):
        DataParallel(net, devices(2))(torch.ones(4, 1, device=first))


# -------------------------------------------------------------------------------- replicas that raise


class NeedsTwo(Exception):
    def __init__(self, code, reason):
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class NeedsKeyword(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


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
    """A function of a share that raises what the maker with the number of its first row makes, and a list of that."""
    raised = {}

    def function(x):
        number = int(x[0, 0])
        if kinds[number] is not None:
            raised[number] = error = kinds[number]()
            raise error
        return x

    return function, raised


ERRORS = {
    "value": lambda: ValueError("wonderful"),
    "no arguments": ValueError,
    "two arguments": lambda: NeedsTwo(3, "wonderful"),
    "keyword": lambda: NeedsKeyword(code=3),
    "own text": lambda: OwnText("wonderful"),
    "no text": lambda: NoText("wonderful"),
    "key": lambda: KeyError("wonderful"),
    "key of another type": lambda: KeyError(Row(3)),
    "os": lambda: FileNotFoundError(2, "wonderful"),
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
    function, raised = failing(*(make if i in which else None for i in range(3)))
    x = torch.arange(3.0, device=first)[:, None]
    kind = type(make())
    lines = [f"Caught {type(make()).__name__} in replica {which[0]} on device {where}.\nOriginal .*Traceback"]
    lines += [r"in function\n[ |]+raise error", re.escape(traceback.format_exception_only(make())[0].split("\n")[0])]
    lines += [f"Also failed: replica {i} on device .*{type(make()).__name__}" for i in which[1:]]
    with refused(kind, *lines) as caught:
        DataParallel(Lambda(function).to(first), devices(3))(x)
    assert sorted(raised) == which
    error = raised[which[0]]
    assert caught.value.__cause__ is error
    assert "function" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    for attribute in ("code", "reason", "detail"):
        if hasattr(error, attribute):
            assert getattr(caught.value, attribute) == getattr(error, attribute)


def test_the_message_of_a_key_error(sim):
    function, _ = failing(lambda: KeyError("wonderful"))
    module = Lambda(function).to("sim:0")
    message = r"Caught KeyError in replica \d on device 0.\nOriginal Traceback[\s\S]+wonderful"
    with pytest.raises(KeyError, match=message):
        parallel_apply([module, module], [(torch.zeros(1, 1, device="sim:0"),)] * 2)


def test_every_replica_ends_before_an_error_is_raised(devices, first):
    """The second waits for the first to have failed."""
    failed, ended = threading.Event(), []

    def function(x):
        if int(x[0, 0]) == 0:
            failed.set()
            raise ValueError("at once")
        failed.wait()
        ended.append(1)
        return x

    with refused(ValueError, "in replica 0"):
        DataParallel(Lambda(function).to(first), devices(2))(torch.arange(2.0, device=first)[:, None])
    assert ended == [1]


def test_an_error_in_backward_reaches_the_caller(devices, first):
    net = Lambda(None).to(first)
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


@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_whose_backward_fails_leaves_nothing_for_the_next(devices, first, failing):
    net = nn.Linear(1, 1).to(first)
    parallel, x = DataParallel(net, devices(2)), torch.arange(2.0, device=first)[:, None]
    with refused(ArithmeticError, "a bad batch"):
        parallel.step(lambda output, row: (fails_in_backward(output) if int(row) == failing else output).sum(), x, x)
    net.zero_grad()
    parallel.step(lambda output, row: output.sum(), x, x)
    assert net.weight.grad.tolist() == [[0.5]]
    assert net.bias.grad.tolist() == [1]


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
