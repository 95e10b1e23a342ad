"""Programs that tests share: networks by name (`networks`), and what one device or process computes for replicas.

Those are in one process on many devices (`one_device`), or on ranks that are threads (`ranks`).
"""
