"""The digits example as a user runs it: in one process, on a terminal and elsewhere, and by torchrun."""

import importlib
import io
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from example_programs import DIGITS, EXAMPLES, TORCHRUN, run, run_in_ranks, run_with_rank_0_late, start, stop_in_ranks
from lockstep.checkpoints.memory import MemoryFolder

pytestmark = pytest.mark.timeout(300)  # a run of torchrun imports torch three times

MODULES = ("digits", "handwriting", "options", "progress", "report", "resuming", "timeline")
LENGTH = ("--epochs", "3", "--batch-size", "32")
IN_ONE, IN_TWO = (DIGITS, *LENGTH), (*TORCHRUN, DIGITS, *LENGTH)
STEPS_PER_EPOCH = 1437 // 32


def newest(out):
    return max((out / "checkpoints").glob("save-*"))


def load(out):
    """Return what the newest checkpoint holds of the training."""
    names = ("model", "history", "settings", "order")
    return {name: torch.load(newest(out) / f"{name}.pt", map_location="cpu", weights_only=True) for name in names}


def assert_same(state, other):
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


def copy_of(folder, to):
    shutil.copytree(folder / "checkpoints", to / "checkpoints")
    return to


def until(descriptor, pattern):
    """Return what a terminal shows up to the pattern, or to the end of the process where that comes first."""
    shown = ""
    while not re.search(pattern, shown):
        try:
            shown += os.read(descriptor, 4096).decode(errors="replace")
        except OSError:  # how Linux reports that the other side is closed
            return shown
    return shown


def workers_of(process):
    """The processes that torchrun has started."""
    return [
        int(pid) for file in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in file.read_text().split()
    ]


def stop(process, number, receiver=None, epoch=1):
    """Stop a training after an epoch, whose checkpoint may be on its way; what it says from then on."""
    assert any(re.match(rf"epoch +{epoch}/", line) for line in process.stdout)
    workers = workers_of(process)
    os.kill(receiver(workers) if receiver else process.pid, number)
    told, _ = process.communicate(timeout=120)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    return told


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run: its folder and its output."""
    out = tmp_path_factory.mktemp("finished")
    status, output, error = run_here(*LENGTH, "--out", str(out))
    assert (status, error) == (0, "")
    return out, output


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped by SIGTERM after an epoch: its folder."""
    out = tmp_path_factory.mktemp("stopped")
    ((status, output, _),) = stop_in_ranks(1, "digits", [*LENGTH, "--out", str(out)], signal.SIGTERM)
    assert status == 130
    assert "goes on" in output
    return out


def run_here(*arguments):
    """Status, stdout and stderr of the example in one process."""
    (((status, output, error),),) = run_in_ranks(1, "digits", list(arguments))
    return status, output, error


def test_output_that_is_no_terminal_gets_one_plain_line_an_epoch(finished):
    _, output = finished
    assert not re.search(r"[\r\x1b]", output)
    line = r"epoch (\d)/3  loss \d\.\d{4}  validation +[\d.]+%  +[\d,]+ images/s"
    epochs = [re.fullmatch(line, text) for text in output.splitlines() if text.startswith("epoch")]
    assert [match and match[1] for match in epochs] == ["1", "2", "3"]


def test_a_short_run_is_accurate(finished):
    out, output = finished
    accuracy = load(out)["history"]["accuracies"][-1]
    assert accuracy > 0.97
    assert f"validation accuracy {accuracy:.2%} after " in output


