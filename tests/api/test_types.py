"""What mypy and pyright know of a user's program."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = """
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.distributed import GradBucket, Replicated


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).sum()  # type: ignore[no-any-return]


def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    raise NotImplementedError


def takes_a_net(net: Net) -> None: ...


def takes_a_replicated(model: Replicated) -> None:
    model.set_requires_gradient_sync(False)
    model.load_state_dict(model.state_dict())


def train(loader: Iterable[tuple[Tensor, int]]) -> None:
    with lockstep.session(seed=1) as run:
        net = Net()
        model = lockstep.replicate(net.to(run.device))
        optimizer = torch.optim.SGD(model.parameters())
        model.register_comm_hook(None, hook)
        reveal_type(net)  # Net
        reveal_type(model)  # Replicated
        reveal_type(net.loss(torch.ones(2)))  # Tensor
        takes_a_net(model)
        takes_a_replicated(model)
        for x, number in run.batches(loader, padding=(torch.ones(2), 0)):
            reveal_type(x)  # Tensor
            reveal_type(number)  # int
            with model.no_sync(), lockstep.accumulate(model, last=False):
                model.loss(x).backward()
            optimizer.step()
        reveal_type(run.shard(TensorDataset(torch.ones(2))))  # Subset[tuple[Tensor, ...]]
        reveal_type(run.rank)  # int
        net = lockstep.replicate(Net())
        net.no_sync()
        reveal_type(lockstep.DistributedDataParallel(Net()).module)  # Net
        reveal_type(lockstep.DataParallel(Net()).module)  # Net
        run.save("runs", model=model)
        if run.should_stop:
            return


def errors(model: Replicated, run: lockstep.Session) -> None:
    model.register_comm_hook(None)  # error
    model.set_requires_gradient_sync("yes")  # error
    run.batch([])  # error
    lockstep.session(sed=1)  # error
    lockstep.session().rank  # error
    lockstep.replicate([Net()])  # error
"""


def expected() -> tuple[dict[int, str], set[int]]:
    """The types and the errors, by line."""
    lines = list(enumerate(PROGRAM.splitlines(), 1))
    types = {number: line.partition("# ")[2] for number, line in lines if "reveal_type(" in line}
    return types, {number for number, line in lines if line.endswith("# error")}


def run_mypy(folder: Path) -> list[tuple[int, str, str]]:
    command = [sys.executable, "-m", "mypy", "--strict", "--output=json", "--config-file=", "--cache-dir=.cache"]
    done = subprocess.run([*command, "program.py"], cwd=folder, capture_output=True, text=True, timeout=280)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stdout + done.stderr
    notes = {"note": "information"}
    return [(each["line"], notes.get(each["severity"], each["severity"]), each["message"]) for each in found]


def run_pyright(folder: Path) -> list[tuple[int, str, str]]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [(each["range"]["start"]["line"] + 1, each["severity"], each["message"]) for each in found]


def plain(kind: str) -> str:
    """The name of a type without the modules, and without the word that pyright has in front."""
    kind = kind.rpartition('is "')[2].removesuffix('"')
    parts = kind.replace("[", " [ ").replace("]", " ] ").replace(",", " , ").split()
    return "".join(part.rpartition(".")[2] if part.strip(".") else part for part in parts).replace(",", ", ")


@pytest.mark.parametrize(("checker", "run"), [("mypy", run_mypy), ("pyright", run_pyright)])
def test_a_program_types_well(checker, run, tmp_path):
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: `make check` installs it")
    if checker == "pyright" and shutil.which("node") is None:
        pytest.skip("pyright needs Node.js, which is not on this machine")
    (tmp_path / "program.py").write_text(PROGRAM)
    types, errors = expected()
    found = run(tmp_path)
    assert {line for line, severity, _ in found if severity == "error"} == errors, found
    assert {line: plain(message) for line, severity, message in found if severity == "information"} == types
