"""Global batches, cut into shares."""

from lockstep.data.global_batches import GlobalBatches as GlobalBatches

__all__ = ["GlobalBatches"]