def test_after_an_epoch_of_few_steps_validation_is_as_accurate_as_training(modules):
    training, validation = modules["handwriting"].load_handwriting()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = modules["digits"].make_model(width=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    images, labels = training.tensors
    for rows in torch.arange(len(images)).split(96)[:14]:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    images, labels = validation.tensors
    with torch.no_grad():
        correct = model.eval()(images).argmax(1) == labels
    assert correct.double().mean() > 0.8


def test_the_checkpoint_loads_into_the_plain_model(finished, modules):
    out, _ = finished
    model = modules["digits"].make_model()
    state = load(out)["model"]
    assert list(state) == list(model.state_dict())
    model.load_state_dict(state)
    _, validation = modules["handwriting"].load_handwriting()
    images, labels = validation.tensors
    correct = model.eval()(images).argmax(1) == labels
    assert correct.double().mean().item() == pytest.approx(load(out)["history"]["accuracies"][-1], abs=0.003)


def test_the_report_is_a_picture_with_a_timeline(finished):
    out, _ = finished
    picture = (out / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.endswith(b"IEND\xaeB\x60\x82")
    width, height = struct.unpack(">II", picture[16:24])
    assert 1000 <= width <= 4000
    assert 600 <= height <= 3000
    timeline = load(out)["history"]["timeline"]
    assert [phase for phase, *_ in timeline] == ["forward", "loss", "backward", "communication"]
    assert all(start <= end for _, _, start, end in timeline)


def test_the_picture_tells_waiting_for_a_process_from_communication(modules):
    timeline = modules["timeline"]
    early = [("forward", 0, 0.0, 1.0), ("backward", 0, 1.0, 3.0), ("communication", 0, 2.0, 6.0)]
    late = [("forward", 1, 0.0, 1.5), ("backward", 1, 1.5, 5.0), ("communication", 1, 4.0, 6.0)]
    by_the_clock_of_another_host = [(phase, row, start + 70.0, end + 70.0) for phase, row, start, end in late]
    spans = timeline.with_waiting(timeline.on_one_clock([*early, *by_the_clock_of_another_host]))
    drawn = {(phase, row): (start, end) for phase, row, start, end in spans}
    assert drawn[timeline.WAITS, 0] == (-3.0, -1.0)  # all have the last gradient at 0
    assert (timeline.WAITS, 1) not in drawn
    assert drawn[timeline.HIDDEN, 0] == (-4.0, -3.0)
    assert drawn[timeline.HIDDEN, 1] == (-2.0, -1.0)
    assert drawn[timeline.EXPOSED, 0] == drawn[timeline.EXPOSED, 1] == (-1.0, 0.0)
    assert "process 1 came last" in timeline.describe([*early, *late])


def test_a_run_interrupted_within_an_epoch_resumes_to_the_same_weights(finished, tmp_path):
    uninterrupted = load(finished[0])
    terminal, other_side = pty.openpty()
    command = [sys.executable, *IN_ONE, "--out", str(tmp_path)]
    with subprocess.Popen(command, stdin=other_side, stdout=other_side, stderr=other_side) as process:
        os.close(other_side)
        shown = until(terminal, r"epoch 2/3")  # on a terminal this comes after its first step, of 44
        process.send_signal(signal.SIGINT)
        shown += until(terminal, r"goes on")
        assert process.wait(timeout=60) == 130
    os.close(terminal)
    assert re.search(r"\repoch 1/3  [━─]{6,}  loss", shown)
    stopped = re.search(r"stopped in epoch (\d) after step (\d+) of 44; `python examples/digits.py --epochs 3", shown)
    assert stopped
    steps = (int(stopped[1]) - 1) * STEPS_PER_EPOCH + int(stopped[2])
    assert len(load(tmp_path)["history"]["losses"]) == steps
    assert not (tmp_path / "report.png").exists()

    status, output, error = run_here(*LENGTH, "--resume", "--out", str(tmp_path))
    assert (status, error) == (0, "")
    assert f"resuming after {steps} of {3 * STEPS_PER_EPOCH} steps" in output
    resumed = load(tmp_path)
    assert_same(resumed["model"], uninterrupted["model"])
    assert resumed["history"]["losses"] == uninterrupted["history"]["losses"]
    assert resumed["history"]["accuracies"] == uninterrupted["history"]["accuracies"]


def test_sigterm_stops_the_run_with_its_checkpoint_saved(stopped):
    assert STEPS_PER_EPOCH <= len(load(stopped)["history"]["losses"]) < 3 * STEPS_PER_EPOCH


def test_resuming_a_finished_run_leaves_it_as_it_is(finished, tmp_path):
    status, _, _ = run_here(*LENGTH, "--resume", "--out", str(copy_of(finished[0], tmp_path)))
    assert status == 0
    assert (tmp_path / "report.png").exists()
    assert_same(load(tmp_path)["model"], load(finished[0])["model"])


BAD = {
    "--resume": r"there is no checkpoint in .*checkpoints to resume from",
    "--batch-size 1438": r"--batch-size is at most 1437, the number of training images",
    "--epochs 0": r"argument --epochs: '0' is not a whole number above 0",
    "--lr nan": r"argument --lr: 'nan' is not a number above 0",
    "--seed -1": r"argument --seed: '-1' is not a whole number from 0 to 2\*\*32 - 1",
    "--shares 97": r"--shares is from 1, the number of processes, to --batch-size",
}


def test_a_bad_option_is_one_line(tmp_path):
    to = ["--out", str(tmp_path)]
    runs = run_in_ranks(1, "digits", *([*options.split(), *to] for options in BAD))
    for ((status, output, error),), message in zip(runs, BAD.values(), strict=True):
        assert (status, output) == (2, "")
        assert re.fullmatch(f"digits.py: error: {message}\n", error)
    assert not list(tmp_path.iterdir())


def test_resuming_with_other_settings_names_those_that_differ(finished):
    status, _, error = run_here(*LENGTH[:2], "--batch-size", "64", "--seed", "7", "--resume", "--out", str(finished[0]))
    assert status == 2
    assert "batch size 32 there and 64 here, seed 0 there and 7 here" in error


def test_resuming_from_what_is_no_checkpoint_of_this_program_says_so(stopped, tmp_path):
    (newest(copy_of(stopped, tmp_path)) / "model.pt").unlink()
    for other in sorted((tmp_path / "checkpoints").glob("save-*"))[:-1]:
        shutil.rmtree(other)
    status, _, error = run_here(*LENGTH, "--resume", "--out", str(tmp_path))
    assert status == 2
    assert "none is whole on every rank" in error


def test_a_new_run_keeps_the_checkpoints_of_the_run_before_apart(stopped, tmp_path):
    before = newest(copy_of(stopped, tmp_path)).name
    assert run_here("--epochs", "1", "--batch-size", "479", "--out", str(tmp_path))[0] == 0
    assert (tmp_path / "checkpoints-before" / before).exists()
    assert len(load(tmp_path)["history"]["losses"]) == 3


class Terminal(io.StringIO):
    """A terminal without a window."""

    def __init__(self, encoding):
        super().__init__()
        self._encoding = encoding

    encoding = property(lambda self: self._encoding)

    def isatty(self):
        return True

    def fileno(self):
        return 1


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (10, ""),
        (28, "loss"),
        (48, "loss validation"),
        (64, "loss validation images/s"),
        (80, "bar loss validation images/s"),
        (300, "bar loss validation images/s"),
        (0, "bar loss validation images/s"),  # a terminal that does not know its width
    ],
)
@pytest.mark.parametrize(("encoding", "bar"), [("utf-8", "━+─+"), ("ascii", "#+-+")])
def test_the_moving_line_fits_the_terminal(columns, parts, encoding, bar, modules, monkeypatch):
    progress, stream = modules["progress"], Terminal(encoding)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    shown = progress.Progress(stream, epochs=12, steps_per_epoch=10)
    shown.after_step(progress.Status(epoch=3, step=5, loss=0.5, images_per_second=1234.0, accuracy=None))
    line = stream.getvalue().removeprefix("\r")
    assert len(line) == (columns or 80) - 1
    assert "epoch  3/12".startswith(line[:11])
    patterns = {"bar": f"  {bar}  ", "loss": "loss 0", "validation": "validation ", "images/s": "images/s"}
    assert " ".join(part for part, pattern in patterns.items() if re.search(pattern, line)) == parts
    assert line.isascii() or encoding == "utf-8"


