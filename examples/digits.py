"""Train a convolutional network on handwritten digits, in as many processes as you like.

    python examples/digits.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/digits.py  # two; `make train` does this

Ctrl-C stops the run after a step, saved, and `--resume` goes on with it, to the very weights that it would have reached
unstopped. With `--shares 8` these do not depend on the number of processes, either. With `make train MAX_RESTARTS=3`
processes that were killed start again, from a snapshot in memory, and come to the same weights.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lockstep
from handwriting import load_handwriting
from lockstep.errors import CheckpointError, PeerFailure
from options import STOPPED, BadOption, begin, check, command_to_resume, fail, tell
from progress import Progress, Status, printing
from report import History, write_report
from resuming import go_on, settings_of
from timeline import StepTimes


def make_model(width: int = 48) -> nn.Sequential:
    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        # With PyTorch's 0.1, averages after 14 steps are near those of the first weights: 12% right in place of 91%.
        norm = nn.BatchNorm2d(outputs, momentum=0.3)
        return [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False), norm, nn.ReLU()]

    first = [*convolution(1, width), *convolution(width, width), nn.MaxPool2d(2)]
    second = [*convolution(width, 2 * width), *convolution(2 * width, 2 * width), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(2 * width * 2 * 2, 10))


def order_images(run: lockstep.Session, data: Dataset, options: Namespace) -> tuple[Any, Iterable, int]:
    """The order of the images, which knows how far training has come; batches from there on; how many an epoch has."""
    if options.shares:
        order = lockstep.shares.GlobalBatches(data, options.batch_size, options.shares, options.seed)
        return order, order, len(order)
    # The last images are dropped, not repeated, so that an epoch has as many steps on any number of processes.
    order = lockstep.ResumableSampler(DistributedSampler(data, seed=options.seed, drop_last=True))
    loader = DataLoader(data, options.batch_size // run.world_size, sampler=order, drop_last=True)
    return order, order.batches(loader), len(loader)


def compute_gradients(model: nn.Module, images: Tensor, labels: Tensor, times: StepTimes) -> float:
    """The mean loss of these images; the gradients of all processes' mean are left on the model."""
    outputs = model(images)
    times.lap("forward")
    loss = cross_entropy(outputs, labels)
    times.lap("loss")
    loss.backward()
    times.lap("backward")
    return loss.item()


@torch.no_grad()
def evaluate(run: lockstep.Session, model: nn.Module, data: Dataset) -> tuple[float, float]:
    """Loss and accuracy; each process has a part of the images."""
    model.eval()
    images, labels = next(iter(DataLoader(run.shard(data), batch_size=len(data))))
    outputs = model(images.to(run.device)).cpu()
    model.train()
    accuracy = (outputs.argmax(1) == labels).double().mean().item()
    return lockstep.mean((cross_entropy(outputs, labels).item(), accuracy), weight=len(labels))


def train(run: lockstep.Session, options: Namespace) -> bool:
    """Return True if all epochs are done; else the run was stopped between two steps, and is saved."""
    torch.set_num_threads(1)  # a network so small is not split further
    started = time.perf_counter()
    training, validation = load_handwriting()
    order, batches, steps = order_images(run, training, options)
    torch.manual_seed(options.seed)
    model = lockstep.replicate(make_model().to(run.device), shares=options.shares, loss="mean")
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.epochs * steps)
    history, times = History(), StepTimes(model, run.rank)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "order": order, "history": history}
    checkpoints, report = options.out / "checkpoints", options.out / "report.png"
    if go_on(run, checkpoints, options, state):
        print(f"resuming after {len(history.losses)} of {options.epochs * steps} steps")
    print(f"{len(training)} images to train on, {len(validation)} to validate on; processes: {run.world_size}")

    progress = Progress(sys.stdout, options.epochs, steps)
    for epoch in range(order.epoch, options.epochs):
        begin, before = time.perf_counter(), len(history.losses)
        for batch in run.batches(batches):
            times.begin()
            optimizer.zero_grad()
            shares = batch if options.shares else [batch]
            losses = [compute_gradients(model, *(each.to(run.device) for each in share), times) for share in shares]
            times.end()
            optimizer.step()
            scheduler.step()
            history.losses.append(lockstep.mean(fmean(losses), weight=len(losses)))
            done = len(history.losses) - epoch * steps
            loss = fmean(history.losses[-done:])  # of the epoch so far
            speed = (len(history.losses) - before) * options.batch_size / (time.perf_counter() - begin)
            progress.after_step(Status(epoch + 1, done, loss, speed, history.accuracy))
            if done < steps:  # after the last one, the epoch is saved
                run.snapshot(checkpoints, step=len(history.losses), settings=settings_of(options), **state)
                if run.should_stop:
                    break
        if done == steps:
            history.add_epoch(*evaluate(run, model, validation), times.median_step())
            progress.after_epoch(Status(epoch + 1, done, loss, speed, history.accuracy))
        run.save(checkpoints, step=len(history.losses), settings=settings_of(options), **state)
        if done < steps or (run.should_stop and epoch + 1 < options.epochs):
            progress.stop(epoch + 1, done)
            return False

    progress.close()
    if run.is_main:
        write_report(history, steps, report)
    print(f"validation accuracy {history.accuracy:.2%} after {time.perf_counter() - started:.1f} s")
    print(f"wrote {checkpoints} and {report}")
    if options.shares:
        print(f"fingerprint {lockstep.shares.fingerprint(model, optimizer)}")
    return True


def main(arguments: Sequence[str]) -> int:
    """The exit status. One process speaks."""
    try:
        with begin(arguments) as (run, options), printing(run.is_main):
            try:
                if train(run, check(options, run.world_size)):
                    return 0
            except (BadOption, CheckpointError) as problem:  # in all processes: none has failed the others
                return fail(problem, run.is_main)
            print(f"`{command_to_resume(arguments, run.world_size)}` goes on")
            return STOPPED
    except PeerFailure as failure:
        return tell(failure, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
