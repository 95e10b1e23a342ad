"""How a failure of one rank is known on all; this room knows nothing of modules or gradients."""
