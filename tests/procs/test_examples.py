"""The examples in the two processes that torchrun starts, as a user runs them."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import lockstep
from processes import run_processes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = (str(EXAMPLES / "launch.py"), "--nproc-per-node", "2")
IN_TWO, IN_ONE = (*TORCHRUN, str(EXAMPLES / "digits.py")), (str(EXAMPLES / "digits.py"), "--devices", "cpu,cpu")
SETTINGS = ("--epochs", "3", "--batch-size", "33")  # shares of 17 and 16 rows
STEPS_PER_EPOCH = 1437 // 33
PASSAGES, MICRO_BATCH = 13, 3

pytestmark = pytest.mark.timeout(300)  # each run imports torch three times


def start(*command, **options):
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, **options)


def run(*command, status=0):
    """What a run writes to stdout and to stderr."""
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert process.returncode == status, process.stderr
    return process.stdout, process.stderr


def train(way, out, *options):
    """The output of a training that ends well, without a word on stderr."""
    output, error = run(*way, *SETTINGS, *options, "--out", str(out))
    assert not error
    return output


def load(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)


def workers_of(process):
    """The processes that torchrun has started."""
    return [
        int(pid) for file in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in file.read_text().split()
    ]


def stop(process, number, receiver=None):
    """Stop a training after its first epoch; what it says from then on."""
    assert any(line.startswith("epoch 1/3") for line in process.stdout)
    workers = workers_of(process)
    os.kill(receiver(workers) if receiver else process.pid, number)
    told, _ = process.communicate(timeout=120)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    return told


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted training in two processes: its folder and its output."""
    out = tmp_path_factory.mktemp("finished")
    return out, train(IN_TWO, out)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A training in two processes that was stopped by SIGINT, as Ctrl-C does: its folder."""
    out = tmp_path_factory.mktemp("stopped")
    with start(*IN_TWO, *SETTINGS, "--out", str(out), stderr=subprocess.PIPE) as process:
        told = stop(process, signal.SIGINT)
    assert process.returncode == 130
    step = re.search(r"stopped in epoch (\d) after step (\d+) of 43; `make train ARGS='--epochs 3 .* --resume'`", told)
    assert step, told
    assert (load(out)["epoch"] + 1, load(out)["step"]) == (int(step[1]), int(step[2]))
    assert not (out / "report.png").exists()
    return out


def copy_of(folder, to):
    shutil.copy(folder / "checkpoint.pt", to)
    return to


def test_one_process_speaks(finished):
    _, output = finished
    assert output.startswith("1437 images to train on and 360 to validate on; processes on cpu, cpu\n")
    assert [line[:9] for line in output.splitlines()[1:4]] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert output.count("\n") == 6


def test_two_processes_train_as_two_threads_do(finished, tmp_path):
    train(IN_ONE, tmp_path)
    one, two = load(tmp_path), load(finished[0])
    assert one["settings"] == two["settings"]
    assert list(one["model"]) == list(two["model"])
    assert two["history"]["losses"][:10] == pytest.approx(one["history"]["losses"][:10], rel=1e-4)
    assert two["history"]["accuracies"][-1] == pytest.approx(one["history"]["accuracies"][-1], abs=0.02)
    assert two["history"]["accuracies"][-1] > 0.97


def test_the_report_has_a_timeline_of_both_processes(finished):
    out, _ = finished
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    timeline = load(out)["history"]["timeline"]
    phases = {(phase, rank) for phase, rank, _, _ in timeline}
    assert phases == {(phase, rank) for phase in ("forward", "loss", "backward") for rank in (0, 1)}
    assert all(start <= end for _, _, start, end in timeline)


def test_stopped_in_two_processes_and_resumed_in_two_it_comes_to_the_same_weights(finished, stopped, tmp_path):
    output = train(IN_TWO, copy_of(stopped, tmp_path), "--resume")
    assert f"resuming in epoch {load(stopped)['epoch'] + 1} after step {load(stopped)['step']}\n" in output
    resumed, uninterrupted = load(tmp_path), load(finished[0])
    assert all(torch.equal(value, uninterrupted["model"][name]) for name, value in resumed["model"].items())
    assert resumed["history"]["losses"] == uninterrupted["history"]["losses"]


def test_stopped_in_two_processes_it_is_resumed_in_one(stopped, tmp_path):
    train(IN_ONE, copy_of(stopped, tmp_path), "--resume")
    before, after = load(stopped)["history"], load(tmp_path)["history"]
    assert after["losses"][: len(before["losses"])] == before["losses"]
    assert len(after["losses"]) == 3 * STEPS_PER_EPOCH
    assert after["accuracies"][-1] > 0.97


def test_stopped_in_one_process_it_is_resumed_in_two(tmp_path):
    with start(*IN_ONE, *SETTINGS, "--out", str(tmp_path)) as process:
        assert "`python examples/digits.py --devices" in stop(process, signal.SIGTERM)
    assert process.returncode == 143
    before = load(tmp_path)["history"]
    train(IN_TWO, tmp_path, "--resume")
    after = load(tmp_path)["history"]
    assert after["losses"][: len(before["losses"])] == before["losses"]
    assert len(after["losses"]) == 3 * STEPS_PER_EPOCH
    assert after["accuracies"][-1] > 0.97


def test_one_process_that_is_asked_to_stop_stops_both(tmp_path):
    with start(*IN_TWO, *SETTINGS, "--out", str(tmp_path), stderr=subprocess.STDOUT) as process:
        told = stop(process, signal.SIGTERM, receiver=max)  # the last one; the first speaks
    assert process.returncode == 143
    assert re.fullmatch(r"(epoch .*\n)*stopped in epoch .* goes on\n", told), told
    assert load(tmp_path)["epoch"] < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], r"there is no checkpoint .*checkpoint\.pt to resume from"),
        (["--epochs", "0"], r"argument --epochs: '0' is not a whole number above 0"),
    ],
)
def test_a_bad_option_is_one_line(options, message, tmp_path):
    output, error = run(*IN_TWO, *options, "--out", str(tmp_path), status=2)
    assert not output
    assert re.fullmatch(f"digits.py: error: {message}\n", error)


def refusals(rank, folder):
    sys.path.insert(0, folder)
    runner = importlib.import_module("runner").Ranks()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    messages = []
    for devices, batch_size in (["cpu"], 8), (["cpu", "cpu"], 1):
        with pytest.raises(ValueError) as error:
            runner.place(Namespace(devices=devices, batch_size=batch_size))
        messages.append(str(error.value))
    problem = runner.first_problem("something that is so on this rank alone" if rank.rank == 1 else None)
    return [*messages, problem]


def test_no_process_may_be_without_a_device_or_a_row_and_all_hear_of_a_problem():
    expected = [
        "--devices names 1, but 2 processes need one each",
        "--batch-size is at least 2, the number of processes",
        "something that is so on this rank alone",
    ]
    assert run_processes(2, refusals, str(EXAMPLES)) == [expected, expected]


def test_the_launcher_names_the_process_that_failed(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os, sys, signal\nif os.environ['RANK'] == '1': sys.exit(3)\nsignal.pause()\n")
    assert run(*TORCHRUN, str(script), status=3) == ("", "process 1 failed with exit status 3\n")


# ------------------------------------------------------------------------------------------ characters


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["one process", "two processes"])
def test_characters_learns_and_writes(launcher):
    output, error = run(*launcher, str(EXAMPLES / "characters.py"), "--quick")
    assert not error
    begin, then = [
        float(loss) for loss in re.findall(r"^step \d\d/20  loss ([\d.]+) per character", output, re.MULTILINE)
    ]
    assert then < begin
    written = output.split("characters/s\n")[-1]
    assert written.startswith("\n    def ")
    assert len(written.removesuffix("\n")) == 60


def gradients_of_a_rank(rank, folder):
    sys.path.insert(0, folder)
    characters = importlib.import_module("characters")
    passages = characters.load_passages()[:PASSAGES]
    torch.manual_seed(rank.rank)  # the first rank's weights count
    model = lockstep.replicate(characters.Transformer().double())
    loss_sum, count = characters.leave_gradients(model, passages[rank.rank :: dist.get_world_size()], MICRO_BATCH)
    return loss_sum, count, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_gradient_is_the_mean_over_all_characters_of_all_processes():
    ranks = run_processes(2, gradients_of_a_rank, str(EXAMPLES), timeout=60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        before = set(sys.modules)
        characters = importlib.import_module("characters")
    for name in ("characters", "options", "group"):
        if name not in before:
            del sys.modules[name]
    torch.manual_seed(0)
    model = characters.Transformer().double()
    passages = characters.load_passages()[:PASSAGES]
    loss = sum(cross_entropy(model(p[None, :-1])[0], p[1:], reduction="sum") for p in passages)
    count = sum(len(passage) - 1 for passage in passages)
    (loss / count).backward()

    assert ranks[0][1] != ranks[1][1]
    assert ranks[0][1] + ranks[1][1] == count
    assert ranks[0][0] + ranks[1][0] == pytest.approx(loss.item(), rel=1e-12)
    for _, _, gradients in ranks:
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-13, msg=name)
