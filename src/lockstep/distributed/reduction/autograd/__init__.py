"""What a backward pass does: where it enters and leaves, what it can reach, and which gradients it has brought."""
