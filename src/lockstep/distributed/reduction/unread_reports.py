"""Reports that are read before an optimizer uses the gradients of their round.

On an accelerator backward does not wait for what the other ranks say. An optimizer's step does: it comes when nearly
all of the round has arrived, and before weights change. Steps that no ``torch.optim.Optimizer`` takes are not seen
here; then the report is read when the next round opens.
"""

import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.compiler import outside_compiler
from lockstep.distributed.one_by_one import OneByOne


class Reader(Protocol):
    """Who has not read the report of a round yet."""

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of that round are what the optimizer uses."""

    def read_before_step(self) -> None:
        """Read it; raises, before weights change, if the round has failed on some rank."""


_lock = threading.Lock()
_readers: weakref.WeakSet[Reader] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def before_next_step(reader: Reader) -> None:
    """Have a report read at the next step of an optimizer, if it has not been read by then."""
    with _lock:
        _readers.add(reader)
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_before_step))


@outside_compiler
def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _readers or _is_captured():
        return
    steps = OneByOne()
    for reader in _due(optimizer):
        with steps:
            reader.read_before_step()
    steps.end()


def _due(optimizer: Optimizer) -> list[Reader]:
    with _lock:
        due = [each for each in _readers if each.has_parameter_of(optimizer)]
        for each in due:
            _readers.discard(each)
    return due


def _is_captured() -> bool:
    """Whether the step is only recorded, for a CUDA graph: nothing can be waited for."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
