"""What each rank runs: a small training, which notes each step and how it ends in a file, one line of JSON for each.

Its only argument is a JSON object: `folder`, `how` ("session", "replicate", or "reference" for PyTorch's DDP),
`backend` (None: what the session chooses), `options` (of the session), `timeout`, `steps`, `forward_seconds`, and of
one rank `leaves` and the step at which it does: "raise" or "exit 0". With `exchanges` every rank sends something to
every other in each step, as Gloo's sums do not. Rank `late` pauses after it has told where it listens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lockstep
import lockstep.session.start  # not while the ranks meet
from lockstep.failures.ring import Connection, Meeting

RANK = int(next(filter(None, map(os.environ.get, ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"]))))
JOB = json.loads(sys.argv[1])


def note(what: str, **more: Any) -> None:
    with open(f"{JOB['folder']}/{RANK}.jsonl", "a") as file:
        file.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")


def train(model: nn.Module, batches: Callable[[Iterable[int]], Iterable[int]], check: Callable[[], object]) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in batches(range(JOB["steps"])):
        generator = torch.Generator().manual_seed(1000 * step + RANK)
        x = torch.randn(16, 64, generator=generator)
        y = torch.randint(10, (16,), generator=generator)
        optimizer.zero_grad()
        outputs = model(x)
        time.sleep(JOB["forward_seconds"])
        if (RANK, step) == (JOB.get("leaver"), JOB.get("leaves_at")):
            leave(JOB["leaves"])
        nn.functional.cross_entropy(outputs, y).backward()
        optimizer.step()
        if JOB["exchanges"]:
            dist.all_to_all_single(torch.empty(dist.get_world_size()), torch.ones(dist.get_world_size()))
        note("step", step=step)
        check()
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()[:12]


def leave(how: str) -> None:
    note("leaves")
    if how == "raise":
        raise ValueError(f"of rank {RANK}")
    sys.exit(0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


@contextlib.contextmanager
def group() -> Iterator[None]:
    dist.init_process_group(JOB["backend"], timeout=timedelta(seconds=JOB["timeout"]))
    yield
    dist.destroy_process_group()


def pause_before_connecting() -> None:
    connect = Meeting._connect_to_next

    def connect_late(meeting: Meeting) -> Connection | None:
        if meeting._listener is None:
            return None
        time.sleep(1.0)  # the event is that nothing happens to this rank meanwhile
        return connect(meeting)

    Meeting._connect_to_next = connect_late


def note_when_it_has_met_the_others() -> None:
    """From then on it knows on which hosts they are."""
    connect = Meeting.connect

    def noted(meeting: Meeting, *given: Any, **named: Any) -> Any:
        connected = connect(meeting, *given, **named)
        note("has met")
        return connected

    Meeting.connect = noted


def main() -> str:
    if JOB["how"] == "session":
        with lockstep.session(backend=JOB["backend"], timeout=JOB["timeout"], **JOB["options"]) as run:
            note("in", backend=run.backend, local_rank=run.local_rank)
            model = lockstep.replicate(network())
            # A rank that looks whether it is to stop is not ended by the signal that torchrun sends to the ranks beside
            # one that was killed, perhaps before it has heard of that.
            digest = train(model, run.batches, lambda: run.check() or run.should_stop)
            lockstep.check_in_sync(model)
        return digest
    wrap = nn.parallel.DistributedDataParallel if JOB["how"] == "reference" else lockstep.replicate
    with group():
        note("in")
        return train(wrap(network()), lambda steps: steps, lambda: None)


torch.set_num_threads(1)
if JOB["late"] == RANK:
    pause_before_connecting()
note_when_it_has_met_the_others()
note("start", pid=os.getpid())
try:
    digest = main()
except BaseException as error:
    note("raised", type=type(error).__name__, message=str(error), rank=getattr(error, "rank", None))
    raise
note("done", digest=digest)
