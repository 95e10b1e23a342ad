"""Who is called at a step of an optimizer that uses their parameters: once, before weights change or afterwards.

Steps that no ``torch.optim.Optimizer`` takes are not seen.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep.compiler import outside_compiler
from lockstep.distributed.one_by_one import OneByOne


class HasParameters(Protocol):
    """Whose parameters an optimizer may use."""

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer uses any of them."""


W = TypeVar("W", bound=HasParameters)


class NextStep(Generic[W]):
    """Calls those who wait for a step of an optimizer that uses parameters of theirs."""

    def __init__(
        self, register: Callable[[Callable[[Optimizer, Any, Any], None]], RemovableHandle], call: Callable[[W], None]
    ) -> None:
        """``register`` hooks the steps of all optimizers of the process, from the first that waits on."""
        self._register, self._call = register, call
        self._lock = threading.Lock()
        self._waiting: weakref.WeakSet[W] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []

    def wait(self, waiting: W) -> None:
        """Have ``waiting`` called, once."""
        with self._lock:
            self._waiting.add(waiting)
            if not self._handles:
                self._handles.append(self._register(self._step))

    @outside_compiler
    def _step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._waiting or _is_captured():
            return
        steps = OneByOne()
        for each in self._due(optimizer):
            with steps:
                self._call(each)
        steps.end()

    def _due(self, optimizer: Optimizer) -> list[W]:
        with self._lock:
            due = [each for each in self._waiting if each.has_parameter_of(optimizer)]
            for each in due:
                self._waiting.discard(each)
        return due


def _is_captured() -> bool:
    """Whether the step is only recorded, for a CUDA graph: nothing can be waited for."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
