"""A small training, run by every rank of a trial; one rank, the victim, comes to grief at a place of the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.failures.ring import Meeting
from lockstep.phases import Phases

STEPS = 6
LIMIT = 100.0  # seconds after which a rank shows where it hangs, and ends

PLACES = [
    *(
        "meeting",
        "group",
        "replicate",
        "data",
        "worker",
        "forward",
        "loss",
        "backward",
        "collect",
        "collective",
        "wait",
    ),
    *("finish", "hook", "optimizer", "checkpoint", "own collective", "evaluation", "after the last batch"),
    *("handling", "tear-down"),
]
"""Where the victim may be; `collect` to `finish` are the phases of a round."""
ACTIONS = ["kill", "exit", "raise", "leave"]
"""SIGKILL, `os._exit`, an exception, `sys.exit(0)`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One trial."""

    world: int
    backend: str
    place: str
    """Empty if the victim is killed from outside, at any time."""
    action: str
    victim: int
    step: int
    launcher_has_store: bool = False
    delay: float = 0.0
    """Seconds until it is killed from outside."""

    def __str__(self) -> str:
        where = f"{self.place}, step {self.step}" if self.place else f"killed after {self.delay:.2f} s"
        return f"{self.backend}, {self.world} ranks: rank {self.victim} {self.action} in {where}"


class Trigger:
    """Does to the victim what the plan says, when it comes to the place."""

    def __init__(self, plan: Plan, rank: int, folder: Path) -> None:
        self._plan, self._folder, self._rank = plan, folder, rank
        self.step = 0
        self._process = os.getpid()

    def at(self, place: str) -> None:
        plan = self._plan
        if (self._rank, place, self.step) == (plan.victim, plan.place, plan.step):
            self.act()

    def act(self) -> None:
        self.note_death()
        if self._plan.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(LIMIT)
        if self._plan.action == "exit":
            os._exit(3)
        if self._plan.action == "leave":
            sys.exit(0)
        raise ValueError(f"of rank {self._rank}")

    def note_death(self) -> None:
        (self._folder / "died").write_text(repr(time.monotonic()))


class Samples(Dataset):
    def __init__(self, trigger: Trigger) -> None:
        self._trigger, self._main = trigger, os.getpid()

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        self._trigger.step = index // 4 + 1
        self._trigger.at("data" if os.getpid() == self._main else "worker")
        return torch.randn(8)


class Marked(nn.Module):
    """A layer in whose forward and backward something may happen."""

    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self._trigger = trigger

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._trigger.at("forward")
        if x.requires_grad:
            x.register_hook(lambda _: self._trigger.at("backward"))
        return x


def train(plan: Plan, rank: int, folder: Path) -> dict[str, Any]:
    """The training; returns what is left behind in the process."""
    trigger = Trigger(plan, rank, folder)
    with contextlib.ExitStack() as patches:
        if rank == plan.victim:
            for patch in _patches(plan, trigger):
                patches.enter_context(patch)
        try:
            _session(plan, rank, folder, trigger)
        except BaseException:
            if rank == plan.victim and plan.action in ("raise", "leave") and plan.place != "worker":
                pass
            raise


def _session(plan: Plan, rank: int, folder: Path, trigger: Trigger) -> None:
    steps = STEPS if plan.place else 10**6
    with lockstep.session(backend=plan.backend, timeout=20.0) as run:
        try:
            _steps(run, plan, trigger, folder, steps)
        except BaseException as error:
            if rank == plan.victim and not isinstance(error, lockstep.errors.PeerFailure):
                trigger.note_death()  # of a loader's worker, this rank has just heard
            _note_raised(folder, rank)
            raise
        trigger.step = 0
    if rank == plan.victim:
        trigger.at("never")


def _steps(run: lockstep.Session, plan: Plan, trigger: Trigger, folder: Path, steps: int) -> None:
    trigger.at("replicate")
    layers = [nn.Linear(8, 64), nn.ReLU(), Marked(trigger), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
    model = lockstep.replicate(nn.Sequential(*layers), bucket_cap_mb=0.01)
    if plan.place == "hook":
        model.register_comm_hook(None, lambda _, bucket: trigger.at("hook") or bucket.buffer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: trigger.at("optimizer"))
    loader = DataLoader(Samples(trigger), batch_size=4, num_workers=int(plan.place == "worker"))
    for step in range(steps):
        for batch in run.batches(loader) if step % STEPS == 0 else ():
            trigger.step = run.step
            _step(run, model, optimizer, batch, trigger, folder)
    trigger.step = 0
    trigger.at("after the last batch")


def _step(run: Any, model: nn.Module, optimizer: Any, batch: torch.Tensor, trigger: Trigger, folder: Path) -> None:
    optimizer.zero_grad()
    outputs = model(batch)
    trigger.at("loss")
    try:
        loss = outputs.square().mean()
        loss.backward()
        optimizer.step()
        trigger.at("handling")
    except ValueError:
        raise KeyError("raised while another error was handled")  # noqa: B904
    if run.is_main or run.rank == trigger._plan.victim:
        torch.save(Saved(trigger), folder / f"checkpoint of {run.rank}")
    if run.step % 2 == 0:
        with run.phase("evaluation"):
            trigger.at("evaluation")
            values = loss.detach().clone()
            trigger.at("own collective")
            dist.all_reduce(values)


class Saved:
    """Something to save, which takes its time."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger

    def __reduce__(self) -> Any:
        self._trigger.at("checkpoint")
        return dict, ()


