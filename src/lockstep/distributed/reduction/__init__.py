"""One round of gradients: from the hooks on parameters to the means over the ranks in ``.grad``."""
