"""Train a convolutional network on handwritten digits, on several replicas at once.

    python examples/digits.py                                   # replicas are threads of one process
    torchrun --standalone --nproc-per-node 2 examples/digits.py # or processes; `make train` does this

The 1,797 images come with scikit-learn, so nothing is downloaded. Ctrl-C stops the run, and `--resume`
goes on with it, to the very weights that it would have reached unstopped: the order of the images depends
on the seed and the epoch alone, and the checkpoint holds all the rest. With `--shares 8` the weights do not depend
on the number of processes either, up to eight, and a run may go on with another number.

Three lines make the training data-parallel, and `runner.py` has them for both ways: one that takes the model (called
in `carry_out`), one in place of forward, loss and backward (in `train_step`), and one in place of `model(...)` (in
`evaluate`). The optimizer, the scheduler and the checkpoint see only the plain model.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import checkpoint
import lockstep
from checkpoint import Settings, Training
from lockstep.errors import CheckpointError
from options import Parser, make_parser, resuming
from progress import Progress, Status
from report import write_report
from runner import Ranks, Threads, running
from timeline import Span, median_step

VALIDATION_IMAGES = 360
SPLIT_SEED = 0  # apart from --seed: runs of different seeds are measured on the same images
CHECKPOINTS, REPORT = "checkpoints", "report.png"


class Data(NamedTuple):
    """Images of shape (rows, 1, 8, 8) with values from 0 to 1, and the digit that each one shows."""

    images: Tensor
    labels: Tensor


def load_data() -> tuple[Data, Data]:
    """Training and validation data."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    held_out, rest = order[:VALIDATION_IMAGES], order[VALIDATION_IMAGES:]
    return Data(images[rest], labels[rest]), Data(images[held_out], labels[held_out])


def epoch_batches(rows: int, batch_size: int, seed: int, epoch: int) -> Tensor:
    """The rows of each batch of an epoch; those few that would not fill a last batch sit this one out."""
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    batches = rows // batch_size
    return torch.randperm(rows, generator=generator)[: batches * batch_size].view(batches, batch_size)


def make_model(width: int = 48) -> nn.Module:
    """Four convolutions. No dropout: replicas that are threads would race for its random numbers."""

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *convolution(1, width),
        *convolution(width, width),
        nn.MaxPool2d(2),
        *convolution(width, 2 * width),
        *convolution(2 * width, 2 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 2 * 2, 10),
    )


def train_step(runner: Threads | Ranks, training: Training, batch: Any) -> tuple[float, list[Span]]:
    """One step of all replicas together: the mean loss, and who did what when."""
    training.optimizer.zero_grad()
    loss, timeline = runner.backward(batch)
    training.optimizer.step()
    training.scheduler.step()
    return loss, timeline


def evaluate(runner: Threads | Ranks, model: nn.Module, data: Data) -> tuple[float, float]:
    """Loss and accuracy; these rows are shared among the replicas too."""
    model.eval()
    outputs = runner.predict(data.images)
    model.train()
    accuracy = (outputs.argmax(1) == data.labels).double().mean()
    return cross_entropy(outputs, data.labels).item(), accuracy.item()