def _patches(plan: Plan, trigger: Trigger) -> list[Any]:
    """Return what brings the victim to grief in places that no program of a user has."""

    def before(name: str, call: Any) -> Any:
        def patched(*args: Any, **kwargs: Any) -> Any:
            trigger.at(name)
            return call(*args, **kwargs)

        return patched

    begin = Phases.phase

    def phase(self: Phases, name: str, *args: Any, **kwargs: Any) -> Any:
        trigger.at(name)
        return begin(self, name, *args, **kwargs)

    return [
        mock.patch.object(Meeting, "connect", before("meeting", Meeting.connect)),
        mock.patch.object(dist, "init_process_group", before("group", dist.init_process_group)),
        mock.patch.object(dist, "destroy_process_group", before("tear-down", dist.destroy_process_group)),
        mock.patch.object(Phases, "phase", phase),
    ]


# -------------------------------------------------------------------------------- in the processes


def _note_raised(folder: Path, rank: int) -> None:
    path = folder / f"raised by {rank}"
    if not path.exists():
        path.write_text(repr(time.monotonic()))


def main(plan: Plan, rank: int, folder: Path, port: int) -> None:
    """One rank: leaves what it has raised, and what is left of it, in a file."""
    with open(folder / f"{rank}.log", "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(plan.world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(plan.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(plan.launcher_has_store),
    )
    before = _sockets().keys()
    error: BaseException | None = None
    try:
        train(plan, rank, folder)
    except BaseException as raised:
        _note_raised(folder, rank)
        error = raised
    told: dict[str, Any] = {
        "type": type(error).__name__ if error is not None else None,
        "message": str(error),
        "rank": getattr(error, "rank", None),
        "step": getattr(error, "step", None),
        "phase": getattr(error, "phase", None),
        "traceback": getattr(error, "traceback", None),
    }
    _drop(error)
    del error
    until = time.monotonic() + 5.0
    while (_threads() or _sockets().keys() - before) and time.monotonic() < until:  # some end by themselves
        time.sleep(0.05)
        gc.collect()  # what a thread that has ended since had held
    told["threads"] = _threads()
    told["sockets"] = [text for link, text in _sockets().items() if link not in before]
    (folder / f"result of {rank}").write_text(json.dumps(told))
    faulthandler.cancel_dump_traceback_later()


def _drop(error: BaseException | None) -> None:
    """Let go of the frames that an error holds, and so of the model and the group."""
    seen = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__cause__ or seen.__context__
    gc.collect()


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("lockstep")]


def _sockets() -> dict[str, str]:
    """Sockets of this process, by the number that the system has given to each, and what each connects."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[link] = _describe(int(name))
    return found


def _describe(fd: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
        own = f"{each.family.name} {each.getsockname()}"
        try:
            return f"{own} to {each.getpeername()}"
        except OSError:
            return f"{own}, not connected"
    return "closed since"
