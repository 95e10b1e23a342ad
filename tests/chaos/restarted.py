"""A training that is killed and started again: what each rank of a trial runs, and the failures that it causes.

A failure strikes its victim inside a region of the program (start-up, resume, a step, a snapshot, a save), after a
share of the calls of Python and C functions that the region takes undisturbed: so it may come between any two of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lockstep

REGIONS = ("start-up", "resume", "training", "snapshot", "save")
KINDS = ("rank", "host", "launcher", "link")
"""SIGKILL of a rank, of all ranks of a host, whose memory is lost, or of what hosts the store; a cable is pulled."""
ROWS, BATCH, EPOCHS = 160, 16, 2
STEPS = EPOCHS * ROWS // BATCH
SAVE_EVERY = 4


@dataclasses.dataclass(frozen=True)
class Failure:
    """What happens to one rank, or by it, in one start of the ranks."""

    kind: str
    region: str
    victim: int
    share: float
    """Of the calls in the region; where it takes fewer, at its end."""
    step: int = 0
    """How many steps after the one from which the ranks go on."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a rank is told."""

    folder: str
    path: str
    """The folder of the checkpoints, as this host sees it."""
    attempt: int
    backend: str
    calls: dict[str, int]
    """How many calls each region takes; empty to count them."""
    failures: list[Failure]
    launcher: int = 0
    """The process that hosts the store; 0 if rank 0 does."""


class Trial:
    """What a rank notes, and the failures that it causes."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._left = [each for each in job.failures if each.victim == rank]
        self._struck: set[Failure] = set()
        self._behind: Failure | None = None
        self._lock = threading.Lock()

    def note(self, what: str, **more: Any) -> None:
        line = {"what": what, "attempt": self._job.attempt, "rank": self._rank, "at": time.monotonic(), **more}
        with open(f"{self._job.folder}/events.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def region(self, name: str, step: int = 0) -> Iterator[None]:
        """Count the calls in a region, or fail in it; threads that it starts belong to it as long as they live."""
        self._strike(self._behind)
        failure = next((each for each in self._left if each.region == name and each.step <= step), None)
        if failure is None and self._job.calls:
            yield
            return
        if failure is not None:
            self._left.remove(failure)
        at = 1 << 60 if failure is None else 1 + int(failure.share * self._job.calls.get(name, 0))
        count = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            if event in ("call", "c_call"):
                with self._lock:
                    count += 1
                    strikes = count == at
                if strikes:
                    self._strike(failure)

        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        self.note("calls", region=name, count=count)
        if name == "save":  # it goes on behind the training, until the next region at most
            self._behind = failure
        else:
            self._strike(failure)

    def _strike(self, failure: Failure | None) -> None:
        """Cause a failure, once."""
        if failure is None or failure in self._struck:
            return
        self._struck.add(failure)
        self.note("fails", **dataclasses.asdict(failure))
        if failure.kind == "rank":
            os.kill(os.getpid(), signal.SIGKILL)
        elif failure.kind == "host":
            for pid in _children_of(os.getppid()) - {os.getpid()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        elif failure.kind == "launcher":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._job.launcher, signal.SIGKILL)
        else:
            Path(self._job.folder, f"pull the cable of {self._rank} in {self._job.attempt}").touch()


def _children_of(parent: int) -> set[int]:
    found = set()
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((each / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.add(int(each.name))
    return found


class Rows(torch.utils.data.Dataset):
    """Rows that know their number."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self._x, self._y = torch.randn(ROWS, 16, generator=numbers), torch.randint(4, (ROWS,), generator=numbers)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self._x[index], self._y[index], index


def main(job: Job) -> None:
    """Train from where the run is to its end; place and number of the rank are in the environment."""
    trial = Trial(job, int(os.environ["RANK"]))
    trial.note("start")
    session = lockstep.session(backend=job.backend, timeout=25.0, link_timeout=3.0)
    with contextlib.ExitStack() as until_end:
        with trial.region("start-up"):
            run = until_end.enter_context(session)
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
            model = lockstep.replicate(network, shares=4)
        trial.note("met")
        optimizer = torch.optim.Adam(model.parameters())
        batches = lockstep.shares.GlobalBatches(Rows(), BATCH, shares=4)
        state = {"model": model, "optimizer": optimizer, "batches": batches}
        with trial.region("resume"):
            run.resume(job.path, **state)
        begin = run.step
        trial.note("from", step=begin)
        for _ in range(batches.epoch, EPOCHS):
            for batch in run.batches(batches):
                done = run.step - begin - 1
                with trial.region("training", done):
                    rows = _train(model, optimizer, batch)
                trial.note("step", step=run.step, rows=rows)
                with trial.region("snapshot", done):
                    run.snapshot(job.path, every=1, **state)
                if run.step % SAVE_EVERY == 0:
                    with trial.region("save", done):
                        run.save(job.path, wait=False, **state)
                    trial.note("save", step=run.step)
        trial.note("end", step=run.step, fingerprint=lockstep.shares.fingerprint(model, optimizer))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> list[int]:
    optimizer.zero_grad()
    rows = []
    for x, y, numbers in batch:
        nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        rows += numbers.tolist()
    optimizer.step()
    return rows


if __name__ == "__main__":  # by torchrun
    torch.set_num_threads(1)
    told = json.loads(Path(sys.argv[1]).read_text())
    told["failures"] = [Failure(**each) for each in told["failures"]]
    told["attempt"] += int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    main(Job(**told))
