"""Batches of the whole world, in shares."""

from lockstep.data.global_batches import GlobalBatches as GlobalBatches

__all__ = ["GlobalBatches"]
