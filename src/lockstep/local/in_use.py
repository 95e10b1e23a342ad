"""Tracks the users of a set of replicas: forwards that need gradients, or one training step.

A step puts leaves of its own into the replicas' slots. A simultaneous forward that wants gradients would put other
tensors there, or use the step's and lose its gradients. So a step's forward excludes those forwards, and steps run one
after the other. Forwards without gradients never wait: any tensors in the slots will do for them, and a step finds in
its graph what others have put there (:mod:`~lockstep.local.replica_backward`). Nothing waits for a backward, which may
itself wait for anything, even for another thread's evaluation.
"""

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.errors import NotReplicableError

_inside: contextvars.ContextVar[tuple[tuple["Uses", str], ...]] = contextvars.ContextVar("lockstep_uses", default=())


class Uses:
    """Locks for one set of replicas; code in the replicas counts as inside of whatever their caller is inside of."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._forwards = 0
        self._stepping = self._alone = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wait for the forward of another thread's step if gradients are wanted; raise inside a step's forward."""
        if not torch.is_grad_enabled() or self._is_inside("forward"):
            yield
            return
        self._refuse_inside("step's forward")
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._forwards += 1
        try:
            with self._entered("forward"):
                yield
        finally:
            with self._changed:
                self._forwards -= 1
                self._changed.notify_all()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wait for other steps; raise inside another use of the same replicas."""
        self._refuse_inside("forward")
        self._refuse_inside("step")
        with self._changed:
            self._changed.wait_for(lambda: not self._stepping)
            self._stepping = True
        try:
            with self._entered("step"):
                yield
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    @contextmanager
    def forward_of_step(self) -> Iterator[None]:
        """Wait for forwards that want gradients, and exclude them inside the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forwards and not self._alone)
            self._alone = True
        try:
            with self._entered("step's forward"):
                yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def _is_inside(self, use: str) -> bool:
        return any(uses is self and entered == use for uses, entered in _inside.get())

    def _refuse_inside(self, use: str) -> None:
        if self._is_inside(use):
            raise NotReplicableError(
                f"a DataParallel is used inside its own {use}, by the module or by loss_fn: its replicas are busy. "
                "Call the module itself there (parallel.module), or compute what is needed outside"
            )

    @contextmanager
    def _entered(self, use: str) -> Iterator[None]:
        token = _inside.set((*_inside.get(), (self, use)))
        try:
            yield
        finally:
            _inside.reset(token)
