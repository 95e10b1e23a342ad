"""The state of a training run, and the file that holds it while the run is stopped."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from report import History


class CheckpointError(ValueError):
    """There is no checkpoint with which this run could go on."""


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
        """Tensors, numbers and strings only, which `torch.load` reads without running any code."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "history": asdict(self.history),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.history = History(**state["history"])


def save(path: Path, training: Training, settings: Settings) -> None:
    """Replace the checkpoint in one move: whatever happens meanwhile, one whole checkpoint is there."""
    unfinished = path.with_name(path.name + ".tmp")
    torch.save(on_cpu(training.state_dict()) | {"settings": asdict(settings)}, unfinished)
    os.replace(unfinished, path)


def on_cpu(state: Any) -> Any:
    """The state with its tensors on the CPU, so that machines with other devices can load it."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, Mapping):
        return {key: on_cpu(value) for key, value in state.items()}
    return [on_cpu(value) for value in state] if isinstance(state, list) else state


def resume(path: Path, training: Training, settings: Settings) -> None:
    """Take up the training that the file holds, if it is one of the same settings."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        differences = compare(state["settings"], asdict(settings))
        if not differences:
            training.load_state_dict(state)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path} to resume from") from None
    except (OSError, EOFError, RuntimeError, UnpicklingError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint of this program: {first_line(error)}") from error
    if differences:
        raise CheckpointError(f"{path} is of a run with other settings: {', '.join(differences)}")


def compare(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Each setting that differs, with both of its values."""
    return [
        f"{name.replace('_', ' ')} {there[name]} there and {value} here"
        for name, value in here.items()
        if there[name] != value
    ]


def first_line(error: Exception) -> str:
    """The gist of messages that run over many lines, as those of `torch.load` do."""
    return (str(error) or type(error).__name__).splitlines()[0]
