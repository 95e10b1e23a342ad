"""`lockstep run`, and `import lockstep.patch`: a program that knows nothing of the library, in two processes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep
import lockstep_command
from lockstep.check import dropout, job, wrapping
from lockstep.cli import run
from lockstep.cli.main import main
from lockstep_command import parse
from processes import run_processes

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if not dist.is_initialized():
    dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(3, 4) * dist.get_rank()).sum().backward()
if dist.get_rank() == 0:
    library = type(model).__module__.partition(".")[0]
    print(library, dist.get_backend(), model.module.weight.grad[0, 0].item(), *sys.argv[1:], flush=True)
dist.barrier()
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def test_a_program_gets_locksteps_wrapper_the_group_asked_for_and_its_exit_status(program):
    options = ("--ranks", "2", "--patch", "--backend", "shm")
    command = [sys.executable, "-m", "lockstep", "run", *options, program, "--log", "own", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["[rank 0] lockstep shm 1.5 --log own 7"]  # an option like several of torchrun
    assert re.fullmatch("lockstep: rank [01] failed with exit status 7", done.stderr.splitlines()[-1])


@pytest.mark.parametrize("arguments", [[], ["--"], ["--", "a"], ["a", "--", "b"], ["--", "--", "--ranks", "3"], ["-m"]])
@pytest.mark.parametrize("ends", [[], ["--"]])
def test_all_arguments_behind_a_program_are_its_own(program, arguments, ends):
    assert parse(["run", "--ranks", "2", *ends, program, *arguments]).arguments == arguments


FAILS = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("no data")
dist.barrier()
"""


