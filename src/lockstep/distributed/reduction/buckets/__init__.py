"""The buckets in which gradients travel, and the communication hooks."""
