"""``session()``, with which a training script starts, and ``watch()``, which watches the ranks of an existing group."""
