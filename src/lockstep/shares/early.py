"""Sends buckets while the backward pass of the last share runs.

A bucket is sent when it has all the gradients that it had in the step before. Partial sums and gradients are kept
meanwhile: if another gradient comes after all - a share runs a second backward - all ranks send these buckets once more
at the end.
"""

from collections.abc import Collection

from lockstep.shares.gradients import ShareGradients
from lockstep.shares.share_exchange import ShareExchange


class EarlyBuckets:
    """Sends those buckets of ``exchange`` that may be sent early."""

    def __init__(
        self, exchange: ShareExchange, gradients: ShareGradients, share: int, expected: Collection[int]
    ) -> None:
        self._exchange = exchange
        self._gradients = gradients
        self._share = share
        leaving = exchange.plan.buckets[: exchange.plan.leave_early]
        self._bucket_of = {slot.index: n for n, bucket in enumerate(leaving) for slot in bucket.slots}
        self._missing: list[set[int]] = [set() for _ in leaving]
        for number in expected:
            if number in self._bucket_of:
                self._missing[self._bucket_of[number]].add(number)
        self.is_late = False
        """True if a bucket was sent before another of its gradients came."""

    def arrived(self, number: int) -> None:
        """Record a parameter's gradient; send the buckets that are complete now."""
        bucket = self._bucket_of.get(number)
        if bucket is None:
            return
        if bucket < self._exchange.sent:
            self.is_late = True
            return
        self._missing[bucket].discard(number)
        while self._exchange.sent < len(self._missing) and not self._missing[self._exchange.sent]:
            self._exchange.send_next(self._gradients.terms_with(self._share))
