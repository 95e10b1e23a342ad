"""The digits example in one process, as a user runs it, on a terminal and elsewhere."""

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

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODULES = ("digits", "checkpoint", "options", "progress", "report", "runner", "group")
DEVICES = ("--devices", "cpu,cpu")
SETTINGS = ("--epochs", "3", "--batch-size", "32", *DEVICES)
STEPS_PER_EPOCH = 1437 // 32


def command(*options, out):
    return [sys.executable, str(EXAMPLES / "digits.py"), *options, "--out", str(out)]


def run(*options, out):
    """The output of a run that succeeds, without a word on stderr."""
    process = subprocess.run(command(*options, out=out), capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert not process.stderr
    return process.stdout


def load(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)


def assert_same(state, other):
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


def until(descriptor, pattern):
    """What a terminal shows up to the pattern, or to the end of the process where that comes first."""
    shown = ""
    while not re.search(pattern, shown):
        try:
            shown += os.read(descriptor, 4096).decode(errors="replace")
        except OSError:  # how Linux reports that the other side is closed
            return shown
    return shown


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
    return out, run(*SETTINGS, out=out)


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


def test_the_checkpoint_loads_into_the_plain_model(finished, modules):
    out, _ = finished
    model = modules["digits"].make_model()
    state = load(out)["model"]
    assert list(state) == list(model.state_dict())
    model.load_state_dict(state)
    _, validation = modules["digits"].load_data()
    correct = model.eval()(validation.images).argmax(1) == validation.labels
    assert correct.double().mean().item() == pytest.approx(load(out)["history"]["accuracies"][-1], abs=0.003)


def test_the_report_is_a_picture_with_a_timeline_of_both_replicas(finished):
    out, _ = finished
    picture = (out / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.endswith(b"IEND\xaeB\x60\x82")
    width, height = struct.unpack(">II", picture[16:24])
    assert 1000 <= width <= 4000
    assert 600 <= height <= 3000
    timeline = load(out)["history"]["timeline"]
    spans = {(phase, replica) for phase, replica, _, _ in timeline}
    assert spans >= {(phase, replica) for phase in ("forward", "loss", "backward") for replica in (0, 1)}
    assert all(start <= end for _, _, start, end in timeline)


def test_a_run_interrupted_within_an_epoch_resumes_to_the_same_weights(finished, tmp_path):
    uninterrupted = load(finished[0])
    terminal, other_side = pty.openpty()
    with subprocess.Popen(
        command(*SETTINGS, out=tmp_path), stdin=other_side, stdout=other_side, stderr=other_side
    ) as process:
        os.close(other_side)
        shown = until(terminal, r"epoch 2/3")  # on a terminal this comes after its first step, of 44
        process.send_signal(signal.SIGINT)
        shown += until(terminal, r"goes on")
        assert process.wait(timeout=30) == 130
    os.close(terminal)
    assert re.search(r"\repoch 1/3  [━─]{6,}  loss", shown)
    stopped = re.search(r"stopped in epoch (\d) after step (\d+) of 44; `python examples/digits.py --epochs", shown)
    assert stopped
    epoch, step = int(stopped[1]), int(stopped[2])
    assert 0 < step < STEPS_PER_EPOCH
    assert (load(tmp_path)["epoch"], load(tmp_path)["step"]) == (epoch - 1, step)
    assert not (tmp_path / "report.png").exists()

    output = run(*SETTINGS, "--resume", out=tmp_path)
    assert f"resuming in epoch {epoch} after step {step}" in output
    resumed = load(tmp_path)
    assert_same(resumed["model"], uninterrupted["model"])
    assert resumed["history"]["losses"] == uninterrupted["history"]["losses"]
    assert resumed["history"]["accuracies"] == uninterrupted["history"]["accuracies"]


def test_sigterm_stops_the_run_with_its_checkpoint_saved(tmp_path):
    with subprocess.Popen(command(*SETTINGS, out=tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert any(line.startswith("epoch 1/3") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert "goes on" in process.stdout.read()
    assert process.returncode == 143
    assert load(tmp_path)["epoch"] in (1, 2)


def test_resuming_a_finished_run_leaves_it_as_it_is(finished, tmp_path):
    shutil.copy(finished[0] / "checkpoint.pt", tmp_path)
    run(*SETTINGS, "--resume", out=tmp_path)
    assert (tmp_path / "report.png").exists()
    assert_same(load(tmp_path)["model"], load(finished[0])["model"])


@pytest.fixture
def main(modules):
    """Runs the example in this process; nothing that it sets stays behind."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    yield modules["digits"].main
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)


def test_accelerators_are_used_where_there_are_any(sim, main, tmp_path, capsys):
    assert main(["--epochs", "1", "--batch-size", "718", "--out", str(tmp_path)]) == 0
    names = [f"sim:{index}" for index in range(torch.accelerator.device_count())]
    assert f"replicas on {', '.join(names)}\n" in capsys.readouterr().out
    state = load(tmp_path)
    assert {replica for _, replica, _, _ in state["history"]["timeline"]} == {None, *range(len(names))}
    assert all(value.device.type == "cpu" for value in state["model"].values())  # any machine can load it


@pytest.fixture
def error_of(main, capsys):
    def error_of(*options):
        with pytest.raises(SystemExit) as exit_info:
            main([*DEVICES, *options])
        assert exit_info.value.code == 2
        output, error = capsys.readouterr()
        assert (output, error.count("\n")) == ("", 1)
        return error.rstrip()

    return error_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], r"there is no checkpoint .*checkpoint\.pt to resume from"),
        (["--batch-size", "1438"], r"--batch-size is at most 1437, the number of training images"),
        (["--epochs", "0"], r"argument --epochs: '0' is not a whole number above 0"),
        (["--lr", "nan"], r"argument --lr: 'nan' is not a number above 0"),
        (["--seed", "-1"], r"argument --seed: '-1' is not a whole number from 0 to 2\*\*32 - 1"),
        (["--devices", "cpu,nowhere:1"], r"argument --devices: no device 'nowhere:1' here, only cpu.*"),
    ],
)
def test_a_bad_option_is_one_line(options, message, error_of, tmp_path):
    assert re.search(f"error: {message}$", error_of(*options, "--out", str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_resuming_with_other_settings_names_those_that_differ(finished, error_of):
    error = error_of(*SETTINGS, "--batch-size", "64", "--seed", "7", "--resume", "--out", str(finished[0]))
    assert error.endswith("other settings: batch size 32 there and 64 here, seed 0 there and 7 here")


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_resuming_from_another_file_says_so(content, error_of, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(content)
    assert "checkpoint.pt is no checkpoint of this program" in error_of("--resume", "--out", str(tmp_path))


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
