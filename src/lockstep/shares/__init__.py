"""Shares: the batch of a step is cut into a fixed number of parts, whose gradients are added in a fixed order.

So gradients have the same bits on any number of ranks.
"""

from lockstep.shares.audit import audit as audit
from lockstep.shares.fingerprint import fingerprint as fingerprint
from lockstep.shares.global_batches import GlobalBatches as GlobalBatches

__all__ = ["GlobalBatches", "audit", "fingerprint"]
