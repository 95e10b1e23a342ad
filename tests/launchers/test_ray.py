"""Ray Train: workers that fail are named in its error, and a run whose workers come and go ends with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launchers import ray_cluster
from lockstep.checkpoints.memory import MemoryFolder

pytestmark = pytest.mark.launchers
HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "ray.md"
SECONDS = 150.0


def run(cluster: ray_cluster.Cluster, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=SECONDS, env=cluster.environment, **options
    )


def test_the_program_of_the_page(cluster, tmp_path):
    cluster.add_node(3)
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "train.py").write_text(program)
    ended = run(cluster, "train.py", cwd=tmp_path)
    assert re.search(r"^fingerprint [0-9a-f]{64}$", ended.stdout, re.M), ended.stderr[-4000:]
    assert (tmp_path / "run").is_dir()


KILLED = """
import os, signal, sys
import ray, torch
from ray.train import RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer
import lockstep
from lockstep.errors import PeerFailure
from lockstep.ray import SessionConfig

def train():
    with lockstep.session(device="cpu") as run:
        model = lockstep.replicate(torch.nn.Linear(2, 2))
        for step in range(100):
            if run.rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 2)).sum().backward()

try:
    scaling = ScalingConfig(num_workers=3, resources_per_worker={"slot": 1})
    TorchTrainer(
        train, torch_config=SessionConfig(), scaling_config=scaling, run_config=RunConfig(storage_path=sys.argv[1])
    ).fit()
except WorkerGroupError as error:
    failures = error.worker_failures
    heard = {rank: each for rank, each in failures.items() if isinstance(each, PeerFailure)}  # before Ray had looked
    assert heard or 1 in failures, error
    assert {each.rank for each in heard.values()} <= {1}, error
    assert heard.keys() <= {0, 2}, error
    assert "Rank 1 Error Snippet" in str(error) or "because rank 1 has ended without a word" in str(error), error
    print("named")
"""


def test_a_killed_worker_is_named_in_the_error_of_ray(cluster, tmp_path):
    cluster.add_node(3)
    (tmp_path / "train.py").write_text(KILLED)
    ended = run(cluster, "train.py", str(tmp_path / "ray"), cwd=tmp_path)
    assert "named" in ended.stdout.splitlines(), ended.stderr[-4000:]


RESTARTED = """
import os, signal, sys
from pathlib import Path
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
import lockstep
from lockstep.ray import SessionConfig

def train(settings):
    folder = Path(settings["folder"])
    with lockstep.session(device="cpu", seed=5) as run:
        model = lockstep.replicate(torch.nn.Linear(4, 3), shares=2)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        rows = torch.utils.data.TensorDataset(torch.randn(80, 4, generator=torch.Generator().manual_seed(1)))
        batches = lockstep.shares.GlobalBatches(rows, batch_size=8, shares=2)
        state = {"model": model, "optimizer": optimizer, "batches": batches}
        found = run.resume(folder / "run", **state)
        if run.is_main:
            with open(folder / "starts", "a") as starts:
                starts.write(f"{run.step} {found and found.folder.parts[1]}\\n")
        for batch in run.batches(batches):
            optimizer.zero_grad()
            for (x,) in batch:
                model(x).square().sum().backward()
            optimizer.step()
            if run.rank == 1 and run.step == settings["kill"] and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            run.snapshot(folder / "run", every=1, **state)
        return lockstep.shares.fingerprint(model, optimizer)

for kill in (7, 0):
    folder = Path(sys.argv[1]) / str(kill)
    folder.mkdir()
    result = TorchTrainer(
        train, train_loop_config={"folder": str(folder), "kill": kill}, torch_config=SessionConfig(),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"slot": 1}),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print("fingerprint", result.return_value)
"""


def test_workers_that_ray_starts_again_go_on_from_memory(cluster, tmp_path):
    cluster.add_node(2)
    (tmp_path / "train.py").write_text(RESTARTED)
    ended = run(cluster, "train.py", str(tmp_path), cwd=tmp_path)
    killed, undisturbed = re.findall(r"^fingerprint (\w+)$", ended.stdout, re.M) or [ended.stderr[-4000:], ""]
    assert killed == undisturbed
    assert (tmp_path / "7" / "starts").read_text().splitlines() == ["0 None", "6 dev"]  # from /dev/shm
    assert not any(MemoryFolder.of(tmp_path / kill / "run").folder.exists() for kill in ("7", "0"))


def worlds(steps: Path) -> list[int]:
    """How many workers there were, one after the other."""
    lines = steps.read_text().splitlines() if steps.exists() else []
    found = [int(line.split()[1]) for line in lines]
    return [each for each, before in zip(found, [0, *found], strict=False) if each != before]


def wait_for(steps: Path, wanted: list[int], program: subprocess.Popen[str], count: int) -> None:
    """Return when these worlds have trained, and so many steps are done."""
    deadline = time.monotonic() + SECONDS
    while worlds(steps) != wanted or len(steps.read_text().splitlines()) < count:
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline, steps.read_text() if steps.exists() else "no step"
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_workers_that_come_and_go_end_with_the_bits_of_a_fixed_run(cluster, tmp_path):
    for name in ("elastic", "fixed"):
        (tmp_path / name).mkdir()
    steps = tmp_path / "elastic" / "steps"
    cluster.add_node(1)
    command = [sys.executable, str(HERE / "ray_elastic.py"), str(tmp_path / "elastic"), "3", "hold"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cluster.environment
    ) as program:
        try:
            wait_for(steps, [1], program, 8)
            cluster.add_node(1)
            last = cluster.add_node(1)
            wait_for(steps, [1, 3], program, 16)
            cluster.remove_node(last)
            output, errors = program.communicate(timeout=SECONDS)
        finally:
            program.kill()
    assert worlds(steps) == [1, 3, 2], errors[-4000:]
    fixed = run(cluster, str(HERE / "ray_elastic.py"), str(tmp_path / "fixed"), "2")
    assert worlds(tmp_path / "fixed" / "steps") == [2], fixed.stderr[-4000:]
    (elastic_print, fixed_print) = (re.findall(r"^[0-9a-f]{64}$", text, re.M) for text in (output, fixed.stdout))
    assert len(fixed_print) == 1
    assert elastic_print == fixed_print