def test_the_rank_is_named_whose_error_it_is_and_not_one_that_waited_for_it(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    command = [sys.executable, "-m", "lockstep", "run", "--ranks", "2", str(tmp_path / "fails.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "lockstep: rank 1 failed with exit status 1"
    assert "[rank 1] ValueError: no data\n" in done.stderr  # and not "[rank 1] [rank1]: "


FIRST = {
    # what the launcher has found, at one time; what ranks have written: status, time, whether it follows; the first
    "an error, and what follows": ([0, 1], {0: (1, 2.5, True), 1: (3, 2.9, False)}, (1, 3)),
    "the earlier of two errors": ([0, 1], {0: (1, 2.9, False), 1: (2, 2.5, False)}, (1, 2)),
    "an error of a rank that has not ended": ([0], {0: (1, 2.5, True), 1: (1, 2.4, False)}, (1, 1)),
    "an error, and a process that Gloo has ended": ([0, 1], {1: (1, 2.5, False)}, (1, 1)),
    "a killed process, and what follows": ([0, 1], {0: (1, 1.5, True)}, (1, 137)),
    "a killed process alone": ([1], {}, (1, 137)),
    "what follows, where nothing else is known": ([0], {0: (1, 1.5, True)}, (0, 1)),
}


@pytest.mark.parametrize("case", FIRST)
def test_the_first_failure_is(case, tmp_path):
    ended, written, (rank, status) = FIRST[case]
    for number, fields in written.items():
        (tmp_path / "none_x/attempt_0" / str(number)).mkdir(parents=True)
        record = json.dumps(dataclasses.asdict(run.Failed(*fields)))
        (tmp_path / "none_x/attempt_0" / str(number) / "lockstep.json").write_text(record)
    first, failed = run.first_failure({number: run.Failed(137, 2, False) for number in ended}, tmp_path)
    assert (first, failed.status) == (rank, status)


def run_under_a_launcher(rank, *program):
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit) as end:
        main(["run", *program, "3"])
    return output.getvalue(), end.value.code


def run_as_a_module(rank, program):
    os.chdir(Path(program).parent)
    return run_under_a_launcher(rank, "-m", "program")


def test_a_module_is_run_as_python_does(program):
    assert run_processes(1, run_as_a_module, program) == [("torch gloo 0.0 3\n", 3)]


def test_without_patch_a_program_keeps_pytorch_s_wrapper_and_makes_its_own_group(program):
    assert run_processes(1, run_under_a_launcher, program) == [("torch gloo 0.0 3\n", 3)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing.py"], "nothing.py: there is no such file; expected a Python program"),
        (
            ["-m", "nothing_like_it"],
            "lockstep: -m nothing_like_it: there is no such module, or it is a package without",
        ),
        (["-m", "nothing_like.it"], "lockstep: -m nothing_like.it: the module cannot be found (No module named"),
        (
            ["--ranks", "0", __file__],
            "lockstep run: argument --ranks/-n/--nproc-per-node: '0' is no number of at least 1",
        ),
        (["--backend", "shmm", __file__], "lockstep: --backend: there is no backend 'shmm'; did you mean shm?"),
        (["--bakend", "shm", __file__], "lockstep run: there is no '--bakend': did you mean --backend?"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line_before_a_rank_is_started(arguments, told, capsys, monkeypatch):
    monkeypatch.setattr(run, "_launch", None)
    try:
        code = main(["run", *arguments])
    except SystemExit as end:
        code = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert told in line


def test_a_program_that_fails_shows_its_own_frames_first(tmp_path, capsys, monkeypatch):
    program = tmp_path / "fails.py"
    program.write_text("def train():\n    raise ValueError('no data')\n\ntrain()\n")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch.distributed replaces it where a group is made
    assert main(["run", str(program)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["Traceback (most recent call last):", f'  File "{program}", line 4, in <module>']
    assert told[-1] == "ValueError: no data"


def test_a_run_that_is_interrupted_says_so_and_nothing_else(tmp_path):
    program = tmp_path / "waits.py"
    program.write_text("import time\nprint('here', flush=True)\ntime.sleep(250)\n")
    command = [sys.executable, "-m", "lockstep", "run", "--ranks", "2", str(program)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert {running.stdout.readline(), running.stdout.readline()} == {"[rank 0] here\n", "[rank 1] here\n"}
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        out, err = running.communicate(timeout=250)
    assert (running.returncode, out, err) == (130, "", "lockstep: interrupted\n")


def test_ranks_end_with_a_command_that_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\nout = sys.stdout\n"
        "print(out.line_buffering, out.write_through, os.getpid())\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "lockstep", "run", "--ranks", "2", str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        lines = [running.stdout.readline() for _ in range(2)]
        ranks = [int(line.split()[-1]) for line in lines]
        assert all("] True False " in line for line in lines), "a line is one write, so that the launcher sees it whole"
        ends = [os.pidfd_open(rank) for rank in ranks]
        running.kill()
        for end in ends:
            assert select.select([end], [], [], 60)[0], "the process has ended"
            os.close(end)


def test_ctrl_c_while_torch_is_imported_prints_one_line():
    command = [sys.executable, "-X", "importtime", "-m", "lockstep_command", "doctor", "--no-timing"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while not re.search(r" torch\.", running.stderr.readline()):  # torch's first modules; it has more than 1,000
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=250)
    told = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (running.returncode, out, told) == (130, "", ["lockstep: interrupted"])


MISTAKES = [["--help"], ["--version"], ["rn"], ["run"], ["run", "--helpp"], ["run", "nothing.py"], ["check", "--wrp"]]


def test_help_the_version_and_mistakes_do_not_wait_for_torch():
    program = f"""
import sys, lockstep_command
for sys.argv in {[["lockstep", *each] for each in MISTAKES]!r}:
    try:
        lockstep_command.main()
    except SystemExit as end:
        assert end.code == (2 if sys.argv[1][0] != "-" else 0), sys.argv
assert not {{"torch", "lockstep"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert f"lockstep {lockstep.__version__}, PyTorch {torch.__version__}" in done.stdout
    assert done.stderr.splitlines()[:2] == [
        "lockstep: there is no 'rn': did you mean run?; see lockstep --help",
        "lockstep run: the following arguments are required: program; see lockstep run --help",
    ]


def test_the_command_offers_what_a_check_knows():
    assert tuple(wrapping.WRAPS) == lockstep_command.WRAPS
    assert tuple(job.PRECISIONS) == lockstep_command.PRECISIONS
    assert lockstep_command.DROPOUTS == dropout.DROPOUTS


@pytest.mark.parametrize("name", ["-n", "--nproc-per-node", "--ranks"])
def test_the_number_of_ranks_has_the_names_that_people_know(name):
    assert lockstep_command.parse(["run", name, "3", __file__, "-n", "4"]).ranks == 3


@pytest.fixture
def patch():
    from lockstep import patch

    patch.apply()
    yield patch
    patch.undo()


def test_lockstep_classes_are_used_wherever_they_are_found_and_can_be_put_back(monkeypatch):
    imported_before = types.ModuleType("imported_before")
    imported_before.Wrapper = torchs = torch.nn.parallel.DistributedDataParallel
    monkeypatch.setitem(sys.modules, "imported_before", imported_before)
    from lockstep import patch

    try:
        patch.apply()
        assert imported_before.Wrapper is lockstep.DistributedDataParallel
        assert torch.nn.parallel.DistributedDataParallel is lockstep.DistributedDataParallel
        assert torch.nn.parallel.distributed.DistributedDataParallel is lockstep.DistributedDataParallel
        assert torch.nn.DataParallel is torch.nn.parallel.DataParallel is lockstep.DataParallel
    finally:
        patch.undo()
    assert imported_before.Wrapper is torch.nn.parallel.DistributedDataParallel is torchs
    assert torch.nn.DataParallel is not lockstep.DataParallel


def test_our_own_wrappers_work_while_the_classes_are_replaced(patch):
    network = torch.nn.Linear(4, 2)
    parallel = torch.nn.DataParallel(network, ["cpu", "cpu"])
    parallel.step(torch.nn.functional.mse_loss, torch.ones(4, 4), torch.zeros(4, 2))
    assert isinstance(parallel, lockstep.DataParallel)
    assert network.weight.grad is not None