# ----------------------------------------------------------------------------------------- in two processes


@pytest.fixture(scope="module")
def stopped_in_two(tmp_path_factory):
    """A training that was stopped by SIGINT, as Ctrl-C does: its folder."""
    out = tmp_path_factory.mktemp("stopped-in-two")
    with start(*IN_TWO, "--out", str(out), stderr=subprocess.PIPE) as process:
        told = stop(process, signal.SIGINT)
    assert process.returncode == 130
    step = re.search(r"stopped in epoch (\d) after step (\d+) of 44; `make train ARGS='--epochs 3 .* --resume'`", told)
    assert step, told
    assert len(load(out)["history"]["losses"]) == (int(step[1]) - 1) * STEPS_PER_EPOCH + int(step[2])
    assert not (out / "report.png").exists()
    return out


@pytest.fixture(scope="module")
def in_two(tmp_path_factory):
    """A training that nothing interrupts: its folder, and what each process has to say."""
    out = tmp_path_factory.mktemp("finished-in-two")
    (outcomes,) = run_in_ranks(2, "digits", [*LENGTH, "--out", str(out)])
    return out, outcomes


def test_one_process_speaks(in_two):
    (status, output, error), quiet = in_two[1]
    assert (status, error) == (0, "")
    assert quiet == (0, "", "")
    assert output.startswith("1437 images to train on, 360 to validate on; processes: 2\n")
    assert [line[:9] for line in output.splitlines()[1:4]] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert output.count("\n") == 6


