"""The two ways of training data-parallel, with the same methods: threads of this process, or processes of torchrun.

`Threads` calls `lockstep.DataParallel`; `Ranks` calls `lockstep.replicate` in every process. Both split the same
batches into the same shares, so a training that is stopped in one way can go on in the other.
"""

import os
import shlex
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lockstep
from timeline import COMMUNICATION, WORK, Span


class Threads:
    """One process: each replica is a thread, on a device of its own or on a core."""

    name, speaks = "replicas", True
    batches = staticmethod(iter)
    phase = staticmethod(nullcontext)

    def place(self, options: Namespace) -> str:
        """The device on which the model is made."""
        if options.shares:
            raise ValueError("--shares is for processes: start it by torchrun, one process is enough")
        self.devices, self.replicas = options.devices, len(options.devices)
        return options.devices[0]

    def replicate(self, model: nn.Module) -> None:
        """Train this model from now on."""
        self.dp = lockstep.DataParallel(model, device_ids=self.devices)

    def backward(self, batch: Any) -> tuple[float, list[Span]]:
        """The mean loss, whose gradients are left on the model, and who did what when."""
        images, labels = batch
        with self.dp.timeline() as events:
            loss = self.dp.step(cross_entropy, images, labels)
        return loss.item(), [(event.phase, event.replica, event.start, event.end) for event in events]

    def predict(self, images: Tensor) -> Tensor:
        """The model's outputs for all rows, without gradients; the replicas share these rows too."""
        with torch.no_grad():
            return self.dp(images).cpu()

    def agree(self, number: int) -> int:
        """The highest number that a process has here."""
        return number

    def first_problem(self, problem: str | None) -> str | None:
        """Why a process cannot train."""
        return problem

    def complete(self, timelines: list[list[Span]]) -> list[list[Span]]:
        """The timeline of each step with the spans of all replicas."""
        return timelines

    def command(self, options: str) -> str:
        """What starts the training in this way."""
        return f"python examples/digits.py {options}"


class Ranks:
    """Many processes: each has one replica and takes its share of every batch; the first one speaks and writes."""

    name = "processes"

    def __init__(self, run: lockstep.Session) -> None:
        self.rank, self.replicas, self.speaks = run.rank, run.world_size, run.is_main
        self.batches = run.batches  # counts steps, so that messages about a process that fails can name its step
        self.phase = run.phase  # so that they can tell what it was doing
        self.model: nn.Module | None = None

    def place(self, options: Namespace) -> str:
        """The device on which the model of this process is made; none may be left without a device or a row."""
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        if len(options.devices) != here:
            raise ValueError(f"--devices names {len(options.devices)}, but {here} processes need one each")
        if options.batch_size < self.replicas:
            raise ValueError(f"--batch-size is at least {self.replicas}, the number of processes")
        self.shares = options.shares
        if self.shares and not self.replicas <= self.shares <= options.batch_size:
            raise ValueError(f"--shares is from {self.replicas}, the number of processes, to --batch-size")
        self.device = torch.device(options.devices[int(os.environ["LOCAL_RANK"])])
        if self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)
        return str(self.device)

    def replicate(self, model: nn.Module) -> None:
        """Train this model from now on, like those of the other processes."""
        self.model = lockstep.replicate(model, shares=self.shares)

    def backward(self, batch: Any) -> tuple[float, list[Span]]:
        """The mean loss, whose gradients are left on the model, and what this process did when."""
        if self.shares:
            return self._backward_of_shares(batch)
        images, labels = map(self._share, batch)
        before, times = lockstep.statistics(self.model), [time.perf_counter()]
        outputs = self.model(images)
        times.append(time.perf_counter())
        loss = cross_entropy(outputs, labels, reduction="sum")
        times.append(time.perf_counter())
        with lockstep.accumulate(self.model, weight=len(labels)):  # one share may have a row more: all rows count alike
            loss.backward()
        times.append(time.perf_counter())
        after, begin = lockstep.statistics(self.model), times[0]
        arrived = times.pop()
        times.append(
            arrived - (after.exposed_seconds - before.exposed_seconds)
        )  # backward has only waited from here on
        sent = times[-1] - (after.hidden_seconds - before.hidden_seconds)
        sending = (COMMUNICATION, self.rank, sent - begin, arrived - begin)
        return self._mean(loss.item(), len(labels)), [*spans(self.rank, WORK, times), sending]

    def _backward_of_shares(self, batch: Any) -> tuple[float, list[Span]]:
        """The same for the shares of this process: when the loop is over, the gradients of all are there."""
        total, rows, times = 0.0, 0, [time.perf_counter()]
        for images, labels in batch:
            outputs = self.model(images.to(self.device))
            times.append(time.perf_counter())
            loss = cross_entropy(outputs, labels.to(self.device), reduction="sum")
            times.append(time.perf_counter())
            loss.backward()
            times.append(time.perf_counter())
            total, rows = total + loss.item(), rows + len(labels)
        times.append(time.perf_counter())
        return self._mean(total, rows), spans(self.rank, (*WORK * len(batch), COMMUNICATION), times)

    def _mean(self, total: float, rows: int) -> float:
        """The mean over the rows of all processes."""
        sums = torch.tensor([total, rows], dtype=torch.float64)
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def predict(self, images: Tensor) -> Tensor:
        """The model's outputs for all rows, without gradients: each process computes its share, all get the whole."""
        with torch.no_grad():
            outputs = self.model(self._share(images)).cpu()
        return torch.cat(self._gather(outputs))

    def agree(self, number: int) -> int:
        """The highest number that a process has here, the same in all of them."""
        highest = torch.tensor(number)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return int(highest)

    def first_problem(self, problem: str | None) -> str | None:
        """Why a process cannot train: all hear of it, so none waits for one that has given up."""
        return next(filter(None, self._gather(problem)), None)

    def complete(self, timelines: list[list[Span]]) -> list[list[Span]]:
        """The timeline of each step with the spans of all processes."""
        return [list(chain.from_iterable(step)) for step in zip(*self._gather(timelines), strict=True)]

    def command(self, options: str) -> str:
        """What starts the training in this way."""
        return f"make train ARGS={shlex.quote(options)}"

    def _share(self, rows: Tensor) -> Tensor:
        """The rows of this process, as many as `DataParallel` would give to its replica."""
        return rows.tensor_split(self.replicas)[self.rank].to(self.device)

    def _gather(self, value: Any) -> list[Any]:
        values = [None] * self.replicas
        dist.all_gather_object(values, value)
        return values


def spans(replica: int, phases: Sequence[str], times: Sequence[float]) -> list[Span]:
    """Phases that follow each other, timed from the first one's begin: two machines' clocks have nothing in common."""
    return [
        (phase, replica, start - times[0], end - times[0])
        for phase, start, end in zip(phases, times, times[1:], strict=False)
    ]


@contextmanager
def running() -> Iterator[Threads | Ranks]:
    """The way that the environment asks for: torchrun gives each of its processes a rank."""
    if "RANK" not in os.environ:
        yield Threads()
        return
    with lockstep.session() as run:
        runner = Ranks(run)
        yield runner
        runner.agree(0)  # torchrun ends all processes with the first that was stopped: wait for the one that writes
        runner.model = None
