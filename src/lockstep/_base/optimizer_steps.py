"""Tells observers of every step of an optimizer of PyTorch: when it begins, and when it has ended.

PyTorch calls two hooks around the ``step`` of each ``torch.optim.Optimizer``. They are registered once, with the first
observer. A step that raises does not end. Steps may be nested: a subclass calls ``super().step()``, and
``ZeroRedundancyOptimizer`` steps another optimizer inside of its own step.
"""

import threading
import weakref
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import cache
from operator import call
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep._base.compiler import outside_compiler


class StepObserver(Protocol):
    """An object that is told of the steps of all optimizers."""

    def step_begins(self, optimizer: Optimizer, closure: bool) -> object:
        """Called before an optimizer's step; if it raises, the step is not made. With a ``closure`` the step runs
        backward passes itself, so its gradients come later."""

    def step_ended(self, optimizer: Optimizer, closure: bool) -> object:
        """Called after an optimizer's step."""

    def has_parameter_of(self, optimizer: Optimizer) -> bool | None:
        """Return True if an optimizer has a parameter of a module that the observer replicates; None if it replicates
        none."""


_lock = threading.Lock()
_observers: list[weakref.ref[StepObserver]] = []


def observe_steps(observer: StepObserver) -> None:
    """Tell ``observer`` of the steps of all optimizers, as long as something else refers to it."""
    with _lock:
        _observers[:] = [each for each in _observers if each() is not None]
        _observers.append(weakref.ref(observer))
    _register()


def stop_observing(observer: StepObserver) -> None:
    """Tell ``observer`` of no further steps."""
    with _lock:
        _observers[:] = [each for each in _observers if each() not in (None, observer)]


def has_replicated_parameters(optimizer: Optimizer) -> bool:
    """Return True if an optimizer has a parameter of a replicated module, or if no module is replicated."""
    found = [observer.has_parameter_of(optimizer) for observer in _present()]
    return True in found or False not in found


def has_any(optimizer: Optimizer, parameters: AbstractSet[int]) -> bool:
    """Return True if an optimizer has one of some ``parameters``, which are given by their ``id``."""
    return not parameters.isdisjoint(id(each) for group in optimizer.param_groups for each in group["params"])


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_step_begins)
    register_optimizer_step_post_hook(_step_ended)


@outside_compiler
def _step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    closure = _has_closure(args, kwargs)
    for observer in _present():
        observer.step_begins(optimizer, closure)


@outside_compiler
def _step_ended(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    closure = _has_closure(args, kwargs)
    for observer in _present():
        observer.step_ended(optimizer, closure)


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return True if ``step`` was called with a function; ``args`` begin with the optimizer."""
    return any(map(callable, (*args[1:], *kwargs.values())))


def _present() -> Iterator[StepObserver]:
    """Yield the observers that still exist; keeps alive the one that is being told, and no other rank's group."""
    return filter(None, map(call, tuple(_observers)))
