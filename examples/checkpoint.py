"""The state of a training run, as `lockstep.save` writes it and `lockstep.resume` puts it back."""

import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.errors import CheckpointError
from report import History


@dataclass(frozen=True)
class Settings:
    """What the final weights depend on; a run goes on only under the settings it began with."""

    epochs: int
    batch_size: int
    lr: float
    seed: int
    replicas: int
    """Any number, written as 0, if there are shares."""
    shares: int


@dataclass
class Training:
    """All that changes while training."""

    model: nn.Module
    """The plain model, so that its checkpoint loads with or without lockstep."""
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    epoch: int = 0
    """Epochs completed."""
    step: int = 0
    """Steps done in the epoch under way."""
    history: History = field(default_factory=History)

    def state_dict(self) -> dict[str, Any]:
        """Where it is; the model, the optimizer and the scheduler have a state of their own."""
        return {"epoch": self.epoch, "step": self.step, "history": asdict(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.epoch, self.step, self.history = state["epoch"], state["step"], History(**state["history"])

    def parts(self) -> dict[str, Any]:
        """What is saved and resumed, by the names of the files."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "progress": self}


def save(folder: Path, training: Training, settings: Settings) -> None:
    """Save where the run is; every process calls it."""
    lockstep.save(folder, step=len(training.history.losses), settings=asdict(settings), **training.parts())


def resume(folder: Path, training: Training, settings: Settings) -> None:
    """Take up the training that the folder holds, if it is one of the same settings; every process calls it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*: saved by")  # another number of processes: none draws random numbers
        found = lockstep.resume(folder, **training.parts())
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {folder} to resume from")
    if differences := compare(found.values["settings"], asdict(settings)):
        raise CheckpointError(f"{folder} is of a run with other settings: {', '.join(differences)}")


def set_aside(folder: Path) -> None:
    """Begin without checkpoints; those of the run before stay, under another name, until the next run begins."""
    before = folder.with_name(f"{folder.name}-before")
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)


def compare(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Each setting that differs, with both of its values."""
    return [
        f"{name.replace('_', ' ')} {there[name]} there and {value} here"
        for name, value in here.items()
        if there[name] != value
    ]