class StopRequest:
    """Ctrl-C and SIGTERM only ask for a stop, which comes between two steps. A second one kills."""

    def __init__(self) -> None:
        self.signal = 0  # none so far
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Run:
    """A training with its data, and with what it shows and leaves behind."""

    runner: Threads | Ranks
    training: Training
    settings: Settings
    data: Data
    validation: Data
    directory: Path
    stop: StopRequest

    def __post_init__(self) -> None:
        self.steps_per_epoch = len(self.data.images) // self.settings.batch_size
        self.progress = Progress(sys.stdout, self.settings.epochs, self.steps_per_epoch)
        self.checkpoints = self.directory / CHECKPOINTS
        self.report = self.directory / REPORT
        self.stopped_by = 0

    @property
    def finished(self) -> bool:
        """Whether the last epoch is done."""
        return self.training.epoch == self.settings.epochs

    def train(self) -> None:
        """To the end of the last epoch, or until a stop is asked for; either way the checkpoint is saved."""
        while not self.finished and not self.stopped_by:
            self._train_epoch()
            with self.runner.phase("checkpoint"):
                checkpoint.save(self.checkpoints, self.training, self.settings)
        self.progress.close()

    def _train_epoch(self) -> None:
        """The steps that are left of this epoch, then its validation."""
        training, history, settings = self.training, self.training.history, self.settings
        timelines, speed, begin = [], 0.0, time.perf_counter()
        for done, batch in enumerate(self._batches(), start=1):
            self.stopped_by = self.runner.agree(self.stop.signal)  # all replicas stop before the same step
            if self.stopped_by:
                return
            loss, timeline = train_step(self.runner, training, batch)
            training.step += 1
            history.losses.append(loss)
            timelines.append(timeline)
            speed = done * settings.batch_size / (time.perf_counter() - begin)
            self.progress.after_step(self._status(speed))
        validation_loss, accuracy = evaluate(self.runner, training.model, self.validation)
        history.validation_losses.append(validation_loss)
        history.accuracies.append(accuracy)
        history.timeline = median_step(self.runner.complete(timelines))
        self.progress.after_epoch(self._status(speed))
        training.epoch, training.step = training.epoch + 1, 0

    def _batches(self) -> Iterable[Any]:
        """What is left of this epoch: whole batches, or batches that each process goes through share by share."""
        settings, epoch, step = self.settings, self.training.epoch, self.training.step
        if settings.shares:
            rows = TensorDataset(*self.data)
            batches = lockstep.GlobalBatches(rows, settings.batch_size, settings.shares, settings.seed)
            batches.load_state_dict({"epoch": epoch, "batch": step})
            return batches
        order = epoch_batches(len(self.data.images), settings.batch_size, settings.seed, epoch)
        return self.runner.batches([Data(self.data.images[rows], self.data.labels[rows]) for rows in order[step:]])

    def _status(self, images_per_second: float) -> Status:
        """Where the epoch under way stands; its loss is the mean of its steps."""
        training, history = self.training, self.training.history
        return Status(
            epoch=training.epoch + 1,
            step=training.step,
            loss=fmean(history.losses[-training.step :]),
            images_per_second=images_per_second,
            accuracy=history.accuracies[-1] if history.accuracies else None,
        )


def prepare(options: argparse.Namespace, runner: Threads | Ranks, stop: StopRequest) -> Run:
    """All that the options ask for, at its beginning."""
    data, validation = load_data()
    if options.batch_size > len(data.images):
        raise ValueError(f"--batch-size is at most {len(data.images)}, the number of training images")
    device = runner.place(options)
    replicas, shares = (0, options.shares) if options.shares else (runner.replicas, 0)
    settings = Settings(options.epochs, options.batch_size, options.lr, options.seed, replicas, shares)
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # a network so small is not split further: one thread is enough for each replica
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    steps = settings.epochs * (len(data.images) // settings.batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=settings.lr, total_steps=steps)
    training = Training(model, optimizer, scheduler)
    if not options.resume:
        options.out.mkdir(parents=True, exist_ok=True)
    return Run(runner, training, settings, data, validation, options.out, stop)


def refuse(parser: Parser, runner: Threads | Ranks, problem: object) -> NoReturn:
    """End every process; one of them says why."""
    parser.exit(2, f"{parser.prog}: error: {problem}\n" if runner.speaks else None)


def carry_out(arguments: Sequence[str], runner: Threads | Ranks, stop: StopRequest) -> int:
    """From the options to the report, or to wherever the run is stopped."""
    begin, parser, problem = time.perf_counter(), make_parser(), None
    try:
        options = parser.parse_args(arguments)
        run = prepare(options, runner, stop)
    except (ValueError, OSError) as error:
        problem = str(error)
    if problem := runner.first_problem(problem):
        refuse(parser, runner, problem)
    training = run.training
    runner.replicate(training.model)
    if options.resume:
        try:
            checkpoint.resume(run.checkpoints, training, run.settings)
        except CheckpointError as error:  # in every process
            refuse(parser, runner, error)
    elif runner.speaks:
        checkpoint.set_aside(run.checkpoints)
    print(
        f"{len(run.data.images)} images to train on and {len(run.validation.images)} to validate on; "
        f"{runner.name} on {', '.join(options.devices)}"
    )
    if options.resume and not run.finished:
        print(f"resuming in epoch {training.epoch + 1} after step {training.step}")
    run.train()
    if not run.finished:
        print(
            f"stopped in epoch {training.epoch + 1} after step {training.step} of {run.steps_per_epoch}; "
            f"`{runner.command(resuming(arguments))}` goes on"
        )
        return 128 + run.stopped_by
    if runner.speaks:
        write_report(training.history, run.steps_per_epoch, run.report)
    accuracy, seconds = training.history.accuracies[-1], time.perf_counter() - begin
    print(f"validation accuracy {accuracy:.2%} after {seconds:.1f} s")
    print(f"wrote {run.checkpoints} and {run.report}")
    if options.shares:
        print(f"fingerprint {lockstep.fingerprint(training.model, training.optimizer)}")
    return 0


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 after the last epoch, 128 and the number of the signal that stopped it before."""
    stop = StopRequest()
    with (
        running() as runner,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(sys.stdout if runner.speaks else nowhere),
    ):
        return carry_out(arguments, runner, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