@pytest.mark.parametrize("world", [3, 4, *(pytest.param(each, marks=pytest.mark.soak) for each in (6, 8, 12))])
def test_an_epoch_has_as_many_steps_in_any_number_of_processes(world, tmp_path):
    (outcomes,) = run_in_ranks(world, "digits", ["--epochs", "2", "--out", str(tmp_path)])
    status, output, error = outcomes[0]
    assert (status, error) == (0, "")
    assert f"processes: {world}" in output
    assert outcomes[1:] == [(0, "", "")] * (world - 1)
    assert len(load(tmp_path)["history"]["losses"]) == 2 * (1437 // 96)


def test_the_report_has_a_timeline_of_both_processes(in_two):
    out, _ = in_two
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    timeline = load(out)["history"]["timeline"]
    phases = {(phase, rank) for phase, rank, _, _ in timeline}
    assert phases == {(phase, rank) for phase in ("forward", "loss", "backward", "communication") for rank in (0, 1)}
    assert all(start <= end for _, _, start, end in timeline)
    ends = {(phase, rank): end for phase, rank, _, end in timeline}
    assert all(ends["backward", rank] < ends["communication", rank] for rank in (0, 1))
    assert load(out)["history"]["accuracies"][-1] > 0.97


def test_stopped_in_two_processes_and_resumed_in_two_it_comes_to_the_same_weights(in_two, stopped_in_two, tmp_path):
    (((status, output, error), _),) = run_in_ranks(
        2, "digits", [*LENGTH, "--resume", "--out", str(copy_of(stopped_in_two, tmp_path))]
    )
    assert (status, error) == (0, "")
    assert "resuming after " in output
    assert (tmp_path / "report.png").exists()
    resumed, uninterrupted = load(tmp_path), load(in_two[0])
    assert_same(resumed["model"], uninterrupted["model"])
    assert resumed["history"]["losses"] == uninterrupted["history"]["losses"]


def test_stopped_in_two_processes_it_is_resumed_in_one(stopped_in_two, tmp_path):
    status, _, error = run_here(*LENGTH, "--resume", "--out", str(copy_of(stopped_in_two, tmp_path)))
    assert status == 0
    assert "saved by 2 rank(s) and resumed by 1" in error
    before, after = load(stopped_in_two)["history"], load(tmp_path)["history"]
    assert after["losses"][: len(before["losses"])] == before["losses"]
    assert len(after["losses"]) == 3 * STEPS_PER_EPOCH
    assert after["accuracies"][-1] > 0.97


def test_one_process_that_is_asked_to_stop_stops_both(tmp_path):
    arguments = [*LENGTH, "--out", str(tmp_path)]
    first, second = stop_in_ranks(2, "digits", arguments, signal.SIGTERM, receiver=1)  # the other one speaks
    assert (first[0], second) == (130, (130, "", ""))
    assert re.search(r"^stopped in epoch .* goes on$", first[1], re.M), first[1]
    assert len(load(tmp_path)["history"]["losses"]) < 3 * STEPS_PER_EPOCH


def test_a_process_that_is_killed_is_named_in_a_few_lines(tmp_path):
    command = (*TORCHRUN, DIGITS, "--epochs", "999", "--batch-size", "478", "--out", str(tmp_path))
    with start(*command, stderr=subprocess.STDOUT) as process:
        told = stop(process, signal.SIGKILL, receiver=max, epoch=2)
    assert process.returncode == 137
    assert re.search(r"^rank 0 stops, because rank 1 has ended without a word .* at step \d+, in \w+$", told, re.M)
    assert re.search(r"^`make train ARGS='.* --resume'` goes on from the newest checkpoint$", told, re.M)
    assert told.endswith("process 1 was ended by SIGKILL, exit status 137\n")
    assert "Traceback" not in told


def test_a_bad_option_is_one_line_of_one_process(tmp_path):
    to = ["--out", str(tmp_path)]
    bad = {
        "--resume": r"there is no checkpoint in .*checkpoints to resume from",
        "--batch-size 33": "--batch-size is a multiple of 2, the number of processes",
        "--shares 1": "--shares is from 2, the number of processes, to --batch-size",
    }
    runs = run_in_ranks(2, "digits", *([*options.split(), *to] for options in bad))
    for ((*outcome, told), quiet), message in zip(runs, bad.values(), strict=True):
        assert (outcome, quiet) == ([2, ""], (2, "", ""))
        assert re.fullmatch(f"digits.py: error: {message}\n", told)


def test_a_bad_option_that_another_process_finds_first_is_no_failure_of_that_one(tmp_path):
    (*outcome, told), quiet = run_with_rank_0_late(2, "digits", ["--shares", "1", "--out", str(tmp_path)])
    assert (outcome, quiet) == ([2, ""], (2, "", ""))
    assert told == "digits.py: error: --shares is from 2, the number of processes, to --batch-size\n"


@pytest.mark.parametrize(("status", "told"), [(3, "process 1 failed with exit status 3\n"), (2, "")])
def test_the_launcher_names_the_process_that_failed_unless_it_has_told_why(status, told, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(f"import os, sys, signal\nif os.environ['RANK'] == '1': sys.exit({status})\nsignal.pause()\n")
    assert run(*TORCHRUN, str(script), status=status) == ("2 processes on the CPU, no accelerators here\n", told)


def test_with_shares_the_number_of_processes_changes_nothing(tmp_path):
    options = ("--shares", "2", "--epochs", "1", "--batch-size", "477", "--out")
    prints = []
    for world in (1, 2):
        ((first, *others),) = run_in_ranks(world, "digits", [*options, str(tmp_path / str(world))])
        assert first[0] == 0, first[2]
        assert not any(output for _, output, _ in others)
        prints += re.findall(r"^fingerprint (\w{64})$", first[1], re.M)
    assert len(prints) == 2
    assert prints[0] == prints[1]


@pytest.mark.soak  # in small: tests/shares/test_shares.py, tests/checkpoints
def test_with_shares_a_run_that_was_stopped_goes_on_in_another_number_of_processes(tmp_path):
    command = (*TORCHRUN, DIGITS, *LENGTH, "--shares", "2", "--out", str(tmp_path))
    with start(*command, stderr=subprocess.STDOUT) as process:
        assert "goes on" in stop(process, signal.SIGINT)
    output, _ = run(DIGITS, *LENGTH, "--shares", "2", "--resume", "--out", str(tmp_path))
    assert "resuming after" in output
    assert load(tmp_path)["history"]["accuracies"][-1] > 0.97


def kill(process, receivers, epoch):
    """Kill some of its workers after an epoch."""
    assert any(re.match(rf"epoch +{epoch}/", line) for line in process.stdout)
    for worker in receivers(workers_of(process)):
        os.kill(worker, signal.SIGKILL)


def fingerprint_of(told):
    return re.search(r"^fingerprint (\w{64})$", told, re.M)[1]


def test_killed_processes_start_again_and_come_to_the_same_weights(tmp_path):
    """`make train MAX_RESTARTS=3`: one of its processes is killed, then the other, then both, then the launcher."""
    options = ("--epochs", "5", "--batch-size", "32", "--shares", "2")
    undisturbed, _ = run(DIGITS, *options, "--out", str(tmp_path / "undisturbed"))
    with start(*TORCHRUN, "--max-restarts", "3", DIGITS, *options, "--out", str(tmp_path / "killed")) as process:
        kill(process, lambda workers: workers[:1], 1)
        kill(process, lambda workers: workers[1:], 2)
        kill(process, lambda workers: workers, 3)
        assert any(re.match("epoch +4/", line) for line in process.stdout)
        process.kill()  # the others train on to the end
        assert fingerprint_of(process.stdout.read()) == fingerprint_of(undisturbed)
    assert not MemoryFolder.of(tmp_path / "killed" / "checkpoints").folder.exists()
