"""One round of gradients: from a look at ``.grad`` to the means over the ranks in it."""
