"""Communication: collectives of one process group, and agreements of its ranks."""
