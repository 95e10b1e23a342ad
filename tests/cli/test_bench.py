"""`lockstep bench`: the user's own model in every way, in several processes and in one; what it refuses."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.cli import bench, printing
from lockstep.cli.bench import find_builder
from lockstep.cli.doctor import usable_backends
from lockstep.cli.local_ranks import run_ranks
from lockstep.cli.main import main
from lockstep.errors import CommunicationError, OptionError
from processes import be_launched, run_processes

MODEL = """
import torch

def build():
    model = torch.nn.Linear(8, 4)
    return model, lambda model: model(torch.ones(2, 8)).sum()
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A user's module, in the working directory. Ranks are forked off the server, which has imported torch already."""
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "run_ranks", run_ranks_of_the_server)


def run_ranks_of_the_server(module, options, ranks, timeout):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_processes(ranks, run_as_started, module, options, os.getcwd(), store.port)


def run_as_started(rank, module, options, folder, port):
    """As `python -m module` in the folder, with the environment that `run_ranks` gives."""
    dist.destroy_process_group()
    be_launched(rank, port)
    result = f"{folder}/{rank.rank}.json"
    os.environ["LOCKSTEP_RESULT_FILE"] = result
    sys.path.insert(0, folder)
    sys.argv[:] = [module, json.dumps(options)]
    sys.modules.pop(module, None)  # this file has imported it
    runpy.run_module(module, run_name="__main__")
    with open(result) as file:
        return json.load(file)


def test_a_model_in_every_way(model, capsys):
    arguments = ["--model", "my_model:build", "--rounds", "1", "--json"]
    assert main(["bench", *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    backends = [name for name in usable_backends() if name != "nccl"]  # the model is on the CPU
    assert set(told["ways"]) == {"alone", *(f"{kind}, {b}" for kind in ("DDP", "lockstep") for b in backends)}
    for way in told["ways"].values():
        assert way["seconds"] > 0
        assert way["exposed_seconds"] == pytest.approx(way["seconds"] - told["ways"]["alone"]["seconds"])


def test_replicas_in_one_process_are_compared_with_one_where_pytorch_has_none(model, capsys):
    arguments = ["--model", "my_model:build", "--rounds", "1", "--ranks", "3"]
    assert main(["bench", "--one-process", *arguments]) == 0
    told = capsys.readouterr().out
    assert "3 replicas in one process, on cpu, cpu, cpu; medians" in told
    assert [line.partition("  ")[0] for line in told.splitlines()[4:6]] == ["alone", "lockstep.DataParallel"]
    assert "There is no row of torch.nn.DataParallel" in told


WRONG_MODELS = """
import torch

def one(): return torch.nn.Linear(2, 2)
def fails(): raise OSError("no data here")
def three(): return torch.nn.Linear(2, 2), len, 3
"""
WRONG = {
    "--ranks 0": "lockstep bench: argument --ranks: '0' is no number of at least 1; see lockstep bench --help",
    "--rounds many": "argument --rounds: 'many' is no number of at least 1",
    "--modle a:b": "there is no '--modle': did you mean --model?",
    "--model no_such_module_here:build": "--model no_such_module_here:build: ModuleNotFoundError: No module named",
    "--model wrong": "--model wrong: ValueError: there is no colon. Expected MODULE:FUNCTION",
    "--model wrong:tree": "AttributeError: wrong has no tree; did you mean three?. Expected MODULE:FUNCTION",
    "--model wrong:one": "--model wrong:one: called, it returned Linear. Expected MODULE:FUNCTION",
    "--model wrong:three": "called, it returned Linear, builtin_function_or_method, int. Expected",
    "--model wrong:fails": "called, it raised OSError: no data here. Expected",
}


@pytest.mark.parametrize(("arguments", "told"), WRONG.items())
def test_a_wrong_argument_is_told_in_one_line_before_a_rank_is_started(arguments, told, tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong.py").write_text(WRONG_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(bench, "run_ranks", None)
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    try:
        code = main(["bench", *arguments.split()])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert len(captured.err.splitlines()) == 1
    assert told in captured.err


def test_a_long_measurement_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(printing, "SOON", 0.0)
    (tmp_path / "talks.py").write_text(
        "import sys, time\nfrom pathlib import Path\nfrom lockstep.cli.local_ranks import as_rank, say\n"
        "def measure(options):\n    say('round 3 of 4')\n    sys.stdin.read()\n"
        "    while not Path('shown').exists():\n        time.sleep(0.01)\n    return 1\n"
        "as_rank(measure)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(printing, "_EVERY", 0.0)
    show = printing.ProgressLine.show

    def show_and_tell(line, text):
        show(line, text)
        if text == "round 3 of 4":
            Path("shown").touch()

    monkeypatch.setattr(printing.ProgressLine, "show", show_and_tell)
    assert run_ranks("talks", {}, 1, 100.0) == [1]
    told = capsys.readouterr().err.splitlines()
    assert re.match(r"lockstep: measuring in one process, starting \(\d+ s\)", told[0])
    assert re.match(r"lockstep: measuring in one process, round 3 of 4 \(\d+ s\)", told[-1])


@pytest.mark.parametrize(("command", "seconds"), [(["bench", "--rounds", "2"], 21), (["doctor"], 15)])
def test_how_long_it_takes_is_said_before_pytorch_is_imported(command, seconds):
    started = subprocess.Popen([sys.executable, "-m", "lockstep", *command], stderr=subprocess.PIPE, text=True)
    with started:
        told = started.stderr.readline()
        started.kill()
    assert told.startswith(f"lockstep: measuring takes about {seconds} s")


def test_a_command_that_is_interrupted_says_so_and_nothing_else(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_ranks", interrupted)
    assert main(["bench"]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "lockstep: interrupted\n")


@pytest.mark.parametrize("name", ["json:nothing", "no_such_module_here:build", "json"])
def test_a_model_that_is_not_there_is_told(name):
    with pytest.raises(OptionError, match=f"--model {name}: .*Expected MODULE:FUNCTION"):
        find_builder(name)


def test_the_built_in_model_is_where_the_accelerators_are(sim, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    module, step = find_builder("")()
    assert next(module.parameters()).device == torch.device("sim", 1)
    assert step(module).device == torch.device("sim", 1)


def test_a_rank_that_fails_is_told_with_what_it_said(tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text("import os, sys\nif os.environ['RANK'] == '1': sys.exit('no such data set')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommunicationError, match="rank 1 of 2 ended with exit status 1: no such data set"):
        run_ranks("fails", {}, 2, 100.0)
