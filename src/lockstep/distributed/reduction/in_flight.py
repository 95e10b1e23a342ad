"""What a round has sent, and not waited for yet: collectives, and communication hooks that are at work."""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.distributed.reduction.bucket import GradientBucket, ZeroBucket
from lockstep.distributed.reduction.comm_hooks import Waitable
from lockstep.distributed.reduction.setup import Setup
from lockstep.errors import CommunicationError
from lockstep.texts import LONGEST_HEADLINE, shortened


class InFlight:
    """Waits for what round ``number`` has sent; sends buckets through communication hooks, if there are any."""

    def __init__(self, number: int, setup: Setup) -> None:
        self._number, self._setup, self._collectives = number, setup, setup.collectives
        self._pending: list[Waitable] = []
        self._begun = 0.0  # when the first collective has begun
        self._last = len(setup.buckets.in_order) - 1
        self._divide_factor = setup.gradient_divide_factor

    def add(self, pending: Waitable, begun: float) -> None:
        """A collective is on its way, since ``begun`` of ``time.perf_counter()``."""
        if not self._pending:
            self._begun = begun
        self._pending.append(pending)

    def send_through_hooks(self, bucket: GradientBucket, flat: Tensor, what: str) -> None:
        """Let communication hooks reduce a bucket, whose gradients are in ``flat``."""
        self.order_hooks(flat.device)
        collectives, begun = self._collectives, self._collectives.begun()
        try:
            with collectives.phases.phase("hook", f"{what}, round {self._number}"):
                self._pending.append(self._call_hooks(bucket, flat))
        except BaseException as error:
            if begun is None or collectives.begun() != begun:
                gist = shortened(f"{type(error).__name__}: {error}", LONGEST_HEADLINE)
                self._setup.scheduler.lose(f"a communication hook raised {gist}, after it had begun to communicate")
            raise

    def _call_hooks(self, bucket: GradientBucket, flat: Tensor) -> Waitable:
        is_last = bucket.index == self._last
        setup = self._setup
        return setup.hooks.send(bucket, flat, is_last, self._collectives, self._divide_factor, setup.is_planned)

    def order_hooks(self, device: torch.device) -> None:
        """Where hooks are not ordered by a stream, what one sends from a callback must not meet what comes next."""
        if not self._collectives.follows_stream(device):
            while self._pending:
                self._pending.pop(0).wait()

    def may_call_hooks(self, device: torch.device) -> bool:
        """Whether hooks can be called while backward runs: no call may wait for other ranks."""
        if self._collectives.follows_stream(device):
            return True
        return not self._setup.hooks.may_wait and all(pending.done() for pending in self._pending)

    def wait(self) -> None:
        """Return when all has arrived."""
        now, traffic = time.perf_counter(), self._collectives.traffic
        traffic.pace.waits(now)
        if self._begun:
            traffic.was_hidden(now - self._begun)
        with self._collectives.phases.phase("wait"):
            for pending in self._pending:
                pending.wait()
        traffic.pace.has_waited(time.perf_counter())

    # --------------------------------------------------------------------------- of a round that is abandoned

    def send_zeros_through_hooks(self, bucket: GradientBucket, zeros: Tensor) -> None:
        """Let communication hooks send what the other ranks' hooks wait for, of a bucket without gradients."""
        if not self._collectives.follows_stream(zeros.device):  # see order_hooks
            self.wait_abandoned()
        self._pending.append(self._call_hooks(ZeroBucket(bucket), zeros))

    def wait_abandoned(self) -> None:
        """Return when all has arrived of a round that this rank has abandoned."""
        while self._pending:
            try:
                self._pending.pop(0).wait()
            except CommunicationError:
                raise
            except Exception as error:  # of a communication hook: its round has failed already
                logging.getLogger("lockstep").debug("round %d, abandoned: %r", self._number, error)

    def make(self, make: Callable[[], Tensor]) -> Tensor:
        """New memory; where there is none left, what has been sent is waited for first, and given back."""
        try:
            return make()
        except (RuntimeError, MemoryError, OSError):
            self.wait_abandoned()
            return make()
