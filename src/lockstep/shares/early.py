"""Buckets that leave while the backward pass of the last share runs.

A bucket leaves when all gradients have come that it had in the step before. Partial sums and gradients stay as they
are meanwhile: if another gradient comes after all - a share runs a second backward - its bucket is sent once more at
the end, by all ranks.
"""

from collections.abc import Collection

from lockstep.shares.gradients import ShareGradients
from lockstep.shares.reduction import Exchange


class EarlyBuckets:
    """Sends the buckets of ``exchange`` in their order; parameters are numbered from the last to the first there."""

    def __init__(self, exchange: Exchange, gradients: ShareGradients, share: int, expected: Collection[int]) -> None:
        self._exchange, self._gradients, self._share = exchange, gradients, share
        last = len(gradients.parameters) - 1
        self._bucket_of = {last - slot.index: n for n, b in enumerate(exchange.buckets) for slot in b.slots}
        self._missing: list[set[int]] = [set() for _ in exchange.buckets]
        for number in expected:
            self._missing[self._bucket_of[number]].add(number)
        self.sent = 0
        """How many buckets have left."""
        self.late: set[int] = set()
        """Those among them for which another gradient has come."""

    def arrived(self, number: int) -> None:
        """A parameter has got a gradient."""
        bucket = self._bucket_of[number]
        if bucket < self.sent:
            self.late.add(bucket)
            return
        self._missing[bucket].discard(number)
        while self.sent < len(self._missing) and not self._missing[self.sent]:
            self._exchange.send(self.sent, self._gradients.terms_with(self._share))
            self.sent += 1
