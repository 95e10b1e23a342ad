"""The examples on hosts with accelerators, which are simulated: none, one, and one for each process."""

from __future__ import annotations

import importlib
import importlib.util
import re

import pytest
import torch
import torch.distributed as dist

import sim as simulator
from example_programs import LAUNCH, run_one, run_script_in_ranks
from processes import run_processes

QUICK = ["--epochs", "1", "--batch-size", "480"]


def launcher():
    spec = importlib.util.spec_from_file_location("launch", LAUNCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHOICES = [
    # accelerators, --processes, the program's arguments: processes, what it is told, where it trains
    (0, None, [], (2, [], "on the CPU, no accelerators here")),
    (1, None, [], (2, ["--device", "cpu"], "on the CPU, 1 accelerator here")),
    (4, None, [], (4, [], "on an accelerator each, 4 accelerators here")),
    (4, 2, [], (2, [], "on an accelerator each, 4 accelerators here")),
    (1, 1, [], (1, [], "on an accelerator each, 1 accelerator here")),
    (2, 3, [], (3, ["--device", "cpu"], "on the CPU, 2 accelerators here")),
    (1, 2, ["--device", "cuda"], (2, [], "on cuda, 1 accelerator here")),
    (1, 2, ["--device=cuda"], (2, [], "on cuda, 1 accelerator here")),
]


@pytest.mark.parametrize(("accelerators", "processes", "arguments", "chosen"), CHOICES)
def test_the_launcher_starts_a_process_for_each_accelerator_or_two_on_the_cpu(
    monkeypatch, accelerators, processes, arguments, chosen
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerators > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: accelerators)
    assert launcher().choose(processes, arguments) == chosen


def test_the_launcher_starts_on_several_machines():
    told = launcher().meeting(2, "node0", {"SLURM_STEP_NUM_TASKS": "2"})
    assert told == ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "launch", "--rdzv-endpoint", "node0"]
    assert launcher().meeting(1, None, {"SLURM_STEP_NUM_TASKS": "1", "PET_NNODES": "1"}) == launcher().HERE


@pytest.mark.parametrize(
    ("hosts", "meet", "variables", "words"),
    [
        (2, None, {}, "--hosts 2 and --meet HOST go together"),
        (1, "node0", {}, "--hosts 2 and --meet HOST go together"),
        (1, None, {"SLURM_STEP_NUM_TASKS": "4"}, "has set SLURM_STEP_NUM_TASKS=4. Start the program itself by that"),
        (1, None, {"PET_NNODES": "2", "WORLD_SIZE": "8"}, "has set WORLD_SIZE=8, PET_NNODES=2. Start the program"),
    ],
)
def test_the_launcher_says_why_it_does_not_start(hosts, meet, variables, words):
    with pytest.raises(SystemExit, match=words):
        launcher().meeting(hosts, meet, variables)


def digits(rank, accelerators, port, arguments):
    """(status, stdout, stderr) of the digits example on a host with some accelerators."""
    dist.destroy_process_group()
    assert not isinstance(found := simulator.load(accelerators), str), found
    return run_one(rank, "digits", port, arguments)


def run_digits(world, accelerators, *arguments):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_processes(world, digits, accelerators, store.port, list(arguments))


@pytest.mark.parametrize(("world", "accelerators", "device"), [(1, 1, []), (2, 2, []), (2, 1, ["--device", "cpu"])])
def test_it_trains_on_the_accelerators_or_on_the_cpu(world, accelerators, device, tmp_path):
    (status, output, error), *others = run_digits(world, accelerators, *QUICK, "--out", str(tmp_path), *device)
    assert (status, error) == (0, "")
    assert all(other == (0, "", "") for other in others)
    assert re.search(r"^validation accuracy", output, re.M)


def test_more_processes_than_accelerators_are_one_line_that_says_what_to_type(tmp_path):
    (*outcome, told), other = run_digits(2, 1, "--out", str(tmp_path))
    assert (outcome, other) == ([2, ""], (2, "", ""))
    assert told == (
        "digits.py: error: 2 processes on this host, which has 1 accelerator of type sim: type `torchrun "
        '--nproc-per-node 1`, or `session(device="cpu")` for the CPU; here that is --device cpu\n'
    )


def test_its_help_needs_no_accelerator():
    (first, output, _), (other, quiet, _) = run_digits(2, 1, "--help")
    assert (first, other, quiet) == (0, 0, "")
    assert "--device DEVICE" in output


@pytest.mark.parametrize("script", ["experts.py", "lora.py", "characters.py", "tensor_parallel.py"])
def test_each_example_takes_a_device(script):
    more = ["--steps", "1", "--batch-size", "2", "--length", "10"] if script == "characters.py" else ["--epochs", "1"]
    more += ["--split", "1"] if script == "tensor_parallel.py" else []
    assert run_script_in_ranks(1, script, *more, "--device", "cpu")[0]
