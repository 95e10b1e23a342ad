"""What a rank sends whose part of a round has failed: all that the other ranks wait for, without a gradient, and a
report that says so. Nobody waits for its arrival, unless communication hooks have to be ordered by waiting.

Communication hooks are run, too, on buckets of zeros: each rank runs the same hooks, so what they send is what the
other ranks' hooks wait for.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.distributed.collectives import Collectives
from lockstep.distributed.reduction.buckets import GradientBucket
from lockstep.distributed.reduction.comm_hooks import HookChain, Waitable
from lockstep.errors import CommunicationError


class AbandonedRound:
    """Sends in place of a round that has failed; keeps what it has sent until it has arrived."""

    def __init__(self, collectives: Collectives, number: int, sent: Sequence[Waitable]) -> None:
        self._collectives, self._what = collectives, f"round {number}, abandoned"
        self._sent = list(sent)

    def send_buckets(
        self, buckets: Sequence[GradientBucket], carrier: GradientBucket | None, write: Callable[[Tensor], None]
    ) -> None:
        """Send buckets of zeros; ``write`` fills the report behind the one that carries it."""
        for bucket in buckets:
            blank = self._make(bucket.blank)
            if bucket is carrier:
                write(blank[bucket.planned.layout.numel :])
            self.send(blank)

    def send_through(self, hooks: HookChain, buckets: Sequence[GradientBucket], divisor: float, planned: bool) -> None:
        """Have communication hooks send buckets of zeros; ``planned`` as in :meth:`HookChain.send`."""
        for bucket in buckets:
            blank = self._make(bucket.blank)
            if not self._collectives.follows_stream(blank.device):  # see Reducer._wait_for_hooks
                self.wait()
            last = bucket is buckets[-1]
            self._sent.append(hooks.send(_Blank(bucket), blank, last, self._collectives, divisor, planned))
        if not self._collectives.follows_stream(self._collectives.device):
            self.wait()

    def send(self, tensor: Tensor) -> None:
        """Send a tensor."""
        self._sent.append(self._collectives.all_reduce(tensor, self._what))

    def wait(self) -> None:
        """Return when all has arrived."""
        while self._sent:
            try:
                self._sent.pop(0).wait()
            except CommunicationError:
                raise
            except Exception as error:  # of a communication hook: its round has failed already
                logging.getLogger("lockstep").debug("%s: %r", self._what, error)

    def _make(self, make: Callable[[], Tensor]) -> Tensor:
        """New memory; where there is none left, what has been sent is waited for first, and given back."""
        try:
            return make()
        except (RuntimeError, MemoryError, OSError):
            self.wait()
            return make()


class _Blank(GradientBucket):
    """What hooks see of a bucket that has failed; the gradients stay as they are, whatever comes back."""

    def __init__(self, bucket: GradientBucket) -> None:
        super().__init__(bucket.index, bucket.planned, bucket.members)

    def collect(self, scale: float, touched: bytearray) -> Tensor:
        """See :meth:`GradientBucket.blank`."""
        return self.blank()

    def accept(self, summed: Tensor) -> None:
        """Nothing is taken."""

    def rescale(self, factor: float) -> None:
        """Nothing is there."""

    def _gradient(self, position: int) -> Tensor:
        return torch.empty(0)
