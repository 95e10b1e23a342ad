"""Replicated modules: ``replicate()``, ``DistributedDataParallel`` and their options."""
