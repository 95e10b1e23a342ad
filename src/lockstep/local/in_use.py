"""Tracks the users of a set of replicas: forwards that need gradients, or one training step.

A step puts leaves of its own into the replicas' slots. A simultaneous forward that wants gradients would put other
tensors there, or use the step's and lose its gradients. So a step's forward excludes those forwards, and steps run one
after the other. Forwards without gradients never wait: any tensors in the slots will do for them, and a step finds in
its graph what others have put there (:mod:`~lockstep.local.training_step`). Nothing waits for a backward, which may
itself wait for anything, even for another thread's evaluation.
"""

import contextvars
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from lockstep.errors import NotReplicableError

_inside: contextvars.ContextVar[tuple[tuple["Uses", str], ...]] = contextvars.ContextVar("lockstep_uses", default=())


class Uses:
    """Locks for one set of replicas; code in the replicas counts as inside of whatever their caller is inside of."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Counter[str] = Counter()

    def forward(self) -> AbstractContextManager[None]:
        """Wait for the forward of another thread's step if gradients are wanted; raise inside a step's forward."""
        if not torch.is_grad_enabled() or self._is_inside("forward"):
            return nullcontext()
        self._refuse_inside("step's forward")
        return self._entered("forward", after=["step's forward"])

    def step(self) -> AbstractContextManager[None]:
        """Wait for other steps; raise inside another use of the same replicas."""
        self._refuse_inside("forward")
        self._refuse_inside("step")
        return self._entered("step", after=["step"])

    def forward_of_step(self) -> AbstractContextManager[None]:
        """Wait for forwards that want gradients, and exclude them inside the block."""
        return self._entered("step's forward", after=["forward", "step's forward"])

    def _is_inside(self, use: str) -> bool:
        return any(uses is self and entered == use for uses, entered in _inside.get())

    def _refuse_inside(self, use: str) -> None:
        if self._is_inside(use):
            raise NotReplicableError(
                f"a DataParallel is used inside its own {use}, by the module or by loss_fn: its replicas are busy. "
                "Call the module itself there (parallel.module), or compute what is needed outside"
            )

    @contextmanager
    def _entered(self, use: str, after: Sequence[str]) -> Iterator[None]:
        """Begin a use when no use in ``after`` runs, and end it with the block."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._running[other] for other in after))
            self._running[use] += 1
        token = _inside.set((*_inside.get(), (self, use)))
        try:
            yield
        finally:
            _inside.reset(token)
            with self._changed:
                self._running[use] -= 1
                self._changed.notify_all()
